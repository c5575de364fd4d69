"""The calibrated estimator learns from a profile whether attention runs in whole turns of tiles."""

import math

import pytest

from twolane.estimate.catalog import ESTIMATORS
from twolane.estimate.profile import Profile
from twolane.estimate.query import prefill_slice
from twolane.model.shapes import SHAPES
from twolane.sim.gpus import GPUS
from twolane.sim.profile import simulated_profile


def worst(gpu: str) -> float:
    """Largest |log| error of long prompts alone on the whole device."""
    model = SHAPES["llama-3.1-8b"]
    path = simulated_profile(GPUS[gpu], model, 8)
    profile = Profile.read(path)
    estimator = ESTIMATORS["calibrated"](profile)
    errors = [
        abs(math.log(estimator.predict(prefill_slice(s.load, s.layers), s.units) / s.median))
        for s in profile.of("prefill", beside=False)
        if s.units == profile.key.units and s.load.new >= 1024 and not s.finishes
    ]
    return max(errors)


@pytest.mark.full
@pytest.mark.parametrize("gpu", ["a100-80gb", "h200"])
def test_prompts_that_fill_their_last_turn_badly_are_predicted(gpu: str):
    assert worst(gpu) < 0.1
