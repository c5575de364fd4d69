"""By how much tokens are delivered late, as the API process measures it and the pacer hears it."""

from bisect import bisect_left
from collections.abc import Sequence

WINDOW_SECONDS = 1.0
"""The spread is reported once in this many seconds."""
LEAST_DELIVERIES = 100
"""A window with fewer deliveries than this reports nothing: its P99 would be its maximum."""
MOST_KEPT = 4096
"""Deliveries of a window above which only a part of them is sorted."""
LATE_BUCKETS = (
    *(0.0001, 0.0002, 0.0003, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075),
    *(0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0),
)
"""Upper bounds of the buckets of late deliveries, in seconds."""


class Lateness:
    """Counts by how many seconds deliveries were late, and finds their spread in each window."""

    def __init__(self) -> None:
        self.counts = [0] * (len(LATE_BUCKETS) + 1)
        """Deliveries in each of `LATE_BUCKETS`, and beyond the last."""
        self.total = 0.0
        """Sum over all deliveries in seconds."""
        self._window: list[float] = []
        self._every = 1
        """One delivery in this many of the window is kept."""
        self._since = 0
        """Number of deliveries of the window so far."""
        self._ends = 0.0

    def add(self, due: float, at: float) -> float | None:
        """Count a delivery; return the spread of the window that it ends.

        Args:
            due: Time at which a token was due, in seconds.
            at: Time at which it was delivered.

        Returns:
            Seconds (see `spread`); None while the window lasts, or if it had few deliveries.
        """
        late = at - due if at > due else 0.0
        self.counts[bisect_left(LATE_BUCKETS, late)] += 1
        self.total += late
        if at < self._ends:
            self._since += 1
            if self._since % self._every == 0:
                self._window.append(late)
            return None
        self._every, self._since = 1 + self._since // MOST_KEPT, 0
        ended, self._window, self._ends = self._window, [late], at + WINDOW_SECONDS
        return spread(ended) if len(ended) >= LEAST_DELIVERIES else None


def spread(late: Sequence[float]) -> float:
    """Return the P99 of these delays minus their median, in seconds.

    A delay that all tokens share lengthens no gap between two of them.
    """
    ordered = sorted(late)
    return ordered[int(0.99 * (len(ordered) - 1))] - ordered[len(ordered) // 2]
