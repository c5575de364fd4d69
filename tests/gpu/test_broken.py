"""NaN in a model's logits on the GPU ends the request that it is of, and no other."""

import time

import pytest
import torch
from msgspec.structs import replace

from tests.gpu.serving import LEVELS, PAGE, lanes_on
from tests.model.checkpoints import make_checkpoint
from twolane.devices import DeviceSettings
from twolane.engine.engine import Engine
from twolane.engine.intake import ServedModel
from twolane.engine.kv.manager import KVCacheManager
from twolane.engine.messages import Output, Refused, Submit
from twolane.engine.state import State
from twolane.estimate.online import OnlineEstimator
from twolane.lanes.cuda.machine import CudaMachine
from twolane.model.load.hub import resolve
from twolane.model.load.weights import load_weights
from twolane.sampling import SamplingParams
from twolane.systems.registry import make_system

POISON = 251
"""A token whose embedding holds no number."""
PAGES, SLOTS, SECONDS = 256, 16, 60.0
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SOUND = [Submit(f"sound {i}", list(range(20 + i, 60 + i)), GREEDY) for i in range(4)]
BROKEN = [
    Submit("prompt", [9, 8, POISON, 7, 6], GREEDY),
    Submit("drawn", [9, POISON, 6], replace(GREEDY, temperature=1.0, top_p=0.9)),
    Submit("scored", [9, POISON, 6, 5], replace(GREEDY, prompt_logprobs=1)),
    Submit("banned", [POISON, 6, 5], replace(GREEDY, ignore_eos=False, min_tokens=9, logprobs=2)),
    Submit("chosen", [9, 8, 7, 6], replace(GREEDY, logit_bias={POISON: 100.0})),
]


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> CudaMachine:
    path = make_checkpoint("qwen2", tmp_path_factory.mktemp("gpu") / "qwen2", seed=1)
    spec, weights = load_weights(resolve(str(path)), dtype="float32", device="cuda")
    weights.embedding[POISON] = torch.nan
    return CudaMachine(spec, weights, DeviceSettings(model="", levels=LEVELS))


def serve(machine: CudaMachine, system: str, submits: list[Submit]) -> dict[str, list]:
    """Serve requests to their ends; the events of each, and the engine's count under ""."""
    lanes = lanes_on(machine, PAGES, SLOTS)(lambda: None)
    spec = machine.spec
    engine = Engine(
        make_system(system),
        State(
            KVCacheManager(PAGES, PAGE, SLOTS, prefix_cache=True),
            lanes,
            spec.layers,
            OnlineEstimator(),
        ),
        ServedModel(spec.vocab_size, spec.eos_token_ids, 512),
        pass_sizes=machine.pass_sizes,
    )
    events: dict[str, list] = {submit.id: [] for submit in submits}
    engine.take(submits)
    end = time.monotonic() + SECONDS
    while engine.state.requests or engine.state.in_flight:
        assert time.monotonic() < end
        engine.reap()
        while engine.carry_out(engine.plan()):
            pass
        if (news := engine.outputs()) is not None:
            for event in (*news.outputs, *news.refused):
                events[event.id].append(event)
        lanes.rest(0.0005)
    if (news := engine.outputs()) is not None:
        for event in (*news.outputs, *news.refused):
            events[event.id].append(event)
    events[""] = [engine.stats().broken]
    lanes.close()
    return events


def tokens_of(events: list[Output | Refused]) -> list[int]:
    return [token for each in events if isinstance(each, Output) for token in each.tokens]


@pytest.mark.parametrize("system", ["static-split", "chunked", "auto"])
def test_the_broken_requests_end_and_the_others_go_on(machine: CudaMachine, system: str) -> None:
    alone = serve(machine, system, SOUND)
    mixed = [SOUND[0], BROKEN[0], BROKEN[1], SOUND[1], *BROKEN[2:], *SOUND[2:]]
    events = serve(machine, system, mixed)
    for submit in SOUND:
        assert len(tokens_of(alone[submit.id])) == GREEDY.max_tokens
        assert tokens_of(events[submit.id]) == tokens_of(alone[submit.id])
    for submit in BROKEN:
        assert isinstance(events[submit.id][-1], Refused), submit.id
        assert events[submit.id][-1].code == "broken"
        assert tokens_of(events[submit.id]) in ([], [POISON])
    assert events[""] == [len(BROKEN)]
