"""A Gaussian process over what a base model misses, and by how much it misses itself."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.linalg import cho_factor, cho_solve

from twolane.estimate import Floats, Ints

MOST = 700
"""Samples that are kept; more would make predictions slow, and add little."""
SEARCHED = 250
"""Samples that the length scales are chosen on."""
SCALES = (0.5, 0.7, 1.4, 2.0)
"""Factors that a length scale is tried at."""
NOISES = (1e-3, 3e-3, 1e-2, 3e-2)
"""Of the variance; measuring again gives the same within a percent."""
SWEEPS = 3


class Residual:
    """Mean of log(measured / base), and by how much it misses what it was not fitted on.

    Samples of one configuration (on several numbers of units, of both slices of a pass) miss alike:
    one of them foretells the others. So whole configurations are left out, by the formula for one
    sample (Rasmussen and Williams, §5.4.2) with a block of the inverse in place of an element.

    Args:
        states: [S, features], of about one unit of length each.
        logs: [S].
        groups: [S], which configuration each is of.
    """

    def __init__(self, states: Floats, logs: Floats, groups: Sequence[str]) -> None:
        order = self.order = _shuffled(groups)
        """Places of the samples that are kept."""
        states, logs, names = states[order], logs[order], np.array(groups)[order]
        few = slice(SEARCHED)
        self.scales, noise = _chosen(states[few], logs[few], _members(names[few]))
        self.scaled = states / self.scales
        self.mean = float(np.median(logs))
        inverse = _inverse(self.scaled, noise)
        self.weights: Floats = inverse @ (logs - self.mean)
        self.missed = _left_out(inverse, self.weights, _members(names))
        """By how much log(measured) would have been above the prediction, without its
        configuration."""


class Means:
    """The sum of some processes' means, in few operations on small arrays.

    With z = (x, x², 1) the squared distances of x to all samples of all processes are one product.

    Args:
        parts: each over the first of the state's features, the last one over all of them.
    """

    def __init__(self, *parts: Residual) -> None:
        most = len(parts[-1].scales)
        self._lifted = np.hstack([_lifted(part, most) for part in parts])
        self._weights = np.concatenate([part.weights for part in parts])
        self._mean = sum(part.mean for part in parts)

    def at(self, states: Sequence[Sequence[float]]) -> Floats:
        """The sum at each state [L, features]."""
        lifted = np.array([[*state, *[x * x for x in state], 1.0] for state in states])
        return np.asarray(_matern(np.dot(lifted, self._lifted)).dot(self._weights) + self._mean)


def _lifted(part: Residual, most: int) -> Floats:
    """What takes z to three times the squared distances: [2 most + 1, S]."""
    own = len(part.scales)
    lifted = np.zeros((2 * most + 1, len(part.weights)))
    lifted[:own] = -2.0 * (part.scaled / part.scales).T
    lifted[most : most + own] = 1.0 / np.square(part.scales)[:, None]
    lifted[-1] = np.square(part.scaled).sum(axis=1)
    return 3.0 * lifted


def _kernel(squares: Floats) -> Floats:
    """Matérn 3/2 of squared distances; the process varies by so much around its mean as 1 says."""
    return _matern(3.0 * squares)


def _matern(squares: Floats) -> Floats:
    """Of three times the squared distances, which are overwritten."""
    distance = np.sqrt(np.maximum(squares, 0.0, out=squares), out=squares)
    decay = np.exp(-distance)
    distance += 1.0
    distance *= decay
    return distance


def _inverse(scaled: Floats, noise: float) -> Floats:
    """(K + σ²I)⁻¹"""
    norms = np.square(scaled).sum(axis=1)
    kernel = _kernel(norms[:, None] - 2.0 * scaled @ scaled.T + norms)
    kernel[np.diag_indices_from(kernel)] = 1.0 + noise
    return np.asarray(cho_solve(cho_factor(kernel), np.eye(len(kernel))))


def _shuffled(groups: Sequence[str]) -> list[int]:
    """Places of at most `MOST` samples, whole configurations in random order."""
    names = sorted(set(groups))
    rank = dict(zip(names, np.random.default_rng(0).permutation(len(names)), strict=True))
    return sorted(range(len(groups)), key=lambda i: int(rank[groups[i]]))[:MOST]


def _members(names: npt.NDArray[np.str_]) -> list[Ints]:
    """Places of each configuration's samples, [configurations, samples] for each number of them."""
    by_size: dict[int, list[Ints]] = {}
    for name in np.unique(names):
        places = np.flatnonzero(names == name)
        by_size.setdefault(len(places), []).append(places)
    return [np.array(places) for places in by_size.values()]


def _left_out(inverse: Floats, weights: Floats, members: Sequence[Ints]) -> Floats:
    """Residuals of each configuration without it."""
    missed = np.empty(len(weights))
    for each in members:
        blocks = inverse[each[:, :, None], each[:, None, :]]
        missed[each] = np.linalg.solve(blocks, weights[each][:, :, None])[:, :, 0]
    return missed


def _chosen(states: Floats, logs: Floats, members: Sequence[Ints]) -> tuple[Floats, float]:
    """Length scales and noise with the smallest error on what is left out, one after the other."""
    scales: Floats = 3.0 * np.maximum(states.std(axis=0), 1e-3)
    noise, best = NOISES[1], _missed(states, logs, members, scales, NOISES[1])
    for _ in range(SWEEPS):
        for i in range(len(scales)):
            for factor in SCALES:
                tried = scales.copy()
                tried[i] *= factor
                if (error := _missed(states, logs, members, tried, noise)) < best:
                    best, scales = error, tried
        errors = {each: _missed(states, logs, members, scales, each) for each in NOISES}
        noise = min(errors, key=errors.__getitem__)
        best = errors[noise]
    return scales, noise


def _missed(
    states: Floats, logs: Floats, members: Sequence[Ints], scales: Floats, noise: float
) -> float:
    """Root of the mean square of the residuals of what is left out."""
    inverse = _inverse(states / scales, noise)
    missed = _left_out(inverse, inverse @ (logs - np.median(logs)), members)
    return float(np.sqrt(np.square(missed).mean()))
