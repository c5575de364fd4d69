"""Skew of the choice of experts, from the numbers of experts that decode steps have read."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from twolane.model.spec import MoeSpec

SKEWS = tuple(step / 16 for step in range(33))
"""Exponents of Zipf's law that counts are compared with."""
SIZE_WEIGHT = 0.02
"""Weight of the newest step in the mean of its size."""
COMPARE_EVERY = 32
"""Number of steps between two comparisons."""


@dataclass(slots=True)
class _Size:
    """Means over steps of one size."""

    rows: float
    experts_read: float


class ExpertCounts:
    """The experts of a model, with the skew by their counts.

    A histogram: for each power of two of rows, means of the rows of steps and of the experts that
    they have read in a layer. The skew is the exponent of Zipf's law that comes closest to it.

    Args:
        moe: The model's experts, with the skew to begin with.
    """

    def __init__(self, moe: MoeSpec) -> None:
        self.moe = moe
        self._sizes: dict[int, _Size] = {}
        self._seen = 0

    def learn(self, seen: Sequence[tuple[int, float]]) -> None:
        """Learn from the steps of a profile, rows and experts read, if one skew explains them."""
        if not seen:
            return
        skew = min(SKEWS, key=lambda skew: self._error(skew, seen))
        # The counts of a profile teach nothing if the best skew is off by more than this, as the
        # root mean square of relative errors: its rows resembled one another.
        if self._error(skew, seen) <= 0.15**2 * len(seen):
            for rows, experts_read in seen:
                self._note(rows, experts_read)
            self.moe = replace(self.moe, skew=skew)

    def note(self, rows: int, experts_read: float) -> bool:
        """Note a step; return whether the skew has changed."""
        self._note(rows, experts_read)
        self._seen += 1
        if self._seen % COMPARE_EVERY:
            return False
        before, sizes = self.moe.skew, [(s.rows, s.experts_read) for s in self._sizes.values()]
        self.moe = replace(self.moe, skew=min(SKEWS, key=lambda skew: self._error(skew, sizes)))
        return self.moe.skew != before

    def _note(self, rows: int, experts_read: float) -> None:
        size = self._sizes.setdefault(rows.bit_length(), _Size(rows, experts_read))
        size.rows += SIZE_WEIGHT * (rows - size.rows)
        size.experts_read += SIZE_WEIGHT * (experts_read - size.experts_read)

    def _error(self, skew: float, seen: Sequence[tuple[float, float]]) -> float:
        """Sum of squared relative errors of the experts that steps are expected to read."""
        moe = replace(self.moe, skew=skew)
        return sum(
            (moe.active(rows) / max(experts_read, 1.0) - 1.0) ** 2 for rows, experts_read in seen
        )
