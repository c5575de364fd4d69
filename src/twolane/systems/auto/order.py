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
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from twolane.systems.common.multiplex import TTFT_PER_TOKEN
from twolane.systems.plan import Refusal
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
UNBOUND_SECONDS = 1.0
"""Requests without a TTFT bound are ordered as if they had one of this many seconds and
`TTFT_PER_TOKEN` for each new token."""


@dataclass(frozen=True, slots=True)
class ServiceOrder:
    """The waiting requests in the order of service, and those to be refused."""

    order: Sequence[RequestView]
    refusals: Sequence[Refusal]
    hurried: bool = False
    """Whether one of them has no deadline, or will end only in the second half of its bound."""


@dataclass(slots=True, eq=False)
class _Queued:
    """A waiting request, its deadline, and the seconds that its prefill takes."""

    request: RequestView
    deadline: float
    seconds: float
    late: bool = False

    @property
    def bound(self) -> float:
        """Seconds from arrival within which the first token is wanted."""
        return self.deadline - self.request.arrival

    @property
    def yields(self) -> bool:
        """Whether it may be late or refused: no part of it was computed or delivered."""
        return not (self.request.started or self.request.generated)

    def hurried(self, done: float) -> bool:
        """Return whether it has little time to spare if its prefill ends at `done`."""
        request = self.request
        return request.deadline is None or done > request.arrival + HURRY_FRACTION * self.bound


def order_requests(
    waiting: Sequence[RequestView],
    begin: float,
    seconds: Callable[[RequestView], float],
    *,
    refuse: bool,
) -> ServiceOrder:
    """Order the requests and give up what cannot be kept.

    Args:
        waiting: all of them.
        begin: Time at which the first request can begin, in seconds on the requests' clock.
        seconds: Returns the seconds of a request's prefill, at the pace that it will have.
        refuse: Whether these seconds are certain enough to refuse a request.
    """
    places = [_Queued(r, _deadline(r), seconds(r)) for r in waiting]
    places.sort(key=lambda place: (place.request.priority, place.deadline))
    first = _overtaking(places, begin)
    at = begin + sum(place.seconds for place in first)
    places = [place for place in places if place not in first]
    _give_up(places, at)
    places.sort(key=lambda place: (place.request.priority, place.late, place.deadline))
    order = [place.request for place in first]
    refusals: list[Refusal] = []
    hurried = False
    for place in places:
        refusal = _refusal(place, at) if refuse and place.late else None
        if refusal is not None:
            refusals.append(refusal)
        else:
            order.append(place.request)
            at += place.seconds
            hurried = hurried or place.hurried(at)
    return ServiceOrder(order, refusals, hurried)


def _deadline(request: RequestView) -> float:
    """Return the deadline in seconds; a request that was preempted after a token goes first."""
    if request.generated:
        return -math.inf
    if request.deadline is not None:
        return request.deadline
    return request.arrival + UNBOUND_SECONDS + TTFT_PER_TOKEN * request.new


def _overtaking(places: Sequence[_Queued], begin: float) -> list[_Queued]:
    """Return the short prompts that go before the first, which has begun: they would miss their
    deadlines after it, and do not make it miss its own."""
    if not places or places[0].yields:
        return []
    begun, found = places[0], []
    spare, slack = OVERTAKING_FRACTION * begun.seconds, begun.deadline - begin - begun.seconds
    if slack > 0.0:
        spare = min(spare, slack)
    for place in places[1:]:
        ends = begin + LATE_SAFETY_FACTOR * (begun.seconds + place.seconds)
        late = place.request.deadline is not None and ends > place.deadline
        if late and place.seconds <= spare and place.request.priority == begun.request.priority:
            found.append(place)
            spare -= place.seconds
    return found


def _give_up(places: Sequence[_Queued], begin: float) -> None:
    """Mark the fewest that must be late; none of a higher priority is late for one of a lower."""
    at = begin
    longest: list[tuple[int, float, int, _Queued]] = []
    for i, place in enumerate(places):
        at += place.seconds
        if place.yields and place.request.deadline is not None:
            heapq.heappush(longest, (-place.request.priority, -place.seconds, -i, place))
        if at > place.deadline and longest and place.request.deadline is not None:
            *_, given_up = heapq.heappop(longest)
            given_up.late = True
            at -= given_up.seconds


def _refusal(place: _Queued, begins: float) -> Refusal | None:
    """Return a refusal if its prefill would begin later than `REFUSAL_FACTOR` times its bound."""
    request = place.request
    wait = begins - request.arrival
    if not place.yields or wait <= REFUSAL_FACTOR * place.bound:
        return None
    return Refusal(
        request.id,
        f"overloaded: prefill would begin {wait:.1f} s after arrival by prediction; "
        f"the first token is wanted within {place.bound:.1f} s",
    )
