"""Pacing: tokens of requests with a TBT bound are delivered evenly.

A token that the device makes early is held back, so that a later one may take longer than the bound
without being late for the client (`twolane.playout`). The engine decides here when each token is
due, and `frontend.delivery` delivers it then; or clients hold tokens back themselves, and get them
at once. A first token whose second could not follow in time is held here, unseen, until it can,
also where there is no buffer: a slice makes first tokens in the middle of a decode step, a pass at
its end.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

import numpy as np

from twolane.engine.request import InFlightLaunch, Phase, Request
from twolane.estimate.query import Floats, Ints
from twolane.lanes.base import Sampled
from twolane.playout import PACE_FRACTION, SHORT_BOUND, first_shown, next_shown
from twolane.slo import Slo
from twolane.systems.plan import PrefillSlice

CAUTIOUS_PACE = 0.92
"""Twice the spread makes the pace no shorter than this fraction of the TBT bound; beyond that, the
spread counts once."""
LEAST_PACE = 0.88
"""Tokens are due no closer together than this fraction of the TBT bound."""
SPREAD_KEPT = 0.9
"""A spread of late deliveries counts for this fraction of it a second later."""

SURE_FRACTION = 0.8
"""Without a buffer, a held first token goes out once its second is predicted within this fraction
of the TBT bound after it: the rest is for a step that takes longer than predicted."""

Scheduled = tuple[float, float | None, float, float | None]
"""When a token was made and is due, its slack, and when it is delivered, in seconds: see
`Pacer.delivery`."""

KEPT_GAPS = 8192
"""Gaps that are remembered: more than those of a tenth of a second, after which the margin looks at
them."""


class Gaps:
    """The seconds between two tokens of a request, as clients see them if nothing delays delivery.

    `total` is the number of gaps since the start.
    """

    def __init__(self) -> None:
        self.total = 0
        self._latest = np.zeros(KEPT_GAPS)
        """Gap number i, counted from the start, is at place i modulo the length."""

    def add(self, seconds: float) -> None:
        """Remember a new gap."""
        self._latest[self.total % KEPT_GAPS] = seconds
        self.total += 1

    def extend(self, gaps: Floats) -> None:
        """Remember new gaps, in seconds."""
        places = np.arange(self.total, self.total + len(gaps)) % KEPT_GAPS
        self._latest[places] = gaps
        self.total += len(gaps)

    def above(self, bound: float, count: int) -> int:
        """Return how many of the latest `count` gaps that are remembered exceed `bound` seconds."""
        count = min(count, KEPT_GAPS, self.total)
        latest = self._latest[(self.total - count) % KEPT_GAPS :][:count]
        earliest = self._latest[: count - len(latest)]  # those that begin the array again
        return int(np.count_nonzero(latest > bound) + np.count_nonzero(earliest > bound))


class PacedColumns(Protocol):
    """The columns of requests in decode that pacing reads and writes, a value for each slot."""

    tbt: Floats
    """TBT bounds in seconds; NaN: none."""
    last_at: Floats
    """Seconds at which the device made the latest tokens."""
    due: Floats
    """Seconds at which these are delivered; NaN: at once."""
    slack: Floats
    """Seconds for which these are held back."""


class Pacer:
    """Decides when each token is due; a request without a TBT bound gets its tokens at once.

    Args:
        buffer: Longest time in seconds for which a token is held back, or its TBT bound if that is
            less. With 0, only a first token is, until its second can follow in time.
        transport: Seconds that the way to the client may take. Every paced token is due that much
            after the device made it, at the earliest, so that a shorter way does not show.
        at_client: Whether clients hold tokens back. Tokens are due at the same times and are
            delivered at once.
    """

    def __init__(
        self, buffer: float = 0.0, transport: float = 0.0, *, at_client: bool = False
    ) -> None:
        self.gaps = Gaps()
        self._at_client = at_client
        self._buffer = buffer
        self._transport = transport
        self._delay = min(transport, buffer)
        self._held: dict[Request, Sampled] = {}
        self._spread = 0.0
        """Spread of late deliveries in seconds: the latest, or what is left of greater ones."""

    @property
    def held(self) -> Collection[Request]:
        """The requests whose first token is held."""
        return self._held.keys()

    def planned(self, slo: Slo) -> Slo:
        """Return the bounds that systems plan for: transport takes its part of the TBT bound."""
        return slo.sooner(self._transport)

    def hear(self, spread: float) -> None:
        """Learn how unevenly tokens were delivered in the last second: see `DeliveryLateness`."""
        self._spread = max(spread, SPREAD_KEPT * self._spread)

    def pace(self, bound: float) -> float:
        """Return the seconds from one due time to the next under a TBT bound.

        Of gaps as written, the P99 is longer than that of gaps between due times by 0.6 to 0.8 of
        the spread (measured on busy and on quiet hosts), and by up to twice of it if the client is
        as slow; the time for transport covers a part of it. A small spread counts twice.
        """
        most, least = PACE_FRACTION * bound, LEAST_PACE * bound
        if bound < SHORT_BOUND:
            return most
        allowed = bound + self._transport
        twice = max(CAUTIOUS_PACE * bound, allowed - 2 * self._spread)
        return max(least, min(most, twice, allowed - self._spread))

    def schedule(self, request: Request, at: float) -> None:
        """Set when the request's next token, which the device made at `at` seconds, is due."""
        last, before = request.last_token_at, request.due
        if last is None:
            request.first_token_at = at
        else:
            at = max(at, last)  # a held first token is as old as its release
        due = self._due(request, at)
        if last is not None:
            self.gaps.add(at - last if due is None or before is None else due - before)
        request.last_token_at, request.due = at, due
        request.slack = 0.0 if due is None else due - at - self._delay

    def schedule_rows(self, columns: "PacedColumns", slots: Ints, at: float) -> list[Scheduled]:
        """Do what `schedule` does for rows whose earlier tokens were sent, each with a token that
        the device made at `at` seconds.
        """
        last, before = columns.last_at[slots], columns.due[slots]
        made = np.maximum(at, last)
        if not self._buffer:
            self.gaps.extend(made - last)
            columns.last_at[slots] = made
            return [(each, None, 0.0, None) for each in made.tolist()]
        bounds = columns.tbt[slots]
        shown = made + self._delay
        several, places = np.unique(bounds, return_inverse=True)
        paces = np.array([self.pace(bound) for bound in several.tolist()])[places]
        latest = shown + np.minimum(self._buffer, bounds)
        due = np.maximum(shown, np.minimum(before + paces, latest))
        gaps = np.where(np.isnan(due), made - last, due - before)
        slack = np.where(np.isnan(due), 0.0, due - made - self._delay)
        self.gaps.extend(gaps)
        columns.last_at[slots], columns.due[slots], columns.slack[slots] = made, due, slack
        dues = [None if each != each else each for each in due.tolist()]
        deliveries = [None] * len(dues) if self._at_client else dues
        return [*zip(made.tolist(), dues, slack.tolist(), deliveries, strict=True)]

    def delivery(self, request: Request) -> float | None:
        """Return when to deliver the request's latest token; None: at once."""
        return None if self._at_client else request.due

    def hold(self, request: Request, sampled: Sampled) -> bool:
        """Hold a first token that a prefill slice sampled, if its request has a TBT bound.

        A request that is sent back loses its prompt's log-probabilities, so those go out at once.
        """
        if request.slo.tbt is None or request.prompt_logprobs:
            return False
        self._held[request] = sampled
        return True

    def release(self, request: Request) -> Sampled | None:
        """Remove and return the request's held token, if there is one."""
        return self._held.pop(request, None)

    def release_ready(
        self, now: float, in_flight: Sequence[InFlightLaunch]
    ) -> Iterator[tuple[Request, Sampled]]:
        """Remove and yield the held tokens that need not wait, given the launches in flight."""
        for request, sampled in list(self._held.items()):
            if request.phase is Phase.DECODE and self._too_early(request, now, in_flight):
                continue
            del self._held[request]
            if request.phase is not Phase.FINISHED:
                yield request, sampled

    def _due(self, request: Request, at: float) -> float | None:
        """Return when a token made at `at` is due; None: at once."""
        bound = request.slo.tbt
        if bound is None or not self._buffer:
            return None
        at += self._delay
        if request.due is None and len(request.tokens) >= request.limit:
            return at
        hold = min(self._buffer, bound)
        if request.due is None:
            return first_shown(at, hold, request.deadline)
        return next_shown(at, request.due, self.pace(bound), hold)

    def _too_early(self, request: Request, now: float, in_flight: Sequence[InFlightLaunch]) -> bool:
        """Return whether the second token would be late by prediction if the first were sent now.

        It would be if other decode launches run first for long enough. The first token goes out
        nevertheless if it would miss its deadline meanwhile.
        """
        bound = request.slo.tbt
        assert bound is not None
        begins, step = now, None
        for flight in in_flight:
            if isinstance(flight.launch.work, PrefillSlice):
                continue
            step = flight.predicted
            if any(other is request for other, _ in flight.rows):
                break
            if step is None:
                return True
            start = flight.ticket.start
            begins = max(now, (begins if start is None else start) + step)
        deadline = request.deadline
        if begins == now or (deadline is not None and begins > deadline):
            return False
        allowed = bound + min(self._buffer, bound) if self._buffer else SURE_FRACTION * bound
        return step is None or begins + step > now + allowed
