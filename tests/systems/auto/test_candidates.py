"""The ways to run a prefill batch beside decode, each by itself."""

import pytest

from tests.estimate import synthetic
from tests.systems.handmade import LAYERS, UNITS
from twolane.estimate.base import Estimator
from twolane.estimate.online import OnlineEstimator
from twolane.estimate.query import Load, decode_step, prefill_slice
from twolane.systems.auto.candidates import Candidates, cut

KNOWN = synthetic.calibrated()
DECODE, BATCH = Load.decode([1000] * 16), Load([2000], [0])
STEP = 0.006


def ways(estimator: Estimator, target: float = 0.02) -> Candidates:
    return Candidates(estimator, LAYERS, UNITS, (), DECODE, STEP, BATCH, target)


@pytest.mark.parametrize("target", [0.001, 0.02, 1.0])
def test_layers_between_two_steps_fill_the_time_that_is_left(target: float) -> None:
    """One at least and all at most; the pace is the share of the time that prefill has."""
    (way,) = ways(KNOWN, target).all(sliced=True)
    batch = prefill_slice(BATCH, LAYERS)
    alone, bound = KNOWN.predict(batch, UNITS), KNOWN.predict(batch, UNITS, bound=True)
    assert alone is not None and bound is not None
    layers = min(LAYERS, max(1, int((target - STEP) / (bound / LAYERS))))
    spent = alone * layers / LAYERS
    assert (way.mode, way.layers) == ("temporal", layers)
    assert way.gap == pytest.approx(STEP + layers * bound / LAYERS)
    assert way.pace == pytest.approx(spent / (spent + STEP))


def test_there_is_no_way_while_nothing_is_known() -> None:
    estimator = OnlineEstimator()
    estimator.observe(decode_step(DECODE), UNITS, STEP)
    assert ways(estimator).all(sliced=False) == []


def test_a_cut_has_no_request_of_which_it_computes_nothing() -> None:
    batch = Load([100, 50, 70], [8, 16, 32])
    assert cut(batch, 100) == Load([100], [8])
    assert cut(batch, 120) == Load([100, 20], [8, 16])
    assert cut(batch, 220) == batch
