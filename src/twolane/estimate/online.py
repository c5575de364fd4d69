"""An estimator without a profile: it remembers what launches like this one took.

It knows nothing of the hardware and nothing of the other lane. It is what a server that was never
profiled has, and good enough to size layer slices and to know when a lane will run dry.
"""

from collections.abc import Sequence

from twolane.estimate.base import Estimator
from twolane.estimate.query import Corunner, LaunchShape

WEIGHT = 0.3
"""Weight of the newest observation in the moving average."""


class _Averages:
    """Moving averages of seconds over (units, power-of-two bucket of size)."""

    def __init__(self, *, linear: bool) -> None:
        self._seconds: dict[tuple[int, int], tuple[float, float]] = {}
        self._linear = linear  # seconds grow with size; otherwise they are taken as constant

    def observe(self, units: int, size: int, seconds: float) -> None:
        key = (units, size.bit_length())
        old_size, old = self._seconds.get(key, (float(size), seconds))
        self._seconds[key] = (
            old_size + WEIGHT * (size - old_size),
            old + WEIGHT * (seconds - old),
        )

    def predict(self, units: Sequence[int], size: int) -> list[float] | None:
        """From the nearest bucket, of these units if any was seen on them.

        On fewer units than were seen it is taken to last in proportion longer, which is so for
        prefill and too much for decode; on more, just as long.
        """
        if not self._seconds:
            return None
        return [self._nearest(each, size) for each in units]

    def _nearest(self, units: int, size: int) -> float:
        bucket = size.bit_length()
        key = min(self._seconds, key=lambda k: (abs(k[0] - units), abs(k[1] - bucket)))
        seen, seconds = self._seconds[key]
        seconds *= max(1.0, key[0] / units)
        return seconds * size / seen if self._linear else seconds


class OnlineEstimator(Estimator):
    """Moving averages by kind of launch, units and size (tokens, or rows for decode).

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
        self._averages[launch.kind].observe(units, _size(launch), seconds / _parts(launch))

    def _seconds(
        self, launch: LaunchShape, units: Sequence[int], corunner: Corunner | None, bound: bool
    ) -> Sequence[float] | None:
        seconds = self._averages[launch.kind].predict(units, _size(launch))
        return None if seconds is None else [each * _parts(launch) for each in seconds]


def _size(launch: LaunchShape) -> int:
    """Rows of a decode step, tokens of all else."""
    return launch.load.requests if launch.kind == "decode" else launch.load.new


def _parts(launch: LaunchShape) -> int:
    """The averages of slices are of one layer."""
    return launch.layers if launch.kind == "prefill" else 1
