"""An estimator without a profile: it remembers what launches like this one took.

It knows nothing of the hardware and nothing of the other lane. It is what a server that was never
profiled has, and good enough to size layer slices and to know when a lane will run dry.
"""

from collections.abc import Sequence

from twolane.estimate.base import Beside, Estimator, Load

WEIGHT = 0.3
"""Of the newest observation in the moving average."""


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
        self._layers = _Averages(linear=True)
        self._passes = _Averages(linear=True)
        self._steps = _Averages(linear=False)

    def observe_prefill(
        self,
        load: Load,
        layers: int,
        units: int,
        seconds: float,
        beside: Beside | None = None,
        *,
        finishes: bool = False,
    ) -> None:
        """See `Estimator.observe_prefill`."""
        self._layers.observe(units, load.new, seconds / layers)

    def observe_decode(
        self, load: Load, units: int, seconds: float, beside: Beside | None = None
    ) -> None:
        """See `Estimator.observe_decode`."""
        self._steps.observe(units, load.requests, seconds)

    def observe_hybrid(self, load: Load, units: int, seconds: float) -> None:
        """See `Estimator.observe_hybrid`."""
        self._passes.observe(units, load.new, seconds)

    def _prefill(
        self,
        load: Load,
        layers: int,
        units: Sequence[int],
        beside: Beside | None,
        finishes: bool,
        bound: bool,
    ) -> Sequence[float] | None:
        seconds = self._layers.predict(units, load.new)
        return None if seconds is None else [layer * layers for layer in seconds]

    def _decode(
        self, load: Load, units: Sequence[int], beside: Beside | None, bound: bool
    ) -> Sequence[float] | None:
        return self._steps.predict(units, load.requests)

    def _hybrid(self, load: Load, units: Sequence[int], bound: bool) -> Sequence[float] | None:
        return self._passes.predict(units, load.new)
