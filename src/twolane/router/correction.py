"""Learns online how much longer first tokens take than predicted.

Predictions know the prompts before a request and the device's pace. They know nothing of decode
steps between slices, of a busy host, or of what a system does first. Whoever refuses requests by
them needs the time that nearly all requests stay below.
"""

QUANTILE = 0.99
"""Share of the counted first tokens that come within the corrected prediction. About five requests
are late together and count once, so that about 95 % of all come within it."""
STEP = 0.2
"""Relative change of the factor, both ways together, per first token."""
EARLY_FRACTION, EARLY_WEIGHT = 0.5, 5
"""A first token that comes within this fraction of the corrected prediction counts as this many, so
that the factor comes back from a stall within seconds."""
RELEVANT = 0.25
"""First tokens in time are counted only where the prediction is at least this share of the bound:
the others tell of fixed costs, not of how fast a queue is served."""


class TtftCorrection:
    """The factor from predicted to actual times to the first token, as a high quantile.

    Requests that wait together are late together: one burst counts once, or a server that is only
    slowed would refuse nearly all, and learn from few that it need not. Requests that were
    predicted before the factor was last raised count neither way: they came by an old factor.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self._raised = 0.0
        """Time at which the factor was raised, in seconds on the clock of `note`."""

    def note(
        self, predicted: float, at: float, now: float, bound: float, *, overtaken: bool = False
    ) -> None:
        """Count a first token.

        Args:
            predicted: Predicted seconds, without the factor.
            at: Time of the prediction, in seconds.
            now: Time of the first token, in seconds.
            bound: Seconds within which it was wanted.
            overtaken: Whether requests that came later may have gone first. Then a first token that
                came later than predicted counts only if it was late.
        """
        corrected, seconds = self.factor * predicted, now - at
        if at < self._raised or (overtaken and corrected < seconds <= bound):
            return
        if seconds > max(corrected, RELEVANT * bound):
            self.factor *= (1 + STEP) ** QUANTILE
            self._raised = now
        elif seconds <= corrected and corrected > RELEVANT * bound:
            weight = EARLY_WEIGHT if seconds <= EARLY_FRACTION * corrected else 1
            self.factor /= (1 + STEP) ** (weight * (1 - QUANTILE))
