"""A model with experts: what padding does not wake, by times of an H200; how many are read."""

from random import Random

import pytest

from twolane.estimate.calibrated.estimator import Calibrated
from twolane.estimate.experts import COMPARE_EVERY, ExpertCounts
from twolane.estimate.profile import SHIPPED, Profile
from twolane.model.shapes import SHAPES
from twolane.model.spec import skewed

PROFILE = Profile.read(SHIPPED / "qwen3-30b-a3b-h200.json")
SPECS = {skew: skewed(SHAPES["qwen3-30b-a3b"], skew) for skew in (0.0, 0.8)}


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


def test_counts_tell_how_skewed_the_choice_is() -> None:
    """Of steps of several sizes, each as many experts as the law expects, within 8 % of noise."""
    even, uneven = (SPECS[skew].moe for skew in (0.0, 0.8))
    assert even is not None and uneven is not None
    noise = Random(1)
    seen = [
        (rows, uneven.active(rows) * noise.uniform(0.92, 1.08))
        for _ in range(60)
        for rows in (2, 6, 20, 60)
    ]
    counts = ExpertCounts(even)
    counts.learn(seen)
    assert counts.moe.skew == pytest.approx(0.8, abs=0.07)
    for _ in range(200):  # other requests come, whose experts are not those of before
        for rows in (2, 6, 20, 60):
            counts.note(rows, even.active(rows))
    assert counts.moe.skew < 0.2


def test_counts_of_rows_that_resemble_one_another_say_nothing() -> None:
    """Steps of a profile whose rows had the same tokens, beside some whose rows had their own."""
    moe = SPECS[0.0].moe
    assert moe is not None
    counts = ExpertCounts(moe)
    counts.learn([(64, 125.5), (1, 8.0), (8, 51.3), (18, 13.5), (15, 35.0), (85, 25.6), (7, 12.9)])
    assert counts.moe == moe
    counts.learn([(8, factor * moe.active(8)) for factor in (0.6, 1.0)])  # off by a quarter
    assert counts.moe == moe
    uneven = SPECS[0.8].moe
    assert uneven is not None
    counts.learn([(8, factor * uneven.active(8)) for factor in (0.92, 1.1)])  # off by a tenth
    assert counts.moe.skew == pytest.approx(0.8, abs=0.1)


def test_the_choice_is_compared_once_in_many_steps() -> None:
    even, uneven = (SPECS[skew].moe for skew in (0.0, 0.8))
    assert even is not None and uneven is not None
    counts = ExpertCounts(even)
    told = [counts.note(8, uneven.active(8)) for _ in range(COMPARE_EVERY)]
    assert told == [False] * (COMPARE_EVERY - 1) + [True]
