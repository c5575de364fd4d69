"""The prefill seconds of each waiting prompt: a cache of predictions, kept from plan to plan."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from twolane.estimate.query import Floats, Load, prefill_slice
from twolane.systems.rows import WaitingTable
from twolane.systems.view import View

REFERENCE_TOKENS = 1024
"""A prompt costs what it adds to a batch of this many new tokens."""
QUEUED_PREFILL_FACTOR = 1.15
"""The predicted prefill time of a queued prompt is multiplied by this. A prompt takes many
launches, and the bound on a single one is loose for their sum."""


@dataclass(frozen=True, slots=True)
class PrefillCosts:
    """Predicted seconds on the whole device."""

    reference: float | None = None
    """The seconds of `REFERENCE_TOKENS` new tokens; None: not known yet."""
    table: WaitingTable | None = None
    """The waiting requests."""
    seconds: Floats = field(default_factory=lambda: np.zeros(0))
    """The seconds that each of them adds to a batch."""
    long: Mapping[tuple[str, int], float] = field(default_factory=dict)
    """The seconds of those whose attention counts, by id and number of new tokens."""

    def updated(self, view: View) -> "PrefillCosts":
        """Return the costs of those who wait now; those of known prompts are kept."""
        table, reference = view.prompts, self.reference
        if table is self.table and reference is not None:
            return self
        if reference is None or not self.table:
            reference = _predicted(view, Load([REFERENCE_TOKENS], [0]))
        if reference is None:
            return PrefillCosts(None, table, np.zeros(len(table)))
        seconds = reference * table.new / REFERENCE_TOKENS
        long = {}
        for i in np.flatnonzero(np.maximum(table.new, table.reused) > REFERENCE_TOKENS).tolist():
            new = int(table.new[i])
            key = table.requests[i].id, new
            if (known := self.long.get(key)) is None:
                known = _added(view, reference, new, int(table.reused[i]))
            seconds[i] = long[key] = known
        return PrefillCosts(reference, table, seconds, long)

    def tokens_in(self, seconds: float) -> float | None:
        """Return how many new tokens take that long, if known."""
        return seconds * REFERENCE_TOKENS / self.reference if self.reference else None


def _added(view: View, reference: float, new: int, reused: int) -> float:
    """Return the seconds that a prompt adds to the reference batch."""
    both = _predicted(view, Load([REFERENCE_TOKENS, new], [0, reused]))
    return max(0.0, (both or reference) - reference)


def _predicted(view: View, load: Load) -> float | None:
    predicted = view.estimator.predict(prefill_slice(load, view.layers), view.units)
    return None if predicted is None else QUEUED_PREFILL_FACTOR * predicted
