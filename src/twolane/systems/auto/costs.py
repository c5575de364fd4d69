"""The prefill seconds of each waiting prompt: a cache of predictions, kept from plan to plan."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from twolane.estimate.query import Load, prefill_slice
from twolane.systems.view import RequestView, View

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
    seconds: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    """New tokens of each waiting request, by its id, and the seconds that they add."""

    def updated(self, view: View) -> "PrefillCosts":
        """Return the costs of those who wait now; those of known prompts are kept."""
        reference = self.reference
        if reference is None or not self.seconds:
            reference = _predicted(view, Load([REFERENCE_TOKENS], [0]))
        if reference is None:
            return self
        seconds = {}
        for request in view.waiting:
            known = self.seconds.get(request.id)
            if known is None or known[0] != request.new:
                known = request.new, _added(view, reference, request)
            seconds[request.id] = known
        return PrefillCosts(reference, seconds)

    def of(self, request: RequestView) -> float:
        """Return the seconds that a request's prompt adds; 0.0 if they are not known."""
        return self.seconds.get(request.id, (0, 0.0))[1]

    def tokens_in(self, seconds: float) -> float | None:
        """Return how many new tokens take that long, if known."""
        return seconds * REFERENCE_TOKENS / self.reference if self.reference else None


def _added(view: View, reference: float, request: RequestView) -> float:
    """Return the seconds that a prompt adds to the reference batch."""
    new, reused = request.new, request.reused
    if max(new, reused) <= REFERENCE_TOKENS:  # attention does not count
        return reference * new / REFERENCE_TOKENS
    both = _predicted(view, Load([REFERENCE_TOKENS, new], [0, reused]))
    return max(0.0, (both or reference) - reference)


def _predicted(view: View, load: Load) -> float | None:
    predicted = view.estimator.predict(prefill_slice(load, view.layers), view.units)
    return None if predicted is None else QUEUED_PREFILL_FACTOR * predicted
