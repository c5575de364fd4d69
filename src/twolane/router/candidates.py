"""The replicas that are looked at for a request, where there are many.

To predict the first token at each of a thousand replicas takes the router as long as a decode step.
Of those that have nothing of a prompt, all but the least loaded are worse than these. So what is
looked at are the least loaded, those that are known to have the longest prefixes of the prompt, the
one of its session and the one that has been passed over longest.
"""

import heapq
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

LEAST_LOADED, WITH_PREFIX = 32, 16
"""Replicas that are looked at since they are least loaded, and since they have a prefix."""
HOLDERS = 128
"""Most replicas that are known for each landmark: those that had it last."""
MAX_LANDMARKS = 1 << 20
"""Most landmarks whose replicas are known; those that were noted first are forgotten."""


class ReplicaLoad(NamedTuple):
    """Load of a replica; the least goes first."""

    seconds: float
    """Prefill seconds that are queued, and the cost of the KV pages in use."""
    open: int
    """Requests that the router sent and that have not ended."""
    last_sent: int
    """Sequence number of the last request sent to it."""
    name: str


class ReplicaCandidates:
    """Finds the replicas that are worth a look."""

    def __init__(self) -> None:
        self._ordered: list[ReplicaLoad] = []
        """Loads of the replicas that can take a request, ascending."""
        self._loads: dict[str, ReplicaLoad] = {}
        self._turns: OrderedDict[str, None] = OrderedDict()
        """The replicas by their last request, the one passed over longest first."""
        self._holders: OrderedDict[int, tuple[str, ...]] = OrderedDict()
        """By hash of a landmark: the replicas that have it, the latest first."""

    def __len__(self) -> int:
        return len(self._ordered)

    def put(self, load: ReplicaLoad) -> None:
        """Note the load of a replica that can take a request."""
        if (before := self._loads.get(load.name)) is not None:
            del self._ordered[bisect_left(self._ordered, before)]
        self._loads[load.name] = load
        insort(self._ordered, load)
        self._turns.setdefault(load.name)

    def remove(self, name: str) -> None:
        """Note that a replica takes no request, until its load is noted again."""
        if (before := self._loads.pop(name, None)) is not None:
            del self._ordered[bisect_left(self._ordered, before)]
            del self._turns[name]

    def took(self, name: str) -> None:
        """Note that a replica was sent a request."""
        if name in self._turns:
            self._turns.move_to_end(name)

    def note(self, name: str, landmarks: Iterable[int]) -> None:
        """Note that a replica has these landmarks, given as hashes."""
        for landmark in landmarks:
            others = (each for each in self._holders.pop(landmark, ()) if each != name)
            self._holders[landmark] = (name, *islice(others, HOLDERS - 1))
        while len(self._holders) > MAX_LANDMARKS:
            self._holders.popitem(last=False)

    def of(self, landmarks: Sequence[int], more: Collection[str]) -> set[str]:
        """Return the names of the replicas to look at for a prompt.

        Args:
            landmarks: Hashes of its landmarks, shortest prefix first.
            more: Further names, of which the least loaded are looked at, too.
        """
        names = set[str]()
        for landmark in reversed(landmarks):
            names.update(self._least(WITH_PREFIX, self._holders.get(landmark, ())))
            if len(names) >= WITH_PREFIX:
                break
        names.update(self._least(LEAST_LOADED, more))
        names.update(each.name for each in self._ordered[:LEAST_LOADED])
        names.update(islice(self._turns, 1))
        return names

    def _least(self, count: int, names: Collection[str]) -> Collection[str]:
        """Return the least loaded of some replicas, of those that can take a request."""
        able = {*names} & self._loads.keys()
        if len(able) <= count:
            return able
        return heapq.nsmallest(count, able, key=self._loads.__getitem__)
