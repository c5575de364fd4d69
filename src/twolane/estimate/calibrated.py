"""Ours: a linear base for each level, what it misses learnt from the samples, and a P99 bound.

    alone:  T = base(load, units) · exp m(load, units)
    beside: T = T_alone · exp m'(load, units, what runs beside, its units)
    P99:    T · exp q

The base has the terms of the solo-run models, over batches of all sizes; fitted for each number of
units, it has what the kernels in use reach on few SMs. m and m' are Gaussian processes over
log(measured / base), see `residual.py`: products bound by the weights' bytes, the rounding of
batches, the contention for memory, and the clocks, which fall under the power cap, are smooth in
what both lanes do and on how many units. q is the 99th percentile of the process's leave-one-out
residuals: how far the truth is above the prediction for one sample in a hundred that it has not
seen. Online, each kind of launch has a slow correction of its own.
"""

from collections.abc import Sequence
from math import log2

import numpy as np

from twolane.estimate import Beside, Estimator, Floats, Ints, Load
from twolane.estimate.profile import Kind, Profile, Sample
from twolane.estimate.residual import Means, Residual
from twolane.estimate.solo_run import LevelModel, pass_features, slice_features, step_features

COVERED = 0.99
"""Share of launches that the bound is for."""
WEIGHT = 0.08
"""Of the newest launch that is looked at in the online correction of the mean."""
EVERY = 4
"""One launch in so many is looked at: to predict it anew costs as much as the plan did."""
MOST_CORRECTED = 0.2
"""Of the online correction, as a logarithm: beyond that something else is wrong."""


class _Layer:
    """A process over what is left, its quantile, and its online correction."""

    def __init__(self, states: Floats, logs: Floats) -> None:
        self.residual = Residual(states, logs)
        missed = self.residual.missed
        rank = min(1.0, COVERED * (1 + 1 / len(missed)))  # conformal: of so many and one more
        self.quantile = float(np.quantile(missed, rank))
        self.correction = 0.0

    def learn(self, log_missed: float) -> None:
        """A launch took exp(log_missed) times what was predicted."""
        moved = self.correction + WEIGHT * log_missed
        self.correction = max(-MOST_CORRECTED, min(MOST_CORRECTED, moved))


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
        units: Ints,
        beside: Beside | None,
        finishes: bool,
        bound: bool,
    ) -> Floats | None:
        features = slice_features(load, layers, finishes)
        return self._predict("prefill", features, _slice_sizes(load, layers), units, beside, bound)

    def _decode(self, load: Load, units: Ints, beside: Beside | None, bound: bool) -> Floats | None:
        return self._predict("decode", step_features(load), _sizes(load), units, beside, bound)

    def _hybrid(self, load: Load, units: Ints, bound: bool) -> Floats | None:
        return self._predict("hybrid", pass_features(load), _pass_sizes(load), units, None, bound)

    def _predict(
        self,
        kind: Kind,
        features: Sequence[float],
        sizes: Sequence[float],
        units: Ints,
        beside: Beside | None,
        bound: bool,
    ) -> Floats:
        layer, log = self._alone[kind], 0.0
        if beside is not None and kind in self._beside:
            log, layer = layer.correction, self._beside[kind]
        else:
            beside = None
        log += layer.correction + (layer.quantile if bound else 0.0)
        logs = self._means[kind, beside is not None].at(_states(sizes, units, beside)) + log
        return np.asarray(self._base[kind].predict(features, units) * np.exp(logs))

    def _layer(self, samples: Sequence[Sample]) -> _Layer:
        """What is left over what has been fitted so far."""
        states, logs = [], []
        for sample in samples:
            units, sizes = np.array([sample.units]), _sample_sizes(sample)
            base = self._base[sample.kind].seconds(_features(sample), sample.units)
            log = float(np.log(sample.median / base))
            beside = sample.beside.beside if sample.beside is not None else None
            if beside is not None:
                (alone,) = self._means[sample.kind, False].at(_states(sizes, units, None))
                log -= float(alone)
            states += _states(sizes, units, beside)
            logs.append(log)
        return _Layer(np.array(states), np.array(logs))

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


def _states(sizes: Sequence[float], units: Ints, beside: Beside | None) -> list[list[float]]:
    """What is asked for at each of the units, and what the other lane does meanwhile."""
    own = [[*sizes, log2(each)] for each in units.tolist()]
    if beside is None:
        return own
    its, others = _sizes(beside.load), beside.units
    each = others.tolist() if isinstance(others, np.ndarray) else [others] * len(own)
    return [[*state, *its, log2(other)] for state, other in zip(own, each, strict=True)]
