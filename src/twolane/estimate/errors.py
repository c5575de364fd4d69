"""Errors of estimators on samples that they were not fitted on."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twolane.estimate.base import Estimator
from twolane.estimate.catalog import ESTIMATORS
from twolane.estimate.profile import Profile, Sample, load_of
from twolane.estimate.query import Corunner, decode_step

CASES: dict[str, tuple[str, bool]] = {
    "solo prefill": ("prefill", False),
    "solo decode": ("decode", False),
    "co-run decode": ("decode", True),
    "co-run prefill": ("prefill", True),
    "hybrid": ("hybrid", False),
}
"""(kind, whether the other lane works) of each."""
MIN_TOKENS = 1024
"""New and reused tokens of the prefill batches in the papers' figures."""


@dataclass(frozen=True)
class Errors:
    """Errors of one estimator on one case: |prediction / truth - 1| of held-out medians."""

    estimator: str
    case: str
    samples: int
    mean: float
    p95: float
    worst: float
    covered: float | None
    """Share of the samples that the bound was not below; None: it promises none here."""
    excess: float | None
    """Mean of bound / truth - 1."""


def table(profile: Profile) -> list[Errors]:
    """Return the errors of every estimator on every case that has held-out samples."""
    rows = []
    for name, make in ESTIMATORS.items():
        estimator = make(profile)
        for case, samples in held_out(profile).items():
            rows.append(_errors(name, case, estimator, samples))
    return rows


def held_out(profile: Profile) -> dict[str, list[Sample]]:
    """Return each case's held-out samples, and those of prefill in the papers' figures."""
    cases = {
        case: [s for s in profile.samples if s.held_out and _case(s) == wanted]
        for case, wanted in CASES.items()
    }
    long = [s for s in cases["solo prefill"] if s.load.new + s.load.reused >= MIN_TOKENS]
    cases = {"solo prefill": cases["solo prefill"], "- n + r >= 1024": long, **cases}
    return {case: samples for case, samples in cases.items() if samples}


def predicted(estimator: Estimator, sample: Sample, *, bound: bool = False) -> float:
    """Return seconds that an estimator predicts for a sample."""
    seconds = estimator.predict(sample.launch, sample.units, sample.corunner, bound=bound)
    assert seconds is not None, "a fitted estimator always has a prediction"
    return seconds


def prediction_seconds(profile: Profile) -> dict[str, tuple[float, float]]:
    """Host seconds of a prediction for one candidate, and for all levels at once, by estimator.

    The median over the co-runs of decode, each batch asked about once: nothing is remembered, and
    making the load and its sums is included. Empty if no co-runs were measured.
    """
    batches = {sample.configuration: sample for sample in profile.of("decode", beside=True)}
    samples = list(batches.values())[:200]
    if not samples:
        return {}
    levels = np.array([level for level in profile.levels if all(level)])
    costs = {}
    for name, make in ESTIMATORS.items():
        estimator = make(profile)
        one, every = [], []
        for sample in samples:
            assert sample.beside is not None
            prefill = load_of(sample.beside.runs)
            begun = time.perf_counter()
            corunner = Corunner(prefill, sample.beside.units)
            step = decode_step(load_of(sample.runs))
            estimator.predict(step, sample.units, corunner, bound=True)
            between = time.perf_counter()
            step = decode_step(load_of(sample.runs))
            estimator.predict(step, levels[:, 1], Corunner(prefill, levels[:, 0]), bound=True)
            one.append(between - begun)
            every.append(time.perf_counter() - between)
        costs[name] = float(np.median(one)), float(np.median(every))
    return costs


def _errors(name: str, case: str, estimator: Estimator, samples: Sequence[Sample]) -> Errors:
    truth = np.array([sample.median for sample in samples])
    means = np.array([predicted(estimator, sample) for sample in samples])
    bounds = np.array([predicted(estimator, sample, bound=True) for sample in samples])
    errors, promises = np.abs(means / truth - 1), not np.array_equal(bounds, means)
    return Errors(
        estimator=name,
        case=case,
        samples=len(samples),
        mean=float(errors.mean()),
        p95=float(np.percentile(errors, 95)),
        worst=float(errors.max()),
        covered=float((bounds >= truth).mean()) if promises else None,
        excess=float((bounds / truth - 1).mean()) if promises else None,
    )


def _case(sample: Sample) -> tuple[str, bool]:
    return sample.kind, sample.beside is not None
