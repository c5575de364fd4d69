"""Bounds on the number of requests that wait for their first token."""

import math
import time
from collections import Counter, deque
from collections.abc import Callable

from twolane.server.http.errors import ApiError

RETRY_SECONDS = (1, 60)
"""Smallest and largest `Retry-After`, in seconds."""
SERVED_WINDOW = 64
"""Number of recent first tokens from which the service rate is measured."""
MIN_SERVED = 8
"""First tokens of the present queue from which its rate is measured; with fewer it is predicted."""


class Admission:
    """Counts requests without a first token and refuses those beyond the bounds.

    Args:
        max_queue: most requests that may wait.
        max_queued_per_key: most requests of one API key that may wait; None: `max_queue`.
        token_seconds: returns the seconds that the engine takes for a prompt token; 0: not known.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        max_queue: int,
        max_queued_per_key: int | None = None,
        token_seconds: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_queue = max_queue
        self.waiting = 0
        self._max_per_key = max_queued_per_key
        self._waiting_of: Counter[int | None] = Counter()
        """Number of waiting requests by API key."""
        self._tokens_of: Counter[int | None] = Counter()
        """Prompt tokens of the waiting requests, by API key."""
        self._token_seconds = token_seconds
        self._clock = clock
        # Of this queue alone: single requests tell nothing of how fast a queue moves.
        self._served: deque[float] = deque(maxlen=SERVED_WINDOW + 1)

    def check_count(self, count: int, param: str = "prompt") -> None:
        """Refuse a call with more answers than may ever wait.

        Args:
            count: number of answers that it asks for.
            param: the request field that asks for them.

        Raises:
            ApiError: 400.
        """
        most = min(self.max_queue, self._max_per_key or self.max_queue)
        if count > most:
            message = f"{param}: {count} answers exceed the {most} that may wait at once"
            raise ApiError(400, message, code="too_many_answers", param=param)

    def enter(
        self, count: int = 1, param: str = "prompt", *, key: int | None = None, tokens: int = 0
    ) -> None:
        """Take `count` places in the queue, or raise and take none.

        Args:
            count: number of places.
            param: the request field that asks for them.
            key: number of the API key that the call came with; None: there are no keys.
            tokens: prompt tokens of the call.

        Raises:
            ApiError: 429 when there is no room now, 400 when there never will be.
        """
        self.check_count(count, param)
        if self.waiting + count > self.max_queue:
            message = f"the queue is full: {self.waiting} of {self.max_queue} requests wait"
            raise self._full(message, "queue_full")
        mine = self._waiting_of[key]
        if self._max_per_key is not None and mine + count > self._max_per_key:
            message = f"this API key's queue is full: {mine} of {self._max_per_key} requests wait"
            raise self._full(message, "key_queue_full")
        self._waiting_of[key] += count
        if self.waiting == 0:
            self._served.clear()
            self._served.append(self._clock())
        self.waiting += count
        self._tokens_of[key] += tokens

    def leave(self, *, served: bool, key: int | None = None, tokens: int = 0) -> None:
        """Give one place in the queue back.

        Args:
            served: true if the request has its first token.
            key: see `enter`.
            tokens: prompt tokens of the request, as part of those that entered.
        """
        assert self.waiting > 0
        if served:
            self._served.append(self._clock())
        self.waiting -= 1
        self._tokens_of[key] -= tokens
        self._waiting_of[key] -= 1

    def is_alone(self, key: int | None) -> bool:
        """Return whether no request of another key waits."""
        return self._waiting_of[key] == self.waiting

    def share_before(self, key: int | None, tokens: int) -> float:
        """Return the share of the waiting tokens that is served before more of a key: keys take
        turns, so that it is as much of each other key as of its own.

        Args:
            key: The key.
            tokens: Further prompt tokens of the key.
        """
        own = self._tokens_of[key]
        before = sum(min(waiting, own + tokens) for waiting in self._tokens_of.values())
        return before / (self._tokens_of.total() or 1)

    def retry_after(self) -> int:
        """Return the whole seconds after which the present queue should be served."""
        least, most = RETRY_SECONDS
        served = len(self._served) - 1
        if served >= MIN_SERVED:
            seconds = self.waiting * (self._clock() - self._served[0]) / served
        else:
            seconds = self._tokens_of.total() * self._token_seconds()
        return min(most, max(least, math.ceil(seconds)))

    def _full(self, message: str, code: str) -> ApiError:
        headers = {"Retry-After": str(self.retry_after())}
        return ApiError(429, message, code=code, headers=headers)
