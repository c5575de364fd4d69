"""Simulated lanes: fixed durations on a clock that moves when it is told to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from tests.sim.durations import FixedDurations
from twolane.lanes.base import PromptLogprobs, Sampled, Step, TokenLogprobs
from twolane.lanes.work import (
    DecodeRow,
    DecodeWork,
    HybridWork,
    PrefillWork,
    PromptChunk,
    PromptRow,
    Scoring,
    pack,
)
from twolane.sim.lanes import TOKEN, Demand, SimLanes

DURATIONS = FixedDurations(prefill_layer=1.0, decode_step=2.0, hybrid=5.0)


def prompt(*, final: bool = True) -> PromptRow:
    return PromptRow(0, 0, 4, samples=final)


def prefill(layers: int, *rows: PromptRow, finishes: bool = False) -> PrefillWork:
    return PrefillWork(0, rows or (prompt(),), 0, layers, finishes)


def decode(k: int, *steps: int) -> DecodeWork:
    """k steps; a row for each number of steps it takes part in."""
    rows = tuple(DecodeRow(i, 4, n) for i, n in enumerate(steps or (k,)))
    return DecodeWork(rows, k)


def sampled(*rows: int) -> Step:
    return Step([Sampled(row, TOKEN) for row in rows])


@pytest.fixture
def lanes() -> SimLanes:
    return SimLanes(108, [(84, 24), (72, 36)], DURATIONS)


def test_the_levels(lanes: SimLanes) -> None:
    assert lanes.units == 108
    assert set(lanes.levels) == {(84, 24), (72, 36), (108, 0), (0, 108)}


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        (prefill(1), 1.0),
        (prefill(7), 7.0),
        (decode(1), 2.0),
        (decode(3), 6.0),
        (HybridWork(decode(1).rows, (prompt(),)), 5.0),
    ],
)
def test_durations(lanes: SimLanes, work: Any, seconds: float) -> None:
    """Not a moment before, exactly then; the units do not matter."""
    lanes.advance(10.0)
    ticket = lanes.launch("prefill", 24, work, ())
    assert (ticket.lane, ticket.units) == ("prefill", 24)
    lanes.advance(10.0 + seconds - 1e-6)
    assert ticket.start == 10.0
    assert not ticket.done
    lanes.advance(10.0 + seconds)
    assert ticket.done
    assert ticket.seconds == seconds


def test_the_clock_stands_still(lanes: SimLanes) -> None:
    """Until it is advanced; it never goes back, and never by itself."""
    lanes.launch("decode", 24, decode(2), ())
    assert lanes.clock() == 0.0
    lanes.advance(3.0)
    lanes.advance(1.0)
    assert lanes.clock() == 3.0


def test_events_are_the_ends_of_steps(lanes: SimLanes) -> None:
    """Of all lanes, in order of time; none when nothing runs."""
    assert lanes.next_event() is None
    lanes.launch("decode", 24, decode(3), ())
    lanes.launch("prefill", 84, prefill(1), ())
    times = []
    while (at := lanes.next_event()) is not None:
        times.append(at)
        lanes.advance(at)
    assert times == [1.0, 2.0, 4.0, 6.0]


def test_a_lane_runs_in_order(lanes: SimLanes) -> None:
    """Each launch begins when the one before it ends, and shows no start until then."""
    first = lanes.launch("prefill", 84, prefill(3), ())
    second = lanes.launch("prefill", 108, prefill(2), ())
    lanes.advance(2.0)
    assert second.start is None
    lanes.advance(9.0)
    third = lanes.launch("prefill", 84, prefill(1), ())
    lanes.advance(20.0)
    spans = [(ticket.start, ticket.end) for ticket in (first, second, third)]
    assert spans == [(0.0, 3.0), (3.0, 5.0), (9.0, 10.0)]


def test_lanes_run_at_the_same_time(lanes: SimLanes) -> None:
    """And with fixed durations neither slows the other."""
    tickets = [
        lanes.launch("prefill", 84, prefill(4), ()),
        lanes.launch("decode", 24, decode(2), ()),
    ]
    lanes.advance(10.0)
    assert [(t.start, t.end) for t in tickets] == [(0.0, 4.0), (0.0, 4.0)]


def test_the_whole_device_excludes_both_lanes(lanes: SimLanes) -> None:
    """It waits for what was launched before it, and what is launched later waits for it."""
    tickets = [
        lanes.launch("prefill", 84, prefill(3), ()),
        lanes.launch("device", 108, HybridWork((), (prompt(),)), ()),
        lanes.launch("decode", 24, decode(1), ()),
    ]
    lanes.advance(20.0)
    assert [(t.start, t.end) for t in tickets] == [(0.0, 3.0), (3.0, 8.0), (8.0, 10.0)]


def test_a_launch_waits_for_those_it_is_after(lanes: SimLanes) -> None:
    """All of them, and its own lane; what is behind it in the lane waits, too."""
    one = lanes.launch("prefill", 84, prefill(3), ())
    two = lanes.launch("prefill", 84, prefill(2), ())
    lanes.launch("decode", 24, decode(1), ())
    held = lanes.launch("decode", 24, decode(1), [one.number, two.number])
    behind = lanes.launch("decode", 24, decode(1), ())
    lanes.advance(4.9)
    assert held.start is None
    lanes.advance(20.0)
    assert (held.start, held.end) == (5.0, 7.0)
    assert (behind.start, behind.end) == (7.0, 9.0)


@dataclass(frozen=True)
class Halving(FixedDurations):
    """Whatever runs beside something else runs at half speed; launching takes half a second."""

    host: float = 0.0

    def seconds(self, running: Sequence[Demand]) -> list[float]:
        return [demand.fixed * len(running) for demand in running]

    def host_seconds(self, work: Any) -> tuple[float, float]:
        return self.host, self.host


def test_work_in_progress_is_rated_anew() -> None:
    """2 s of 8 alone, then half speed beside 4 s of work that so takes 8, then alone again."""
    lanes = SimLanes(108, [(84, 24)], Halving(1.0, 2.0))
    first = lanes.launch("prefill", 84, prefill(8), ())
    lanes.advance(2.0)
    second = lanes.launch("decode", 24, decode(2), ())
    assert lanes.next_event() == 6.0
    lanes.advance(30.0)
    assert (second.start, second.end) == (2.0, 10.0)
    assert (first.start, first.end) == (0.0, 12.0)


def test_launching_takes_the_host_time() -> None:
    """One launch after the other; a lane that is fed ahead does not feel it."""
    lanes = SimLanes(108, [(84, 24)], Halving(1.0, 2.0, host=0.5))
    tickets = [
        lanes.launch("prefill", 84, prefill(1), ()),
        lanes.launch("prefill", 84, prefill(1), ()),
    ]
    assert lanes.next_event() == 0.5
    lanes.advance(0.5)
    assert lanes.next_event() == 1.5  # the other is ready at 1.0, but waits for the first
    lanes.advance(10.0)
    assert [(t.start, t.end) for t in tickets] == [(0.5, 1.5), (1.5, 2.5)]


def test_a_lane_begins_before_its_work_is_launched_whole() -> None:
    class FirstSoon(FixedDurations):
        def host_seconds(self, work: Any) -> tuple[float, float]:
            return 0.5, 3.0

    lanes = SimLanes(108, [(84, 24)], FirstSoon(1.0, 2.0))
    first = lanes.launch("prefill", 84, prefill(2), ())
    second = lanes.launch("decode", 24, decode(1), ())
    lanes.advance(10.0)
    # Not before all is launched.
    assert (first.start, first.end, first.host_seconds) == (0.5, 3.0, 3.0)
    assert (second.start, second.end) == (3.5, 6.0)  # the host was busy until 3.0


def test_a_launch_after_one_that_is_done_starts_now(lanes: SimLanes) -> None:
    done = lanes.launch("prefill", 84, prefill(1), ())
    lanes.advance(4.0)
    ticket = lanes.launch("decode", 24, decode(1), [done.number])
    lanes.advance(6.0)
    assert (ticket.start, ticket.end) == (4.0, 6.0)


def test_steps_come_one_by_one(lanes: SimLanes) -> None:
    """Rows leave when their steps are over, as on a device."""
    ticket = lanes.launch("decode", 24, decode(3, 3, 1, 2), ())
    want = [sampled(0, 1, 2), sampled(0, 2), sampled(0)]
    for step in range(3):
        assert ticket.steps == want[:step]
        assert not ticket.done
        lanes.advance(2.0 * (step + 1))
    assert ticket.steps == want
    assert ticket.done


@pytest.mark.parametrize(
    ("work", "result"),
    [
        (prefill(2, prompt(), prompt(final=False)), Step()),
        (prefill(2, prompt(final=False), prompt(), finishes=True), sampled(1)),
        (
            HybridWork(decode(1, 1, 1).rows, (prompt(final=False), prompt())),
            sampled(0, 1, 3),
        ),
    ],
    ids=["not the last layer", "a chunk and an end", "decode rows first"],
)
def test_first_tokens(lanes: SimLanes, work: Any, result: Step) -> None:
    """Prompts that end in the model's last layer are sampled, no others."""
    ticket = lanes.launch("device", 108, work, ())
    lanes.advance(10.0)
    assert [Step(step.sampled) for step in ticket.steps] == [result]


@pytest.mark.parametrize("passed", [False, True])
def test_a_prompt_is_scored_where_its_chunk_ends(lanes: SimLanes, passed: bool) -> None:
    """The tokens come with the first slice of a batch, or with a pass."""
    rows = PromptRow(0, 0, 4, samples=True), PromptRow(1, 0, 4, samples=True)
    chunks = PromptChunk(pack([5] * 4)), PromptChunk(pack([6] * 4), Scoring(pack([7, 8]), 0))
    works: list[Any] = [
        PrefillWork(0, rows, 0, 1, False, chunks),
        PrefillWork(0, rows, 1, 2, True),
    ]
    if passed:
        works = [HybridWork((), rows, chunks)]
    *opened, last = [lanes.launch("device", 108, work, ()) for work in works]
    lanes.advance(10.0)
    assert [step for ticket in opened for step in ticket.steps] == [Step()] * len(opened)
    scores = [TokenLogprobs(token, 0.0, 1, []) for token in (7, 8)]
    assert last.steps == [Step(sampled(0, 1).sampled, [PromptLogprobs(1, scores)])]
