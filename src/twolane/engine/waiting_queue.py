"""The requests that wait for prefill."""

import bisect
import heapq
import math
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from twolane.engine.prompt_work import PromptWork, WaitingPrompt
from twolane.engine.request import Phase, Request

OLDEST_EVERY = 8
"""One admission in this many goes to the longest-waiting request."""

TURN_TOKENS = 8192
"""Most prompt tokens by which one key may be served ahead of another that waits, besides its last
prompt."""


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
    """The requests that wait for prefill, by rank. Some are held back from the system.

    API keys take turns by the tokens of their prompts (start-time fair queueing, Goyal et al.,
    SIGCOMM 1996): while several keys wait, systems see only requests that begin before the key with
    the least left would have had all of its prompts, and at most `TURN_TOKENS` further. A key also
    waits while one of its prompts does between two chunks.
    """

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
        self._served: dict[int | None, int] = {}
        """Tokens of admitted prompts by key, in turns: a key that comes back begins at `_turn`."""
        self._turn = 0
        """The tokens that the key of the latest admission had been served before."""
        self._keys = Counter[int | None]()
        """Number of requests in `new` by key."""
        self._shown: list[Request] | None = None
        """The requests of this turn; None: not known."""
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
        return [*self.started, *self.in_turn] if self.started else self.in_turn

    @property
    def in_turn(self) -> list[Request]:
        """The requests of `new` whose keys have their turn; all of them while one key waits."""
        keys = self._keys.keys() | {request.key for request in self.started}
        if len(keys) <= 1 or not self.new:
            return self.new
        if self._shown is None:
            begins = {key: self._served[key] for key in keys}
            least, tagged = min(begins[key] for key in self._keys), []
            for request in self.new:
                tagged.append((request.priority, begins[request.key], request.order, request))
                begins[request.key] += len(request.tokens)
            end = min(*begins.values(), least + TURN_TOKENS)
            self._shown = [request for _, at, _, request in sorted(tagged) if at < end]
        return self._shown

    def note_admission(self, request: Request) -> None:
        """Count a request that is admitted for the first time."""
        self.admissions += 1
        self._turn = self._served[request.key]
        self._served[request.key] += len(request.tokens)
        self._shown = None

    def enqueue(self, request: Request) -> None:
        """Add a request by its rank."""
        request.phase = Phase.WAITING
        line = self.started if request.started else self.new
        if line is self.new:
            if not self._keys[request.key]:
                self._served[request.key] = max(self._served.get(request.key, 0), self._turn)
            self._keys[request.key] += 1
        self._shown = None
        bisect.insort(line, request, key=lambda r: r.rank)

    def dequeue(self, request: Request) -> None:
        """Remove a request."""
        if request.leader is not None:
            self.held[request.leader].remove(request)
            if not self.held[request.leader]:
                del self.held[request.leader]
        else:
            (self.started if request.started else self.new).remove(request)
            self._shown = None
            if not request.started:
                self._forget(request)

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
            self._forget(oldest)
            # A priority before all that requests can have.
            oldest.priority = -(2**31)
            self.enqueue(oldest)

    def _forget(self, request: Request) -> None:
        """Count a request that has left `new`."""
        self._keys[request.key] -= 1
        if not self._keys[request.key]:
            del self._keys[request.key]

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
