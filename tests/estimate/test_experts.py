"""A model with experts: what padding does not wake, by times of an H200."""

import pytest

from twolane.estimate.calibrated.estimator import Calibrated
from twolane.estimate.profile import SHIPPED, Profile

PROFILE = Profile.read(SHIPPED / "qwen3-30b-a3b-h200.json")


@pytest.fixture(scope="module")
def estimator() -> Calibrated:
    return Calibrated(PROFILE)


@pytest.mark.parametrize("kind", ["prefill", "decode", "hybrid"])
def test_batches_that_were_left_out_are_predicted(estimator: Calibrated, kind: str) -> None:
    """Slices of ten tokens among them, which read half as many experts as the 64 of their graph:
    if padding counted, these would be 58 % off."""
    left = [s for s in PROFILE.of(kind, beside=False) if s.held_out]
    assert left
    for sample in left:
        predicted = estimator.predict(sample.launch, sample.units)
        assert predicted == pytest.approx(sample.median, rel=0.15), sample.runs
