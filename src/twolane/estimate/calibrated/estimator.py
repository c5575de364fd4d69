"""The calibrated estimator: a linear base for each level, a learnt residual, and a P99 bound.

    alone:  T = base(load, units) · exp m(load, units)
    beside: T = T_alone · exp m'(units, bytes/s, FLOP/s and, of several ranks, sums/s of both lanes)
    P99:    T · exp q

The base has the terms of the solo-run models, over batches of all sizes, and slopes from where
arithmetic binds products; for slices, the tokens of prefixes, which bound attention of few new
ones; for decode, a step for each way that products go (`computed.py`); with experts, how many of
them are read, which follows the counts that decode steps bring. Fitted for each number of
units, it has what the kernels in use reach on few SMs. m and m' are Gaussian processes, see
`residual.py`. m is over the sizes of a batch. m' is over what each lane would move
and compute in a second if it were alone, by the base, for that is what lanes contend for:
bandwidth, the power that clocks are lowered for, and the link that several ranks sum over. q is
the 99th percentile of how far launches of configurations that were left out are above the
prediction. Online, each kind of launch has a slow correction of its own; and a device that is slow
for a moment, by the last two launches, has longer bounds.
"""

from collections.abc import Callable, Sequence
from copy import copy
from functools import cache
from math import exp, log, log2
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from twolane.estimate.base import Estimator
from twolane.estimate.calibrated.residual import Means, Residual
from twolane.estimate.computed import BENDS, SLOPES, Computed
from twolane.estimate.experts import ExpertCounts
from twolane.estimate.papers.operators import Shape
from twolane.estimate.papers.solo_run import LevelModel, Rows, pass_features, slice_features
from twolane.estimate.profile import Profile, Sample
from twolane.estimate.query import Corunner, Floats, Kind, LaunchShape, Load

BOUND_QUANTILE = 0.99
"""Share of launches that the bound is for."""
MIN_FOR_QUANTILE = 100
"""Configurations that have a 99th percentile."""
FOLDS = 6
"""Parts of the configurations that are left out in turn."""
MEAN_WEIGHT = 0.08
"""Weight of the newest launch in the online correction of the mean."""
CORRECT_EVERY = 4
"""The mean and the bound are corrected once in this many launches."""
MIN_SECONDS = 1e-6
"""Durations below this many seconds are treated as equal."""
MAX_CORRECTION = 0.2
"""Largest online correction, as a logarithm: beyond it something else is wrong."""
BOUND_GAIN = 0.01
"""Share by which a launch above its bound raises the next bounds."""
SLOW_EXCESS = 0.1
"""Launches above their bounds and as far above their predictions, as a logarithm, say that the
device is slow: an H200 is, for 60 to 100 ms every few seconds, by 0.08 to 0.26
(docs/notes/host-h200.md). A single one says nothing of the next: of steps beside slices one in a
hundred takes a quarter longer there."""
LAUNCH_EXCESS = 0.05
"""Part of that excess that is put down to the launch itself, as a logarithm."""
MAX_SLOW_EXCESS = 0.3
"""Largest excess, as a logarithm, that means a slow device: a launch above it stood still."""
SLOW_SECONDS = 0.02
"""Launches longer than this many seconds say nothing of a slow moment, which is over before another
plan is carried out."""
CONTEXT_BITS = 6
"""Binary ones of a decode step's context that the processes see: 1.6 % off at most."""
CORUNNER: dict[Kind, Kind] = {"prefill": "decode", "decode": "prefill"}
"""The kind of work in the other lane, for each kind that has one."""
OWN_FEATURES: dict[Kind, int] = {"prefill": 2, "decode": 2}
"""Features of a state that the process of contention does not look at: it begins with the layers
and units of a slice, the units of a step."""


class _Query(NamedTuple):
    """A launch whose seconds are asked for on each of these units."""

    launch: LaunchShape
    units: Sequence[int]
    corunner: Corunner | None = None
    experts_read: float | None = None
    """Experts of a layer that a step is known to have read; None: what is expected."""

    @classmethod
    def of(cls, sample: Sample) -> "_Query":
        return cls(sample.launch, (sample.units,), sample.corunner, sample.experts_read)


class _LinearBase:
    """The linear base, and the processes' view of a launch."""

    def __init__(self, profile: Profile) -> None:
        self._computed = Computed.on(profile)
        key = profile.key
        sizes = key.weight_itemsize, key.kv_itemsize
        self._shape = Shape(profile.shape, key.itemsize, key.tensor_parallel, *sizes)
        self._layers, moe = profile.shape.layers, profile.shape.moe
        self._models: dict[Kind, LevelModel] = {}
        self._turns = False
        """Whether attention runs in whole turns of tiles, by the measured slices."""
        self.experts = None if moe is None else ExpertCounts(moe)
        """Shared by all that are fitted from here."""
        if self.experts is not None and not self.experts.moe.skew:
            steps = profile.training("decode", beside=False)
            counts = [
                (s.load.requests, s.experts_read) for s in steps if s.experts_read is not None
            ]
            self.experts.learn(counts)
        slices = profile.training("prefill", beside=False)
        # Least samples of slices by which attention is tested for whole turns of tiles.
        if self._computed.heads and len(slices) >= 24:
            self._fit_turns(slices)

    def _fit_turns(self, samples: Sequence[Sample]) -> None:
        """See whether turns of tiles explain the slices' seconds better than their pairs alone."""
        seconds, off = np.array([sample.median for sample in samples]), dict[bool, float]()
        for self._turns in (False, True):
            base = self.fitted("prefill", samples)
            predicted = [base.seconds(_Query.of(sample))[0] for sample in samples]
            off[self._turns] = float(np.square(np.array(predicted) / seconds - 1.0).sum())
        # Fraction of the squared errors that may remain for turns of tiles to be believed in.
        self._turns = off[True] < 0.5 * off[False]

    def fitted(self, kind: Kind, samples: Sequence[Sample]) -> "_LinearBase":
        """Return a copy in which one kind's model is fitted on these samples."""
        other = copy(self)
        features = [self._features(_Query.of(sample))[0] for sample in samples]
        other._models = {**self._models, kind: LevelModel.fit(features, samples)}
        return other

    def seconds(self, query: _Query) -> list[float]:
        """Return the predicted seconds at each of the units."""
        return self._models[query.launch.kind].predict(self._features(query), query.units)

    def states(self, query: _Query) -> list[list[float]]:
        """Return the state at each of the units; beside the other lane, with both lanes' rates."""
        launch, units, corunner, _ = query
        kind = launch.kind
        sizes = self._sizes(launch, units)
        own = [[*size, log2(each)] for size, each in zip(sizes, units, strict=True)]
        if corunner is None:
            return own
        mine = self._rates(kind, launch.load, units)
        its = self._rates(CORUNNER[kind], corunner.load, corunner.each(len(units)))
        return [[*state, *a, *b] for state, a, b in zip(own, mine, its, strict=True)]

    def _rates(self, kind: Kind, load: Load, units: Sequence[int]) -> list[tuple[float, ...]]:
        """Return the bytes/s and FLOP/s of the products and attention, and the bytes/s that several
        ranks sum, alone, at each of the units."""
        if kind == "prefill":
            rows = self._computed.tokens(load)
            features, layers = self._slices(load, 1, False, units), 1
            sums = load.new, load.reused, load.squares + load.products
        else:
            rows, context = load.requests, _rounded(round(self._computed.context(load)))
            features, layers = self._steps(load, context, units), self._layers
            sums = rows, context, rows + context
        moved, flops = self._shape.layer(rows, *sums)
        moved += 0.0 if kind == "prefill" else rows * self._shape.state_bytes
        amounts = [layers * moved, layers * flops]
        if self._shape.tensor_parallel > 1:
            amounts.append(2 * layers * self._shape.reduced_bytes(rows))
        every = self._models[kind].predict(features, units)
        return [tuple(amount / (each + MIN_SECONDS) for amount in amounts) for each in every]

    def _features(self, query: _Query) -> Rows:
        """Return the features in which the base is linear, at each of the units."""
        (kind, load, layers, finishes, _), units, _, experts_read = query
        if kind == "decode":
            return self._steps(load, self._computed.context(load), units, experts_read)
        if kind == "prefill":
            return self._slices(load, layers, finishes, units)
        new, (few, many) = self._computed.tokens(load), BENDS
        bends = max(0, new - few), max(0, new - many)
        row = [*pass_features(self._computed, load), *bends]
        return self._in_turns([*row, *self._active(load.new)], load.chunks, units)

    def _slices(self, load: Load, layers: int, finishes: bool, units: Sequence[int]) -> Rows:
        """Equation 1, the tokens of prefixes, what ends the pass, and what more new tokens take."""
        row = slice_features(self._computed, load, layers, finishes)
        new, (few, many) = self._computed.tokens(load), BENDS
        bends = layers * max(0, new - few), layers * max(0, new - many)
        active = [layers * each for each in self._active(load.new)]
        row = [*row, layers * load.reused, *bends, *active]
        return self._in_turns(row, load, units)

    def _in_turns(self, row: list[float], load: Load, units: Sequence[int]) -> Rows:
        """Return the features at each of the units; the first two are the pairs of attention."""
        if not self._turns:
            return [row] * len(units)
        turns = [self._computed.turns(load.n, each) for each in units]
        return [[row[0] * turn, row[1] * turn, *row[2:]] for turn in turns]

    def _steps(
        self, load: Load, context: float, units: Sequence[int], experts_read: float | None = None
    ) -> Rows:
        """Return Equation 2's terms for `context` tokens, and those of products of more rows."""
        rows = self._computed.rows(load)
        ways = _ways(rows, self._computed.steps)
        active = self._active(load.requests) if experts_read is None else (experts_read,)
        return [[context, *ways, *active]] * len(units)

    def _active(self, tokens: int) -> tuple[float, ...]:
        """Return the number of experts expected to be read; empty for a dense model."""
        return () if self.experts is None else (self.experts.moe.active(tokens),)

    def _sizes(self, launch: LaunchShape, units: Sequence[int]) -> list[list[float]]:
        """Return the tokens, and the layers of a slice, as logarithms."""
        kind, load, layers, _, _ = launch
        if kind == "decode":
            rows, context = self._computed.rows(load), _rounded(load.reused)
            return [[log2(max(1, rows)), _reused(context)]] * len(units)
        if kind == "hybrid":
            rest = [_reused(load.chunks.reused), _reused(load.decoding.reused)]
        else:
            rest = [_reused(load.reused), log2(layers)]
        return [[log2(max(1, self._computed.tokens(load))), *rest]] * len(units)


@cache
def _ways(rows: int, steps: tuple[int, ...]) -> tuple[float, ...]:
    """Return the features in which the products of a decode step are linear."""
    ways = [float(rows > most) for most in steps]
    return (rows, 1.0, *ways, *[max(0, rows - most) for most in SLOPES])


def _reused(tokens: int) -> float:
    return log2(1 + tokens / 16)


class _KindModel:
    """Base and processes of one kind of launch, alone or beside the other lane.

    Args:
        base: fitted.
        parts: the processes, each with the place of its first feature in the state.
    """

    def __init__(self, base: _LinearBase, *parts: tuple[int, Residual]) -> None:
        self.base, self.parts = base, parts
        self._means = Means(*parts) if parts else None

    def missed(self, query: _Query) -> list[float]:
        """Return the processes' correction of the base, a logarithm at each of the units."""
        if self._means is None:
            return [0.0] * len(query.units)
        means: list[float] = self._means.at(self.base.states(query)).tolist()
        return means

    def predicted(self, sample: Sample) -> float:
        """Return the logarithm of the predicted seconds."""
        query = _Query.of(sample)
        return log(self.base.seconds(query)[0] + MIN_SECONDS) + self.missed(query)[0]

    def taught(
        self, samples: Sequence[Sample], first: int, like: "_KindModel | None"
    ) -> "_KindModel":
        """Return a model with one more process, fitted on the residuals of these samples."""
        states = np.array([self.base.states(_Query.of(sample))[0][first:] for sample in samples])
        logs = np.array([log(sample.median) - self.predicted(sample) for sample in samples])
        groups = [sample.configuration for sample in samples]
        residual = Residual(states, logs, groups, like.parts[-1][1] if like is not None else None)
        return _KindModel(self.base, *self.parts, (first, residual))


Fit = Callable[[Sequence[Sample], _KindModel | None], _KindModel]
"""Fits a model to samples, with the parameters of one that was fitted before, if there is one."""


class _BoundModel:
    """The quantile of launches above a model's prediction, and its online corrections.

    Base and processes are fitted anew without each part of the configurations: so far are launches
    of configurations above that nobody has seen. What is served is seen again and again, the mean's
    correction follows it, and fewer launches are above. The quantile goes down with each, and up by
    `BOUND_GAIN` with one above its bound, so that it rests where one in a hundred is (Robbins and
    Monro 1951), but not above the profile's.
    """

    def __init__(self, model: _KindModel, fit: Fit, samples: Sequence[Sample]) -> None:
        missed: list[Floats] = []
        folds = _folds(samples)
        for fold in folds:
            without = fit([each for each in samples if each.configuration not in fold], model)
            left = [each for each in samples if each.configuration in fold]
            missed += [np.log(each.seconds) - without.predicted(each) for each in left]
        self.quantile = _quantile(missed, sum(map(len, folds)))
        self._most = self.quantile
        self.correction = 0.0

    def learn(self, log_missed: float) -> None:
        """Learn from a launch that took exp(log_missed) times its prediction."""
        moved = self.correction + MEAN_WEIGHT * log_missed
        self.correction = max(-MAX_CORRECTION, min(MAX_CORRECTION, moved))
        moved = self.quantile + BOUND_GAIN * ((log_missed > self.quantile) - (1 - BOUND_QUANTILE))
        self.quantile = min(self._most, max(0.0, moved))


def _folds(samples: Sequence[Sample]) -> list[set[str]]:
    """Return the configurations in parts; fewer than `FOLDS` if there are fewer. Nothing is
    predicted beyond the anchors, so they are no part where there is anything else."""
    drawn = {sample.configuration for sample in samples if not sample.anchors}
    names = sorted(drawn if len(drawn) > 1 else {sample.configuration for sample in samples})
    names = [names[i] for i in np.random.default_rng(0).permutation(len(names))]
    parts = [set(names[i::FOLDS]) for i in range(FOLDS)]
    return [part for part in parts if part and len(part) < len(names)]


def _quantile(missed: Sequence[Floats], configurations: int) -> float:
    """Return the logarithm by which one launch in a hundred exceeds its prediction.

    Each sample's launches count as one. Fewer than a hundred configurations have no such rank:
    there it is Student's, of the samples' medians.
    """
    if configurations < MIN_FOR_QUANTILE:
        medians = [float(np.median(each)) for each in missed] or [0.0]
        return float(
            stdtrit(max(1, configurations), BOUND_QUANTILE) * np.sqrt(np.square(medians).mean())
        )
    launches = np.concatenate(missed)
    shares = np.concatenate([np.full(len(each), 1.0 / len(each)) for each in missed])
    order = np.argsort(launches)
    place = np.searchsorted(np.cumsum(shares[order]), BOUND_QUANTILE * len(missed))
    return float(launches[order][place])


class Calibrated(Estimator):
    """Base and processes. Promises a P99: one launch in a hundred takes longer than its bound."""

    promises = True

    def __init__(self, profile: Profile) -> None:
        self._base = _LinearBase(profile)
        self._models: dict[tuple[Kind, bool], _KindModel] = {}
        """Models of launches alone and beside the other lane, by kind."""
        self._bounds: dict[tuple[Kind, bool], _BoundModel] = {}
        self._seen = 0
        """Launches since one was looked at."""
        self._slow = False
        """Whether the last launch that made tokens was."""
        self._answers: dict[tuple[object, ...], Sequence[float]] = {}
        """Cached answers of the processes."""
        kinds: tuple[Kind, ...] = ("prefill", "decode", "hybrid")
        for kind in kinds:
            alone = profile.training(kind, beside=False)
            self._base = self._base.fitted(kind, alone)
            self._fit((kind, False), alone, self._fit_alone(kind))
        for kind in CORUNNER:
            if both := profile.training(kind, beside=True):
                self._fit((kind, True), both, self._fit_beside(kind))

    def observe(
        self, launch: LaunchShape, units: int, seconds: float, corunner: Corunner | None = None
    ) -> None:
        """See `Estimator.observe`."""
        if launch.kind != "prefill" or self._is_learning_turn():
            predicted = self.predict(launch, units, corunner)
            self._learn(launch.kind, seconds, predicted, corunner)

    def observe_experts(self, rows: int, experts_read: float) -> None:
        """See `Estimator.observe_experts`: predictions follow the skew that is seen."""
        experts = self._base.experts
        if experts is not None and experts.note(rows, experts_read):
            self._answers.clear()

    def _fit_alone(self, kind: Kind) -> Fit:
        return lambda samples, like: _KindModel(self._base.fitted(kind, samples)).taught(
            samples, 0, like
        )

    def _fit_beside(self, kind: Kind) -> Fit:
        alone = self._models[kind, False]
        base = _KindModel(self._base, *alone.parts)
        return lambda samples, like: base.taught(samples, OWN_FEATURES[kind], like)

    def _fit(self, case: tuple[Kind, bool], samples: Sequence[Sample], fit: Fit) -> None:
        model = self._models[case] = fit(samples, None)
        self._bounds[case] = _BoundModel(model, fit, samples)

    def _is_learning_turn(self) -> bool:
        """Return whether to learn from this launch."""
        self._seen = (self._seen + 1) % CORRECT_EVERY
        return self._seen == 0

    def _seconds(
        self, launch: LaunchShape, units: Sequence[int], corunner: Corunner | None, bound: bool
    ) -> Sequence[float]:
        kind, log = launch.kind, 0.0
        if corunner is not None and (kind, True) not in self._models:
            corunner = None
        query = _Query(launch, units, corunner)
        bounds = self._bounds[kind, corunner is not None]
        if corunner is not None:
            log = self._bounds[kind, False].correction
        log += bounds.correction + (bounds.quantile + self.slowdown if bound else 0.0)
        means = self._missed(query) if kind == "hybrid" else self._cached(query)
        bases = self._base.seconds(query)
        return [base * exp(mean + log) for base, mean in zip(bases, means, strict=True)]

    def _cached(self, query: _Query) -> Sequence[float]:
        """Return the processes' answer, cached by the leading bits of the context: decode steps are
        asked about again and again, a token further each time."""
        (kind, load, layers, _, _), units, corunner, _ = query
        others: tuple[object, ...] = ()
        if corunner is not None:
            others = (*corunner.each(len(units)), *_sums(corunner.load, CORUNNER[kind]))
        key = (kind, layers, *units, *_sums(load, kind), others)
        means = self._answers.get(key)
        if means is None:
            # Answers that are remembered.
            if len(self._answers) == 4096:
                self._answers.clear()
            means = self._answers[key] = self._missed(query)
        return means

    def _missed(self, query: _Query) -> Sequence[float]:
        """Return the processes' prediction of log(truth / base), at each of the units."""
        return self._models[query.launch.kind, query.corunner is not None].missed(query)

    def _learn(
        self, kind: Kind, seconds: float, predicted: float | None, corunner: Corunner | None
    ) -> None:
        """Learn from two launches in a row that make tokens whether the device is slow, and from
        one in `CORRECT_EVERY` how far predictions are off."""
        bounds = self._bounds.get((kind, corunner is not None))
        if predicted is None or bounds is None:
            return
        missed = log(seconds / predicted)
        if kind != "prefill":
            slow = missed > max(SLOW_EXCESS, bounds.quantile) and seconds <= SLOW_SECONDS
            self.slowdown = (
                min(missed, MAX_SLOW_EXCESS) - LAUNCH_EXCESS if slow and self._slow else 0.0
            )
            self._slow = slow
            if not self._is_learning_turn():
                return
        bounds.learn(missed)


def _sums(load: Load, kind: Kind) -> tuple[object, ...]:
    """Return the sums of a load that the processes depend on."""
    if kind == "decode":
        return load.requests, _rounded(load.reused)
    return tuple(load.n), tuple(load.r)


def _rounded(tokens: int) -> int:
    """Return a number of tokens rounded to `CONTEXT_BITS` binary digits."""
    dropped = max(0, tokens.bit_length() - CONTEXT_BITS)
    return (tokens + (1 << dropped >> 1)) >> dropped << dropped
