"""What the engine answers to pings."""

from dataclasses import dataclass, field

from tests.engine.test_rules import Script, one_by_one
from tests.systems.simulation import LAYERS, UNITS, submit
from twolane.devices import LaneName
from twolane.engine.engine import Engine
from twolane.engine.intake import ServedModel
from twolane.engine.kv.manager import KVCacheManager
from twolane.engine.messages import LaneWait, Ping
from twolane.engine.state import State
from twolane.estimate.base import Estimator
from twolane.estimate.online import OnlineEstimator
from twolane.lanes.base import TIMEOUT_FACTOR, OpenTickets, Sampled, Step, Ticket
from twolane.lanes.work import Work
from twolane.systems.plan import Plan


@dataclass
class HeldLanes:
    """Lanes whose launches end when the test says so."""

    units: int = UNITS
    levels: tuple[tuple[int, int], ...] = ((UNITS, 0), (0, UNITS), (UNITS - 1, 1))
    now: float = 0.0
    tickets: list[Ticket] = field(default_factory=list)
    _open: OpenTickets[Ticket] = field(default_factory=OpenTickets)

    def launch(self, lane: LaneName, units: int, work: Work, after: tuple[int, ...]) -> Ticket:
        self.tickets.append(self._open.add(Ticket(lane, units)))
        return self.tickets[-1]

    def set_masks(self, number: int, masks: object) -> None: ...

    def drop(self, batch: int) -> None: ...

    def silences(self) -> tuple[float, ...]:
        return ()

    def check(self) -> None: ...

    def clock(self) -> float:
        return self.now

    def step(self, ticket: Ticket, rows: int = 1) -> None:
        ticket.start = self.now if ticket.start is None else ticket.start
        ticket.add(Step([Sampled(row, 7) for row in range(rows)]), self.now)


class Known(Estimator):
    """Predicts the same for every launch."""

    def _seconds(self, *_: object) -> list[float]:
        return [100.0]


def make_engine(lanes: HeldLanes, estimator: Estimator | None = None) -> Engine:
    return Engine(
        Script(lambda view: one_by_one(view, k=4)),
        State(
            KVCacheManager(64, 16, 8, prefix_cache=True),
            lanes,
            LAYERS,
            estimator or OnlineEstimator(),
        ),
        ServedModel(100_000, (), 512),
    )


def turn(engine: Engine) -> list[LaneWait] | None:
    """One turn with a ping; the answer to it."""
    engine.take([Ping()])
    engine.reap()
    news = engine.outputs()
    while engine.carry_out(engine.plan()):
        pass
    assert news is not None
    return news.waits


def test_an_engine_at_rest_waits_for_nothing() -> None:
    engine = make_engine(HeldLanes())
    assert turn(engine) == []
    assert turn(engine) == []


def test_who_does_not_ask_is_not_answered() -> None:
    engine = make_engine(HeldLanes())
    engine.take([submit("a", 16, 8)])
    assert engine.plan() != Plan()
    news = engine.outputs()
    assert news is not None
    assert news.waits is None


def test_the_wait_counts_from_the_launch_and_from_each_step() -> None:
    lanes = HeldLanes(now=5.0)
    engine = make_engine(lanes)
    engine.take([submit("a", 16, 8)])
    turn(engine)
    lanes.now = 7.0
    assert turn(engine) == [LaneWait("prefill", 2.0, None)]
    (prompt,) = lanes.tickets
    lanes.step(prompt)
    prompt.end = lanes.now
    assert turn(engine) == []  # the decode steps are launched after the answer
    lanes.now = 8.0
    assert turn(engine) == [LaneWait("decode", 1.0, None)]
    lanes.step(lanes.tickets[-1])
    lanes.now = 9.5
    turn(engine)  # which finds the step
    lanes.now = 10.0
    assert turn(engine) == [LaneWait("decode", 0.5, None)]


def test_a_launch_that_waits_for_another_lane_is_not_late() -> None:
    lanes = HeldLanes()
    engine = make_engine(lanes)
    engine.take([submit("a", 16, 8), submit("b", 16, 8)])
    turn(engine)
    lanes.step(lanes.tickets[0])
    lanes.tickets[0].end = lanes.now = 1.0
    turn(engine)  # a decodes, b's prompt is launched
    lanes.now = 4.0
    waits = turn(engine)
    assert waits is not None
    assert {wait.lane: wait.seconds for wait in waits} == {"prefill": 3.0, "decode": 3.0}
    engine.state.in_flight[-1].after = [engine.state.in_flight[0].ticket]
    waits = turn(engine)
    assert waits is not None
    assert [wait.lane for wait in waits] == [engine.state.in_flight[0].launch.lane]


def test_lanes_are_told_how_long_a_launch_may_take_by_its_prediction() -> None:
    lanes = HeldLanes()
    engine = make_engine(lanes, Known())
    engine.take([submit("a", 16, 8)])
    turn(engine)
    assert lanes.tickets[0].timeout == 100.0 * TIMEOUT_FACTOR
