"""A point of a profile: enough is queued, and a device that waits for the host does not count."""

from collections.abc import Callable

import pytest

from twolane.engine.config import EngineConfig
from twolane.lanes.base import Ticket
from twolane.lanes.work import PrefillWork, Work
from twolane.model.shapes import SHAPES
from twolane.profile import measure
from twolane.profile.clocks import Clocks
from twolane.profile.grid import Point, plan
from twolane.profile.rig import Rig
from twolane.profile.run import rig_on
from twolane.sim.gpus import GPUS
from twolane.sim.machine import SimulatedMachine

SPEC = SHAPES["qwen3-8b"]
PROMPT = Point("prompt", "prefill", ((2048, 0, 1),), (), 132, 0, held_out=False)
STEPS = Point("steps", "decode", (), ((1, 500, 8),), 0, 132, held_out=False)


@pytest.fixture
def rig():
    machine = SimulatedMachine(GPUS["h200"], SPEC, EngineConfig(model="simulated"), tp=1, seed=0)
    with rig_on(EngineConfig(model="simulated"), machine, lambda stage, share: None) as rig:
        yield rig


class Host:
    """Queues what is launched on a rig; the device waits for the launches that it says."""

    def __init__(self, rig: Rig, late: Callable[[Work], bool] = lambda work: False) -> None:
        self.launched: list[tuple[Work, Ticket]] = []
        self.queued: list[int] = []
        """Launches that had not ended, with each."""
        self._late, self._launch, self._wait = late, rig.launch, rig.wait
        rig.launch, rig.wait = self.launch, self.wait

    def launch(self, lane, units, work):
        ticket = self._launch(lane, units, work)
        self.launched.append((work, ticket))
        self.queued.append(sum(not ticket.done for _, ticket in self.launched))
        return ticket

    def wait(self, until, tickets):
        self._wait(until, tickets)
        for ticket in self.late:
            ticket.queued_at = ticket.end

    @property
    def late(self) -> list[Ticket]:
        return [ticket for work, ticket in self.launched if ticket.done and self._late(work)]


def measured(rig: Rig, point: Point):
    with Clocks(None) as clocks:
        return measure.measure(rig, point, clocks)


def test_a_small_pool_has_the_pages_of_every_point():
    """Of many short rows, too: each takes whole pages."""
    config = EngineConfig(model="simulated", kv_tokens=8192)
    machine = SimulatedMachine(GPUS["h200"], SPEC, config, tp=1, seed=0)
    with rig_on(config, machine, lambda stage, share: None) as rig:
        points = plan(rig.limits, seed=0, rounds=5)
        for point in points:
            rig.give_back([*rig.prompts(point.prompts).rows, *rig.decode_rows(point.contexts)])
        assert max(sum(count for *_, count in point.contexts) for point in points) > 100


def test_a_lane_has_work_for_longer_than_a_launch_takes_the_host(rig):
    host = Host(rig)
    (sample,) = measured(rig, STEPS)
    assert 2 * sample.median < measure.QUEUED_SECONDS
    assert (max(host.queued) + 0.1) * sample.median > measure.QUEUED_SECONDS


def test_launches_that_the_device_waited_for_are_left_out(rig, monkeypatch):
    """There the first slice of a batch: the host has to lay it out."""
    monkeypatch.setattr(measure, "REPEATS", 12)
    host = Host(rig, lambda work: work.first == 0)
    first, last = measured(rig, PROMPT)
    late = {ticket.seconds for ticket in host.late}
    assert len(late) > 2
    assert (first.finishes, last.finishes) == (False, True)
    assert not late & {*first.seconds, *last.seconds}


def test_where_it_always_waits_that_is_what_launches_take(rig):
    host = Host(rig, lambda work: True)
    (sample,) = measured(rig, STEPS)
    assert len(sample.seconds) >= 3
    assert {*sample.seconds} <= {ticket.seconds for ticket in host.late}


@pytest.mark.parametrize("point", [PROMPT, STEPS], ids=lambda point: point.name)
def test_what_a_lane_ran_into_is_told(rig, point):
    rig.launch = lambda lane, units, work: Ticket(lane, units, end=0.0, error=MemoryError("full"))
    with pytest.raises(MemoryError, match="full"):
        measured(rig, point)


def test_rows_of_a_model_with_experts_decode_tokens_of_their_own() -> None:
    spec, config = SHAPES["qwen3-30b-a3b"], EngineConfig(model="simulated")
    machine = SimulatedMachine(GPUS["h200"], spec, config, tp=1, seed=0)
    with rig_on(config, machine, lambda stage, share: None) as rig:
        host = Host(rig)
        rig.decode_rows(((1, 500, 8), (1, 0, 1)))
        [(work, ticket)] = host.launched
    assert ticket.done and isinstance(work, PrefillWork)
    assert [(row.slot, row.start) for row in work.rows] == [(slot, 499) for slot in range(8)]
    assert len({chunk.tokens for chunk in work.chunks}) == 8
