"""The bound on the queue: how many requests may wait for their first token."""

import math
import time
from collections import deque
from collections.abc import Callable

from twolane.api.errors import ApiError

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
        self._served: deque[float] = deque(maxlen=SERVED_WINDOW)

    def enter(self, count: int = 1) -> None:
        """Take `count` places in the queue, or none.

        Raises:
            ApiError: 429 when there is no room now, 400 when there never will be.
        """
        if count > self.max_queue:
            message = f"{count} prompts are more than the queue holds ({self.max_queue})"
            raise ApiError(400, message, code="too_many_prompts", param="prompt")
        if self.waiting + count > self.max_queue:
            raise ApiError(
                429,
                f"the queue is full: {self.waiting} requests wait, {self.max_queue} may",
                code="queue_full",
                headers={"Retry-After": str(self.retry_after())},
            )
        self.waiting += count

    def leave(self, *, served: bool) -> None:
        """Give a place back; `served` means that the request has its first token."""
        assert self.waiting > 0
        self.waiting -= 1
        if served:
            self._served.append(self._clock())

    def retry_after(self) -> int:
        """Return the whole seconds in which the present queue should be served."""
        least, most = RETRY_SECONDS
        if len(self._served) < 2:
            return least
        rate = len(self._served) / max(self._clock() - self._served[0], 1e-9)
        return min(most, max(least, math.ceil(self.waiting / rate)))
