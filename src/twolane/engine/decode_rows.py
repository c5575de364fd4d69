"""The requests in decode as arrays, kept as they join and leave.

A column has a value for each slot, so that a step over thousands of rows is a few operations on
arrays. What a column holds of a request is also an attribute of it, for those that look at one.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from twolane.engine.kv.manager import Allocation
from twolane.engine.request import Phase, Request
from twolane.estimate.query import Ints
from twolane.systems.rows import RowTable

MOST_STOPS = 8
"""Largest number of stop tokens of a request whose tokens are compared with them in arrays."""


@dataclass(frozen=True, slots=True, eq=False)
class ReadyRows:
    """The rows of a decode launch, in the order of their ranks."""

    requests: Sequence[Request]
    pairs: Sequence[tuple[Request, Allocation]]
    allocations: Sequence[Allocation]
    slots: Ints

    @classmethod
    def of(cls, requests: Sequence[Request]) -> "ReadyRows":
        """Return the rows of these requests, which hold allocations."""
        pairs = [(request, request.allocation) for request in requests if request.allocation]
        allocations = [allocation for _, allocation in pairs]
        slots = np.array([allocation.slot for allocation in allocations], dtype=np.int64)
        return cls(requests, pairs, allocations, slots)


class DecodingRequests:
    """Columns over the requests in decode.

    Args:
        slots: Number of slots.
        page_size: Number of tokens in a KV page.
    """

    def __init__(self, slots: int, page_size: int) -> None:
        self.requests: list[Request] = []
        """Requests in decode, by rank."""
        self.special: dict[Request, None] = {}
        """Those whose masks, rules or compiled grammars are looked at one by one."""
        self.unsent: set[Allocation] = set()
        """Allocations with pages that the lanes do not know."""
        self._page_size = page_size

        def column(fill: float, kind: Any = np.int64) -> npt.NDArray[Any]:
            return np.full(slots, fill, dtype=kind)

        self.context, self.left, self.capacity = column(0), column(0), column(0)
        """Tokens in the KV cache at the launched frontier, tokens that may still be launched, and
        tokens that the pages hold."""
        self.tokens, self.limit = column(0), column(0)
        """Tokens of prompt and output so far, and at most."""
        self.stops = np.full((slots, MOST_STOPS), -1, dtype=np.int64)
        self.quick = column(0, np.bool_)
        """Whether a token only has to be appended, compared with the stop tokens and sent."""
        self.tbt, self.bound = column(np.nan, np.float64), column(np.nan, np.float64)
        """TBT bound in seconds, and this or the TPOT bound; NaN: none."""
        self.last_at, self.due, self.slack = (column(np.nan, np.float64) for _ in range(3))
        """See `Request.last_token_at`, `Request.due` and `Request.slack`; NaN is None."""
        self._ready: ReadyRows | None = None
        self._table: RowTable | None = None

    def add(self, request: Request) -> None:
        """Add a request whose prompt is done, by its rank."""
        bisect.insort(self.requests, request, key=lambda r: r.rank)
        if not request.plain:
            self.special[request] = None
        slot, slo = request.held.slot, request.slo
        self.note_coming(request)
        self.limit[slot], self.tokens[slot] = request.limit, len(request.tokens)
        self.tbt[slot] = np.nan if slo.tbt is None else slo.tbt
        self.bound[slot] = self.tbt[slot] if slo.tbt is not None or slo.tpot is None else slo.tpot
        self.stops[slot] = -1
        self.stops[slot, : min(len(request.stops), MOST_STOPS)] = list(request.stops)[:MOST_STOPS]
        self.note_sent(request)
        self._ready = None

    def note_coming(self, request: Request) -> None:
        """Note the columns that a launch reads of a request that may not be in decode yet."""
        held = request.held
        self.context[held.slot], self.left[held.slot] = request.context, request.to_generate
        self.note_pages(held)

    def remove(self, request: Request) -> None:
        """Remove a request that still has its slot."""
        self.requests.remove(request)
        self.special.pop(request, None)
        self.quick[request.held.slot] = False
        self._ready = None

    def note_pages(self, allocation: Allocation) -> None:
        """Note that an allocation has got pages."""
        self.capacity[allocation.slot] = len(allocation.pages) * self._page_size

    def note_sent(self, request: Request) -> None:
        """Note that a token of a request was scheduled and sent by itself."""
        if request.phase is not Phase.DECODE:
            return
        slot = request.held.slot
        sent = request.last_token_at is not None
        self.last_at[slot] = np.nan if request.last_token_at is None else request.last_token_at
        self.due[slot] = np.nan if request.due is None else request.due
        self.slack[slot], self.tokens[slot] = request.slack, len(request.tokens)
        fits = len(request.stops) <= MOST_STOPS and request.sampling.params.logprobs is None
        self.quick[slot] = sent and fits and request not in self.special

    def advance(self, rows: ReadyRows, steps: Ints) -> None:
        """Move the launched frontier of the rows of a launch, each by its steps."""
        self.context[rows.slots] += steps
        left = self.left[rows.slots] - steps
        self.left[rows.slots] = left
        for request, count in zip(rows.requests, steps.tolist(), strict=True):
            request.context += count
            request.to_generate -= count
        if not left.all():
            self._ready = None

    @property
    def ready(self) -> ReadyRows:
        """The rows that a decode step launched now would serve in any lane."""
        sitting_out = any(request.constraint is not None for request in self.special)
        if self._ready is None or sitting_out:
            self._ready = ReadyRows.of([request for request in self.requests if request.decodes])
            self._table = None
        return self._ready

    def table(self) -> RowTable:
        """Return the columns of `ready` that systems see."""
        ready = self.ready
        if self._table is None:
            columns = (self.context, self.bound, self.tbt, self.slack, self.last_at)
            self._table = RowTable(ready.requests, ready.slots, *columns)
        return self._table
