"""The margin: the fraction of a TBT bound that is planned for, controlled by late gaps.

An estimator's bound leaves out what it cannot know, and some estimators promise no bound at all.
So the target shrinks while more gaps between tokens than allowed exceed the SLO, and grows back
while fewer do: a stochastic approximation of a quantile (Robbins and Monro 1951).
"""

import math
from dataclasses import dataclass, replace

from twolane.systems.view import GapsView

CHECK_SECONDS = 0.1
"""The controller looks at the latest gaps once in this many seconds."""
FORGET_SECONDS = 1.0
"""After this many seconds without any gap the margin is 1 again, for the load was another one."""
TARGET_LATE_FRACTION = 0.005
"""This fraction of the gaps may exceed the TBT SLO before the target shrinks. It is half of what a
P99 allows, because late gaps come in bursts and half a minute has few of those."""
MARGIN_GAIN = 1.0
"""Each late decode step shrinks the margin by this fraction for each second of the TBT bound: by
1 % under a bound of 10 ms. The margin thus moves as fast in time under all bounds."""
MIN_MARGIN = 0.6
"""The margin does not fall below this while the estimator promises no bound."""
MIN_PROMISED_MARGIN = 0.8
"""The margin does not fall below this if the estimator promises its bounds: gaps that are late
whatever is planned, because host or device stalled, must not take prefill's units away."""
UNPROMISED_FRACTION = 0.9
"""At margin 1, this fraction of the TBT SLO is planned for if the estimator promises no bound."""
UNHURRIED_FRACTION = 0.95
"""At most this fraction of the TBT SLO is planned for while no prompt is in a hurry."""


@dataclass(frozen=True, slots=True)
class Margin:
    """The state of the controller; `watch` returns the next one."""

    value: float = 1.0
    """The fraction of the TBT SLO that gaps so far suggest to plan for."""
    checked_at: float = -math.inf
    """Time of the controller's last look at the gaps, in seconds."""
    gaps_seen: int = 0
    """The number of gaps that there had been by then."""

    def watch(
        self, now: float, gaps: GapsView, *, bound: float, decoding: int, promises: bool
    ) -> "Margin":
        """Return the margin after a look at the gaps since the last one.

        The gaps of one decode step are late together and count as one gap, so that a stall does
        not move the margin more if more requests decode.

        Args:
            now: Current time in seconds.
            gaps: the gaps between tokens so far.
            bound: the tightest TBT SLO in seconds; `inf` if there is none.
            decoding: the number of requests that decode.
            promises: Whether the estimator promises its bounds.
        """
        if now < self.checked_at + CHECK_SECONDS:
            return self
        new = gaps.total - self.gaps_seen
        if not new:
            idle = now > self.checked_at + FORGET_SECONDS
            return replace(self, value=1.0, checked_at=now) if idle else self
        late = gaps.above(bound, new) if bound < math.inf else 0
        spare = TARGET_LATE_FRACTION * new - late if bound < math.inf else 0.0
        moved = MARGIN_GAIN * spare * min(bound, 1.0) / max(1, decoding)
        least = MIN_PROMISED_MARGIN if promises else MIN_MARGIN
        most = 1.0 if promises else 1.0 / UNPROMISED_FRACTION
        value = min(most, max(least, self.value * math.exp(moved)))
        return Margin(value, now, gaps.total)

    def fraction(self, *, hurried: bool, promises: bool) -> float:
        """Return the fraction of the TBT SLO to plan for.

        Args:
            hurried: Whether a waiting prompt has little time left.
            promises: Whether the estimator promises its bounds.
        """
        fraction = self.value if hurried else min(UNHURRIED_FRACTION, self.value)
        return fraction * (1.0 if promises else UNPROMISED_FRACTION)
