"""Liveness of an engine, judged by its answers to pings."""

import math
import time
from collections.abc import Callable, Sequence

from twolane.engine.messages import LaneWait

PING_SECONDS = 1.0
"""Seconds between two pings."""
HANG_SECONDS = 10.0
"""Default seconds without a turn of the loop or a finished launch after which an engine counts as
hung."""


class Liveness:
    """The liveness of one engine.

    Args:
        bound: seconds without any sign after which the engine counts as hung.
        clock: seconds, monotonic.
    """

    def __init__(
        self, bound: float = HANG_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bound = bound
        self._clock = clock
        self._asked_at = clock()
        self._awake_since = -math.inf
        """Time at which this process last resumed after standing still."""
        self._unanswered_since: float | None = None
        """Time of the first unanswered ping; None: the engine has answered."""
        self._waits: Sequence[LaneWait] = ()
        self.silences: Sequence[float] = ()
        """Seconds since ranks 1 and up last reported, at the engine's latest answer."""

    def asked(self) -> None:
        """Record that a ping is sent; called every `PING_SECONDS`.

        If this process stood still meanwhile, the engine's answers may be unread, and the engine
        may have stood still, too (Ctrl-Z, a paused container): all counts from now on.
        """
        now = self._clock()
        if now - self._asked_at > 2 * PING_SECONDS:
            self._awake_since = self._unanswered_since = now
        elif self._unanswered_since is None:
            self._unanswered_since = now
        self._asked_at = now

    def heard(self, waits: Sequence[LaneWait] | None, silences: Sequence[float] = ()) -> None:
        """Record a turn of the engine's loop; `waits` is its answer to a ping, if any, and
        `silences` are those of the other ranks."""
        self._unanswered_since = None
        if waits is not None:
            self._waits, self.silences = waits, silences

    @property
    def silence(self) -> float:
        """Seconds for which the engine's loop has not answered."""
        return 0.0 if self._unanswered_since is None else self._clock() - self._unanswered_since

    @property
    def longest_wait(self) -> float:
        """Seconds for which the slowest lane had finished no launch, at the engine's latest
        answer."""
        return max([wait.seconds for wait in self._waits], default=0.0)

    @property
    def problem(self) -> str | None:
        """Reason why nothing can be served: the engine is hung, or an idle rank is silent; None:
        there is none."""
        return self.hung or self._silent_rank

    @property
    def hung(self) -> str | None:
        """Reason why the engine counts as hung; None: it does not."""
        if self.silence > self._bound:
            return f"the engine has made no turn for {self.silence:.0f} s"
        awake = self._clock() - self._awake_since
        late = [w for w in self._waits if min(w.seconds, awake) > self._longest(w)]
        if not late:
            return None
        first = late[0]
        prediction = "without a prediction"
        if first.predicted is not None:
            prediction = f"predicted to take {first.predicted:.3g} s"
        lane = "whole device" if first.lane == "device" else f"{first.lane} lane"
        return f"the {lane} has finished nothing for {first.seconds:.0f} s (a launch {prediction})"

    @property
    def _silent_rank(self) -> str | None:
        longest = max(self.silences, default=0.0)
        if self._waits or longest <= self._bound:  # in work, all wait for one another
            return None
        return f"rank {self.silences.index(longest) + 1} has not answered for {longest:.0f} s"

    def _longest(self, wait: LaneWait) -> float:
        if wait.predicted is None:
            # A launch without a prediction counts as hung after this multiple of the bound.
            return 6.0 * self._bound
        # A launch counts as hung after this multiple of its predicted seconds, and not before the
        # bound.
        return max(self._bound, 5.0 * wait.predicted)
