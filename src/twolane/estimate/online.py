"""An estimator without a profile: it remembers what launches like this one took.

It knows nothing of the hardware and nothing of the other lane. It is what a server that was never
profiled has, and good enough to size layer slices and to know when a lane will run dry.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from twolane.estimate.base import Estimator
from twolane.estimate.query import Corunner, LaunchShape

WEIGHT = 0.3
"""Weight of the newest observation in the moving average."""


class _Average(NamedTuple):
    """Launches of about one size, averaged."""

    size: float
    seconds: float
    last: int
    """Number of observations of all sizes until the last one of this size."""


class _Averages:
    """Moving averages of seconds over (units, power-of-two bucket of size)."""

    def __init__(self, *, linear: bool) -> None:
        self._seen: dict[tuple[int, int], _Average] = {}
        self._count = 0
        self._linear = linear  # seconds grow with size; otherwise they are taken as constant

    def observe(self, units: int, size: int, seconds: float) -> None:
        key = (units, size.bit_length())
        old = self._seen.get(key, _Average(float(size), seconds, 0))
        self._count += 1
        self._seen[key] = _Average(
            old.size + WEIGHT * (size - old.size),
            old.seconds + WEIGHT * (seconds - old.seconds),
            self._count,
        )

    def predict(self, units: Sequence[int], size: int) -> list[float] | None:
        """Predict from the nearest bucket, of these units if any was seen on them.

        On fewer units than were seen it is taken to last in proportion longer, which is so for
        prefill and too much for decode; on more, just as long.
        """
        if not self._seen:
            return None
        return [self._nearest(each, size) for each in units]

    def _nearest(self, units: int, size: int) -> float:
        bucket = size.bit_length()
        key = min(self._seen, key=lambda k: (abs(k[0] - units), abs(k[1] - bucket)))
        near, slower = self._seen[key], max(1.0, key[0] / units)
        if not self._linear:
            return near.seconds * slower
        return slower * min(near.seconds * size / near.size, self._at_most(key, near.last, size))

    def _at_most(self, key: tuple[int, int], last: int, size: int) -> float:
        """Bound a size by smaller ones that were seen since, in proportion.

        Otherwise a size whose first launches were slow would never be tried again.
        """
        units, bucket = key
        newer = (
            average.seconds * size / average.size
            for (there, smaller), average in self._seen.items()
            if there == units and smaller < bucket and average.last > last
        )
        return min(newer, default=math.inf)


class OnlineEstimator(Estimator):
    """Moving averages by kind of launch, units and new tokens, which are the rows of a decode step.

    Promises no bound.
    """

    def __init__(self) -> None:
        self._averages = {
            "prefill": _Averages(linear=True),
            "decode": _Averages(linear=False),
            "hybrid": _Averages(linear=True),
        }

    def observe(
        self, launch: LaunchShape, units: int, seconds: float, corunner: Corunner | None = None
    ) -> None:
        """See `Estimator.observe`."""
        self._averages[launch.kind].observe(units, launch.load.new, seconds / _parts(launch))

    def _seconds(
        self, launch: LaunchShape, units: Sequence[int], corunner: Corunner | None, bound: bool
    ) -> Sequence[float] | None:
        seconds = self._averages[launch.kind].predict(units, launch.load.new)
        return None if seconds is None else [each * _parts(launch) for each in seconds]


def _parts(launch: LaunchShape) -> int:
    """Return the layers of a slice, since its averages are of one layer; 1 for other launches."""
    return launch.layers if launch.kind == "prefill" else 1
