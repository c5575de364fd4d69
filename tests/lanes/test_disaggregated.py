"""Prefill and decode in processes of their own, under random schedules: outputs as when alone.

The other process is threads of this one, with the real lanes, runners, pools and pipe, so that the
model can be in float64, and delays and faults can be put where a test wants them.
"""

import os
import random
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.random_plans import RandomPlans
from tests.engine.world import ADAPTERS, PAGE, tiny_decoder
from tests.lanes.test_ranks import Late, Nearby
from tests.lanes.test_real_threads import ThreadedWorld
from twolane.common.errors import FieldError
from twolane.common.resources import usable_cores
from twolane.devices import DeviceSettings
from twolane.engine.config import EngineConfig
from twolane.engine.settings import check_settings
from twolane.lanes.cpu.lanes import CpuLanes
from twolane.lanes.cpu.runner import Runner
from twolane.lanes.disaggregated.arrivals import Arrivals
from twolane.lanes.disaggregated.cpu_decode import DecodeRunner, halves
from twolane.lanes.disaggregated.cpu_mirror import MirroredKVCache
from twolane.lanes.disaggregated.cpu_prefill import PromptRunner
from twolane.lanes.disaggregated.lanes import DisaggregatedLanes
from twolane.lanes.disaggregated.shared_memory import SharedMemory
from twolane.lanes.load import load
from twolane.lanes.work import DecodeWork, HybridWork, PrefillWork
from twolane.model.lora import AdapterPool
from twolane.systems.base import System
from twolane.systems.plan import DecodeSteps, Launch, PrefillSlice
from twolane.systems.registry import make_system
from twolane.systems.view import View

pytestmark = pytest.mark.usefixtures("one_thread")
WORLDS, FULL_WORLDS = 2, 200
UNWRITTEN = 1e3
"""What nobody wrote must not be read: it would show."""
LATE_PUSHES = 40
"""A faulty pool pushes this many pushes too late, those of ten decode steps."""


class LatePrompts(Late, PromptRunner):
    """The prefill process is held up now and then."""


class LateDecode(Late, DecodeRunner):
    """The decode process is held up now and then."""


class HeldUp(MirroredKVCache):
    """Pages are pushed slowly."""

    rng = random.Random(0)

    def push(self, layer: int, slots: Tensor, new: Tensor) -> None:
        if self.rng.random() < 0.05:
            time.sleep(0.002)
        super().push(layer, slots, new)


class TooLate(MirroredKVCache):
    """Pages arrive behind those of many later launches, though it was told that they have."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._late: deque[tuple[int, Tensor, Tensor]] = deque()

    def push(self, layer: int, slots: Tensor, new: Tensor) -> None:
        self._late.append((layer, slots.clone(), new.clone()))
        if len(self._late) > LATE_PUSHES:
            super().push(*self._late.popleft())


@dataclass(frozen=True)
class ApartPlans(RandomPlans):
    """Random plans whose slices are in the prefill lane and whose decode steps in the other."""

    def _launches(self, view: View, rng: random.Random, first: int | None) -> list[Launch]:
        launches: list[Launch] = []
        for _ in range(rng.choice((0, 1, 1, 2))):
            if rng.random() < 0.5:
                work = DecodeSteps(rng.randint(1, 4), rng.random() < 0.5)
                if view.lanes["decode"].queued + len(launches) < self.max_queued:
                    launches.append(Launch("decode", view.units, work))
            elif first is not None and first < view.layers:
                part = PrefillSlice(first, rng.randint(first + 1, view.layers))
                launches.append(Launch("prefill", view.units, part))
                first = part.last
        return launches


class ApartWorld(ThreadedWorld):
    """A world whose prompts are computed by another runner, with a pool of its own.

    Its `pools` are those of the decode and of the prefill process.
    """

    pools: tuple[type[MirroredKVCache], type[MirroredKVCache]] = (HeldUp, HeldUp)

    def make_lanes(self, runner: Runner) -> Any:
        decoder = tiny_decoder()
        ours, theirs = SharedMemory.new(), SharedMemory.new()
        shape = decoder.spec, self.pages, PAGE, torch.float64
        kv = self.pools[0](*shape, (ours, theirs))
        for cache in (kv, kv.other):
            for layer in cache.layers:
                assert isinstance(layer, Tensor)
                layer.fill_(UNWRITTEN)
        read, write = os.pipe()
        there = SharedMemory(theirs.file), SharedMemory(ours.file)
        adapters = [AdapterPool(decoder.weights, len(ADAPTERS)) for _ in range(2)]
        prompts = LatePrompts(decoder, self.pools[1](*shape, there), self.slots, adapters[0])
        prompts.arrivals = write
        ours.close()
        theirs.close()
        decode = LateDecode(decoder, kv, self.slots, adapters[1])
        decode.arrivals = Arrivals(read)
        self.decode, self.prompts, self.written = decode, prompts, write
        lanes = CpuLanes(decode, usable_cores(), self.news.set)
        return DisaggregatedLanes(lanes, Nearby(prompts))  # type: ignore[arg-type]

    def run(self) -> None:
        try:
            super().run()
        finally:
            os.close(self.written)  # which ends the reader
        assert not self.decode._paused, "rows of a batch were kept"
        assert not self.prompts._paused, "hidden states were kept"


def run_worlds(system: str, seeds: range, kind: type[ApartWorld] = ApartWorld) -> Counter[str]:
    """What the schedules of these seeds did, all together."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        policy: System = ApartPlans(seed) if system == "random plans" else make_system(system)
        world = kind(policy, random.Random(seed), adapted=seed % 2 == 1)
        world.run()
        seen += world.seen
    return seen


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("system", ["random plans", "two-stream"])
def test_outputs_are_those_of_requests_alone(system: str, request: pytest.FixtureRequest) -> None:
    """With aborts, next turns, adapters, log-probabilities, and delays everywhere."""
    full = request.config.getoption("--full")
    seen = run_worlds(system, range(FULL_WORLDS if full else WORLDS))
    for what in ("memory preemptions", "prefix hits", "aborted in flight", "scored prompts"):
        assert seen[what] >= 1, f"{what}: {seen[what]}"


class PromptsArriveLate(ApartWorld):
    pools = MirroredKVCache, TooLate


class StepsArriveLate(ApartWorld):
    pools = TooLate, MirroredKVCache


@pytest.mark.parametrize("kind", [PromptsArriveLate, StepsArriveLate])
def test_pages_that_arrive_after_their_launch_has_ended_are_noticed(
    kind: type[ApartWorld],
) -> None:
    """Decode reads those of prompts, and later prompts those of decode steps."""
    with pytest.raises(AssertionError, match="is not"):  # an output is another
        run_worlds("two-stream", range(50), kind)


def test_what_shares_a_device_between_the_lanes_is_refused() -> None:
    world = ApartWorld(make_system("two-stream"), random.Random(0))
    steps = DecodeWork((), 1)
    slice_ = PrefillWork(0, (), 0, 1, finishes=False)
    for lane, work, after in (
        ("prefill", steps, ()),
        ("decode", slice_, ()),
        ("device", HybridWork((), ()), ()),
        ("prefill", slice_, (0,)),
    ):
        with pytest.raises(ValueError, match="have devices of their own"):
            world.lanes.launch(lane, 1, work, after)
    world.lanes.close()
    os.close(world.written)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"system": "auto"}, "system must be two-stream with disaggregated, not auto"),
        ({"tensor_parallel_size": 2}, "disaggregated needs tensor_parallel_size 1"),
        ({"levels": (16,)}, "levels do not go with disaggregated: each lane has a whole GPU"),
    ],
)
def test_settings_that_do_not_go_with_it_are_refused_by_name(
    settings: dict[str, Any], said: str
) -> None:
    check_settings(EngineConfig(model="m", disaggregated=True))
    check_settings(EngineConfig(model="m", disaggregated=True, system="two-stream"))
    with pytest.raises(FieldError, match=said):
        check_settings(EngineConfig(model="m", disaggregated=True, **settings))


def test_prefill_and_decode_have_as_many_cores_each() -> None:
    assert halves([3, 4, 5, 6]) == ((3, 4), (5, 6))
    assert halves([3, 4, 5]) == ((3,), (5,))
    assert halves([3]) == ((3,), (3,))


@pytest.mark.parametrize(
    ("count", "mapped", "said"),
    [
        (1, True, "disaggregated takes two GPUs, and PyTorch finds 1"),
        (2, False, "map each other's"),
    ],
)
def test_gpus_that_cannot_serve_it_are_refused_by_name(
    count: int, mapped: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any process is started, and before the model is looked for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: mapped)
    for device in ("auto", "cuda"):
        settings = DeviceSettings(model="nowhere", device=device, disaggregated=True)
        with pytest.raises(FieldError, match=said):
            load(settings, lambda *_: None)


def test_pages_in_fp8_are_refused_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: True)
    settings = DeviceSettings(model="nowhere", disaggregated=True, kv_cache_dtype="fp8")
    with pytest.raises(FieldError, match="kv_cache_dtype cannot be fp8 yet with disaggregated"):
        load(settings, lambda *_: None)
