"""The errors of an estimator on held-out samples, against figures that are worked out by hand."""

import numpy as np
import pytest

from tests.estimate import synthetic
from twolane.estimate import errors
from twolane.estimate.base import Estimator
from twolane.estimate.profile import Key, Neighbour, Profile, Sample, model_digest

BOUND = 1.25


class OneSecond(Estimator):
    """Predicts a second for any launch, promises a quarter more, and remembers the questions."""

    def __init__(self, bound: float = BOUND) -> None:
        self.bound = bound
        self.asked: list[list[int]] = []

    def _seconds(self, launch, units, corunner, bound):
        self.asked.append(list(units))
        return [self.bound if bound else 1.0] * len(units)


def sample(kind: str, seconds: float, new: int, *, beside: bool = False, held_out: bool = True):
    return Sample(
        f"{kind}-{seconds}-{new}", kind, [(new, 24, 1)], 48, 36, True, [seconds],
        Neighbour([(512, 0, 1)], 84) if beside else None, held_out=held_out,
    )  # fmt: skip


def of(*samples: Sample) -> Profile:
    key = Key("made up", "", "0", model_digest(synthetic.SHAPE), 2, synthetic.UNITS)
    return Profile(key, synthetic.SHAPE, list(synthetic.LEVELS), 32, 0, list(samples))


@pytest.fixture
def only(monkeypatch):
    """Make one estimator the whole catalog."""

    def make(estimator: Estimator) -> None:
        monkeypatch.setattr(errors, "ESTIMATORS", {"a second": lambda profile: estimator})

    return make


def test_errors_are_relative_to_what_was_measured(only):
    only(OneSecond())
    truth = [0.5, 1.0, BOUND, 2.0]
    missing = sample("decode", 100.0, 1, held_out=False)
    (row,) = errors.table(of(*[sample("decode", each, 1) for each in truth], missing))
    off = [1.0, 0.0, 0.2, 0.5]
    assert (row.estimator, row.case, row.samples) == ("a second", "solo decode", 4)
    assert row.mean == pytest.approx(np.mean(off))
    assert row.p95 == pytest.approx(np.percentile(off, 95))
    assert row.worst == 1.0
    assert row.covered == 0.75  # a launch that takes just as long as the bound is covered
    assert row.excess == pytest.approx(np.mean([1.5, 0.25, 0.0, -0.375]))


def test_an_estimator_without_bounds_of_its_own_covers_nothing(only):
    only(OneSecond(bound=1.0))
    (row,) = errors.table(of(sample("decode", 2.0, 1)))
    assert (row.covered, row.excess) == (None, None)


def test_each_kind_of_launch_is_a_case_alone_and_beside_another():
    kinds = [("prefill", False), ("decode", False), ("decode", True), ("prefill", True)]
    samples = [sample(kind, 1.0, 999, beside=beside) for kind, beside in kinds]
    samples += [sample("hybrid", 1.0, 999), sample("prefill", 1.0, 1000)]
    short, *others, long = samples
    names = ("solo decode", "co-run decode", "co-run prefill", "hybrid")
    assert errors.held_out(of(*samples)) == {
        "solo prefill": [short, long],
        "- n + r >= 1024": [long],
        **{name: [each] for name, each in zip(names, others, strict=True)},
    }


def test_the_cost_of_a_prediction_is_that_of_one_level_and_of_all(only):
    """Each batch is asked about once, however many units it was measured on."""
    estimator = OneSecond()
    only(estimator)
    twice = [sample("decode", seconds, 1, beside=True) for seconds in (1.0, 2.0)]
    assert set(errors.prediction_seconds(of(*twice))) == {"a second"}
    shared = [d for p, d in synthetic.LEVELS if p and d]
    assert estimator.asked == [[48], shared]
