"""The requests that wait for prefill."""

import bisect
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from twolane.engine.kv.prefix_tree import PrefixTree
from twolane.engine.prompt_work import PromptWork, WaitingPrompt
from twolane.engine.request import Phase, Request
from twolane.estimate.query import Floats
from twolane.systems.rows import COLUMNS, WaitingTable, values_of

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
        self.rows = WaitingRows()
        """Columns over `new` and `started`."""
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

    def table(self) -> WaitingTable:
        """Return the columns of `visible`."""
        table = self.rows.table(None if self.in_turn is self.new else self.visible)
        table.shared = len(self._served) > 1
        return table

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
        self.rows.add(request)

    def dequeue(self, request: Request) -> None:
        """Remove a request."""
        if request.leader is not None:
            self.held[request.leader].remove(request)
            if not self.held[request.leader]:
                del self.held[request.leader]
        else:
            (self.started if request.started else self.new).remove(request)
            self.rows.remove(request)
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
            self.rows.remove(oldest)
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
        held = [request for line in self.held.values() for request in line]
        new, reused, due = self.rows.prompts(held)
        pairs = float((new * (reused + new / 2)).sum())
        work = PromptWork(len(new), int(new.sum()), pairs)
        if not self.gives_up:
            return QueueCount(now, work)
        # Number of queued prompts that are reported one by one; the others are reported as a sum.
        left = due - now
        largest = np.lexsort((left, reused, new))[::-1]
        largest = largest[~np.isnan(left[largest])][:128]
        rows = zip(*(column[largest].tolist() for column in (new, reused, left)), strict=True)
        return QueueCount(now, work, [WaitingPrompt(int(n), int(r), at) for n, r, at in rows])


class WaitingRows:
    """Columns over the requests that wait for prefill, kept as they come and go.

    What a request finds in the prefix cache is looked up again when pages that its prompt begins
    with came or went.
    """

    def __init__(self) -> None:
        self.tree: PrefixTree | None = None
        """The prefix tree, which tells of those pages; None: there is none."""
        self._requests: list[Request] = []
        self._places: dict[Request, int] = {}
        self._first: dict[Request, bytes] = {}
        """Keys of the first pages of requests that may find some in the prefix cache."""
        self._values = np.zeros((64, len(COLUMNS) + 1))
        """The columns of `WaitingTable`, then the time in seconds at which the first token is due;
        NaN: the request has no bound, or does not yield."""
        self._table: WaitingTable | None = None
        self._shown: Sequence[Request] | None = None

    def add(self, request: Request) -> None:
        """Add a request that begins to wait."""
        place = self._places[request] = len(self._requests)
        self._requests.append(request)
        if place == len(self._values):
            self._values = np.concatenate([self._values, np.zeros_like(self._values)])
        self._values[place], self._table = _values(request), None
        if self.tree is None or request.started or request.scores_prompt:
            return
        if (first := self.tree.first_key(request.tokens, request.salt)) is not None:
            self._first[request] = first
            self.tree.waiting.setdefault(first, {})[request] = None

    def remove(self, request: Request) -> None:
        """Remove a request; the last one takes its place."""
        place, last = self._places.pop(request), self._requests.pop()
        if last is not request:
            self._requests[place], self._places[last] = last, place
            self._values[place] = self._values[len(self._requests)]
        self._table = None
        if self.tree is not None and (first := self._first.pop(request, None)) is not None:
            waiting = self.tree.waiting[first]
            del waiting[request]
            if not waiting:
                del self.tree.waiting[first]

    def table(self, shown: Sequence[Request] | None) -> WaitingTable:
        """Return the table of some of the requests in the order in which systems see them, or of
        all by rank; the same object while nothing changes."""
        self._refresh()
        if self._table is None or shown != self._shown:
            values, requests = self._values[: len(self._requests)], self._requests
            if shown is not None:
                values, requests = values[[self._places[each] for each in shown]], [*shown]
            columns = values[:, :-1].T.copy()
            if shown is not None:
                columns[1] = np.arange(len(requests))
            self._table, self._shown = WaitingTable([*requests], columns), shown
        return self._table

    def prompts(self, others: Sequence[Request]) -> tuple[Floats, Floats, Floats]:
        """Return new tokens, reused tokens, and the time in seconds at which the first token of a
        prompt that yields is due (else NaN), of all requests and of these others."""
        self._refresh()
        values = self._values[: len(self._requests)]
        if others:
            values = np.concatenate([values, [_values(request) for request in others]])
        return values[:, 4], values[:, 5], values[:, -1]

    def _refresh(self) -> None:
        """Look up again what pages that came or went may have changed."""
        if self.tree is None or not self.tree.touched:
            return
        for first in self.tree.touched:
            for request in self.tree.waiting.get(first, ()):
                place, values = self._places[request], np.array(_values(request))
                if not np.array_equal(self._values[place], values, equal_nan=True):
                    self._values[place], self._table = values, None
        self.tree.touched.clear()


def _values(request: Request) -> tuple[float, ...]:
    # Systems see the requests between two chunks first.
    seen = request.order + (0 if request.started else 2**40)
    bound = request.slo.first_token(request.new) if request.yields else None
    due = np.nan if bound is None else request.arrival + bound
    return (request.priority, seen, *values_of(request), due)


def masks_of(request_id: str) -> str:
    """Return the key in `WaitingQueue.held` of a request whose next mask is being computed; it is
    no request's id."""
    return f"masks of {request_id}"
