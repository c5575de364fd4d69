"""The estimator without a profile learns what it has not launched for a while."""

from twolane.estimate.online import OnlineEstimator
from twolane.estimate.query import LaunchShape, Load, decode_step, hybrid_pass

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
