"""Arrival times of workloads without a trace."""

import math

import numpy as np


def arrivals(count: int, rate: float, *, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Return arrival times of `count` requests at `rate` per second: ascending seconds from the
    start.

    The gaps are drawn from a gamma distribution of shape `burstiness` and mean 1 / rate, as
    `vllm bench serve` does: 1 is a Poisson process, less is burstier, more is smoother, infinity
    is a fixed interval. As there, times are then stretched so that the last one is count / rate:
    the rate is met exactly, and the same seed at another rate is the same pattern, faster or
    slower. An infinite rate sends everything at 0.

    Raises:
        ValueError: `rate` or `burstiness` is not positive.
    """
    if not rate > 0:
        raise ValueError(f"the request rate must be positive, not {rate}")
    if not burstiness > 0:
        raise ValueError(f"the burstiness must be positive, not {burstiness}")
    if math.isinf(rate):
        return [0.0] * count
    if math.isinf(burstiness):
        return [(index + 1) / rate for index in range(count)]
    rng = np.random.default_rng([seed, _ARRIVALS])
    times = np.cumsum(rng.gamma(shape=burstiness, size=count))
    if not count or not times[-1] > 0:
        return [0.0] * count
    return [float(time) for time in times * (count / rate / times[-1])]


_ARRIVALS = 0x41525256
"""Seed offset that separates the draws of arrivals from those of lengths and tokens."""
