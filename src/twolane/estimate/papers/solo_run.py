"""The solo-run models of Drift (§3.4) and MuxWise (§3.3.2): linear, one pair for each level.

    T_prefill = θ1·Σ n² + θ2·Σ n·r + θ3·Σ n + θ4        (Equation 1 of both)
    T_decode  = θ1·Σ r + θ2·bs + θ3                     (Equation 2 of both)

Two things are added, since work here is launched in slices and in hybrid passes. Equation 1 holds
for one layer, and the slice that ends the pass (classifier, sampling) takes θ5 + θ6·bs more. A
hybrid pass is Equation 1 over its chunks plus Equation 2 over its decode rows. New tokens are those
that the device computes, see `computed.py`.

Coefficients are fitted by non-negative least squares on the relative error, for each number of
units that was measured, and interpolated between them over 1 / units.
"""

from collections.abc import Sequence
from operator import mul

import numpy as np
from scipy.optimize import nnls

from twolane.estimate.base import Estimator
from twolane.estimate.computed import Computed
from twolane.estimate.profile import Profile, ProfileError, Sample
from twolane.estimate.query import Corunner, Floats, Ints, Kind, LaunchShape, Load

MIN_TOKENS = 1024
"""New and reused tokens from which on Equation 1 is fitted, as in the papers; smaller batches are
bound by the weights' bytes, which no term of it stands for."""


Rows = Sequence[Sequence[float]]
"""Features on each of the units, one object for those that have the same."""


class LevelModel:
    """Coefficients for each number of units; predicts sums of features times coefficients.

    Between measured numbers they are linear in 1 / units. On fewer units than any that were
    measured, launches take longer in proportion.

    Args:
        units: measured, ascending.
        coefficients: [len(units), features].
    """

    def __init__(self, units: Ints, coefficients: Floats) -> None:
        self._inverse = 1.0 / units[::-1]
        self._coefficients = coefficients[::-1]
        self._rows: dict[int, list[float]] = {}
        self._tables: dict[Sequence[int], Floats] = {}
        """Coefficients by the units that were asked for, one by one and together."""

    @classmethod
    def fit(cls, features: Sequence[Sequence[float]], samples: Sequence[Sample]) -> "LevelModel":
        """Fit each number of units by itself.

        Raises:
            ProfileError: there are no samples.
        """
        if not samples:
            raise ProfileError("the profile has too few samples to fit on: measure for longer")
        x, units = np.array(features, dtype=float), np.array([s.units for s in samples])
        seconds = np.array([sample.median for sample in samples])
        levels = np.unique(units)
        rows = [_relative_nnls(x[units == u], seconds[units == u]) for u in levels]
        return cls(levels, np.array(rows))

    def predict(self, features: Rows, units: Sequence[int]) -> list[float]:
        """Return seconds on each of the units, each with its features."""
        if len(units) == 1 or any(row is not features[0] for row in features):
            return [self.seconds(row, each) for row, each in zip(features, units, strict=True)]
        key = tuple(units)
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = np.array([self._row(each) for each in key])
        seconds: list[float] = table.dot(features[0]).tolist()
        return seconds

    def seconds(self, features: Sequence[float], units: int) -> float:
        """Return seconds on this many units."""
        seconds: float = sum(map(mul, self._row(units), features))
        return seconds

    def _row(self, units: int) -> list[float]:
        row = self._rows.get(units)
        if row is None:
            inverse, columns = 1.0 / units, self._coefficients.T
            # On fewer units than any that were measured, all takes longer in proportion.
            fewer = max(1.0, inverse / self._inverse[-1])
            row = [fewer * float(np.interp(inverse, self._inverse, each)) for each in columns]
            self._rows[units] = row
        return row


def _relative_nnls(features: Floats, seconds: Floats) -> Floats:
    """θ >= 0 that minimises the sum of squares of (features @ θ - seconds) / seconds."""
    scale = np.abs(features).max(axis=0)
    scale[scale == 0.0] = 1.0
    theta, _ = nnls(features / scale / seconds[:, None], np.ones(len(seconds)))
    return np.asarray(theta / scale)


class SoloRun(Estimator):
    """Fitted on runs alone; what the other lane does is ignored. Promises no bound."""

    def __init__(self, profile: Profile) -> None:
        computed = self._computed = Computed.on(profile)
        alone = profile.training("prefill", beside=False)
        long = [s for s in alone if s.load.new + s.load.reused >= MIN_TOKENS]
        self._models: dict[Kind, LevelModel] = {
            "prefill": _fitted(long or alone, computed),
            "decode": _fitted(profile.training("decode", beside=False), computed),
            "hybrid": _fitted(profile.training("hybrid"), computed),
        }

    def _seconds(
        self, launch: LaunchShape, units: Sequence[int], corunner: Corunner | None, bound: bool
    ) -> Sequence[float]:
        features = launch_features(self._computed, launch)
        return self._models[launch.kind].predict([features] * len(units), units)


def launch_features(computed: Computed, launch: LaunchShape) -> list[float]:
    """Return the features in which the seconds of a launch are linear."""
    if launch.kind == "prefill":
        return slice_features(computed, launch.load, launch.layers, launch.finishes)
    if launch.kind == "decode":
        return step_features(computed, launch.load)
    return pass_features(computed, launch.load)


def slice_features(computed: Computed, load: Load, layers: int, finishes: bool) -> list[float]:
    """Return the terms of Equation 1 for this many layers, and those of the pass's end."""
    squares, products = computed.pairs(load)
    end = (1.0, float(load.requests)) if finishes else (0.0, 0.0)
    attention = layers * squares, layers * products
    return [*attention, layers * computed.tokens(load), layers, *end]


def step_features(computed: Computed, load: Load) -> list[float]:
    """Return the terms of Equation 2."""
    return [computed.context(load), load.requests, 1.0]


def pass_features(computed: Computed, load: Load) -> list[float]:
    """Return Equation 1's terms over the chunks and Equation 2's over the decode rows."""
    steps, pairs = load.decoding, computed.pairs(load.chunks, rows=load.new)
    end = step_features(computed, steps)
    return [*pairs, computed.tokens(load) - steps.requests, *end]


def _fitted(samples: Sequence[Sample], computed: Computed) -> LevelModel:
    return LevelModel.fit([launch_features(computed, s.launch) for s in samples], samples)
