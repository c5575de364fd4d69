"""Random numbers and lengths whose mean is stable in short draws, too."""

import functools
import math

import msgspec
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
STRATA = 1024
"""Number of equal parts of [0, 1), each of which gets one of as many consecutive draws."""


def spread(rng: np.random.Generator, count: int, columns: int) -> Floats:
    """Return [columns, count] numbers in [0, 1), uniform and in random order, but evenly spread.

    Every 1,024 in a row are one of each 1,024th part of the interval (stratified sampling), so that
    the mean of a heavy-tailed length does not depend on how many long ones were met by chance. The
    first n of a longer draw are the draw of n.
    """
    blocks = [
        [(rng.permutation(STRATA) + rng.random(STRATA)) / STRATA for _ in range(columns)]
        for _ in range(-(-count // STRATA))
    ]
    if not blocks:
        return np.empty((columns, 0))
    return np.concatenate([np.stack(block) for block in blocks], axis=1)[:, :count]


class Lengths(msgspec.Struct, frozen=True):
    """Distribution of lengths in tokens: a lognormal truncated at minimum and maximum.

    Minimum, mean and maximum are what papers publish; `sigma`, the standard deviation of the
    logarithm, is what they do not.
    """

    minimum: int
    mean: float
    maximum: int
    sigma: float

    def at(self, shares: Floats) -> npt.NDArray[np.int64]:
        """Return the quantiles at these probabilities in whole tokens; their mean over all
        probabilities is `mean`."""
        lengths = _quantiles(shares, self.minimum, self.maximum, _location(self), self.sigma)
        return np.rint(lengths).astype(np.int64)


def _quantiles(shares: Floats, low: float, high: float, location: float, sigma: float) -> Floats:
    from scipy import special

    first, last = (special.ndtr((math.log(end) - location) / sigma) for end in (low, high))
    lengths: Floats = np.exp(location + sigma * special.ndtri(first + shares * (last - first)))
    return np.clip(lengths, low, high)


@functools.cache
def _location(lengths: Lengths) -> float:
    """Return the mean of the logarithm before truncation that gives `lengths.mean` after it."""
    low, high, sigma = lengths.minimum, lengths.maximum, lengths.sigma
    shares = (np.arange(16 * STRATA) + 0.5) / (16 * STRATA)

    def excess(location: float) -> float:
        return float(_quantiles(shares, low, high, location, sigma).mean()) - lengths.mean

    from scipy import optimize

    root: float = optimize.brentq(excess, math.log(low) - 2 * sigma, math.log(high) + 2 * sigma)
    return root
