"""The estimator without a profile learns what it has not launched for a while."""

import pytest

from twolane.estimate.online import WEIGHT, OnlineEstimator
from twolane.estimate.query import LaunchShape, Load, decode_step, hybrid_pass, prefill_slice

UNITS = 2


def hybrid(tokens: int) -> LaunchShape:
    """A pass with four decode rows."""
    return hybrid_pass(Load([1] * 4 + [tokens - 4], [50] * 4 + [0]))


def predicted(estimator: OnlineEstimator, tokens: int) -> float | None:
    return estimator.predict(hybrid(tokens), UNITS)


def test_a_size_whose_first_launch_was_slow_is_tried_again() -> None:
    estimator = OnlineEstimator()
    estimator.observe(hybrid(64), UNITS, 1.0)
    assert predicted(estimator, 64) == 1.0
    for _ in range(20):
        estimator.observe(hybrid(16), UNITS, 0.05)
    assert predicted(estimator, 64) == 4 * 0.05
    assert predicted(estimator, 16) == 0.05


def test_what_was_seen_last_of_a_size_counts_however_little_smaller_ones_take() -> None:
    estimator = OnlineEstimator()
    estimator.observe(hybrid(16), UNITS, 0.05)
    for _ in range(20):
        estimator.observe(hybrid(64), UNITS, 0.5)
    assert predicted(estimator, 64) == 0.5


def test_larger_passes_bound_no_smaller_ones() -> None:
    estimator = OnlineEstimator()
    estimator.observe(hybrid(16), UNITS, 0.3)
    estimator.observe(hybrid(64), UNITS, 0.1)
    assert predicted(estimator, 16) == 0.3


def test_the_same_units_tell_more_than_the_same_size() -> None:
    estimator = OnlineEstimator()
    estimator.observe(hybrid(64), UNITS, 1.0)
    estimator.observe(hybrid(16), 2 * UNITS, 0.05)
    assert predicted(estimator, 16) == 0.25
    assert estimator.predict(hybrid(64), 2 * UNITS) == 0.2


def test_smaller_passes_on_other_units_are_no_bound() -> None:
    estimator = OnlineEstimator()
    estimator.observe(hybrid(64), UNITS, 1.0)
    estimator.observe(hybrid(16), 2 * UNITS, 0.05)
    assert predicted(estimator, 64) == 1.0


def test_a_decode_step_is_taken_to_last_longer_on_fewer_units_and_as_long_on_more() -> None:
    estimator, step = OnlineEstimator(), decode_step(Load.decode([50] * 4))
    estimator.observe(step, UNITS, 0.5)
    assert estimator.predict(step, UNITS // 2) == 1.0
    assert estimator.predict(step, 2 * UNITS) == 0.5


def test_slices_are_taken_to_last_by_their_layers_and_tokens() -> None:
    estimator = OnlineEstimator()
    estimator.observe(prefill_slice(Load([64], [0]), 4), UNITS, 1.0)
    assert estimator.predict(prefill_slice(Load([80], [0]), 2), UNITS) == 0.625


def test_steps_are_taken_to_last_as_long_as_those_of_about_as_many_rows() -> None:
    estimator = OnlineEstimator()
    for rows in (4, 64):
        estimator.observe(decode_step(Load.decode([50] * rows)), UNITS, rows / 64)
    steps = [decode_step(Load.decode([50] * rows)) for rows in (1, 7, 50, 200)]
    assert [estimator.predict(step, UNITS) for step in steps] == [4 / 64, 4 / 64, 1.0, 1.0]


def test_sizes_and_seconds_move_by_a_share_of_what_is_new() -> None:
    estimator, step = OnlineEstimator(), decode_step(Load.decode([50] * 4))
    for seconds in (0.5, 1.0):
        estimator.observe(step, UNITS, seconds)
    assert estimator.predict(step, UNITS) == pytest.approx(0.5 + WEIGHT * 0.5)
    for tokens in (16, 24):
        estimator.observe(hybrid(tokens), UNITS, tokens / 100)
    assert predicted(estimator, 20) == pytest.approx(0.2)


def test_the_fastest_of_the_smaller_passes_is_the_bound() -> None:
    estimator = OnlineEstimator()
    for tokens, seconds in ((64, 1.0), (32, 0.1), (16, 0.1)):
        estimator.observe(hybrid(tokens), UNITS, seconds)
    assert predicted(estimator, 64) == 0.2
