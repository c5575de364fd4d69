"""What a router knows of its replicas: what they published, and what it has sent them since."""

import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from twolane.common.prompt_work import PromptPace, PromptWork
from twolane.router.replica_queue import QueuedPrompt, ReplicaQueue
from twolane.router.state import FORMAT, Ask, ReplicaState

ASSUMED_SECONDS = 30.0
"""Seconds for which the prefix of a request that was sent counts as known, published or not."""
MOST_SESSIONS = 65_536
"""Number of sessions that are remembered; the one unused longest is forgotten first."""


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One replica as seen for one request."""

    name: str
    queued: PromptWork
    """What was to be computed before this request when the replica told its state."""
    pace: PromptPace
    """Seconds that prompts take there."""
    wait: float | None
    """Seconds until the replica is through with the prompts that it keeps before this one; None:
    its pace is not known."""
    longest: float
    """Seconds of the longest of these that it would give up for a shorter one."""
    reused: int
    """Prompt tokens of this request that the replica has."""
    pages_free: int
    pages: int
    page_size: int
    open: int
    """Requests that the router has sent and that have not ended."""
    running: int
    """Requests in decode."""
    ttft: float | None
    """Bound in seconds on the first token of this request."""
    passed_over: int
    """Requests that were sent elsewhere since this replica got one."""
    home: bool
    """Whether the replica had the session's latest request."""


class Sent(NamedTuple):
    """A request that a replica was sent."""

    at: float
    """When, on the router's clock."""
    due: float
    """When its first token is due."""
    work: PromptWork
    pages: int
    """KV pages that it takes."""


@dataclass(slots=True)
class Replica:
    """One replica in the table."""

    name: str
    state: ReplicaState
    asked_at: float
    """When the state was asked for, on the router's clock."""
    known: frozenset[int] = frozenset()
    """Hashes of its landmarks."""
    sent: list[Sent] = field(default_factory=list)
    """Requests that the state may lack."""
    queue: ReplicaQueue | None = None
    """Its prompts in order; None: their seconds are not known."""
    assumed: dict[int, float] = field(default_factory=dict)
    """Hashes of landmarks that requests will have put there, with when they were sent."""
    open: int = 0
    last_sent: int = 0
    """Number of the last request that it got."""

    def has(self, landmark: int) -> bool:
        """Whether a prefix is there, or will be."""
        return landmark in self.known or landmark in self.assumed

    def reused(self, ask: Ask) -> int:
        """Prompt tokens of a request that the replica has; shorter prefixes of one are there."""
        tokens, hashes = ask.landmarks
        found = bisect_right(range(len(hashes)), False, key=lambda i: not self.has(hashes[i]))
        return tokens[found - 1] if found else 0

    def bound(self, ask: Ask, reused: int) -> float | None:
        """Bound in seconds on a request's first token."""
        if ask.ttft is not None:
            return ask.ttft
        return self.state.slo.first_token(ask.prompt_tokens - reused)

    def queued(self) -> PromptWork:
        """What was to be computed, as published, with what was sent since."""
        work = self.state.queued
        for sent in self.sent:
            work = work.plus(sent.work)
        return work

    def form_queue(self) -> None:
        """Put in order what the state tells, and what was sent since."""
        pace, state = self.state.prompt_pace, self.state
        yielding = state.yielding or []
        begun = state.queued
        for prompt in yielding:
            begun = begun.plus(prompt.work, -1)
        begin = self.asked_at + max(0.0, pace.seconds(begun))
        prompts = [QueuedPrompt(self.asked_at + p.left, pace.seconds(p.work)) for p in yielding]
        self.queue = ReplicaQueue(begin, prompts) if pace else None
        for sent in self.sent:
            self.lengthen_queue(sent)

    def lengthen_queue(self, sent: Sent) -> None:
        """Put a request into the queue."""
        if self.queue is not None:
            prompt = QueuedPrompt(sent.due, self.state.prompt_pace.seconds(sent.work), sent.at)
            self.queue = self.queue.plus(prompt, yields=self.state.yielding is not None)


class Table:
    """The replicas of a model, as one router knows them. The clock is the caller's."""

    def __init__(self) -> None:
        self._replicas: dict[str, Replica] = {}
        self._homes: OrderedDict[str, str] = OrderedDict()
        """Replica of each session's latest request."""
        self._requests = 0

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas.values())

    def __getitem__(self, name: str) -> Replica:
        return self._replicas[name]

    def publish(self, name: str, state: ReplicaState, asked_at: float) -> None:
        """Take in a replica's answer to what was asked at that time."""
        replica = self._replicas.get(name)
        if replica is None:
            replica = self._replicas[name] = Replica(name, state, asked_at)
            replica.last_sent = self._requests
        replica.state, replica.asked_at = state, asked_at
        if state.digest is not None:
            replica.known = state.digest.as_set()
        replica.sent = [each for each in replica.sent if each.at > asked_at]
        replica.form_queue()
        oldest = asked_at - ASSUMED_SECONDS
        if replica.assumed and next(iter(replica.assumed.values())) < oldest:
            replica.assumed = {h: at for h, at in replica.assumed.items() if at >= oldest}

    def remove(self, name: str) -> None:
        """Forget a replica."""
        self._replicas.pop(name, None)

    def views(self, ask: Ask, now: float) -> list[ReplicaView]:
        """Return the replicas that can be sent a request, in order of their names."""
        home = self._homes.get(ask.session) if ask.session is not None else None
        return [self._view(each, ask, now, home) for each in self._usable(ask)]

    def _usable(self, ask: Ask) -> Iterator[Replica]:
        for name in sorted(self._replicas):
            state = self._replicas[name].state
            if state.ready and not state.draining and state.format == FORMAT:
                yield self._replicas[name]

    def _view(self, replica: Replica, ask: Ask, now: float, home: str | None) -> ReplicaView:
        state = replica.state
        reused = replica.reused(ask)
        bound = replica.bound(ask, reused)
        ahead = replica.queue and replica.queue.ahead(now + (math.inf if bound is None else bound))
        return ReplicaView(
            name=replica.name,
            queued=replica.queued(),
            pace=state.prompt_pace,
            wait=max(0.0, ahead.until - now) if ahead else None,
            longest=ahead.longest if ahead else 0.0,
            reused=reused,
            pages_free=state.pages_free - sum(sent.pages for sent in replica.sent),
            pages=state.pages,
            page_size=state.page_size,
            open=replica.open,
            running=state.running,
            ttft=bound,
            passed_over=self._requests - replica.last_sent,
            home=replica.name == home,
        )

    def sent(self, name: str, ask: Ask, now: float) -> Sent:
        """Note that a request goes to a replica; return what `ended` takes."""
        replica = self._replicas[name]
        reused = replica.reused(ask)
        new = ask.prompt_tokens - reused
        pages = -(-(new + ask.output_tokens) // replica.state.page_size)
        bound = replica.bound(ask, reused)
        due = now + (math.inf if bound is None else bound)
        sent = Sent(now, due, PromptWork.of(new, reused), pages)
        replica.sent.append(sent)
        replica.lengthen_queue(sent)
        for landmark in ask.landmarks.hashes:
            replica.assumed.pop(landmark, None)  # so that the oldest come first
            replica.assumed[landmark] = now
        replica.open += 1
        self._requests += 1
        replica.last_sent = self._requests
        if ask.session is not None:
            self._homes[ask.session] = name
            self._homes.move_to_end(ask.session)
            if len(self._homes) > MOST_SESSIONS:
                self._homes.popitem(last=False)
        return sent

    def ended(self, name: str, sent: Sent | None = None) -> None:
        """Note that a request of a replica has ended, however it did.

        Args:
            name: of the replica.
            sent: the request, if nothing of it is left to be computed, whatever the state says.
        """
        if (replica := self._replicas.get(name)) is None:
            return
        replica.open -= 1
        if sent in replica.sent:
            replica.sent.remove(sent)
            replica.form_queue()
