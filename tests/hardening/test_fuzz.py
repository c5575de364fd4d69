"""Thousands of requests that nobody should send: every one is answered or closed, none hurts."""

import asyncio
from collections import Counter
from contextlib import suppress

import pytest

from ..server.serving import wait_for
from .footprint import MIB, Footprint
from .mutations import make_case
from .wire import Outcome, play_all

SEED = 20260
BATCH = 500


@pytest.mark.parametrize(
    ("count", "warm_up", "growth"),
    [
        pytest.param(120, 40, 96 * MIB, id="short"),
        pytest.param(
            20_000, 1500, 24 * MIB, id="long", marks=[pytest.mark.full, pytest.mark.timeout(3600)]
        ),
    ],
)
def test_no_request_hurts(target, count, warm_up, growth):
    """The server may grow by `growth` after the warm-up, however many requests there are."""
    target.warm_up(warm_up)
    target.check_quiet()
    before = Footprint.at_rest(target.served)
    outcomes = []
    for begin in range(0, count, BATCH):
        outcomes += play(target, range(begin, min(begin + BATCH, count)))
        target.check_good_request()
    target.check_quiet()
    report(outcomes, before, Footprint.of(target.served))
    assert_unfaulted(outcomes)
    assert_no_leak(target, before, growth)
    target.check_room()
    target.check_good_request()


def play(target, numbers) -> list[Outcome]:
    cases = [make_case(SEED, number) for number in numbers]
    return asyncio.run(play_all(cases, target.address))


def assert_unfaulted(outcomes):
    faults = [f"{outcome.case.name}: {outcome.faults}" for outcome in outcomes if outcome.faults]
    assert not faults, "\n".join(faults[:20])
    statuses = Counter(status for outcome in outcomes for status in outcome.statuses)
    assert statuses[200] > len(outcomes) / 10  # the fuzz gets past the first check
    assert {400, 404, 405, 408} <= statuses.keys()


def assert_no_leak(target, before, growth):
    def left_over():
        return Footprint.of(target.served).files_beyond(before)

    with suppress(AssertionError):  # the next line says what is left over
        wait_for(lambda: not left_over())
    assert not left_over()
    after = Footprint.of(target.served)
    assert after.front_rss - before.front_rss < growth
    assert after.engine_rss - before.engine_rss < growth


def report(outcomes, before, after):
    """What `pytest -s` shows: the figures of the run."""
    statuses = Counter(tuple(outcome.statuses) for outcome in outcomes)
    print(f"\n{len(outcomes)} cases, {statuses.most_common(12)}")
    print(f"slowest {max(outcome.seconds for outcome in outcomes):.1f} s, {before} -> {after}")
