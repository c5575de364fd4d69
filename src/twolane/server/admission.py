"""The bound on the queue: how many requests may wait for their first token."""

import math
import time
from collections import deque
from collections.abc import Callable

from twolane.server.http.errors import ApiError

RETRY_SECONDS = (1, 60)
"""The least and the most that `Retry-After` says."""
SERVED_WINDOW = 64
"""First tokens from which the rate of service is measured."""


class Admission:
    """Counts the requests without a first token, and refuses those beyond the bound.

    Args:
        max_queue: the bound.
        clock: seconds, monotonic.
    """

    def __init__(self, max_queue: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_queue = max_queue
        self.waiting = 0
        self._clock = clock
        # Times of first tokens on a clock that runs only while somebody waits: what an idle
        # server serves in an hour says nothing about how fast a queue moves.
        self._served: deque[float] = deque([0.0], maxlen=SERVED_WINDOW + 1)
        self._busy_until_now = 0.0
        self._waiting_since = 0.0

    def check_count(self, count: int, param: str = "prompt") -> None:
        """Refuse a call for which there never will be room.

        Args:
            count: how many answers it asks for.
            param: the request field that asks for so many.

        Raises:
            ApiError: 400.
        """
        if count > self.max_queue:
            message = f"{param}: {count} answers are more than the queue holds ({self.max_queue})"
            raise ApiError(400, message, code="too_many_answers", param=param)

    def enter(self, count: int = 1, param: str = "prompt") -> None:
        """Take `count` places in the queue, or none.

        Args:
            count: how many.
            param: the request field that asks for so many.

        Raises:
            ApiError: 429 when there is no room now, 400 when there never will be.
        """
        self.check_count(count, param)
        if self.waiting + count > self.max_queue:
            raise ApiError(
                429,
                f"the queue is full: {self.waiting} requests wait, {self.max_queue} may",
                code="queue_full",
                headers={"Retry-After": str(self.retry_after())},
            )
        if self.waiting == 0:
            self._waiting_since = self._clock()
        self.waiting += count

    def leave(self, *, served: bool) -> None:
        """Give a place back; `served` means that the request has its first token."""
        assert self.waiting > 0
        if served:
            self._served.append(self._busy())
        self.waiting -= 1
        if self.waiting == 0:
            self._busy_until_now += self._clock() - self._waiting_since

    def retry_after(self) -> int:
        """Return the whole seconds in which the present queue should be served."""
        least, most = RETRY_SECONDS
        served = len(self._served) - 1
        if served == 0:
            return least
        seconds = self.waiting * (self._busy() - self._served[0]) / served
        return min(most, max(least, math.ceil(seconds)))

    def _busy(self) -> float:
        """How long somebody has been waiting, all in all."""
        running = self._clock() - self._waiting_since if self.waiting else 0.0
        return self._busy_until_now + running
