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


class QueuedPrompt(NamedTuple):
    """A prompt that a replica has; times are on the router's clock."""

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


class ReplicaQueue:
    """The prompts that a replica keeps.

    Args:
        begin: when it is through with what it has begun.
        prompts: those that it has not begun.
    """

    def __init__(self, begin: float, prompts: Sequence[QueuedPrompt] = ()) -> None:
        self._begin = begin
        self._prompts = _kept(begin, sorted(prompts))
        self._dues = [prompt.due for prompt in self._prompts]
        self._ahead = [Ahead(begin)]
        for prompt in self._prompts:
            before = self._ahead[-1]
            until = max(before.until, prompt.since) + prompt.seconds
            self._ahead.append(Ahead(until, max(before.longest, prompt.seconds)))

    def ahead(self, due: float) -> Ahead:
        """Return what is computed before a prompt that is due then."""
        return self._ahead[bisect_right(self._dues, due)]

    def plus(self, prompt: QueuedPrompt, *, yields: bool) -> "ReplicaQueue":
        """Return the queue with one prompt more, which may be given up, or is done in any case."""
        if yields:
            return ReplicaQueue(self._begin, [*self._prompts, prompt])
        return ReplicaQueue(max(self._begin, prompt.since) + prompt.seconds, self._prompts)


def _kept(begin: float, prompts: Sequence[QueuedPrompt]) -> list[QueuedPrompt]:
    """Leave out the fewest that must be late, the longest first; `prompts` are in order."""
    at, given_up = begin, set()
    kept: list[tuple[float, int]] = []
    for i, prompt in enumerate(prompts):
        at = max(at, prompt.since) + prompt.seconds
        heapq.heappush(kept, (-prompt.seconds, i))
        if at > prompt.due:
            seconds, longest = heapq.heappop(kept)
            given_up.add(longest)
            at += seconds
    return [prompt for i, prompt in enumerate(prompts) if i not in given_up]
