"""Random schedules on CPU lanes whose threads really run at once: every output as when alone.

The worlds of `tests/engine` decide themselves when a lane takes a step. Here the machine does:
what two threads do to one KV pool, one set of slots and one set of tickets in the same instant
is put to the test. Prompts, aborts and plans are random, the model is in float64, and every page
is accounted for after every turn.
"""

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch

from tests.engine.random_plans import RandomPlans
from tests.engine.world import World
from twolane.common.resources import usable_cores
from twolane.devices import LaneName
from twolane.lanes.base import Step
from twolane.lanes.cpu.lanes import CpuLanes
from twolane.lanes.cpu.runner import AwaitMasks, Runner
from twolane.lanes.work import Work
from twolane.systems.base import System
from twolane.systems.registry import make_system

pytestmark = pytest.mark.usefixtures("one_thread")
WORLDS = 3
FULL_WORLDS = 300
PATIENCE = 60.0

SYSTEMS: dict[str, Callable[[int], System]] = {
    "random plans": RandomPlans,
    "static-split": lambda _: make_system("static-split", {"slice_seconds": "0"}),
    "static-split, 3 ahead": lambda _: make_system(
        "static-split", {"slice_seconds": "0", "look_ahead": "3"}
    ),
}


class Watched:
    """A runner that counts how often work begins in one thread while another is at work."""

    def __init__(self, runner: Runner, seen: Counter[str]) -> None:
        self._runner, self._seen = runner, seen
        self._at_work = 0
        self._lock = threading.Lock()

    def run(self, work: Work, masks: AwaitMasks) -> Iterator[Step]:
        torch.set_num_threads(1)  # of this lane
        with self._lock:
            self._seen["side by side"] += self._at_work > 0
            self._at_work += 1
        yield from self._runner.run(work, masks)
        with self._lock:
            self._at_work -= 1

    def drop(self, batch: int) -> None:
        self._runner.drop(batch)

    compiled = False

    def bind(self, lane: LaneName) -> None:
        self._runner.bind(lane)


@dataclass
class ThreadedWorld(World):
    """A world whose lanes run by themselves; the script only decides what is asked and when."""

    news: threading.Event = field(default_factory=threading.Event)

    def make_lanes(self, runner: Runner) -> CpuLanes:
        return CpuLanes(Watched(runner, self.seen), usable_cores(), self.news.set)

    def run_lanes(self) -> bool:
        """Look again when a lane has news, or in a moment; whether lanes are at work."""
        self.news.wait(self.rng.choice((0.0005, 0.002)))
        self.news.clear()
        return bool(self.engine.state.in_flight)

    def drain(self) -> None:
        while self.run_lanes():
            self.turn([])
        self.lanes.close(PATIENCE)

    def run(self) -> None:
        try:
            super().run()
        finally:
            self.lanes.close(PATIENCE)


def run_worlds(system: str, seeds: range) -> Counter[str]:
    """What the schedules of these seeds did, all together."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        world = ThreadedWorld(SYSTEMS[system](seed), random.Random(seed))
        world.run()
        seen += world.seen
    return seen


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "system",
    [
        *("random plans", "static-split, 3 ahead"),
        pytest.param("static-split", marks=pytest.mark.full),
    ],
)
def test_outputs_are_those_of_requests_alone(system: str, request: pytest.FixtureRequest) -> None:
    """The threads were at work at once, memory ran out, pages were shared, somebody left."""
    seen = run_worlds(system, range(FULL_WORLDS if request.config.getoption("--full") else WORLDS))
    for what in ("side by side", "memory preemptions", "prefix hits", "aborted in flight"):
        assert seen[what] >= 1, f"{what}: {seen[what]}"
