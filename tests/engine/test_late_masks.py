"""Launches whose masks are late: how many are queued, and which mask each of them gets."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from tests.systems.simulation import LEVELS, SIZES, UNITS, submit
from twolane.engine.constrained.constraints import Constraint, Masks
from twolane.engine.engine import Engine, ServedModel
from twolane.engine.kv import KVBooks
from twolane.estimate.online import OnlineEstimator
from twolane.lanes.base import Sampled, Step, Ticket
from twolane.lanes.work import TokenMask, Work
from twolane.systems.plan import Chunk, DecodeSteps, Launch, Plan, PrefillSlice
from twolane.systems.registry import make_system

LAYERS = 4
STEP = Plan(launches=(Launch("decode", 32, DecodeSteps(4)),))


class Lanes:
    """Lanes whose launches end when the test says so."""

    units, levels = UNITS, LEVELS

    def __init__(self) -> None:
        self.tickets: list[Ticket] = []
        self.works: list[Work] = []
        self.told: list[tuple[int, Sequence[TokenMask]]] = []

    def clock(self) -> float:
        return float(len(self.works))

    def launch(self, lane: Any, units: int, work: Work, after: Sequence[int]) -> Ticket:
        ticket = Ticket(lane, units)
        ticket.number = len(self.tickets)
        self.tickets.append(ticket)
        self.works.append(work)
        return ticket

    def allow(self, number: int, masks: Sequence[TokenMask]) -> None:
        self.told.append((number, masks))

    def check(self) -> None:
        pass

    def end(self, number: int, token: int) -> None:
        """End a launch that has sampled this token for the only row."""
        ticket = self.tickets[number]
        ticket.start = self.clock()
        ticket.add(Step([Sampled(0, token)]), self.clock())
        ticket.end = self.clock()


class Free(Constraint):
    """What a request with a grammar may say: all; its tokens are counted."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def take(self, token: int) -> None:
        self.taken.append(token)


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[Future[Sequence[bytes]]]:
    """Those that were asked for, which come when the test says so."""
    asked: list[Future[Sequence[bytes]]] = []

    def start(_: Masks, constraints: Sequence[Constraint]) -> Future[Sequence[bytes]]:
        asked.append(Future())
        return asked[-1]

    monkeypatch.setattr(Masks, "start", start)
    return asked


def test_two_launches_wait_for_masks_and_each_gets_its_own(masks: list[Any]) -> None:
    lanes: Any = Lanes()
    engine = Engine(
        make_system("static-split", {}),
        lanes,
        KVBooks(100, 16, 4, prefix_cache=True),
        model=ServedModel(LAYERS, 1000, (), 1000),
        pass_sizes=SIZES,
        estimator=OnlineEstimator(),
    )
    engine.take([submit("a", 20, 8)])
    request = engine.state.requests["a"]
    request.constraint, request.mask = Free(), b"first"
    slices = (Launch("prefill", 100, PrefillSlice(0, LAYERS)),)
    engine.carry_out(Plan(admit=(Chunk("a", 20),), launches=slices))
    slot = lanes.works[0].rows[0].slot
    lanes.end(0, 7)
    engine.reap()
    assert [engine.carry_out(STEP) for _ in range(3)] == [True, True, False]
    assert [work.late for work in lanes.works[1:]] == [(slot,), (slot,)]
    assert [work.k for work in lanes.works[1:]] == [1, 1]
    assert not lanes.told

    for number, token in ((1, 8), (2, 9), (3, 10)):
        masks[-1].set_result([b"behind %d" % number])
        engine.take([])
        assert lanes.told[-1] == (number, (TokenMask(slot, b"behind %d" % number),))
        assert engine.carry_out(STEP)
        assert not engine.carry_out(STEP)
        lanes.end(number, token)
        engine.reap()
    assert len(masks) == 4

    engine._end("a", "abort")
    engine.reap()
    assert lanes.told[3:] == [(4, ()), (5, ())], "launches that nobody is left in wait for nothing"
