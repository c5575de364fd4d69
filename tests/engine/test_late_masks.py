"""What launches are told: masks, of which two may be missing, pages, and what they wait for."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest
from msgspec.structs import replace

from tests.systems.simulation import LEVELS, SIZES, UNITS, submit
from twolane.engine.constrained.constraints import SLOW_MASK_SECONDS, Constraint, MaskPace, Masks
from twolane.engine.engine import Engine
from twolane.engine.intake import ServedModel
from twolane.engine.kv.manager import KVCacheManager
from twolane.engine.messages import TokenRules
from twolane.engine.state import State
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
        self.after: list[Sequence[int]] = []
        self.told: list[tuple[int, Sequence[TokenMask]]] = []

    def clock(self) -> float:
        return float(len(self.works))

    def launch(self, lane: Any, units: int, work: Work, after: Sequence[int]) -> Ticket:
        ticket = Ticket(lane, units)
        ticket.number = len(self.tickets)
        self.tickets.append(ticket)
        self.works.append(work)
        self.after.append(after)
        return ticket

    def set_masks(self, number: int, masks: Sequence[TokenMask]) -> None:
        self.told.append((number, masks))

    def check(self) -> None:
        pass

    def end(self, number: int, *tokens: int) -> None:
        """End a launch that has sampled these tokens, one for each row."""
        ticket = self.tickets[number]
        ticket.start = self.clock()
        ticket.add(Step([Sampled(row, token) for row, token in enumerate(tokens)]), self.clock())
        ticket.end = self.clock()


class Free(Constraint):
    """What a request with a grammar may say: all; its tokens are counted."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.pace = MaskPace()

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
    monkeypatch.setattr(Masks, "start_apart", start)
    return asked


def engine_of(lanes: Any, pages: int = 100) -> Engine:
    return Engine(
        make_system("static-split", {}),
        State(KVCacheManager(pages, 16, 4, prefix_cache=True), lanes, LAYERS, OnlineEstimator()),
        ServedModel(1000, (), 1000),
        pass_sizes=SIZES,
    )


def prefill(engine: Engine, *names: str) -> None:
    chunks = tuple([Chunk(name, engine.state.requests[name].new) for name in names])
    slices = (Launch("prefill", 100, PrefillSlice(0, LAYERS)),)
    engine.carry_out(Plan(admit=chunks, launches=slices))


def test_two_launches_wait_for_masks_and_each_gets_its_own(masks: list[Any]) -> None:
    lanes: Any = Lanes()
    engine = engine_of(lanes)
    engine.take([submit("a", 20, 8)])
    request = engine.state.requests["a"]
    request.constraint, request.mask = Free(), b"first"
    prefill(engine, "a")
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


def test_a_launch_names_one_in_another_lane_that_is_done() -> None:
    """Other ranks may not have ended it."""
    lanes: Any = Lanes()
    engine = engine_of(lanes)
    engine.take([submit("a", 20, 8)])
    prefill(engine, "a")
    lanes.end(0, 7)
    engine.reap()
    assert engine.carry_out(STEP)
    assert engine.carry_out(STEP)
    assert lanes.after == [(), (0,), ()]


def test_banned_sequences_wait_for_a_token_and_for_the_grammars_beside_them(
    masks: list[Any],
) -> None:
    lanes: Any = Lanes()
    engine = engine_of(lanes)
    banned = ((7, 8), (9, 8, 10), (999,))
    engine.take([submit("a", 20, 8), replace(submit("b", 20, 8), rules=TokenRules(banned=banned))])
    a, b = (engine.state.requests[name] for name in "ab")
    a.constraint, a.mask = Free(), b"first"
    every = b"\xff" * 124 + b"\x7f"
    prefill(engine, "a", "b")
    one, other = (row.slot for row in lanes.works[0].rows)
    assert lanes.works[0].masks == (TokenMask(one, b"first"), TokenMask(other, every))
    lanes.end(0, 7, 7)
    engine.reap()
    first = every[:1] + b"\xfe" + every[2:]
    assert engine.carry_out(STEP)
    assert engine.carry_out(STEP)
    assert [work.late for work in lanes.works[1:]] == [(one,), (one, other)]
    assert lanes.works[1].masks == (TokenMask(other, first),), "8 would follow 7"
    masks[0].set_result([b"second"])
    engine.take([])
    lanes.end(1, 9, 9)
    engine.reap()
    assert len(lanes.told) == 1, "the row beside it waits for its grammar"
    masks[1].set_result([b"third"])
    engine.take([])
    assert lanes.told[1] == (2, (TokenMask(one, b"third"), TokenMask(other, every)))
    engine.state.send_back(b)
    prefill(engine, "b")
    assert [mask.allowed for mask in lanes.works[-1].masks] == [every]
    assert not lanes.works[-1].late


def slow() -> Free:
    made = Free()
    made.pace.note(SLOW_MASK_SECONDS)
    return made


def decoding(engine: Engine) -> list[str]:
    return [request.id for request in engine.view().decoding]


def test_others_go_on_while_a_slow_mask_is_computed(masks: list[Any]) -> None:
    lanes: Any = Lanes()
    engine = engine_of(lanes)
    engine.take([submit("a", 20, 8), submit("b", 20, 8)])
    a, b = (engine.state.requests[name] for name in "ab")
    a.constraint, a.mask = slow(), b"first"
    prefill(engine, "a", "b")
    assert [each.id for each in engine.view().joining["prefill"]] == ["b"]
    lanes.end(0, 7, 7)
    engine.reap()
    assert len(masks) == 1
    for number in (1, 2, 3):
        assert decoding(engine) == ["b"]
        assert engine.carry_out(STEP)
        assert (lanes.works[-1].late, lanes.works[-1].k) == ((), 1)
        lanes.end(number, 8)
        engine.reap()
    masks[0].set_result([b"second"])
    engine.take([])
    assert decoding(engine) == ["a", "b"]
    assert engine.carry_out(STEP)
    slot = a.allocation.slot if a.allocation is not None else -1
    assert (lanes.works[-1].late, lanes.works[-1].masks) == ((), (TokenMask(slot, b"second"),))
    assert decoding(engine) == ["b"], "its next mask is the one behind a token in flight"
    lanes.end(4, 9, 9)
    engine.reap()
    assert [len(a.tokens), len(b.tokens)] == [22, 25]
    assert not lanes.told


def test_a_request_sent_back_waits_for_its_slow_mask_unseen(masks: list[Any]) -> None:
    lanes: Any = Lanes()
    engine = engine_of(lanes)
    engine.take([submit("a", 20, 8)])
    request = engine.state.requests["a"]
    request.constraint, request.mask = slow(), b"first"
    prefill(engine, "a")
    lanes.end(0, 7)
    engine.reap()
    engine.state.send_back(request)
    assert not engine.view().waiting
    masks[0].set_result([b"second"])
    engine.take([])
    assert [each.id for each in engine.view().waiting] == ["a"]

    prefill(engine, "a")
    engine.state.send_back(request)
    assert [each.id for each in engine.view().waiting] == ["a"], "the mask is known"
    engine._end("a", "abort")
    assert not engine.state.queue.held


def test_one_that_sits_out_gives_up_its_pages_for_others(masks: list[Any]) -> None:
    lanes: Any = Lanes()
    engine = engine_of(lanes, pages=4)
    engine.take([submit("b", 20, 30), submit("a", 20, 30)])
    a = engine.state.requests["a"]
    a.constraint, a.mask = slow(), b"first"
    prefill(engine, "b", "a")
    lanes.end(0, 7, 7)
    engine.reap()
    for number in range(1, 14):
        assert engine.carry_out(STEP)
        lanes.end(number, 8)
        engine.reap()
    assert a.allocation is None
    assert len(engine.state.requests["b"].tokens) == 34


def test_no_mask_is_told_for_a_slot_that_its_request_has_left(masks: list[Any]) -> None:
    """Another request may have the slot by then."""
    lanes: Any = Lanes()
    engine = engine_of(lanes)
    engine.take([submit("a", 20, 8), submit("b", 20, 8)])
    a, b = (engine.state.requests[name] for name in "ab")
    for each in (a, b):
        each.constraint, each.mask = Free(), b"first"
    prefill(engine, "a", "b")
    lanes.end(0, 7, 7)
    engine.reap()
    assert engine.carry_out(STEP)
    assert len(lanes.works[1].late) == 2
    a.mask = b"of a"  # known, but the launch waits for that of b
    engine.state.send_back(a)
    masks[0].set_result([b"of a", b"of b"])
    engine.take([])
    assert b.allocation is not None
    assert lanes.told == [(1, (TokenMask(b.allocation.slot, b"of b"),))]
    assert (a.awaiting_masks, b.awaiting_masks) == (0, 0)


def test_a_launch_tells_only_the_pages_that_lanes_do_not_know() -> None:
    lanes: Any = Lanes()
    engine = engine_of(lanes)
    engine.take([submit("a", 20, 16)])
    prefill(engine, "a")
    lanes.end(0, 7)
    engine.reap()
    told = [update for work in lanes.works for update in work.slots]
    assert [(update.first, len(update.pages)) for update in told] == [(0, 2)]
    step = Plan(launches=(Launch("decode", 32, DecodeSteps(1)),))
    for number in range(1, 15):
        assert engine.carry_out(step)
        lanes.end(number, 8)
        engine.reap()
    told = [update for work in lanes.works for update in work.slots]
    assert [(update.first, len(update.pages)) for update in told] == [(0, 2), (2, 1)]
