"""The order of waiting requests: which is prefilled next, which will be late, which is refused.

Requests of one priority go by deadline. Those without a TTFT bound have a deadline for their order
alone, which is the later the longer the prompt, so that short prompts need not wait for long ones.
Where not all deadlines can be kept, as few as possible are given up (Moore's algorithm: when one
would be late, the longest so far steps back, of equal ones the last), and those are served when no
other request waits. A request that would wait for more than twice its bound is refused. A prompt
that has begun goes on; only those with an earlier deadline, and short ones that would miss theirs
after it, go first.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twolane.estimate.query import Floats, Ints
from twolane.systems.plan import Refusal
from twolane.systems.rows import Ordered, WaitingTable
from twolane.systems.view import RequestView

REFUSAL_FACTOR = 2.0
"""A request is refused if its prefill would begin later than this multiple of its TTFT bound."""
OVERTAKING_FRACTION = 0.1
"""Fraction of the seconds left of a begun prompt that shorter ones may take before it goes on."""
LATE_SAFETY_FACTOR = 1.2
"""A prompt counts as late after a begun one if this multiple of the predicted seconds exceeds its
deadline."""
HURRY_FRACTION = 0.5
"""Fraction of its TTFT bound after which a prompt that is not done is in a hurry."""


@dataclass(frozen=True, slots=True)
class ServiceOrder:
    """The waiting requests in the order of service, and those to be refused."""

    order: Sequence[RequestView]
    refusals: Sequence[Refusal]
    hurried: bool = False
    """Whether one of them has no deadline, or will end only in the second half of its bound."""
    unbound: bool = True
    """Whether none of those in order has a TTFT bound, or another priority than the rest."""


def order_requests(
    table: WaitingTable, begin: float, seconds: Floats, *, refuse: bool
) -> ServiceOrder:
    """Order the requests and give up what cannot be kept.

    Args:
        table: all of them.
        begin: Time at which the first request can begin, in seconds on the requests' clock.
        seconds: The seconds of each request's prefill, at the pace that it will have.
        refuse: Whether these seconds are certain enough to refuse a request.
    """
    line = table.by_deadline
    first = _overtaking(table, line, seconds, begin)
    rest = line if not first else line[~np.isin(line, first)]
    at = begin + sum(seconds[first].tolist())
    refusals: list[Refusal] = []
    late = _given_up(table, rest, seconds, at)
    if late.any():
        rest = rest[np.lexsort((table.wanted[rest], late[rest], table.priority[rest]))]
        if refuse:
            rest, refusals = _without_refused(table, rest, seconds, late, at)
    patience = HURRY_FRACTION * (table.wanted[rest] - table.arrival[rest])
    pressed = _ends(at, seconds[rest]) > table.arrival[rest] + patience
    hurried = bool((pressed | ~table.bounded[rest]).any())
    order = np.concatenate([np.array(first, dtype=np.int64), rest])
    return ServiceOrder(Ordered(table, order), refusals, hurried, table.unbound(order))


def _ends(begin: float, seconds: Floats) -> Floats:
    """Return when each of several prompts ends that begin one after the other, in seconds."""
    return np.cumsum(np.concatenate([[begin], seconds]))[1:]


def _overtaking(table: WaitingTable, line: Ints, seconds: Floats, begin: float) -> list[int]:
    """Return the short prompts that go before the first, which has begun: they would miss their
    deadlines after it, and do not make it miss its own."""
    if not len(line) or table.yields[line[0]]:
        return []
    begun, others = line[0], line[1:]
    its = float(seconds[begun])
    spare, slack = OVERTAKING_FRACTION * its, float(table.wanted[begun]) - begin - its
    if slack > 0.0:
        spare = min(spare, slack)
    ends = begin + LATE_SAFETY_FACTOR * (its + seconds[others])
    late = table.bounded[others] & (ends > table.wanted[others])
    found = []
    for i in others[late & (table.priority[others] == table.priority[begun])].tolist():
        if seconds[i] <= spare:
            found.append(i)
            spare -= float(seconds[i])
    return found


def _given_up(table: WaitingTable, line: Ints, seconds: Floats, at: float) -> Floats:
    """Mark the fewest that must be late; none of a higher priority is late for one of a lower.

    Returns:
        1.0 for each request of the table that will be late, else 0.0.
    """
    marks = np.zeros(len(table))
    bounded = table.bounded[line]
    if not (bounded & (_ends(at, seconds[line]) > table.wanted[line])).any():
        return marks
    columns = (line, seconds[line], table.wanted[line], table.priority[line], bounded)
    yields = (table.yields[line] & bounded).tolist()
    longest: list[tuple[float, float, int, int]] = []
    rows = zip(*(column.tolist() for column in columns), yields, strict=True)
    for place, (i, took, wanted, priority, bound, may_yield) in enumerate(rows):
        at += took
        if may_yield:
            heapq.heappush(longest, (-priority, -took, -place, i))
        if at > wanted and longest and bound:
            _, less, _, given_up = heapq.heappop(longest)
            marks[given_up] = 1.0
            at += less
    return marks


def _without_refused(
    table: WaitingTable, line: Ints, seconds: Floats, late: Floats, at: float
) -> tuple[Ints, list[Refusal]]:
    """Return the requests that stay, in order, and those late ones that are refused: the prefill of
    each would begin later than `REFUSAL_FACTOR` times its bound."""
    kept, refusals = [], []
    for i, took in zip(line.tolist(), seconds[line].tolist(), strict=True):
        arrival = float(table.arrival[i])
        wait, bound = at - arrival, float(table.wanted[i]) - arrival
        if late[i] and table.yields[i] and wait > REFUSAL_FACTOR * bound:
            refusals.append(_refusal(table.requests[i].id, wait, bound))
            continue
        kept.append(i)
        at += took
    return np.array(kept, dtype=np.int64), refusals


def _refusal(request: str, wait: float, bound: float) -> Refusal:
    return Refusal(
        request,
        f"overloaded: prefill would begin {wait:.1f} s after arrival by prediction; "
        f"the first token is wanted within {bound:.1f} s",
    )
