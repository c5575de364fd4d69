"""An estimator without a profile: it remembers what launches like this one took.

It knows nothing of the hardware. It is what a server that was never profiled has, and good
enough to size layer slices and to know when a lane will run dry.
"""

from collections.abc import Sequence

from twolane.estimate import Segment

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

    def predict(self, units: int, size: int) -> float | None:
        """From the nearest bucket, of these units if any was seen on them."""
        if not self._seconds:
            return None
        bucket = size.bit_length()
        key = min(self._seconds, key=lambda k: (abs(k[0] - units), abs(k[1] - bucket)))
        seen, seconds = self._seconds[key]
        return seconds * size / seen if self._linear else seconds


class OnlineEstimator:
    """Moving averages by kind of launch, units and size (tokens, or rows for decode)."""

    def __init__(self) -> None:
        self._prefill = _Averages(linear=True)
        self._hybrid = _Averages(linear=True)
        self._decode = _Averages(linear=False)

    def prefill_layer(self, segments: Sequence[Segment], units: int) -> float | None:
        """One layer of a prefill batch, in seconds."""
        return self._prefill.predict(units, sum(s.n for s in segments))

    def decode_step(self, segments: Sequence[Segment], units: int) -> float | None:
        """One decode step, in seconds."""
        return self._decode.predict(units, len(segments))

    def hybrid(self, segments: Sequence[Segment], units: int) -> float | None:
        """A hybrid forward pass, in seconds."""
        return self._hybrid.predict(units, sum(s.n for s in segments))

    def observe_prefill(
        self, segments: Sequence[Segment], layers: int, units: int, seconds: float
    ) -> None:
        """A slice of that many layers took so many seconds."""
        self._prefill.observe(units, sum(s.n for s in segments), seconds / layers)

    def observe_decode(self, segments: Sequence[Segment], units: int, seconds: float) -> None:
        """One decode step took so many seconds."""
        self._decode.observe(units, len(segments), seconds)

    def observe_hybrid(self, segments: Sequence[Segment], units: int, seconds: float) -> None:
        """A hybrid forward pass took so many seconds."""
        self._hybrid.observe(units, sum(s.n for s in segments), seconds)
