"""Predicted prefill queue of a replica: its prompts in order of their deadlines, without those that
it gives up.

Where not all prompts can be in time, a replica gives up as few as possible: whenever one would be
late, the longest so far steps back (Moore 1968; `systems.auto.order` does so), and of equal ones
the last: it has the most time left, should others take less than predicted. A router that counts
all that is queued would refuse short prompts because of long ones that are given up for them.
"""

import heapq
import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from twolane.engine.prompt_work import PromptPace, PromptWork, WaitingPrompt


class QueuedPrompt(NamedTuple):
    """A prompt queued at a replica; times are on the router's clock."""

    due: float
    """Time at which its first token is due."""
    seconds: float
    """Seconds that its prefill takes."""
    since: float = -math.inf
    """Arrival time, before which its prefill cannot begin."""


class WorkAhead(NamedTuple):
    """Prefill work that a replica does before a new prompt."""

    until: float = -math.inf
    """Time at which it is done."""
    longest: float = 0.0
    """Prefill seconds of the longest prompt in it that the replica would give up for a shorter
    one."""


class ReplicaQueue:
    """The prompts that a replica computes, in order of their deadlines.

    Args:
        begin: time at which it has computed the prompts that it has begun.
        prompts: The queued prompts, which the replica has not begun.
    """

    def __init__(self, begin: float, prompts: Sequence[QueuedPrompt] = ()) -> None:
        self._begin = begin
        self._prompts = _without_late(begin, sorted(prompts))
        self._dues = [prompt.due for prompt in self._prompts]
        self._ahead = [WorkAhead(begin)]
        for prompt in self._prompts:
            before = self._ahead[-1]
            until = max(before.until, prompt.since) + prompt.seconds
            self._ahead.append(WorkAhead(until, max(before.longest, prompt.seconds)))

    @classmethod
    def of(
        cls, at: float, queued: PromptWork, waiting: Sequence[WaitingPrompt], pace: PromptPace
    ) -> "ReplicaQueue":
        """Return the queue of a replica that has published its work.

        Args:
            at: Time of the publication, in seconds.
            queued: The work of all prompts, of those that it has begun, too.
            waiting: Those of them that it may give up.
            pace: Its prefill pace.
        """
        begun = queued
        for prompt in waiting:
            begun = begun.plus(prompt.work, -1)
        prompts = [QueuedPrompt(at + p.left, pace.seconds(p.work)) for p in waiting]
        return cls(at + max(0.0, pace.seconds(begun)), prompts)

    def ahead(self, due: float) -> WorkAhead:
        """Return the work before a prompt whose first token is due at `due`."""
        return self._ahead[bisect_right(self._dues, due)]

    def plus(self, prompt: QueuedPrompt, *, yields: bool) -> "ReplicaQueue":
        """Return the queue with one more prompt, which is never given up unless it `yields`."""
        if yields:
            return ReplicaQueue(self._begin, [*self._prompts, prompt])
        return ReplicaQueue(max(self._begin, prompt.since) + prompt.seconds, self._prompts)


def _without_late(begin: float, prompts: Sequence[QueuedPrompt]) -> list[QueuedPrompt]:
    """Return the prompts without the fewest that must be late, longest first; `prompts` are in
    order."""
    at, given_up = begin, set()
    kept: list[tuple[float, int]] = []
    for i, prompt in enumerate(prompts):
        at = max(at, prompt.since) + prompt.seconds
        heapq.heappush(kept, (-prompt.seconds, -i))
        if at > prompt.due:
            seconds, longest = heapq.heappop(kept)
            given_up.add(-longest)
            at += seconds
    return [prompt for i, prompt in enumerate(prompts) if i not in given_up]
