"""The requests that wait for prefill."""

import bisect
import heapq
import math
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from twolane.engine.prompt_work import PromptWork, WaitingPrompt
from twolane.engine.request import Phase, Request

OLDEST_EVERY = 8
"""One admission in this many goes to the longest-waiting request."""


class QueueCount(NamedTuple):
    """The work of the queued prompts at one moment."""

    at: float = -math.inf
    """The moment, in seconds on the lanes' clock."""
    work: PromptWork = PromptWork()
    yielding: list[WaitingPrompt] | None = None
    """The largest prompts that the system may give up; None if it gives up none."""
    submitted: int = 0
    """Number of requests that had been submitted since the start."""


class WaitingQueue:
    """The requests that wait for prefill, by rank. Some are held back from the system."""

    def __init__(self) -> None:
        self.new: list[Request] = []
        """Requests that wait for their first chunk of prefill and hold no pages, by rank."""
        self.started: list[Request] = []
        """Requests that wait between two chunks of their prompts and keep their pages, by rank."""
        self.held: dict[str, list[Request]] = {}
        """Requests that systems do not see until the request of the key has its first token or
        ends, or until a mask is known (`masks_of`)."""
        self.admissions = 0
        """Number of admissions since the longest-waiting request was last put first."""
        self.gives_up = False
        """Whether the system gives up prompts that cannot meet their deadline, in favour of smaller
        ones."""

    def __len__(self) -> int:
        """Return the number of requests, those held back included."""
        return len(self.new) + len(self.started) + sum(map(len, self.held.values()))

    def __iter__(self) -> Iterator[Request]:
        """Yield all requests, those held back last."""
        return chain(self.new, self.started, *self.held.values())

    @property
    def visible(self) -> list[Request]:
        """The requests that systems see: those between two chunks, then the others, by rank."""
        return [*self.started, *self.new] if self.started else self.new

    def enqueue(self, request: Request) -> None:
        """Add a request by its rank."""
        request.phase = Phase.WAITING
        line = self.started if request.started else self.new
        bisect.insort(line, request, key=lambda r: r.rank)

    def dequeue(self, request: Request) -> None:
        """Remove a request."""
        if request.leader is not None:
            self.held[request.leader].remove(request)
            if not self.held[request.leader]:
                del self.held[request.leader]
        else:
            (self.started if request.started else self.new).remove(request)

    def hold(self, request: Request, leader: str) -> None:
        """Hide a request from systems until `release` is called with `leader`."""
        request.leader = leader
        self.held.setdefault(leader, []).append(request)

    def release(self, leader: str) -> None:
        """Show systems the requests that waited for `leader`."""
        for request in self.held.pop(leader, ()):
            request.leader = None
            self.enqueue(request)

    def promote_oldest(self) -> None:
        """Put the longest-waiting request first, once in `OLDEST_EVERY` admissions, so that no
        request waits forever because of its priority."""
        if self.admissions < OLDEST_EVERY or not self.new:
            return
        self.admissions = 0
        if self.new[0].priority < self.new[-1].priority:
            oldest = min(self.new, key=lambda r: r.order)
            self.new.remove(oldest)
            # A priority before all that requests can have.
            oldest.priority = -(2**31)
            self.enqueue(oldest)

    def count(self, now: float) -> QueueCount:
        """Return the work of all requests, without their tokens in the prefix cache.

        Args:
            now: The time in seconds on the lanes' clock.
        """
        prompts = tokens = 0
        pairs = 0.0
        yielding: list[WaitingPrompt] = []
        for request in self:
            new = request.known_new
            prompts, tokens = prompts + 1, tokens + new
            pairs += new * (len(request.tokens) - new / 2)
            if not self.gives_up or not request.yields:
                continue
            if (bound := request.slo.first_token(new)) is not None:
                left = request.arrival + bound - now
                yielding.append(WaitingPrompt(new, len(request.tokens) - new, left))
        # Number of queued prompts that are reported one by one; the others are reported as a sum.
        largest = heapq.nlargest(128, yielding) if self.gives_up else None
        return QueueCount(now, PromptWork(prompts, tokens, pairs), largest)


def masks_of(request_id: str) -> str:
    """Return the key in `WaitingQueue.held` of a request whose next mask is being computed; it is
    no request's id."""
    return f"masks of {request_id}"
