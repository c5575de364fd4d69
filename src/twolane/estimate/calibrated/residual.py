"""A Gaussian process over what a base model misses."""

from collections.abc import Sequence

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import minimize

from twolane.estimate.query import Floats

MAX_SAMPLES = 400
"""Samples that are kept; more would make predictions slow, and add little."""
EXPECTED_NOISE = 0.01
"""Median of both noises before there are samples: to measure again changes a percent or less."""
MAX_DEVIATIONS = 3.0
"""Deviations from what was expected that are searched: beyond them no covariance has an inverse."""


class Residual:
    """Mean of log(measured / base) over a space of states.

    log(measured / base) = mean + smooth(state) + own(configuration) + noise, all but the mean
    normal: samples of one configuration, on several numbers of units or of both slices of a pass,
    miss alike. Variances and length scales are those with the highest likelihood of the samples
    (Rasmussen and Williams, §5.4.1), times weak priors.

    Args:
        states: [S, features].
        logs: [S].
        groups: [S], which configuration each is of.
        like: has chosen the parameters; None: choose.
    """

    def __init__(
        self, states: Floats, logs: Floats, groups: Sequence[str], like: "Residual | None" = None
    ) -> None:
        order = _shuffled(groups)
        states, logs = states[order], logs[order]
        same = _same([groups[i] for i in order])
        self.mean = float(np.median(logs))
        if like is None:
            # Samples that the parameters are chosen on.
            few = slice(200)
            spread = np.maximum(states[few].std(axis=0), 1e-3)
            unit = _likeliest(states[few] / spread, logs[few] - self.mean, same[few, few])
            self.scales, self._variances = spread * unit[0], unit[1]
        else:
            self.scales, self._variances = like.scales, like._variances
        self.scaled = states / self.scales
        smooth, own, noise = self._variances
        covariance = smooth * _matern(3.0 * _squares(self.scaled).sum(axis=2)) + own * same
        covariance[np.diag_indices_from(covariance)] += noise
        self.weights: Floats = smooth * cho_solve(cho_factor(covariance), logs - self.mean)


class Means:
    """The sum of some processes' means, in few operations on small arrays.

    With z = (x, x², 1) the squared distances of x to all samples of all processes are one product.

    Args:
        parts: the processes, each with the place of its first feature in the state.
    """

    def __init__(self, *parts: tuple[int, Residual]) -> None:
        features = self._features = max(first + len(part.scales) for first, part in parts)
        self._lifted = np.hstack([_lifted(part, first, features) for first, part in parts])
        self._weights = np.concatenate([part.weights for _, part in parts])
        self._mean = sum(part.mean for _, part in parts)

    def at(self, states: Sequence[Sequence[float]]) -> Floats:
        """Return the sum at each state [L, features]; features that no process has are left out."""
        states = [state[: self._features] for state in states]
        lifted = np.array([[*state, *[x * x for x in state], 1.0] for state in states])
        return np.asarray(_matern(np.dot(lifted, self._lifted)).dot(self._weights) + self._mean)


def _lifted(part: Residual, first: int, features: int) -> Floats:
    """Return the matrix that takes z to three times the squared distances: [2 features + 1, S]."""
    own = slice(first, first + len(part.scales))
    lifted = np.zeros((2 * features + 1, len(part.weights)))
    lifted[:features][own] = -2.0 * (part.scaled / part.scales).T
    lifted[features:-1][own] = 1.0 / np.square(part.scales)[:, None]
    lifted[-1] = np.square(part.scaled).sum(axis=1)
    return 3.0 * lifted


def _matern(squares: Floats) -> Floats:
    """Matérn 3/2 of three times the squared distances, which are overwritten."""
    distance = np.sqrt(np.maximum(squares, 0.0, out=squares), out=squares)
    decay = np.exp(-distance)
    distance += 1.0
    distance *= decay
    return distance


def _squares(states: Floats) -> Floats:
    """Squared differences of each feature: [S, S, features]."""
    return np.square(states[:, None, :] - states)


def _same(groups: Sequence[str]) -> Floats:
    """1 where two samples are of one configuration: [S, S]."""
    number = {name: i for i, name in enumerate(dict.fromkeys(groups))}
    numbers = np.array([number[name] for name in groups])
    return np.asarray(numbers[:, None] == numbers, dtype=float)


def _shuffled(groups: Sequence[str]) -> list[int]:
    """Places of at most `MAX_SAMPLES` samples, whole configurations in random order."""
    names = sorted(set(groups))
    rank = dict(zip(names, np.random.default_rng(0).permutation(len(names)), strict=True))
    return sorted(range(len(groups)), key=lambda i: int(rank[groups[i]]))[:MAX_SAMPLES]


def _likeliest(states: Floats, logs: Floats, same: Floats) -> tuple[Floats, Floats]:
    """Length scales [features] and the variances of smooth, own and noise [3].

    Args:
        states: [S, features], each of standard deviation 1.
        logs: [S], around zero.
        same: [S, S].
    """
    squares, features = _squares(states), states.shape[1]
    centre = np.log(
        [
            *[features**0.5] * features,
            max(logs.std(), EXPECTED_NOISE),
            EXPECTED_NOISE,
            EXPECTED_NOISE,
        ]
    )
    # Standard deviation of the length scales' logarithms, before there are samples.
    width = np.array([*[0.7] * features, 1.0, 1.0, 1.0])
    eye = np.eye(len(logs))

    def loss(logarithms: Floats) -> tuple[float, Floats]:
        """-log(likelihood · prior), and its gradient."""
        inverse_squares = np.exp(-2.0 * logarithms[:features])
        # Added to variances, so that covariances have an inverse.
        smooth, own, noise = np.exp(2.0 * logarithms[features:]) + 1e-8
        distance = np.sqrt(3.0 * (squares @ inverse_squares))
        decay = np.exp(-distance)
        shape = (1.0 + distance) * decay
        factor = cho_factor(smooth * shape + own * same + noise * eye, lower=True)
        inverse = cho_solve(factor, eye)
        weights = inverse @ logs
        far = (logarithms - centre) / width
        value = 0.5 * logs @ weights + np.log(np.diag(factor[0])).sum() + 0.5 * far @ far
        slope = inverse - np.outer(weights, weights)  # twice that of the value by the covariance
        by_scales = 1.5 * smooth * np.tensordot(slope * decay, squares, 2) * inverse_squares
        by_variances = [(slope * each).sum() for each in (smooth * shape, own * same)]
        gradient = np.array([*by_scales, *by_variances, noise * np.trace(slope)])
        return float(value), gradient + far / width

    bounds = list(
        zip(centre - MAX_DEVIATIONS * width, centre + MAX_DEVIATIONS * width, strict=True)
    )
    # Steps of the search for the length scales.
    options = {"maxiter": 30}
    found = minimize(loss, centre, jac=True, method="L-BFGS-B", bounds=bounds, options=options).x
    return np.exp(found[:features]), np.exp(2.0 * found[features:])
