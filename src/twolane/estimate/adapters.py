"""Slowdown of launches by LoRA adapters, learnt while serving."""

import math
from collections.abc import Sequence

from twolane.estimate.base import Estimator
from twolane.estimate.query import Corunner, Kind, LaunchShape

WEIGHT = 0.1
"""Weight of the newest launch in the mean of each factor's logarithm."""
MAX_FACTOR = 8.0
"""Largest factor that is learnt; a launch with a larger one counts as if it had this one."""


class AdapterEstimator(Estimator):
    """Another estimator, times a factor for launches with adapters.

    A factor is the mean of observed over predicted seconds, geometric and moving, by kind of launch
    and by the power of two of its number of adapters: each adapter is read once for all its rows.
    Launches without adapters are the other estimator's alone, and what the others took without
    their factor teaches it, too. Bounds grow by the same factor, which no profile promises.

    Args:
        base: predicts launches without adapters.
    """

    def __init__(self, base: Estimator) -> None:
        self.base = base
        self.promises = base.promises
        self.running = 0
        """Number of adapters of a launch that names none, such as one that a system asks about."""
        self._logs: dict[tuple[Kind, int], float] = {}

    def observe(
        self, launch: LaunchShape, units: int, seconds: float, corunner: Corunner | None = None
    ) -> None:
        """See `Estimator.observe`."""
        if key := self._key(launch):
            expected = self.base.predict(launch, units, corunner)
            if expected:
                error = math.log(min(max(seconds / expected, 1 / MAX_FACTOR), MAX_FACTOR))
                before = self._logs.get(key, error)
                self._logs[key] = before + WEIGHT * (error - before)
            seconds /= self._factor(launch)
        self.base.observe(launch, units, seconds, corunner)
        self.slowdown = self.base.slowdown

    def observe_experts(self, rows: int, experts_read: float) -> None:
        """See `Estimator.observe_experts`."""
        self.base.observe_experts(rows, experts_read)

    def _seconds(
        self, launch: LaunchShape, units: Sequence[int], corunner: Corunner | None, bound: bool
    ) -> Sequence[float] | None:
        seconds = self.base._seconds(launch, units, corunner, bound)
        factor = self._factor(launch)
        if seconds is None or factor == 1.0:
            return seconds
        return [each * factor for each in seconds]

    def _key(self, launch: LaunchShape) -> tuple[Kind, int] | None:
        adapters = self.running if launch.adapters is None else launch.adapters
        return (launch.kind, adapters.bit_length()) if adapters else None

    def _factor(self, launch: LaunchShape) -> float:
        """Return the factor of the launch's kind and of the nearest number of adapters."""
        if not (key := self._key(launch)):
            return 1.0
        known = [other for kind, other in self._logs if kind == launch.kind]
        if not known:
            return 1.0
        nearest = min(known, key=lambda other: abs(other - key[1]))
        return math.exp(self._logs[launch.kind, nearest])
