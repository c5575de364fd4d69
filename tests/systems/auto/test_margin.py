"""The controller of the margin, by itself: gaps in, a fraction of the TBT SLO out."""

import math

import pytest

from twolane.engine.pacing import Gaps
from twolane.systems.auto.margin import (
    CHECK_SECONDS,
    MARGIN_GAIN,
    MIN_MARGIN,
    MIN_PROMISED_MARGIN,
    UNHURRIED_FRACTION,
    UNPROMISED_FRACTION,
    Margin,
)

BOUND = 0.010
"""The tightest TBT SLO in seconds."""


def gaps_of(*parts: tuple[float, int], to: Gaps | None = None) -> Gaps:
    """Add so many gaps of these seconds, in order."""
    gaps = to or Gaps()
    for seconds, count in parts:
        for _ in range(count):
            gaps.add(seconds)
    return gaps


def watched(
    margin: Margin,
    gaps: Gaps,
    now: float,
    decoding: int = 10,
    *,
    bound: float = BOUND,
    promises: bool = False,
) -> Margin:
    return margin.watch(now, gaps, bound=bound, decoding=decoding, promises=promises)


def test_the_margin_grows_while_few_gaps_are_late_and_shrinks_while_many_are() -> None:
    """Stalls of all ten requests, every 4,000 gaps: 0.25 % are late, there is room; 2 % are too
    many."""
    rare, often, gaps = Margin(), Margin(), Gaps()
    for i in range(200):
        gaps_of((0.009, 99), (0.02, 10 * (i % 40 == 0)), to=gaps)
        rare = watched(rare, gaps, float(i))
    assert 1.0 < rare.value <= 1.0 / UNPROMISED_FRACTION
    for i in range(200):
        gaps_of((0.009, 98), (0.02, 2), to=gaps)
        often = watched(often, gaps, float(i))
    assert MIN_MARGIN < often.value < 0.9
    for i in range(200, 900):
        gaps_of((0.009, 100), to=gaps)
        often = watched(often, gaps, float(i))
    assert often.value > 0.95


def test_nothing_is_learned_without_a_bound() -> None:
    gaps = gaps_of((0.02, 300))
    assert watched(Margin(), gaps, 1.0, bound=math.inf) == Margin(1.0, 1.0, 300)


def test_gaps_are_looked_at_once_in_a_while() -> None:
    gaps = gaps_of((0.02, 10))
    first = watched(Margin(), gaps, 1.0)
    gaps_of((0.02, 10), to=gaps)
    assert watched(first, gaps, 1.0 + 0.9 * CHECK_SECONDS) is first
    assert watched(first, gaps, 1.0 + 1.1 * CHECK_SECONDS).value < first.value


def test_the_margin_is_forgotten_while_nobody_decodes() -> None:
    """An overload that is over does not keep prefill on few units when the next requests come."""
    gaps = gaps_of((0.02, 300))
    late = watched(Margin(), gaps, 1.0)
    assert watched(late, gaps, 1.5).value == late.value
    again = watched(late, gaps, 2.5)
    assert again.value == 1.0
    gaps_of((0.02, 10), to=gaps)
    expected = math.exp(-MARGIN_GAIN * BOUND)
    assert watched(again, gaps, 3.0).value == pytest.approx(expected, rel=1e-3)


def test_an_estimator_that_promises_bounds_keeps_the_margin_higher() -> None:
    gaps = gaps_of((0.02, 300))
    assert watched(Margin(), gaps, 1.0).value < MIN_PROMISED_MARGIN
    assert watched(Margin(), gaps, 1.0, promises=True).value == MIN_PROMISED_MARGIN
    good = gaps_of((0.001, 500))
    assert watched(Margin(), good, 1.0).value > 1.0
    assert watched(Margin(), good, 1.0, promises=True).value == 1.0


def test_the_gaps_of_a_late_step_count_as_one() -> None:
    """Three late steps move the margin by as much with a hundred requests as with five."""
    few, many = (watched(Margin(), gaps_of((0.02, 3 * n)), 1.0, n).value for n in (5, 100))
    assert few == pytest.approx(many)
    assert 0.96 < few < 0.98


def test_the_margin_moves_as_fast_under_all_bounds() -> None:
    """With five times as long steps there are a fifth as many."""
    gaps = gaps_of((0.06, 20))
    short, long = (watched(Margin(), gaps, 1.0, bound=tbt).value for tbt in (0.01, 0.05))
    assert math.log(long) == pytest.approx(5 * math.log(short))


def test_a_hurry_and_a_promise_leave_more_of_the_bound() -> None:
    assert Margin(1.0).fraction(hurried=True, promises=True) == 1.0
    assert Margin(1.0).fraction(hurried=False, promises=True) == UNHURRIED_FRACTION
    assert Margin(0.8).fraction(hurried=False, promises=True) == 0.8
    assert Margin(1.0).fraction(hurried=True, promises=False) == UNPROMISED_FRACTION
