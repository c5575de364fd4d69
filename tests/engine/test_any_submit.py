"""Whatever a message may carry, the engine goes on, and every request ends once."""

import random
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.engine.random_plans import RandomPlans
from tests.engine.stepped import SteppedLanes, stepped_engine
from tests.engine.world import tiny_decoder
from twolane.engine.engine import Engine
from twolane.engine.intake import ServedModel
from twolane.engine.messages import (
    Abort,
    Finish,
    Output,
    Outputs,
    Submit,
    ToEngine,
    TokenRules,
    decode_from_engine,
    decode_to_engine,
    encode,
)
from twolane.model.decoder import Decoder, Weights
from twolane.model.matrix import Matrix
from twolane.sampling import SamplingParams
from twolane.slo import Slo

VOCAB = 12
EOS = (2,)
PAGE = 4
PAGES = 10
SLOTS = 3
HUGE = 2**63 - 1


@cache
def small_vocabulary() -> Decoder:
    """Fewer tokens than alternatives that may be asked for."""
    tiny = tiny_decoder()
    w = tiny.weights
    weights = Weights(w.embedding[:VOCAB], w.layers, w.norm, Matrix.plain(w.head.values[:VOCAB]))
    return Decoder(replace(tiny.spec, vocab_size=VOCAB), weights)


def edges(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


tokens = edges(0, 1, 2, 2, 3, 5, VOCAB - 1)
wrong_tokens = edges(VOCAB, 2**31, HUGE)
any_token = st.one_of(tokens, tokens, tokens, tokens, tokens, tokens, wrong_tokens)
fields: dict[str, st.SearchStrategy[Any]] = {
    "temperature": edges(0.0, 1e-300, 9.9e-6, 1e-5, 1.0, 100.0),
    "top_p": edges(5e-324, 1e-9, 0.5, 1.0),
    "top_k": edges(-1, 0, 1, VOCAB, VOCAB + 1, HUGE),
    "min_p": edges(0.0, 5e-324, 0.5, 1.0),
    "seed": edges(None, -(2**63), -1, 0, HUGE),
    "max_tokens": edges(None, 1, 2, 7, HUGE),
    "min_tokens": edges(0, 0, 1, 5, HUGE),
    "stop_token_ids": edges((), (2,), (0, 0, 11), tuple(range(VOCAB)), (VOCAB,), (HUGE,)),
    "allowed_token_ids": edges(*[None] * 9, (5, 11)),
    "thinking_token_budget": edges(None, None, -1, 0, 3, HUGE),
    "ignore_eos": st.booleans(),
    "repetition_penalty": edges(5e-324, 1e-30, 1.0, 1.0, 1.5, 1e30, 1.7e308),
    "presence_penalty": edges(-2.0, 0.0, 2.0),
    "frequency_penalty": edges(-2.0, 0.0, 2.0),
    "logit_bias": st.dictionaries(any_token, edges(-100.0, 0.0, 100.0), max_size=4),
    "logprobs": edges(None, 0, 1, 20),
    "prompt_logprobs": edges(None, 0, 20),
}
sequences = st.lists(st.lists(any_token, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple)
slos = st.builds(Slo, ttft=edges(None, 5e-324, 1e308), tbt=edges(None, 1.0), tpot=edges(None, 1.0))


def mask(bits: int) -> bytes:
    return bits.to_bytes(2, "little")


@st.composite
def submits(draw: st.DrawFn) -> Submit:
    """One of few names, so that ids are used twice and leaders are anybody, itself, or nobody."""
    chosen = draw(st.fixed_dictionaries({}, optional=fields))
    try:
        params = SamplingParams(**chosen)
    except ValueError:
        assume(False)
    return Submit(
        draw(edges("a", "b", "c", "d", "e", "")),
        draw(st.lists(any_token if draw(st.booleans()) else tokens, max_size=20)),
        params,
        priority=draw(edges(0, -(2**63), HUGE)),
        slo=draw(slos),
        leader=draw(edges(None, None, "a", "b", "nobody")),
        rules=TokenRules(
            banned=draw(st.one_of(st.just(()), sequences)),
            allowed=draw(edges(None, None, *map(mask, (5 << 8, 4, 1 + (8 << 8), 0xFFF, 0)), b"x")),
            ends=draw(edges((), (), (3,), (VOCAB,))),
            thinking=None
            if params.thinking_token_budget in (None, -1)
            else draw(st.tuples(any_token, any_token)),
        ),
    )


names = edges("a", "b", "c", "d", "e", "", "nobody")
counts = edges(-(2**63), -1, 0, 1, 3, HUGE)
messages = st.one_of(
    submits(), submits(), submits(), st.builds(Abort, names), st.builds(Finish, names, counts)
)


def small_engine(seed: int) -> tuple[Engine, SteppedLanes]:
    model = ServedModel(VOCAB, EOS, 24)
    return stepped_engine(RandomPlans(seed), small_vocabulary(), model, PAGES, PAGE, SLOTS)


class Front:
    """Counts what was asked and what came back, by id."""

    def __init__(self) -> None:
        self.submits: dict[str, Submit] = {}
        self.outputs: dict[str, list[Output]] = {}

    def send(self, message: ToEngine) -> ToEngine | None:
        """The message as it arrives; None: not sent, for the name is in use (see `Submit.id`)."""
        if isinstance(message, Submit):
            if message.id in self.submits:
                return None
            self.submits[message.id] = message
            self.outputs[message.id] = []
        return decode_to_engine(encode(message))

    def receive(self, news: Outputs) -> None:
        for output in news.outputs:
            self.outputs[output.id].append(output)
            if output.finish is not None:
                self.check(self.submits.pop(output.id), self.outputs.pop(output.id))
        for refused in news.refused:
            assert refused.code in ("invalid", "too_long")
            assert not self.outputs.pop(refused.id)
            del self.submits[refused.id]

    def check(self, submit: Submit, outputs: list[Output]) -> None:
        got = [token for output in outputs for token in output.tokens]
        scored = [scores for output in outputs for scores in output.logprobs or ()]
        params = submit.params
        assert all(token in range(VOCAB) for token in got)
        allowed = int.from_bytes(submit.rules.allowed or mask(0xFFF), "little")
        assert all(allowed >> token & 1 for token in got)
        for sequence in submit.rules.banned:
            parts = zip(*(got[place:] for place in range(len(sequence))), strict=False)
            assert sequence not in parts
        if submit.rules.thinking is not None:
            begin, end = submit.rules.thinking
            if begin in got[:-1] and begin not in submit.prompt and end not in submit.prompt:
                thought = got[got.index(begin) + 1 :]
                place = thought.index(end) if end in thought else len(thought)
                assert place <= (params.thinking_token_budget or 0)
        assert len(got) <= (params.max_tokens or HUGE)
        assert len(scored) == (0 if params.logprobs is None else len(got))
        prompts = [o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None]
        assert len(prompts) == (params.prompt_logprobs is not None and bool(got))
        if prompts:
            assert [scores.token for scores in prompts[0]] == submit.prompt[1:]
        for scores in [*scored, *(prompts[0] if prompts else ())]:
            assert 1 <= scores.rank <= VOCAB
        if got and outputs[-1].finish == "length":
            ends = {*params.stop_token_ids}
            ends |= set() if params.ignore_eos else {*EOS, *submit.rules.ends}
            assert not ends & set(got)


@given(script=st.lists(messages, max_size=12), seed=st.integers(0, 2**16))
def test_every_request_ends_once(script: list[ToEngine], seed: int) -> None:
    engine, lanes = small_engine(seed)
    front, rng = Front(), random.Random(seed)
    to_send = script[::-1]
    with torch.inference_mode():
        for _ in range(2000):
            arrived = [front.send(to_send.pop())] if to_send and rng.random() < 0.5 else []
            engine.take([message for message in arrived if message is not None])
            engine.reap()
            engine.carry_out(engine.plan())
            if (news := engine.outputs()) is not None:
                front.receive(decode(news))
            engine.state.kv.check()
            for lane in lanes.runnable():
                if rng.random() < 0.7:
                    lanes.step(lane)
            if not (to_send or front.submits or engine.state.in_flight):
                break
    assert not front.submits, "some never ended"
    kv = engine.state.kv
    assert kv.free_pages + kv.reclaimable_pages == PAGES
    assert kv.free_slots == SLOTS
    assert not engine.state.queue.held


def decode(news: Outputs) -> Outputs:
    """As the API process gets it."""
    arrived = decode_from_engine(encode(news))
    assert isinstance(arrived, Outputs)
    return arrived
