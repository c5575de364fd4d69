"""The prompts that a replica computes before a new one: those that it keeps, by when they are due.

Where not all prompts can be in time, a replica gives up as few as possible: whenever one would be
late, the longest so far steps back (Moore 1968; `systems.auto.order` does so). A router that counts
all that is queued would refuse short prompts behind long ones that are given up for them.
"""

import heapq
import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple


class Place(NamedTuple):
    """A prompt in the line of a replica; times are on the router's clock."""

    due: float
    """When its first token is due."""
    seconds: float
    """Seconds that computing it takes."""
    since: float = -math.inf
    """When it came: it cannot begin before."""


class Ahead(NamedTuple):
    """What is computed before a new prompt."""

    until: float = -math.inf
    """When the replica is through with it."""
    longest: float = 0.0
    """Seconds of the longest prompt among it that the replica would give up for a shorter one."""


class Line:
    """The prompts that a replica keeps.

    Args:
        begin: when it is through with what it has begun.
        places: prompts that it has not begun.
    """

    def __init__(self, begin: float, places: Sequence[Place] = ()) -> None:
        self._begin = begin
        self._places = _kept(begin, sorted(places))
        self._dues = [place.due for place in self._places]
        self._ahead = [Ahead(begin)]
        for place in self._places:
            before = self._ahead[-1]
            until = max(before.until, place.since) + place.seconds
            self._ahead.append(Ahead(until, max(before.longest, place.seconds)))

    def ahead(self, due: float) -> Ahead:
        """Return what is computed before a prompt that is due then."""
        return self._ahead[bisect_right(self._dues, due)]

    def plus(self, place: Place, *, yields: bool) -> "Line":
        """Return the line with one prompt more, which may be given up, or is done in any case."""
        if yields:
            return Line(self._begin, [*self._places, place])
        return Line(max(self._begin, place.since) + place.seconds, self._places)


def _kept(begin: float, places: Sequence[Place]) -> list[Place]:
    """Leave out the fewest that must be late, the longest first; `places` are in order."""
    at, given_up = begin, set()
    kept: list[tuple[float, int]] = []
    for i, place in enumerate(places):
        at = max(at, place.since) + place.seconds
        heapq.heappush(kept, (-place.seconds, i))
        if at > place.due:
            seconds, longest = heapq.heappop(kept)
            given_up.add(longest)
            at += seconds
    return [place for i, place in enumerate(places) if i not in given_up]
