"""Requests with a grammar say what it allows, whatever the system and whatever runs beside them."""

import asyncio
import json
import re
import string

import pytest
from msgspec.structs import replace
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.model.checkpoints import make_checkpoint
from twolane.engine.config import EngineConfig
from twolane.engine.messages import Refused, Submit
from twolane.frontend.engine_client import EngineClient
from twolane.frontend.structured.grammar import json_schema_grammar, regex_grammar
from twolane.frontend.text.codec import TextCodec
from twolane.frontend.text.tokenizer import ModelTokenizer
from twolane.sampling import SamplingParams

EOS = 2
SYSTEMS = [
    "static-split",
    *(
        pytest.param(name, marks=pytest.mark.full)
        for name in ("chunked", "auto", "two-stream", "bullet", "duetserve", "temporal")
    ),
]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["xy", "zzz"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
PATTERN = "[0-9]{3}-[a-f]{1,9}"
GRAMMARS = (json_schema_grammar(SCHEMA), regex_grammar(PATTERN))


def tokenizer():
    """One token a character, fewer than the model has."""
    names = [
        "<pad>",
        "<bos>",
        "<eos>",
        "Ġ",
        *sorted(set(string.printable) - set(string.whitespace)),
    ]
    made = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def vocabulary(words=None):
    return TextCodec(ModelTokenizer(words or tokenizer(), None, {})).vocabulary()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_checkpoint("llama31", tmp_path_factory.mktemp("tied") / "model", seed=1))


async def ask(client, submits):
    """The tokens of each request and how it ended, all at once."""
    answers = {submit.id: ([], asyncio.Future()) for submit in submits}

    def sink_of(tokens, ended):
        def sink(event):
            if isinstance(event, Refused):
                ended.set_result(event)
            else:
                tokens.extend(event.tokens)
                if event.finish is not None:
                    ended.set_result(event.finish)

        return sink

    for submit in submits:
        client.submit(submit, sink_of(*answers[submit.id]))
    async with asyncio.timeout(120):
        return {id: (tokens, await ended) for id, (tokens, ended) in answers.items()}


def requests(count):
    """Constrained and free ones in turn, some greedy, some with penalties or log-probabilities."""
    made = []
    for i in range(count):
        params = SamplingParams(
            temperature=(0.0, 1.0, 2.0)[i % 3],
            seed=i,
            max_tokens=60,
            grammar=(*GRAMMARS, None)[i % 3],
            frequency_penalty=(0.0, 1.0)[i // 3 % 2],
            logprobs=(None, 2)[i // 6 % 2],
        )
        made.append(Submit(f"r{i}", [5 + (7 * i + j) % 80 for j in range(3 + 11 * i % 90)], params))
    return made


def check(text, grammar):
    if grammar == GRAMMARS[1]:
        assert re.fullmatch(PATTERN, text), text
    else:
        value = json.loads(text)
        assert value.keys() == {"a", "b"}, text
        assert isinstance(value["a"], int), text
        assert value["b"] in ("xy", "zzz"), text


async def serve(config, count):
    client = await EngineClient.start(config)
    try:
        client.send_vocabulary(vocabulary())
        return await ask(client, requests(count)), client.stats.preemptions
    finally:
        await client.close()


@pytest.mark.parametrize("system", SYSTEMS)
def test_answers_follow_their_grammars(model, system):
    """With memory that runs out, so that matchers go on from answers that are recomputed."""
    config = EngineConfig(
        model=model, dtype="float32", system=system, kv_tokens=208, max_running=16, cores=2
    )
    answers, preemptions = asyncio.run(serve(config, 24))
    assert preemptions
    ended = 0
    for submit in requests(24):
        tokens, finish = answers[submit.id]
        assert finish in ("stop", "length")
        if submit.params.grammar is not None and finish == "stop":
            ended += 1
            assert tokens[-1] == EOS
            check(tokenizer().decode(tokens[:-1]), submit.params.grammar)
    assert ended >= 10


async def refusals(config):
    client = await EngineClient.start(config)
    try:
        [early] = requests(1)
        too_early = await ask(client, [early])
        client.send_vocabulary(vocabulary())
        bad = replace(early.params, grammar=regex_grammar("("))
        answers = await ask(client, [replace(early, id="bad", params=bad), *requests(6)])
        return too_early["r0"][1], answers
    finally:
        await client.close()


def test_a_grammar_that_does_not_compile_ends_its_request_alone(model):
    config = EngineConfig(model=model, dtype="float32", system="static-split", kv_tokens=4000)
    too_early, answers = asyncio.run(refusals(config))
    assert isinstance(too_early, Refused)
    assert "tokenizer" in too_early.message
    assert isinstance(answers["bad"][1], Refused)
    assert "regex" in answers["bad"][1].message
    assert answers["bad"][1].message.startswith("grammar cannot be followed: ")
    assert answers["bad"][1].field == "grammar"
    assert all(answers[f"r{i}"][1] in ("stop", "length") for i in range(6))


async def abort_and_free(config):
    """A constrained request is given up; the one that has its slot next is free."""
    client = await EngineClient.start(config)
    try:
        client.send_vocabulary(vocabulary())
        constrained, free = requests(3)[0], requests(3)[2]
        alone = await ask(client, [free])
        for turn in range(6):
            client.submit(replace(constrained, id=f"c{turn}"), lambda event: None)
            await asyncio.sleep(0.01 * turn)
            client.abort(f"c{turn}")
            again = await ask(client, [replace(free, id=f"f{turn}")])
            assert again[f"f{turn}"] == alone["r2"]
    finally:
        await client.close()


def test_the_mask_of_a_freed_slot_reaches_nobody_else(model):
    config = EngineConfig(
        model=model, dtype="float32", system="static-split", kv_tokens=4000, max_running=1, cores=2
    )
    asyncio.run(abort_and_free(config))
