"""CPU lanes with real threads: order, hand-overs, shares of the cores, errors, and news."""

import os
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.lanes.scripted import PATIENCE, Bench, Gate, call, gated, nothing, sampled
from twolane.devices import LANES
from twolane.lanes.base import Step
from twolane.lanes.cpu.lanes import TRIED_EVERY, TRIED_STEPS, ThreadCounts

CORES = tuple(sorted(os.sched_getaffinity(0)))[:2] if hasattr(os, "sched_getaffinity") else (0, 1)
UNITS = len(CORES)

pinned = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity"), reason="the system cannot pin threads"
)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(CORES)
    yield bench
    bench.lanes.close(PATIENCE)


@pytest.fixture
def fake_cores(monkeypatch: pytest.MonkeyPatch) -> dict[int, set[int]]:
    """thread → the cores that it pins itself to; machines of any size."""
    pins: dict[int, set[int]] = {}

    def pin(thread: int, cores: Any) -> None:
        assert thread == 0, "a worker pins itself"
        pins[threading.get_ident()] = set(cores)

    monkeypatch.setattr(os, "sched_setaffinity", pin, raising=False)
    return pins


def look(bench: Bench, lane: Any, units: int, what: Callable[[], Any]) -> Any:
    """What a launch there sees."""
    seen: list[Any] = []
    bench.wait_done(bench.lanes.launch(lane, units, call(lambda: seen.append(what())), ()))
    return seen[0]


# Order.


@pytest.mark.parametrize("lane", LANES)
def test_a_lane_runs_in_order(bench: Bench, lane: Any) -> None:
    """Whatever the units: another number of units is another worker of the same lane."""
    gate, second = Gate(), Gate()
    order: list[int] = []
    units = [1, UNITS, 1, UNITS, UNITS, 1]
    first_ticket = bench.lanes.launch(lane, 1, gated(gate), ())
    second_ticket = bench.lanes.launch(lane, UNITS, gated(second), ())
    rest = [
        bench.lanes.launch(lane, n, call(lambda i=i: order.append(i)), ())
        for i, n in enumerate(units)
    ]
    gate.wait_until_reached()
    assert not second.is_reached()
    gate.open()
    second.wait_until_reached()
    assert first_ticket.done
    assert not order
    second.open()
    bench.wait_done(*rest)
    assert order == list(range(len(units)))
    tickets = [first_ticket, second_ticket, *rest]
    for before, after in pairwise(tickets):
        assert before.end <= after.start


def test_lanes_run_at_the_same_time(bench: Bench) -> None:
    """Each is in the middle of a launch while the other is."""
    gates = [Gate(), Gate()]
    tickets = [
        bench.lanes.launch("prefill", 1, gated(gates[0]), ()),
        bench.lanes.launch("decode", 1, gated(gates[1]), ()),
    ]
    for gate in gates:
        gate.wait_until_reached()
    assert not any(ticket.done for ticket in tickets)
    for gate in gates:
        gate.open()
    bench.wait_done(*tickets)
    assert max(ticket.start for ticket in tickets) < min(ticket.end for ticket in tickets)


def test_launch_returns_at_once(bench: Bench) -> None:
    """Any number of launches queue up behind one that runs; the caller waits for none."""
    gate = Gate()
    head = bench.lanes.launch("decode", 1, gated(gate), ())
    queued = [bench.lanes.launch("decode", 1, nothing, ()) for _ in range(100)]
    assert not any(ticket.done for ticket in (head, *queued))
    gate.open()
    bench.wait_done(*queued)


def test_a_launch_waits_for_those_it_is_after(bench: Bench) -> None:
    """In other lanes, all of them."""
    gates = Gate(), Gate()
    before = [
        bench.lanes.launch(lane, 1, gated(gate), ())
        for lane, gate in zip(("prefill", "device"), gates, strict=True)
    ]
    held = Gate()
    ticket = bench.lanes.launch("decode", 1, gated(held), [other.number for other in before])
    assert not held.is_reached()
    gates[0].open()
    bench.wait_done(before[0])
    assert not held.is_reached()
    gates[1].open()
    held.wait_until_reached()
    held.open()
    bench.wait_done(ticket)
    assert ticket.start >= max(other.end for other in before)


def test_a_launch_after_one_that_is_done_starts(bench: Bench) -> None:
    done = bench.lanes.launch("prefill", 1, nothing, ())
    bench.wait_done(done)
    bench.wait_done(bench.lanes.launch("decode", 1, nothing, [done.number]))


def test_the_whole_device_takes_turns_with_both_lanes(bench: Bench) -> None:
    """It begins when what was launched before it in either lane has ended, and what is launched
    after it waits for it."""
    gates = {lane: Gate() for lane in ("prefill", "decode", "device")}
    lanes = [bench.lanes.launch(lane, 1, gated(gates[lane]), ()) for lane in ("prefill", "decode")]
    device = bench.lanes.launch("device", UNITS, gated(gates["device"]), ())
    later = [bench.lanes.launch(lane, 1, nothing, ()) for lane in ("prefill", "decode")]
    gates["prefill"].open()
    bench.wait_done(lanes[0])
    assert not gates["device"].is_reached()
    gates["decode"].open()
    gates["device"].wait_until_reached()
    assert not any(ticket.done for ticket in later)
    gates["device"].open()
    bench.wait_done(*later)
    assert all(ticket.end <= device.start for ticket in lanes)
    assert all(device.end <= ticket.start for ticket in later)


# Shares.


@pinned
@pytest.mark.parametrize("units", range(1, UNITS + 1))
@pytest.mark.parametrize("lane", LANES)
def test_a_worker_is_pinned_to_its_cores(bench: Bench, lane: Any, units: int) -> None:
    """With as many threads in its operations, and none of it on the caller's thread."""
    share = CORES[-units:] if lane == "decode" else CORES[:units]
    caller = os.sched_getaffinity(0), torch.get_num_threads()
    assert look(bench, lane, units, lambda: os.sched_getaffinity(0)) == set(share)
    assert look(bench, lane, units, torch.get_num_threads) == units
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == caller


@pinned
def test_a_level_keeps_its_worker(bench: Bench) -> None:
    """Threads of a team stay where they were pinned: a switch goes to another worker and back."""
    turns = [1, UNITS, 1, UNITS]
    workers = [look(bench, "prefill", units, threading.get_ident) for units in turns]
    assert workers[:2] == workers[2:]
    assert len(set(workers)) == len(set(turns))


@pytest.mark.parametrize("units", [1, 2, 3, 4])
def test_the_levels(fake_cores: dict[int, set[int]], units: int) -> None:
    """Shares of a level are disjoint and make up the device, each as large as the level says."""
    cores = tuple(range(10, 10 + units))
    bench = Bench(cores)
    assert bench.lanes.units == units
    assert set(bench.lanes.levels) == {(units - d, d) for d in range(units + 1)}
    for prefill, decode in bench.lanes.levels:
        shares = [
            fake_cores[look(bench, lane, n, threading.get_ident)]
            for lane, n in (("prefill", prefill), ("decode", decode))
            if n
        ]
        assert sum(map(len, shares)) == units
        assert set().union(*shares) == set(cores)
    assert fake_cores[look(bench, "device", units, threading.get_ident)] == set(cores)
    bench.lanes.close(PATIENCE)


def test_work_runs_without_gradients(bench: Bench) -> None:
    assert look(bench, "prefill", 1, torch.is_inference_mode_enabled)


# News.


def test_steps_are_published_before_the_end(bench: Bench) -> None:
    """Each when it is done, with news of it, while the launch goes on."""
    gates = [Gate() for _ in range(3)]
    ticket = bench.lanes.launch("decode", 1, gated(*gates), ())
    for i, gate in enumerate(gates):
        gate.wait_until_reached()
        assert ticket.steps == [sampled(j) for j in range(i)]
        assert bench.notified == i
        assert ticket.start is not None
        assert not ticket.done
        gate.open()
    bench.wait_done(ticket)
    assert ticket.steps == [sampled(j) for j in range(3)]
    assert ticket.seconds > 0
    # The end is news of its own; its notification comes after `end` is seen.
    bench.wait_for(lambda: bench.notified == len(gates) + 1)


def test_an_error_arrives_in_the_ticket_and_the_lane_goes_on(bench: Bench) -> None:
    """Steps before it count; what waits for the launch is not held up."""
    failure = ValueError("a page of nothing")

    def work() -> Iterator[Step]:
        yield sampled(7)
        raise failure

    failed = bench.lanes.launch("prefill", 1, work, ())
    next_one = bench.lanes.launch("prefill", 1, nothing, ())
    elsewhere = bench.lanes.launch("decode", 1, nothing, [failed.number])
    bench.wait_done(failed, next_one, elsewhere)
    assert failed.error is failure
    assert failed.steps == [sampled(7)]
    assert next_one.error is elsewhere.error is None


def test_an_error_before_the_first_step(bench: Bench) -> None:
    """Even one that ends programs ends only its launch."""

    def work() -> Iterator[Step]:
        raise SystemExit(3)
        yield Step()

    failed = bench.lanes.launch("decode", 1, work, ())
    bench.wait_done(failed, bench.lanes.launch("decode", 1, nothing, ()))
    assert isinstance(failed.error, SystemExit)
    assert failed.steps == []


# The end.


def lane_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("lane-")}


def test_close_finishes_what_is_queued() -> None:
    before = lane_threads()
    bench, gate = Bench(CORES), Gate()
    tickets = [bench.lanes.launch("decode", 1, gated(gate), ())]
    tickets += [bench.lanes.launch("decode", units, nothing, ()) for units in (UNITS, 1)]
    assert lane_threads() - before
    gate.open()
    bench.lanes.close(PATIENCE)
    assert all(ticket.done for ticket in tickets)
    assert not lane_threads() - before


def test_close_does_not_wait_for_ever() -> None:
    """A launch that never ends keeps its thread, which keeps no program from ending."""
    bench, gate = Bench(CORES), Gate()
    stuck = bench.lanes.launch("prefill", 1, gated(gate), ())
    gate.wait_until_reached()
    bench.lanes.close(timeout=0.01)
    assert not stuck.done
    assert all(thread.daemon for thread in lane_threads())
    gate.open()
    bench.wait_done(stuck)


# Threads of a decode step.


def steps(counts: ThreadCounts, rows: int, seconds: dict[int, float], number: int) -> list[int]:
    chosen = []
    for _ in range(number):
        chosen.append(counts.choose(rows))
        counts.observe(rows, chosen[-1], seconds[chosen[-1]])
    return chosen


@pytest.mark.parametrize(("one", "both"), [(0.03, 0.04), (0.04, 0.03)])
def test_a_step_runs_on_as_many_threads_as_are_fastest(one: float, both: float) -> None:
    """For each class of rows by itself; the slower number is tried again now and then."""
    counts, best = ThreadCounts(2), 1 if one < both else 2
    chosen = steps(counts, 1, {1: one, 2: both}, TRIED_EVERY + 2)
    assert {*chosen[: 2 * TRIED_STEPS]} == {1, 2}
    assert {*chosen[2 * TRIED_STEPS : TRIED_EVERY]} == {best}
    assert chosen[TRIED_EVERY:] == [3 - best, best]
    assert {*steps(counts, 16, {1: both, 2: one}, 20)[2 * TRIED_STEPS :]} == {3 - best}


def test_threads_that_took_twice_as_long_are_not_tried_again() -> None:
    chosen = steps(ThreadCounts(16), 1, {1: 0.05, 16: 0.01}, 2 * TRIED_EVERY + 2)
    assert {*chosen[2 * TRIED_STEPS :]} == {16}


def test_a_number_that_became_faster_is_found_again() -> None:
    counts = ThreadCounts(2)
    steps(counts, 1, {1: 0.03, 2: 0.04}, TRIED_EVERY)
    chosen = steps(counts, 1, {1: 0.03, 2: 0.02}, 20)
    assert chosen[0] == 2 == chosen[-1]
