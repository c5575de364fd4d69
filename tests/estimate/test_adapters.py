"""Launches with adapters take longer by a factor that is learnt, and change no other prediction."""

import pytest

from twolane.estimate.adapters import MAX_FACTOR, AdapterEstimator
from twolane.estimate.base import Estimator
from twolane.estimate.online import OnlineEstimator
from twolane.estimate.query import LaunchShape, Load, decode_step, prefill_slice

UNITS = 2
STEP = decode_step(Load.decode([40] * 4))


class Known(Estimator):
    """Knows that launches without adapters take a second, and remembers what it is taught."""

    promises = True

    def __init__(self) -> None:
        self.taught: list[float] = []

    def observe(self, launch, units, seconds, corunner=None):
        self.taught.append(seconds)
        self.slowdown = 0.5

    def _seconds(self, launch, units, corunner, bound):
        return [1.0] * len(units)


def adapted(launch: LaunchShape, adapters: int) -> LaunchShape:
    return launch._replace(adapters=adapters)


def test_a_factor_is_learnt_by_kind_and_number_of_adapters() -> None:
    estimator = AdapterEstimator(Known())
    for _ in range(60):
        estimator.observe(adapted(STEP, 1), UNITS, 1.2)
        estimator.observe(adapted(STEP, 8), UNITS, 2.0)
    assert estimator.predict(adapted(STEP, 1), UNITS) == pytest.approx(1.2, rel=0.01)
    assert estimator.predict(adapted(STEP, 8), UNITS, bound=True) == pytest.approx(2.0, rel=0.01)
    assert estimator.predict(adapted(STEP, 60), UNITS) == pytest.approx(2.0, rel=0.01)
    assert estimator.predict(adapted(STEP, 0), UNITS) == 1.0
    assert estimator.predict(adapted(prefill_slice(STEP.load, 2), 8), UNITS) == 1.0
    assert estimator.promises


def test_the_other_estimator_is_taught_what_launches_take_without_adapters() -> None:
    base = Known()
    estimator = AdapterEstimator(base)
    for _ in range(60):
        estimator.observe(adapted(STEP, 2), UNITS, 1.5)
    assert base.taught[-1] == pytest.approx(1.0, rel=0.01)
    estimator.observe(adapted(STEP, 0), UNITS, 1.1)
    assert base.taught[-1] == 1.1
    assert estimator.slowdown == 0.5  # what it says of the device holds with adapters, too


def test_what_systems_ask_about_has_the_adapters_that_run() -> None:
    estimator = AdapterEstimator(Known())
    estimator.observe(adapted(STEP, 2), UNITS, 1.5)
    assert estimator.predict(STEP, UNITS) == 1.0
    estimator.running = 2
    assert estimator.predict(STEP, UNITS) == pytest.approx(1.5)


def test_without_a_profile_and_without_other_launches_predictions_are_right() -> None:
    estimator = AdapterEstimator(OnlineEstimator())
    assert estimator.predict(adapted(STEP, 1), UNITS) is None
    for seconds in [5.0] + [0.3] * 100:
        estimator.observe(adapted(STEP, 1), UNITS, seconds)
    assert estimator.predict(adapted(STEP, 1), UNITS) == pytest.approx(0.3, rel=0.02)


def test_one_launch_that_hangs_moves_a_factor_by_a_bounded_step() -> None:
    estimator = AdapterEstimator(Known())
    estimator.observe(adapted(STEP, 1), UNITS, 1.0)
    estimator.observe(adapted(STEP, 1), UNITS, 1e6)
    assert estimator.predict(adapted(STEP, 1), UNITS) <= MAX_FACTOR**0.1 + 1e-9
