"""Fifty prompts of 1 to 512 tokens on a random model of each family, served in every way."""

import json
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.model.checkpoints import (
    EVERY_KIND,
    FAMILIES,
    LAYERS,
    VOCAB,
    config_of,
    load_decoder,
    make_checkpoint,
    reference,
)
from tests.parity.axes import Case, all_cases, pairwise_cases
from tests.parity.judge import Judge, Tally
from tests.parity.prompts import LENGTHS, MAX_TOKENS, random_requests
from tests.parity.schedules import schedules
from tests.parity.serving import OneThread, Served, serve
from twolane.engine.messages import Submit
from twolane.lanes.base import Step
from twolane.lanes.cpu.runner import AwaitMasks, Runner, _Paused
from twolane.lanes.work import DecodeRow, PrefillWork
from twolane.model.attention import Batch
from twolane.model.decoder import Decoder
from twolane.model.families import registry
from twolane.model.load.configs import facts_from_directory
from twolane.model.load.hub import resolve
from twolane.model.page_layout import PageLayout
from twolane.model.spec import UNROTATED, ModelSpec

PAGE = 8
REQUESTS = random_requests(VOCAB)
POOLS = {"ample": 2048, "small": -(-(max(LENGTHS) + MAX_TOKENS + PAGE) // PAGE)}
"""Pages: nothing is ever evicted; one of the longest requests, and little beside it."""
PAIRWISE = "qwen2-sliding"
"""The others differ inside a layer alone, which `tests/model/test_parity.py` cuts anywhere."""
KINDS = (
    ("gpt-oss", "chunked-48"),
    ("gemma4-inputs", "every-layer"),
    ("gemma4-moe", "static-split-k3"),
    ("qwen3-moe", "chunked-640"),
    ("qwen3-moe", "static-split"),
    ("qwen3.5-moe", "chunked-48"),
    ("qwen3.5-moe", "cut-2"),
    ("qwen3.5-moe", "static-split-k3"),
    ("laguna", "static-split-k3"),
    ("lfm2", "every-layer"),
    ("glm4-moe", "every-layer"),
    ("qwen2-moe", "chunked-48"),
    ("hunyuan", "cut-2"),
    ("muse-glimmer", "chunked-640"),
    ("olmo2", "cut-1"),
    ("smollm3", "static-split"),
)
"""Families that have, with `PAIRWISE`, every kind of layer, each with a schedule."""
TIMED = ("static-split", "prefill-first", "chunked-640")
"""Schedules that hold as much of prompts at once as has arrived by then."""
QUICK = 10
"""The first of them have layers that the lanes treat in a way of their own: windows and sinks,
heads and keys by layer, experts beside a dense MLP, experts alone, states, gates, convolutions."""
AXES: dict[str, Any] = {
    "family": (PAIRWISE,),
    "schedule": tuple(schedules(LAYERS)),
    # Cases that no pair asks for take the first value: the fastest comes first, one at a time last.
    "running": (16, 2),
    "prefix_cache": (True, False),
    "pool": tuple(POOLS),
}

Models = Callable[[str], tuple[Decoder, Judge]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """family → (decoder, the same checkpoint in transformers); each loaded once."""

    @cache
    def load(family: str) -> tuple[Decoder, Judge]:
        path = make_checkpoint(family, tmp_path_factory.mktemp("parity") / family, seed=1)
        return load_decoder(resolve(str(path))), Judge(reference(path))

    return load


def name(case: Case) -> str:
    cache = "cached" if case["prefix_cache"] else "uncached"
    return f"{case['family']}-{case['schedule']}-{case['running']}-{cache}-{case['pool']}"


@pytest.mark.parametrize("case", pairwise_cases(AXES), ids=name)
def test_pairwise(case: Case, models: Models, tally: Tally) -> None:
    """Every two values of two axes meet in one of these cases, of a model with windows."""
    check(case, models, tally)


@pytest.mark.parametrize(
    ("family", "schedule"),
    [*KINDS[:QUICK], *(pytest.param(*kind, marks=pytest.mark.full) for kind in KINDS[QUICK:])],
)
def test_kinds_of_layers(family: str, schedule: str, models: Models, tally: Tally) -> None:
    """What `test_pairwise` leaves out; `test_in_full` has all schedules of all families."""
    pool = tuple(POOLS)[KINDS.index((family, schedule)) % 2]
    case = {"family": family, "schedule": schedule, "running": 5, "prefix_cache": True}
    check({**case, "pool": pool}, models, tally, every=6)


def traits(spec: ModelSpec) -> set[str]:
    """What layers of a model have beside plain attention, norms of inputs and a dense MLP."""
    moe, found = spec.moe, set[str]()
    for kind in (spec.kind(i) for i in range(spec.layers)):
        found |= {f.name for f in fields(kind) if getattr(kind, f.name) != f.default}
        found |= {"unrotated"} if kind.rope == UNROTATED else set()
    names = ("sinks", "qkv_bias", "v_norm", "layer_scales", "layer_inputs", "output_gate", "gate")
    names += ("norms_rotated", "bare_qk_norm", "norms_embeddings", "logit_cap", "norms_outputs")
    found |= {name for name in (*names, "delta", "convolution") if getattr(spec, name)}
    found |= {f"norm of {spec.qk_norm}"} if spec.qk_norm else set()
    if moe is not None:
        of_moe = ("sigmoid", "biased", "shared", "gated", "beside_dense", "biases", "dense_layers")
        found |= {"experts", *(f"experts: {name}" for name in of_moe if getattr(moe, name))}
    return found


VISION = {kind: name for each in registry.VISION.values() for name, kind in each.vision.items()}
"""Architectures of checkpoints that read images, too, by their types."""


def test_every_kind_of_layer_is_in_the_list(tmp_path: Path) -> None:
    has = {}
    for family in FAMILIES:
        config_of(family).save_pretrained(tmp_path / family)
        config = json.loads((tmp_path / family / "config.json").read_text())
        config.pop("architectures", None)  # a text's type says it; others name theirs
        if "text_config" in config:
            config["architectures"] = [VISION[config["model_type"]]]
        (tmp_path / family / "config.json").write_text(json.dumps(config))
        has[family] = traits(facts_from_directory(tmp_path / family).spec)
    every = set().union(*has.values())
    served = set().union(*(has[family] for family in EVERY_KIND))
    assert every - served == set()
    assert {*EVERY_KIND} == {PAIRWISE, *dict(KINDS)}


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("schedule", AXES["schedule"])
@pytest.mark.parametrize("family", FAMILIES)
def test_in_full(family: str, schedule: str, models: Models, tally: Tally) -> None:
    """All values of the other axes, and more of them, with all of each other."""
    axes = {**AXES, "family": (family,), "schedule": (schedule,), "running": (32, 16, 5, 2, 1)}
    for case in all_cases(axes):
        check(case, models, tally)


@pytest.mark.parametrize("family", ["llama31", "qwen3"])
def test_with_a_team_of_threads_in_each_lane(family: str, models: Models, tally: Tally) -> None:
    """As it is served: a lane on two cores computes on two threads."""
    decoder, judge = models(family)
    requests = REQUESTS[::4]
    served = serve(
        decoder,
        schedules(LAYERS)["static-split-k3"](),
        requests,
        pages=POOLS["ample"],
        page_size=PAGE,
        running=8,
        prefix_cache=True,
        runner=Runner,
    )
    for request, output in zip(requests, served.outputs, strict=True):
        tally.forgiven += judge.forgiven(request.prompt, output)
        tally.tokens += len(output)
    tally.runs += 1


class LeavesOutALayer(OneThread):
    """A prefill that goes on after a cut begins a layer too late."""

    def _layers(self, hidden: Tensor, batch: Batch, first: int, last: int) -> Tensor:
        return super()._layers(hidden, batch, first + (first > 0), last)


class LosesAWrite(OneThread):
    """Keys and values of decode steps are not kept in one layer."""

    def _decode(self, rows: Sequence[DecodeRow], step: int, late: AwaitMasks) -> Step:
        before = self._kv.layers[2].clone()
        tokens = super()._decode(rows, step, late)
        self._kv.layers[2].copy_(before)
        return tokens


class MixesUpSlots(OneThread):
    """Half of the decoding requests go on from their neighbour's token."""

    def _last_tokens(self, slots: Sequence[int]) -> Tensor:
        return super()._last_tokens([slot & ~1 for slot in slots])


class KeepsTheWrongHiddenStates(OneThread):
    """A batch goes on with its tokens in another order."""

    def _resume(self, work: PrefillWork) -> _Paused:
        paused = super()._resume(work)
        return paused if work.first == 0 else replace(paused, hidden=paused.hidden.flip(0))


@pytest.mark.parametrize(
    "faulty", [LeavesOutALayer, LosesAWrite, MixesUpSlots, KeepsTheWrongHiddenStates]
)
def test_faults_are_noticed(faulty: type[Runner], models: Models) -> None:
    """The comparison is worth something: a runner with one fault does not pass it."""
    decoder, judge = models("qwen2")
    requests = REQUESTS[::5]

    def forgiven(runner: type[Runner]) -> int:
        served = serve(
            decoder,
            schedules(LAYERS)["cut-2"](),
            requests,
            pages=POOLS["ample"],
            page_size=PAGE,
            running=4,
            prefix_cache=False,
            runner=runner,
        )
        outputs = zip(requests, served.outputs, strict=True)
        return sum(judge.forgiven(request.prompt, output) for request, output in outputs)

    assert forgiven(OneThread) <= 1
    with pytest.raises(AssertionError, match=r"the reference has|NaN or infinite"):
        forgiven(faulty)


def check(case: Case, models: Models, tally: Tally, every: int | None = None) -> None:
    """Every token is the reference's; and the case was what it says it is.

    One at a time, a third of the requests do: those that begin with the same text. Of few at
    a time, and of 16 that memory has room for, half of them.
    """
    decoder, judge = models(case["family"])
    steps = {1: 3, 2: 2, 5: 2, 16: 2 if case["pool"] == "ample" else 1}
    requests = REQUESTS[:: every or steps.get(case["running"], 1)]
    served = serve(
        decoder,
        schedules(LAYERS)[case["schedule"]](),
        requests,
        pages=POOLS[case["pool"]],
        page_size=PAGE,
        running=case["running"],
        prefix_cache=case["prefix_cache"],
    )
    compare(requests, served, judge, tally)
    if every is not None:  # too few for all that a setting means
        return
    check_setting(case, served, windowed=PageLayout.of(decoder.spec).window > 0)


def compare(requests: list[Submit], served: Served, judge: Judge, tally: Tally) -> None:
    """Every token is the reference's."""
    for request, output, finish in zip(requests, served.outputs, served.finish, strict=True):
        assert len(output) == request.params.max_tokens
        assert finish == "length"
        tally.forgiven += judge.forgiven(request.prompt, output)
        tally.tokens += len(output)
    tally.runs += 1
    tally.side_by_side += served.side_by_side


def check_setting(case: Case, served: Served, *, windowed: bool) -> None:
    """Memory ran out where it should, pages were shared where they may be, cuts are where meant.

    The small pool holds two requests that give back what has left their windows, and more of them
    where time decides how much of their prompts is held at once: in two lanes, and where prompts
    are computed as they arrive.
    """
    running, schedule = case["running"], case["schedule"]
    full = case["pool"] == "small" and running > 1 + windowed
    if not windowed or not full or not schedule.startswith(TIMED):
        assert bool(served.preemptions) == full
    assert bool(served.prefix_hits) == case["prefix_cache"]
    assert served.max_together <= running
    if schedule == "prefill-first" and case["pool"] == "ample":
        assert served.max_together == running
    slices = {launch for launch in served.names if launch.startswith("layers")}
    if schedule.startswith("cut"):
        layer = schedule.removeprefix("cut-")
        assert slices == {f"layers 0:{layer}", f"layers {layer}:{LAYERS}"}
    elif schedule == "every-layer":
        assert slices == {f"layers {i}:{i + 1}" for i in range(LAYERS)}
    elif schedule == "static-split" and running > 1:
        assert {f"layers {i}:{i + 1}" for i in range(LAYERS)} <= slices
    elif schedule == "static-split-k3":
        assert "decode x3" in served.names
    elif schedule.startswith("chunked"):
        assert "hybrid" in served.names
