"""Ours: a linear base for each level, what it misses learnt from the samples, and a P99 bound.

    alone:  T = base(load, units) · exp m(load, units)
    beside: T = T_alone · exp m'(load, units, what runs beside, its units)
    P99:    T · exp q

The base has the terms of the solo-run models, over batches of all sizes; fitted for each number of
units, it has what the kernels in use reach on few SMs. m and m' are Gaussian processes over
log(measured / base), see `residual.py`: products bound by the weights' bytes, the rounding of
batches, the contention for memory, and the clocks, which fall under the power cap, are smooth in
what both lanes do, on how many units, and how long the base says that it takes. q is the 99th
percentile of how far the truth is above the prediction for configurations that were left out, for
small and for large prefill batches apart. Online, each kind of launch has a slow correction of its
own.
"""

from collections.abc import Sequence
from math import exp, log2

import numpy as np

from twolane.estimate import Beside, Estimator, Floats, Load
from twolane.estimate.profile import Kind, Profile, Sample
from twolane.estimate.residual import Means, Residual
from twolane.estimate.solo_run import (
    LEAST_TOKENS,
    LevelModel,
    pass_features,
    slice_features,
    step_features,
)

COVERED = 0.99
"""Share of launches that the bound is for."""
FEWEST = 30
"""Samples of small or of large batches that have a quantile of their own."""
WEIGHT = 0.08
"""Of the newest launch that is looked at in the online correction of the mean."""
EVERY = 4
"""One launch in so many is looked at: to predict it anew costs as much as the plan did."""
LEAST = 1e-6
"""Seconds; less is not told apart."""
MOST_CORRECTED = 0.2
"""Of the online correction, as a logarithm: beyond that something else is wrong."""


class _Layer:
    """A process over what is left, its quantile, and its online correction."""

    def __init__(
        self, states: Floats, logs: Floats, groups: Sequence[str], large: Sequence[bool]
    ) -> None:
        self.residual = Residual(states, logs, groups)
        missed, split = self.residual.missed, np.array(large)[self.residual.order]
        self.quantiles = _quantile(missed[~split], missed), _quantile(missed[split], missed)
        """Of small batches and of large ones."""
        self.correction = 0.0

    def learn(self, log_missed: float) -> None:
        """A launch took exp(log_missed) times what was predicted."""
        moved = self.correction + WEIGHT * log_missed
        self.correction = max(-MOST_CORRECTED, min(MOST_CORRECTED, moved))


def _quantile(missed: Floats, all_missed: Floats) -> float:
    """How far the truth is above the prediction, for one configuration in a hundred."""
    some = missed if len(missed) >= FEWEST else all_missed
    rank = min(1.0, COVERED * (1 + 1 / len(some)))  # conformal: of so many and one more
    return float(np.quantile(some, rank))


class Calibrated(Estimator):
    """Base and processes. Promises a P99: one launch in a hundred takes longer than its bound."""

    promises = True

    def __init__(self, profile: Profile) -> None:
        self._base: dict[Kind, LevelModel] = {}
        self._alone: dict[Kind, _Layer] = {}
        self._beside: dict[Kind, _Layer] = {}
        self._means: dict[tuple[Kind, bool], Means] = {}
        """Of the process alone, and of both."""
        self._seen = 0
        """Launches since one was looked at."""
        kinds: tuple[Kind, ...] = ("prefill", "decode", "hybrid")
        for kind in kinds:
            alone = profile.training(kind, beside=False)
            self._base[kind] = LevelModel.fit([_features(sample) for sample in alone], alone)
        for kind in kinds:
            alone = profile.training(kind, beside=False)
            layer = self._alone[kind] = self._layer(alone)
            self._means[kind, False] = Means(layer.residual)
            if both := profile.training(kind, beside=True):
                beside = self._beside[kind] = self._layer(both)
                self._means[kind, True] = Means(layer.residual, beside.residual)

    def observe_prefill(
        self,
        load: Load,
        layers: int,
        units: int,
        seconds: float,
        beside: Beside | None = None,
        *,
        finishes: bool = False,
    ) -> None:
        """See `Estimator.observe_prefill`."""
        if self._looks():
            predicted = self.prefill_slice(load, layers, units, beside, finishes=finishes)
            self._learn("prefill", seconds, predicted, beside)

    def observe_decode(
        self, load: Load, units: int, seconds: float, beside: Beside | None = None
    ) -> None:
        """See `Estimator.observe_decode`."""
        if self._looks():
            self._learn("decode", seconds, self.decode_step(load, units, beside), beside)

    def observe_hybrid(self, load: Load, units: int, seconds: float) -> None:
        """See `Estimator.observe_hybrid`."""
        if self._looks():
            self._learn("hybrid", seconds, self.hybrid(load, units), None)

    def _looks(self) -> bool:
        """Whether this launch is one to learn from."""
        self._seen = (self._seen + 1) % EVERY
        return self._seen == 0

    def _prefill(
        self,
        load: Load,
        layers: int,
        units: Sequence[int],
        beside: Beside | None,
        finishes: bool,
        bound: bool,
    ) -> Sequence[float] | None:
        features = slice_features(load, layers, finishes)
        sizes = _slice_sizes(load, layers)
        return self._predict("prefill", features, sizes, units, beside, bound, _large(load))

    def _decode(
        self, load: Load, units: Sequence[int], beside: Beside | None, bound: bool
    ) -> Sequence[float] | None:
        return self._predict("decode", step_features(load), _sizes(load), units, beside, bound)

    def _hybrid(self, load: Load, units: Sequence[int], bound: bool) -> Sequence[float] | None:
        return self._predict("hybrid", pass_features(load), _pass_sizes(load), units, None, bound)

    def _predict(
        self,
        kind: Kind,
        features: Sequence[float],
        sizes: Sequence[float],
        units: Sequence[int],
        beside: Beside | None,
        bound: bool,
        large: bool = False,
    ) -> Sequence[float]:
        layer, log = self._alone[kind], 0.0
        if beside is not None and kind in self._beside:
            log, layer = layer.correction, self._beside[kind]
        else:
            beside = None
        log += layer.correction + (layer.quantiles[large] if bound else 0.0)
        bases = self._base[kind].predict(features, units)
        states = self._states(kind, sizes, units, bases, beside)
        means = self._means[kind, beside is not None].at(states).tolist()
        return [base * exp(mean + log) for base, mean in zip(bases, means, strict=True)]

    def _states(
        self,
        kind: Kind,
        sizes: Sequence[float],
        units: Sequence[int],
        bases: Sequence[float],
        beside: Beside | None,
    ) -> list[list[float]]:
        """What is asked for at each of the units, and what the other lane does meanwhile.

        How long each takes by the base stands for how hard it drives memory and arithmetic.
        """
        own = [
            [*sizes, log2(each), log2(base + LEAST)]
            for each, base in zip(units, bases, strict=True)
        ]
        if beside is None:
            return own
        load, other_units = beside.load, beside.each(len(own))
        other: Kind = "decode" if kind == "prefill" else "prefill"
        features = (
            slice_features(load, 1, finishes=False) if kind == "decode" else step_features(load)
        )
        its, model = _sizes(load), self._base[other]
        return [
            [*state, *its, log2(unit), log2(model.seconds(features, unit) + LEAST)]
            for state, unit in zip(own, other_units, strict=True)
        ]

    def _layer(self, samples: Sequence[Sample]) -> _Layer:
        """What is left over what has been fitted so far."""
        states, logs = [], []
        for sample in samples:
            units, sizes = (sample.units,), _sample_sizes(sample)
            base = self._base[sample.kind].seconds(_features(sample), sample.units)
            log = float(np.log(sample.median / base))
            beside = sample.beside.beside if sample.beside is not None else None
            if beside is not None:
                state = self._states(sample.kind, sizes, units, [base], None)
                log -= float(self._means[sample.kind, False].at(state)[0])
            states += self._states(sample.kind, sizes, units, [base], beside)
            logs.append(log)
        groups = [sample.configuration for sample in samples]
        large = [sample.kind == "prefill" and _large(sample.load) for sample in samples]
        return _Layer(np.array(states), np.array(logs), groups, large)

    def _learn(
        self, kind: Kind, seconds: float, predicted: float | None, beside: Beside | None
    ) -> None:
        layers = self._alone if beside is None else self._beside
        if predicted is not None and kind in layers:
            layers[kind].learn(float(np.log(seconds / predicted)))


def _features(sample: Sample) -> list[float]:
    if sample.kind == "prefill":
        return slice_features(sample.load, sample.layers, sample.finishes)
    return step_features(sample.load) if sample.kind == "decode" else pass_features(sample.load)


def _large(load: Load) -> bool:
    """Whether its products, not launches and weights, take most of a prefill slice's time."""
    return load.new + load.reused >= LEAST_TOKENS


def _sample_sizes(sample: Sample) -> Sequence[float]:
    if sample.kind == "prefill":
        return _slice_sizes(sample.load, sample.layers)
    return _sizes(sample.load) if sample.kind == "decode" else _pass_sizes(sample.load)


def _sizes(load: Load) -> list[float]:
    """New and reused tokens and requests, as logarithms."""
    return [log2(max(1, load.new)), log2(1 + load.reused / 16), log2(max(1, load.requests))]


def _slice_sizes(load: Load, layers: int) -> list[float]:
    return [*_sizes(load), log2(layers)]


def _pass_sizes(load: Load) -> list[float]:
    return [*_sizes(load.chunks), *_sizes(load.decoding)[1:]]
