"""The ways to run a prefill batch while requests decode, each with its predictions.

Four ways: *hybrid*, one pass with a decode token each and a chunk of the prompts; *temporal*,
layer slices between decode steps, on the whole device; *spatial*, both at once, each on its
units; *staggered*, layers on the whole device until the next step has to begin, then that step
beside further layers. A choice promises a bound on the time between two tokens and a pace of
prefill.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from twolane.estimate.base import Estimator
from twolane.estimate.query import Corunner, Load, decode_step, hybrid_pass, prefill_slice
from twolane.systems.common.multiplex import Level

Mode = Literal["hybrid", "temporal", "spatial", "staggered"]

TRIED_SIZES: Sequence[int] = range(64, 2048 + 1, 64)
"""Sizes of passes that are tried where the device pads them to none: products compute whole tiles
(tile quantisation, Sarathi-Serve §4.3), so a row more may cost as much as 64."""
UNPROMISED_PASS_FRACTION = 0.95
"""A hybrid pass is taken to last at most this fraction of the sum of its parts where the estimator
promises no bound, since it may have seen no such pass."""
DECODE_WEIGHT = 0.1
"""Weight of the pace of decode beside that of prefill: it breaks ties, the SLO does the rest."""

STAGGERED_FRACTION = 0.9
"""A hybrid pass is preferred to a staggered way if its score is above this fraction of the other's:
prompts of a batch in layers end together, while passes end the first of them earlier."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to run the prefill batch and the decode steps."""

    mode: Mode
    level: Level
    """Units of both lanes, side by side; each has the whole device if they never are."""
    layers: int
    """Number of layers in a slice; a hybrid pass has all of them."""
    layer: float
    """Seconds that one layer takes."""
    tokens: int
    """Number of tokens in a hybrid pass; 0 for the other modes."""
    gap: float
    """Bound on the time between two tokens, in seconds."""
    pace: float
    """Pace of prefill as a fraction of its pace alone on the whole device."""
    score: float
    """The figure that is maximised: the pace of prefill, and a little of decode's."""
    beside: float = 0.0
    """Bound on the seconds of a step and the layers beside it; 0 unless the mode is staggered."""
    ahead: float = 0.0
    """Bound on the seconds of a layer ahead of a step; 0 unless the mode is staggered."""

    def is_like(self, other: "Candidate | None") -> bool:
        """Return whether both have the same mode and level."""
        return other is not None and (self.mode, self.level) == (other.mode, other.level)


@dataclass(frozen=True, slots=True)
class Candidates:
    """The candidates at one scheduling point.

    Args:
        estimator: predicts.
        layers: Number of layers of the model.
        units: Number of units of the device.
        levels: partitions with units for both lanes.
        decode: the step.
        step: bound on its seconds on the whole device.
        batch: the prompts.
        target: TBT that is planned for, in seconds.
        launch_cost: seconds that a launch of a pass takes the host: passes that follow one another
            are no faster.
        pass_sizes: tokens that the device pads passes to; empty: to none.
        stagger: Whether steps may wait for layers on the whole device. A batch in layers ends all
            of its prompts at once, so this helps no deadline; it shortens a backlog.
    """

    estimator: Estimator
    layers: int
    units: int
    levels: Sequence[Level]
    decode: Load
    step: float
    batch: Load
    target: float
    launch_cost: float = 0.0
    pass_sizes: Sequence[int] = ()
    stagger: bool = False

    def all(self, *, sliced: bool, chunk: int = 0) -> list[Candidate]:
        """Return every candidate; none while nothing is known.

        Args:
            sliced: the batch has begun in layer slices, which rules hybrid passes out.
            chunk: tokens at which the search for the largest pass begins.
        """
        alone = self.estimator.predict(prefill_slice(self.batch, self.layers), self.units)
        if not alone:
            return []
        spatial = self._spatial(alone)
        candidates = [*spatial, self._temporal(alone)]
        hybrid = [] if sliced else [self._hybrid(alone, chunk)]
        if self.stagger:
            scores = [way.score for way in hybrid if way.gap <= self.target]
            least = max(scores, default=0.0) / STAGGERED_FRACTION
            candidates += [way for way in self._staggered(alone, spatial) if way.score > least]
        return candidates + hybrid

    def _spatial(self, alone: float) -> list[Candidate]:
        """Return a candidate for each level, with slices that last about a step.

        Prompts that are done before the step is leave their units idle until it ends, and decode on
        few: their pace is that of the step.
        """
        if not self.levels:
            return []
        p, d = np.array(self.levels).T
        predict, step = self.estimator.predict, decode_step(self.decode)
        gaps = predict(step, d, Corunner(self.batch, p), bound=True)
        whole = predict(prefill_slice(self.batch, self.layers), p, Corunner(self.decode, d))
        if gaps is None or whole is None:
            return []
        candidates = []
        for level, gap, seconds in zip(self.levels, gaps.tolist(), whole.tolist(), strict=True):
            layer, pace = seconds / self.layers, alone / max(seconds, gap)
            layers, score = max(1, round(gap / layer)), self._score(pace, gap)
            candidates.append(Candidate("spatial", level, layers, layer, 0, gap, pace, score))
        return candidates

    def _staggered(self, alone: float, spatial: Sequence[Candidate]) -> list[Candidate]:
        """Return a candidate for each level that leaves time for a layer before the next step.

        Only whole layers run, so the whole device waits for the longer of a step and the layers
        beside it. The fewer layers a bound has room for, the more of it that wastes.
        """
        ahead, candidates = self._layer_alone(alone), []
        for way in spatial:
            beside = max(way.gap, way.layers * way.layer)
            layers = min(self.layers, int((self.target - beside) / ahead))
            if layers < 1:
                continue
            part = alone / self.layers
            pace = min(alone, (layers + way.layers) * part) / (layers * part + beside)
            gap = layers * ahead + beside
            score = self._score(pace, gap)
            taken = way.level, way.layers, way.layer, 0, gap, pace, score
            candidates.append(Candidate("staggered", *taken, beside, ahead))
        return candidates

    def _temporal(self, alone: float) -> Candidate:
        """Return the candidate with the most layers between two steps within the bound, or one."""
        layer = self._layer_alone(alone)
        layers = min(self.layers, max(1, int((self.target - self.step) / layer)))
        gap = self.step + layers * layer
        done = alone * layers / self.layers
        pace = done / (done + self.step)
        both = (self.units, self.units)
        return Candidate("temporal", both, layers, layer, 0, gap, pace, self._score(pace, gap))

    def _layer_alone(self, alone: float) -> float:
        """Return a bound on the seconds of a layer on the whole device."""
        batch = prefill_slice(self.batch, self.layers)
        return (self.estimator.predict(batch, self.units, bound=True) or alone) / self.layers

    def _hybrid(self, alone: float, chunk: int) -> Candidate:
        """Return the largest pass within the bound, or the smallest if none is.

        A few tokens more than the graphs hold would be a launch many times as long.
        """
        most, rows = self.batch.new, self.decode.requests
        sizes = [size - rows for size in passes(self.pass_sizes) if rows < size < rows + most]
        if rows + most <= (self.pass_sizes or TRIED_SIZES)[-1] or not sizes:
            sizes.append(most)
        gaps: dict[int, float] = {}

        def fits(i: int) -> bool:
            gaps[i] = self._pass_seconds(sizes[i], alone, bound=True)
            return gaps[i] <= self.target

        i = largest(fits, len(sizes), start=sum(size < chunk for size in sizes))
        seconds = self._pass_seconds(sizes[i], alone, bound=False)
        pace = alone * sizes[i] / most / seconds
        both = (self.units, self.units)
        score = self._score(pace, gaps[i])
        return Candidate(
            "hybrid", both, self.layers, seconds / self.layers, sizes[i], gaps[i], pace, score
        )

    def _score(self, pace: float, gap: float) -> float:
        return pace + DECODE_WEIGHT * self.step / gap

    def _pass_seconds(self, tokens: int, alone: float, *, bound: bool) -> float:
        chunks = cut(self.batch, tokens)
        load = Load.hybrid(self.decode, chunks)
        seconds = self.estimator.predict(hybrid_pass(load), self.units, bound=bound)
        if seconds is None or not self.estimator.promises:
            parts = UNPROMISED_PASS_FRACTION * (self.step + alone * tokens / self.batch.new)
            seconds = parts if seconds is None else min(seconds, parts)
        return max(seconds, self.launch_cost)


def passes(padded: Sequence[int]) -> Sequence[int]:
    """Return the numbers of rows that a hybrid pass may have, the decode rows included."""
    padded = padded or TRIED_SIZES
    return (16, 32, *padded, *range(padded[-1] + 512, 8192 + 1, 512))


def largest(fits: Callable[[int], bool], count: int, start: int) -> int:
    """Return the largest index below `count` that fits, if all below one that fits do; else 0.

    Looks at `start` first, then farther and farther away, then halves what is left.
    """
    low, high, i, stride = -1, count, min(start, count - 1), 1
    while high - low > 1:
        if fits(i):
            low = i
        else:
            high = i
        if high == count:
            i = min(low + stride, count - 1)
        else:
            i = max(high - stride, 0) if low < 0 else (low + high) // 2
        stride *= 2
    return max(low, 0)


def cut(batch: Load, tokens: int) -> Load:
    """Return the first `tokens` new tokens of a batch."""
    n: list[int] = []
    for each in batch.n:
        n.append(min(each, tokens - sum(n)))
        if sum(n) == tokens:
            break
    return Load(n, batch.r[: len(n)])


def choose(
    ways: Sequence[Candidate], target: float, last: Candidate | None, hysteresis: float
) -> Candidate:
    """Return the candidate with the best score within the bound; if there is none, the shortest
    gap.

    What is done now stays until another is better by more than `hysteresis`, a share.
    """
    within = [way for way in ways if way.gap <= target]
    if not within:
        return min(ways, key=lambda way: way.gap)
    best = max(within, key=lambda way: way.score)
    same = next((way for way in within if way.is_like(last)), None)
    return same if same and same.score * (1 + hysteresis) >= best.score else best
