"""The router's table of replicas: their published state and the requests sent since."""

import math
from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from twolane.engine.prompt_work import PromptPace, PromptWork
from twolane.router.candidates import ReplicaCandidates, ReplicaLoad
from twolane.router.correction import TtftCorrection
from twolane.router.replica_queue import QueuedPrompt, ReplicaQueue
from twolane.router.state import FORMAT, ReplicaState, RoutedRequest

FEW = 64
"""Replicas up to which all are looked at for each request."""
PAGES_COST = 0.2
"""Seconds of cost for a replica all of whose KV pages are in use, in proportion for fewer."""
MAX_SESSIONS = 65_536
"""Most sessions in the table; the least recently used one is dropped first."""


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A replica as a routing policy sees it for one request."""

    name: str
    queued: PromptWork
    """Prefill work queued there."""
    pace: PromptPace
    """Prefill pace of the replica."""
    wait: float | None
    """Seconds until the replica has computed the prompts before this one; None: its pace is
    unknown."""
    longest: float
    """Prefill seconds of the longest of these that it would give up for a shorter one."""
    reused: int
    """Prompt tokens of this request in the replica's prefix cache."""
    pages_free: int
    pages: int
    page_size: int
    open: int
    """Number of requests that the router sent and that have not ended."""
    running: int
    """Number of requests in decode."""
    ttft: float | None
    """TTFT bound of this request in seconds."""
    correction: float
    """Factor by which first tokens have come later than predicted; 0 if any request counts as in
    time."""
    passed_over: float
    """Number of requests that went elsewhere since this replica got one, for each replica."""
    home: bool
    """Whether the session's latest request went to this replica."""


class SentRequest(NamedTuple):
    """A request that the router sent to a replica."""

    at: float
    """Time of sending, on the router's clock."""
    due: float
    """Time at which its first token is due."""
    predicted: float
    """Predicted seconds to its first token, without the correction; 0: not known."""
    work: PromptWork
    pages: int
    """Number of KV pages that it takes."""


@dataclass(slots=True)
class Replica:
    """One replica in the table."""

    name: str
    state: ReplicaState
    asked_at: float
    """Time at which the state was requested, on the router's clock."""
    known: frozenset[int] = frozenset()
    """Hashes of its landmarks."""
    sent: list[SentRequest] = field(default_factory=list)
    """Requests that the published state may not include."""
    queue: ReplicaQueue | None = None
    """Its predicted prefill queue; None: its pace is unknown."""
    assumed: dict[int, float] = field(default_factory=dict)
    """By hash of a landmark that sent requests will cache: the time of sending."""
    correction: TtftCorrection = field(default_factory=TtftCorrection)
    open: int = 0
    last_sent: int = 0
    """Sequence number of the last request sent to it."""
    noted: frozenset[int] = frozenset()
    """Those of `known` that `ReplicaCandidates` has."""

    @property
    def usable(self) -> bool:
        """Whether it can take a request."""
        state = self.state
        return state.ready and not state.draining and state.format == FORMAT

    @property
    def load(self) -> ReplicaLoad:
        """Its load, without the time that a request has until it is due."""
        state = self.state
        used = 1 - self.pages_free / state.pages if state.pages else 0.0
        seconds = state.prompt_pace.seconds(self.queued()) + PAGES_COST * max(0.0, used)
        return ReplicaLoad(seconds, self.open, self.last_sent, self.name)

    @property
    def pages_free(self) -> int:
        """Number of KV pages that are left when the requests sent since have theirs."""
        return self.state.pages_free - sum(sent.pages for sent in self.sent)

    def has(self, landmark: int) -> bool:
        """Return whether the replica has a prefix cached, or will have."""
        return landmark in self.known or landmark in self.assumed

    def reused(self, request: RoutedRequest) -> int:
        """Return the number of a request's prompt tokens that the replica has cached."""
        return request.landmarks.reused(self.has)

    def bound(self, request: RoutedRequest, reused: int) -> float | None:
        """Return the TTFT bound of a request in seconds; None: no bound."""
        if request.ttft is not None:
            return request.ttft
        return self.state.slo.first_token(request.prompt_tokens - reused)

    def queued(self) -> PromptWork:
        """Return the published prefill work plus that of the requests sent since."""
        work = self.state.queued
        for sent in self.sent:
            work = work.plus(sent.work)
        return work

    def form_queue(self) -> None:
        """Rebuild the queue from the published state and the requests sent since."""
        pace, state = self.state.prompt_pace, self.state
        waiting = state.yielding or []
        self.queue = None
        if pace:
            self.queue = ReplicaQueue.of(self.asked_at, state.queued, waiting, pace)
        for sent in self.sent:
            self.lengthen_queue(sent)

    def lengthen_queue(self, sent: SentRequest) -> None:
        """Add a sent request to the queue."""
        if self.queue is not None:
            prompt = QueuedPrompt(sent.due, self.state.prompt_pace.seconds(sent.work), sent.at)
            self.queue = self.queue.plus(prompt, yields=self.state.yielding is not None)


class Table:
    """The replicas of a model, as one router knows them. The clock is the caller's.

    Args:
        refuse_late: Whether requests are refused that no replica can answer in time.
    """

    def __init__(self, *, refuse_late: bool = True) -> None:
        self._refuse_late = refuse_late
        self._replicas: dict[str, Replica] = {}
        self._candidates = ReplicaCandidates()
        self._homes: OrderedDict[str, str] = OrderedDict()
        """Replica of each session's latest request."""
        self._requests = 0

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas.values())

    def __getitem__(self, name: str) -> Replica:
        return self._replicas[name]

    def publish(self, name: str, state: ReplicaState, asked_at: float) -> None:
        """Record the state that a replica published in answer to a query at `asked_at`."""
        replica = self._replicas.get(name)
        if replica is None:
            replica = self._replicas[name] = Replica(name, state, asked_at)
            replica.last_sent = self._requests
        replica.state, replica.asked_at = state, asked_at
        if state.digest is not None:
            replica.known = state.digest.as_set()
        replica.sent = [each for each in replica.sent if each.at > asked_at]
        replica.form_queue()
        # Seconds for which a sent request's prefix counts as cached, published or not.
        oldest = asked_at - 30.0
        self._note(replica)
        if replica.assumed and next(iter(replica.assumed.values())) < oldest:
            replica.assumed = {h: at for h, at in replica.assumed.items() if at >= oldest}

    def remove(self, name: str) -> None:
        """Forget a replica."""
        self._replicas.pop(name, None)
        self._candidates.remove(name)

    def views(self, request: RoutedRequest, now: float) -> list[ReplicaView]:
        """Return the replicas that can take a request, in order of their names."""
        return self._views(request, now, self._replicas)

    def candidates(
        self, request: RoutedRequest, now: float, names: Collection[str] = ()
    ) -> list[ReplicaView]:
        """Return those of the replicas that `choose` may choose: all of them where they are few.

        Args:
            request: The request.
            now: The time in seconds on the caller's clock.
            names: Names of which the least loaded are returned, too, if they can take a request.
        """
        if len(self._candidates) <= FEW:
            return self.views(request, now)
        home = self._homes.get(request.session or "", "")
        found = self._candidates.of(request.landmarks.hashes, (home, *names))
        return self._views(request, now, found)

    def _views(
        self, request: RoutedRequest, now: float, names: Collection[str]
    ) -> list[ReplicaView]:
        home = self._homes.get(request.session) if request.session is not None else None
        there = (self._replicas[name] for name in sorted(names))
        return [self._view(each, request, now, home) for each in there if each.usable]

    def _note(self, replica: Replica) -> None:
        """Note what a replica's state has changed for the choice of candidates."""
        if not replica.usable:
            self._candidates.remove(replica.name)
            return
        self._candidates.put(replica.load)
        if len(self._candidates) > FEW and replica.known is not replica.noted:
            self._candidates.note(replica.name, replica.known - replica.noted)
            replica.noted = replica.known

    def _view(
        self, replica: Replica, request: RoutedRequest, now: float, home: str | None
    ) -> ReplicaView:
        state = replica.state
        reused = replica.reused(request)
        bound = replica.bound(request, reused)
        ahead = replica.queue and replica.queue.ahead(now + (math.inf if bound is None else bound))
        return ReplicaView(
            name=replica.name,
            queued=replica.queued(),
            pace=state.prompt_pace,
            wait=max(0.0, ahead.until - now) if ahead else None,
            longest=ahead.longest if ahead else 0.0,
            reused=reused,
            pages_free=replica.pages_free,
            pages=state.pages,
            page_size=state.page_size,
            open=replica.open,
            running=state.running,
            ttft=bound,
            correction=replica.correction.factor if self._refuse_late else 0.0,
            passed_over=(self._requests - replica.last_sent) / len(self._candidates),
            home=replica.name == home,
        )

    def sent(
        self, name: str, request: RoutedRequest, now: float, predicted: float = 0.0
    ) -> SentRequest:
        """Record that a request goes to a replica; return the value to pass to `began` and
        `ended`.

        Args:
            name: Name of the replica.
            request: The request.
            now: The time in seconds on the caller's clock.
            predicted: Predicted seconds to its first token; 0: not known.
        """
        replica = self._replicas[name]
        reused = replica.reused(request)
        new = request.prompt_tokens - reused
        pages = -(-(new + request.output_tokens) // replica.state.page_size)
        bound = replica.bound(request, reused)
        due = now + (math.inf if bound is None else bound)
        sent = SentRequest(now, due, predicted, PromptWork.of(new, reused), pages)
        replica.sent.append(sent)
        replica.lengthen_queue(sent)
        left = request.landmarks.left_by(request.prompt_tokens)
        for landmark in left:
            replica.assumed.pop(landmark, None)  # so that the oldest come first
            replica.assumed[landmark] = now
        replica.open += 1
        self._requests += 1
        replica.last_sent = self._requests
        self._note(replica)
        self._candidates.took(name)
        if len(self._candidates) > FEW:
            self._candidates.note(name, left)
        if request.session is not None:
            self._homes[request.session] = name
            self._homes.move_to_end(request.session)
            if len(self._homes) > MAX_SESSIONS:
                self._homes.popitem(last=False)
        return sent

    def began(self, name: str, sent: SentRequest, now: float) -> None:
        """Learn from the first token of a request that was sent to a replica."""
        if name in self._replicas and sent.predicted and sent.due < math.inf:
            correction = self._replicas[name].correction
            correction.note(sent.predicted, sent.at, now, sent.due - sent.at)

    def ended(self, name: str, sent: SentRequest | None = None) -> None:
        """Record that a request at a replica has ended, in whatever way.

        Args:
            name: Name of the replica.
            sent: the request, if nothing of it is left to be computed, whatever the state says.
        """
        if (replica := self._replicas.get(name)) is None:
            return
        replica.open -= 1
        if sent in replica.sent:
            replica.sent.remove(sent)
            replica.form_queue()
        self._note(replica)
