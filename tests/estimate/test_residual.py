"""What is learnt of a base's residuals, and how far above a prediction the truth may be."""

import numpy as np
import pytest

from twolane.estimate.calibrated.estimator import MIN_FOR_QUANTILE, _quantile
from twolane.estimate.calibrated.residual import Means, Residual


@pytest.fixture
def draw() -> np.random.Generator:
    return np.random.default_rng(3)


def test_what_is_smooth_is_learnt_and_what_is_not_is_left(draw):
    states = draw.uniform(-2, 2, (120, 3))
    smooth, noise = 0.2 * np.sin(states[:, 0]), 0.01 * draw.standard_normal(120)
    groups = [str(i) for i in range(120)]
    new = draw.uniform(-1.5, 1.5, (50, 3))
    learnt = Means((0, Residual(states, smooth + noise, groups))).at(new.tolist())
    assert np.abs(learnt - 0.2 * np.sin(new[:, 0])).max() < 0.03
    nothing = Means((0, Residual(states, 5 * noise, groups))).at(new.tolist())
    assert np.abs(nothing).max() < 0.03


def test_samples_of_one_configuration_do_not_outvote_others(draw):
    """Twenty of one batch that all miss by 0.2, amid batches that miss by nothing."""
    places = np.linspace(-2, 2, 41)
    states = np.array([[x] for x in [*places, *[0.0] * 20]])
    logs = np.array([*draw.normal(0, 0.002, 41), *[0.2] * 20])
    groups = [*map(str, range(41)), *["odd"] * 20]
    assert abs(Means((0, Residual(states, logs, groups))).at([[0.05]])[0]) < 0.05


def test_sums_of_processes_are_over_their_own_features(draw):
    states = draw.uniform(-1, 1, (40, 4))
    groups = [str(i) for i in range(40)]
    first = Residual(states[:, :2], states[:, 0], groups)
    second = Residual(states[:, 1:], states[:, 3], groups)
    at = states[:5].tolist()
    apart = Means((0, first)).at(at) + Means((1, second)).at(at)
    assert Means((0, first), (1, second)).at(at) == pytest.approx(apart)


def test_a_hiccup_of_the_host_is_not_the_bound(draw):
    missed = [draw.normal(0, 0.02) + draw.normal(0, 0.002, 10) for _ in range(40)]
    missed[7][3] = 3.0
    assert 0.02 < _quantile(missed, 40) < 0.06


def test_nothing_is_above_a_prediction_that_no_sample_was_left_out_of():
    assert _quantile([], 0) == 0.0


def test_where_there_are_enough_it_is_their_percentile(draw):
    missed = [draw.normal(0, 0.02, 10) for _ in range(5 * MIN_FOR_QUANTILE)]
    assert _quantile(missed, 5 * MIN_FOR_QUANTILE) == pytest.approx(2.33 * 0.02, rel=0.1)
