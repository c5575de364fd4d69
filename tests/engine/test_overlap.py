"""What is said of the other lane, and until when lanes are taken to be busy."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.test_liveness import HeldLanes, make_engine, turn
from tests.systems.simulation import submit
from twolane.devices import LANES, LaneName
from twolane.engine.launches.overlap import (
    PartialOverlap,
    corunner_during,
    corunner_now,
    lane_waits,
)
from twolane.engine.messages import LaneWait
from twolane.engine.state import State
from twolane.estimate.base import Estimator
from twolane.estimate.query import Corunner, LaunchShape, Load, decode_step
from twolane.lanes.base import Ticket
from twolane.systems.plan import DecodeSteps, Launch

ROW = Load.decode([10])


def flight(
    lane: LaneName,
    start: float | None = None,
    end: float | None = None,
    *,
    units: int = 48,
    predicted: float | None = None,
    after: tuple[Ticket, ...] = (),
) -> Any:
    ticket = Ticket(lane, units)
    ticket.start, ticket.end = start, end
    launch = Launch(lane, units, DecodeSteps())
    return SimpleNamespace(
        ticket=ticket, launch=launch, shape=decode_step(ROW), predicted=predicted, after=after
    )


def beside(*others: Any, lane: LaneName = "prefill") -> Corunner | None:
    """What ran beside a launch from 2.0 to 4.0."""
    finished = {"decode": deque(each for each in others if each.ticket.end is not None)}
    in_flight = [each for each in others if each.ticket.end is None]
    state: Any = SimpleNamespace(finished=finished, in_flight=in_flight)
    return corunner_during(state, flight(lane, 2.0, 4.0, units=84))


@pytest.mark.parametrize(("start", "end"), [(1.8, 4.2), (2.0, 3.92), (2.04, None)])
def test_what_ran_nearly_all_the_while_ran_beside_it(start: float, end: float | None) -> None:
    assert beside(flight("decode", start, end)) == Corunner(ROW, 48)


@pytest.mark.parametrize(
    ("start", "end"), [(0.0, 2.0), (1.0, 2.02), (3.98, 6.0), (4.0, 6.0), (None, None)]
)
def test_what_hardly_ran_meanwhile_did_not(start: float | None, end: float | None) -> None:
    assert beside(flight("decode", start, end)) is None


@pytest.mark.parametrize(
    ("start", "end"),
    [(2.0, 3.8), (2.2, 5.0), (3.0, None), (1.0, 3.0), (2.4, 3.6), (1.0, 2.06)],
)
def test_what_ran_for_a_part_is_neither(start: float, end: float | None) -> None:
    with pytest.raises(PartialOverlap):
        beside(flight("decode", start, end))


def test_of_several_the_longest_counts() -> None:
    short, long = flight("decode", 1.0, 2.6, units=16), flight("decode", 2.6, 4.0, units=32)
    assert beside(short, long) == Corunner(ROW, 32)


def test_only_what_works_in_the_other_lane_is_beside_a_launch() -> None:
    """Nothing is beside the whole device; what is over, or queued behind others, is not either."""
    over, running = flight("decode", 0.0, 1.0, units=8), flight("decode", 1.0, units=16)
    queued, own, whole = flight("decode"), flight("prefill", 0.0), flight("device", 0.0)
    state: Any = SimpleNamespace(in_flight=[over, own, whole, running, queued])
    assert corunner_now(state, "prefill") == Corunner(ROW, 16)
    assert corunner_now(state, "decode") == Corunner(ROW, own.launch.units)
    assert corunner_now(state, "device") is None
    assert beside(own) is None
    assert beside(running, lane="device") is None


class Asked(Estimator):
    """Keeps what it is asked of launches."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Corunner | None]] = []

    def _seconds(
        self, launch: LaunchShape, units: Any, corunner: Corunner | None, bound: bool
    ) -> list[float]:
        self.asked.append((launch.kind, corunner))
        return [1.0]


def test_a_launch_is_predicted_beside_what_is_in_flight_then() -> None:
    lanes, estimator = HeldLanes(), Asked()
    engine = make_engine(lanes, estimator)
    engine.take([submit("a", 16, 8), submit("b", 32, 8)])
    turn(engine)
    lanes.step(lanes.tickets[0])
    lanes.tickets[0].end = lanes.now = 1.0
    turn(engine)  # the prompt of b is launched, then a's steps beside it
    prompt = Corunner(Load([32], [0]), lanes.units)
    assert estimator.asked == [("prefill", None), ("prefill", None), ("decode", prompt)]


def test_only_the_first_launch_in_line_can_be_late() -> None:
    """The whole device waits for both lanes, and they wait for it."""
    line = [flight(lane) for lane in ("prefill", "prefill", "device", "decode")]
    for number, each in enumerate(line):
        each.launched_at = float(number)
    state: Any = SimpleNamespace(in_flight=line, progressed={"device": 2.0}, now=lambda: 9.0)
    assert lane_waits(state) == [LaneWait("prefill", 7.0, None)]
    state.in_flight = line[2:]
    assert lane_waits(state) == [LaneWait("device", 7.0, None)]
    line[2].after = (flight("prefill", 0.0, 5.0).ticket,)  # for which it had to wait
    assert lane_waits(state) == [LaneWait("device", 4.0, None)]


def busy(now: float, *in_flight: Any) -> dict[LaneName, float | None]:
    """Until when each lane is busy that has anything queued."""
    state: Any = SimpleNamespace(
        in_flight=in_flight, launch_costs=SimpleNamespace(longest=dict.fromkeys(LANES, 0.0))
    )
    views = State.lane_views(state, now)
    return {lane: view.until for lane, view in views.items() if view.queued}


def test_a_lane_is_busy_until_its_launches_and_those_that_they_wait_for_are_done() -> None:
    slices = flight("prefill", 0.0, predicted=2.0)
    step = flight("device", predicted=1.0)
    assert busy(1.0, slices, step) == {"prefill": 2.0, "device": 3.0}
    assert busy(2.5, slices) == {"prefill": 2.5}  # late already
    unknown = flight("prefill", 0.0)
    assert busy(1.0, unknown, step) == {"prefill": None, "device": None}


def test_a_launch_does_not_wait_for_the_lane_of_one_that_has_ended() -> None:
    queued, ended = flight("prefill", 0.0, predicted=5.0), flight("prefill", 0.0, 0.5)
    waits = flight("decode", predicted=1.0, after=(queued.ticket,))
    free = flight("decode", predicted=1.0, after=(ended.ticket,))
    assert busy(1.0, queued, waits) == {"prefill": 5.0, "decode": 6.0}
    assert busy(1.0, queued, free) == {"prefill": 5.0, "decode": 2.0}
