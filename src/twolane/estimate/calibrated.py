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
from typing import NamedTuple

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
DIGITS = 6
"""Binary ones of a decode step's context that the processes see: 1.6 % off at most."""
MOST_KNOWN = 4096
"""Answers that are remembered."""
OTHER: dict[Kind, Kind] = {"prefill": "decode", "decode": "prefill"}
"""What runs beside it."""


class _Asked(NamedTuple):
    """A launch whose time is asked for, on each of these units."""

    kind: Kind
    load: Load
    units: Sequence[int]
    beside: Beside | None = None
    layers: int = 0
    finishes: bool = False

    @property
    def features(self) -> list[float]:
        """What the base is linear in."""
        return _features(self.kind, self.load, self.layers, self.finishes)


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
        self._known: dict[tuple[object, ...], Sequence[float]] = {}
        """What the processes have answered."""
        kinds: tuple[Kind, ...] = ("prefill", "decode", "hybrid")
        for kind in kinds:
            alone = profile.training(kind, beside=False)
            self._base[kind] = LevelModel.fit([_sample_features(each) for each in alone], alone)
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
        return self._predict(_Asked("prefill", load, units, beside, layers, finishes), bound)

    def _decode(
        self, load: Load, units: Sequence[int], beside: Beside | None, bound: bool
    ) -> Sequence[float] | None:
        return self._predict(_Asked("decode", load, units, beside), bound)

    def _hybrid(self, load: Load, units: Sequence[int], bound: bool) -> Sequence[float] | None:
        return self._predict(_Asked("hybrid", load, units), bound)

    def _predict(self, asked: "_Asked", bound: bool) -> Sequence[float]:
        kind, load = asked.kind, asked.load
        layer, log = self._alone[kind], 0.0
        if asked.beside is not None and kind in self._beside:
            log, layer = layer.correction, self._beside[kind]
        else:
            asked = asked._replace(beside=None)
        large = kind == "prefill" and _large(load)
        log += layer.correction + (layer.quantiles[large] if bound else 0.0)
        bases = self._base[kind].predict(asked.features, asked.units)
        means = self._missed(asked) if kind == "hybrid" else self._remembered(asked)
        return [base * exp(mean + log) for base, mean in zip(bases, means, strict=True)]

    def _remembered(self, asked: "_Asked") -> Sequence[float]:
        """What is missed, for decode steps of about so much context: they are asked about again and
        again, a token further each time."""
        kind, load, units, beside, layers, finishes = asked
        others = None
        if beside is not None:
            others = tuple(beside.each(len(units))), _sums(beside.load, OTHER[kind])
        key = (kind, layers, finishes, tuple(units), _sums(load, kind), others)
        means = self._known.get(key)
        if means is None:
            if kind == "decode":
                asked = asked._replace(load=_typical(load))
            elif beside is not None:
                asked = asked._replace(beside=Beside(_typical(beside.load), beside.units))
            if len(self._known) == MOST_KNOWN:
                self._known.clear()
            means = self._known[key] = self._missed(asked)
        return means

    def _missed(self, asked: "_Asked") -> Sequence[float]:
        """Of log(truth / base), by the processes, at each of the units."""
        kind, load, units, beside, layers, _ = asked
        bases = self._base[kind].predict(asked.features, units)
        states = self._states(kind, _sizes_of(kind, load, layers), units, bases, beside)
        means: list[float] = self._means[kind, beside is not None].at(states).tolist()
        return means

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
        features = _features(OTHER[kind], load, layers=1, finishes=False)
        its, model = _sizes(load), self._base[OTHER[kind]]
        return [
            [*state, *its, log2(unit), log2(model.seconds(features, unit) + LEAST)]
            for state, unit in zip(own, other_units, strict=True)
        ]

    def _layer(self, samples: Sequence[Sample]) -> _Layer:
        """What is left over what has been fitted so far."""
        states, logs = [], []
        for sample in samples:
            units, sizes = (sample.units,), _sizes_of(sample.kind, sample.load, sample.layers)
            base = self._base[sample.kind].seconds(_sample_features(sample), sample.units)
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


def _sample_features(sample: Sample) -> list[float]:
    return _features(sample.kind, sample.load, sample.layers, sample.finishes)


def _features(kind: Kind, load: Load, layers: int, finishes: bool) -> list[float]:
    if kind == "prefill":
        return slice_features(load, layers, finishes)
    return step_features(load) if kind == "decode" else pass_features(load)


def _sums(load: Load, kind: Kind) -> tuple[int, ...]:
    """What the processes know of a load; of a decode step, its context rounded."""
    if kind == "decode":
        return load.requests, _rounded(load.reused)
    return load.new, load.reused, load.requests, load.squares, load.products


def _typical(step: Load) -> Load:
    """A decode step with the same sums."""
    rows, context = _sums(step, "decode")
    return Load.decode([context, *[0] * (rows - 1)][:rows])


def _rounded(tokens: int) -> int:
    """To `DIGITS` binary ones."""
    dropped = max(0, tokens.bit_length() - DIGITS)
    return (tokens + (1 << dropped >> 1)) >> dropped << dropped


def _large(load: Load) -> bool:
    """Whether its products, not launches and weights, take most of a prefill slice's time."""
    return load.new + load.reused >= LEAST_TOKENS


def _sizes_of(kind: Kind, load: Load, layers: int) -> list[float]:
    if kind == "prefill":
        return [*_sizes(load), log2(layers)]
    return _sizes(load) if kind == "decode" else _pass_sizes(load)


def _sizes(load: Load) -> list[float]:
    """New and reused tokens and requests, as logarithms."""
    return [log2(max(1, load.new)), log2(1 + load.reused / 16), log2(max(1, load.requests))]


def _pass_sizes(load: Load) -> list[float]:
    return [*_sizes(load.chunks), *_sizes(load.decoding)[1:]]
