"""A Gaussian process over what a base model misses, with leave-one-out residuals for its bound."""

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from twolane.estimate import Floats

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
    """Mean and leave-one-out residuals of log(measured / base) (Rasmussen and Williams, §5.4.2).

    Args:
        states: [S, features], of about one unit of length each.
        logs: [S].
    """

    def __init__(self, states: Floats, logs: Floats) -> None:
        keep = np.random.default_rng(0).permutation(len(logs))[:MOST]
        states, logs = states[keep], logs[keep]
        self._scales, noise = _chosen(states[:SEARCHED], logs[:SEARCHED])
        self._states = states / self._scales
        self._norms = np.square(self._states).sum(axis=1)
        self._mean = float(np.median(logs))
        inverse = _inverse(self._states, noise)
        self._weights = inverse @ (logs - self._mean)
        self.missed: Floats = self._weights / np.diag(inverse)
        """By how much log(measured) would have been above the prediction, without the sample."""

    def at(self, states: Floats) -> Floats:
        """The mean at each state [L, features]."""
        scaled = states / self._scales
        squares = np.square(scaled).sum(axis=1)[:, None] - 2.0 * scaled @ self._states.T
        squares += self._norms
        return np.asarray(self._mean + _kernel(squares) @ self._weights)


def _kernel(squares: Floats) -> Floats:
    """Matérn 3/2 of squared distances; the process varies by so much around its mean as 1 says."""
    distance = np.sqrt(3.0 * np.maximum(squares, 0.0))
    return np.asarray((1.0 + distance) * np.exp(-distance))


def _inverse(scaled: Floats, noise: float) -> Floats:
    """(K + σ²I)⁻¹"""
    norms = np.square(scaled).sum(axis=1)
    kernel = _kernel(norms[:, None] - 2.0 * scaled @ scaled.T + norms)
    kernel[np.diag_indices_from(kernel)] = 1.0 + noise
    return np.asarray(cho_solve(cho_factor(kernel), np.eye(len(kernel))))


def _chosen(states: Floats, logs: Floats) -> tuple[Floats, float]:
    """Length scales and noise with the smallest leave-one-out error, one after the other."""
    scales: Floats = 3.0 * np.maximum(states.std(axis=0), 1e-3)
    noise, best = NOISES[1], _missed(states, logs, scales, NOISES[1])
    for _ in range(SWEEPS):
        for i in range(len(scales)):
            for factor in SCALES:
                tried = scales.copy()
                tried[i] *= factor
                if (error := _missed(states, logs, tried, noise)) < best:
                    best, scales = error, tried
        errors = {each: _missed(states, logs, scales, each) for each in NOISES}
        noise = min(errors, key=errors.__getitem__)
        best = errors[noise]
    return scales, noise


def _missed(states: Floats, logs: Floats, scales: Floats, noise: float) -> float:
    """Root of the mean square of the leave-one-out residuals."""
    inverse = _inverse(states / scales, noise)
    missed = inverse @ (logs - np.median(logs)) / np.diag(inverse)
    return float(np.sqrt(np.square(missed).mean()))
