"""What systems see of many requests at once: columns of those in decode, and of those that wait."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import overload

import numpy as np

from twolane.estimate.query import Floats, Ints, Load
from twolane.systems.request_view import RequestView


@dataclass(slots=True, eq=False)
class RowTable:
    """Columns of requests in decode; the value of request i is at place `at[i]` of a column."""

    requests: Sequence[RequestView]
    at: Ints
    context_column: Ints
    bound_column: Floats
    """TBT bounds in seconds, or TPOT bounds where there are none; NaN: neither."""
    tbt_column: Floats
    slack_column: Floats
    last_column: Floats
    """Times of the latest tokens in seconds; NaN: none was delivered."""
    _bounds: Floats | None = field(default=None, init=False)
    _tightest: float | None = field(default=None, init=False)

    @classmethod
    def of(cls, requests: Sequence[RequestView]) -> "RowTable":
        """Return the table of these requests."""

        def column(values: list[float | None]) -> Floats:
            return np.array([np.nan if each is None else each for each in values], dtype=float)

        slos = [r.slo for r in requests]
        return cls(
            requests,
            np.arange(len(requests)),
            np.array([r.context for r in requests], dtype=np.int64),
            column([slo.tpot if slo.tbt is None else slo.tbt for slo in slos]),
            column([slo.tbt for slo in slos]),
            column([r.slack for r in requests]),
            column([r.last_token_at for r in requests]),
        )

    def load(self, others: Sequence[RequestView] = ()) -> Load:
        """Return the load of a decode step that serves these requests and others now."""
        contexts: list[int] = self.context_column[self.at].tolist()
        contexts += [request.context for request in others]
        return Load.decode(contexts)

    @property
    def bounds(self) -> Floats:
        """The different TBT or TPOT bounds in seconds, ascending."""
        if self._bounds is None:
            bounds = np.unique(self.bound_column[self.at])
            self._bounds = bounds[~np.isnan(bounds)]
        return self._bounds

    @property
    def tightest_tbt(self) -> float:
        """The tightest TBT bound in seconds; infinite without any."""
        if self._tightest is None:
            self._tightest = float(np.fmin.reduce(self.tbt_column[self.at], initial=np.inf))
        return self._tightest

    def latest(self, bound: float) -> float | None:
        """Return the least time to the next token, in seconds, by bound and slack.

        Args:
            bound: Tighter bounds are left out.

        Returns:
            The seconds, or None if no request with a token has such a bound.
        """
        bounds = self.bound_column[self.at]
        kept = (bounds >= bound) & ~np.isnan(self.last_column[self.at])
        latest = (bounds + self.slack_column[self.at])[kept]
        return float(latest.min()) if len(latest) else None

    def last_token(self, *, first: bool = False) -> float | None:
        """Return when the newest of the latest tokens was made, or the oldest; None without any."""
        times = self.last_column[self.at]
        times = times[~np.isnan(times)]
        if not len(times):
            return None
        return float(times.min() if first else times.max())


UNBOUND_SECONDS = 1.0
"""Requests without a TTFT bound are ordered as if they had one of this many seconds and
`TTFT_PER_TOKEN` for each new token."""
TTFT_PER_TOKEN = 1.0 / 1024
"""Seconds of TTFT for each new token: 1 s per 1K (Drift §5.1)."""
COLUMNS = ("priority", "place", "arrival", "deadline", "new", "reused", "started", "generated")
"""Names of the columns of `WaitingTable`, in their order."""


class WaitingTable:
    """Columns of the requests that wait for prefill.

    Args:
        requests: The requests, in any order.
        columns: [`COLUMNS`, requests] in float64: priority, place in the order in which systems see
            the requests, time of arrival and deadline of the first token in seconds (NaN: none),
            new and reused tokens, whether the request holds pages, and whether it has a token.
    """

    def __init__(self, requests: Sequence[RequestView], columns: Floats) -> None:
        self.requests = requests
        self.priority, self.place, self.arrival = columns[:3]
        self.deadline: Floats = columns[3]
        self.new, self.reused = columns[4:6]
        self.yields = (columns[6] + columns[7]) == 0
        """Whether a request may be late or refused: no part of it was computed or delivered."""
        unbound = np.isnan(self.deadline)
        self.bounded = ~unbound
        """Whether a request has a TTFT bound."""
        patience = self.arrival + UNBOUND_SECONDS + TTFT_PER_TOKEN * self.new
        self.wanted = np.where(unbound, patience, self.deadline)
        """Time in seconds by which the first token is wanted; a request that was preempted after a
        token goes first."""
        self.wanted[columns[7] > 0] = -np.inf
        self.by_deadline = np.lexsort((self.place, self.wanted, self.priority))
        """Indices of the requests by priority and by the time at which they are wanted."""
        self.shared = False
        """Whether several API keys have sent requests, so that another one's may come any time."""

    def __len__(self) -> int:
        return len(self.requests)

    @classmethod
    def of(cls, requests: Sequence[RequestView]) -> "WaitingTable":
        """Return the table of these requests, in the order in which systems see them."""
        rows = [(each.priority, i, *values_of(each)) for i, each in enumerate(requests)]
        return cls(requests, np.array(rows, dtype=np.float64).reshape(-1, len(COLUMNS)).T)

    def unbound(self, indices: Ints) -> bool:
        """Return whether none of these requests has a TTFT bound, or another priority."""
        priorities = self.priority[indices]
        alike = not len(indices) or bool((priorities == priorities[0]).all())
        return alike and not self.bounded[indices].any()


def values_of(request: RequestView) -> tuple[float, ...]:
    """Return the values of a request in the columns that follow the first two."""
    deadline = request.deadline
    due = np.nan if deadline is None else deadline
    flags = request.started, request.generated > 0
    return (request.arrival, due, request.new, request.reused, *flags)


class Ordered(Sequence[RequestView]):
    """Requests of a table in the order of these indices."""

    def __init__(self, table: WaitingTable, indices: Ints) -> None:
        self._requests, self._indices = table.requests, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[RequestView]:
        return (self._requests[i] for i in self._indices)  # most readers need the first ones

    @overload
    def __getitem__(self, place: int) -> RequestView: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[RequestView]: ...

    def __getitem__(self, place: int | slice) -> RequestView | Sequence[RequestView]:
        if isinstance(place, slice):
            return [self._requests[i] for i in self._indices[place].tolist()]
        request: RequestView = self._requests[self._indices[place]]
        return request
