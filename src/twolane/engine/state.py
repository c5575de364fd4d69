"""The engine's state: which request is where, and what is in flight."""

import bisect
import heapq
import math
from collections import defaultdict, deque
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from msgspec.structs import replace

from twolane.common.prompt_work import PromptPaces, PromptWork, WaitingPrompt
from twolane.common.vocabulary import EXCLUSIVE, LaneName
from twolane.engine.kv import KVBooks
from twolane.engine.launch_costs import LaunchCosts
from twolane.engine.messages import (
    GRAMMAR,
    FinishReason,
    Launched,
    Output,
    PackedLogprobs,
    Refused,
    RefusedCode,
)
from twolane.engine.pacing import Pacer
from twolane.engine.request import Flight, Phase, PrefillBatch, Request
from twolane.engine.trace import Trace
from twolane.estimate.base import Estimator
from twolane.lanes.base import Lanes, Sampled
from twolane.slo import Slo
from twolane.systems.view import LaneView

LANDED_KEPT = 256
"""Number of finished launches that are remembered for each lane."""
QUEUE_SECONDS = 0.02
"""Seconds for which the count of queued tokens holds: with a long queue it takes a while."""
MOST_YIELDING = 128
"""Number of queued prompts that are told one by one; the others are told as a sum."""
HALF_LIFE_TOKENS = 16384.0
"""The weight of earlier launches with prompts halves within this many prompt tokens: a few short
prompts do not outweigh a queue of long ones."""
LEAST_TOKENS = 64.0
"""Each prompt counts as one of at least this many tokens: shorter ones take as long."""
ELDER_SHARE = 8
"""One admission in this many is that of the request that waits longest."""
FIRST_PRIORITY = -(2**31)
"""A priority before all that requests can have."""


class QueueCount(NamedTuple):
    """What is queued at one moment."""

    at: float = -math.inf
    """The moment, in seconds on the lanes' clock."""
    work: PromptWork = PromptWork()
    yielding: list[WaitingPrompt] | None = None
    """The largest prompts that may be given up for smaller ones; None: the system gives up none."""


@dataclass(slots=True)
class Counters:
    """What the engine has counted since its start."""

    prefix_queries: int = 0
    """Prompt tokens that were looked up in the prefix cache."""
    prefix_hits: int = 0
    """Prompt tokens that were found there."""
    preemptions: int = 0
    """Requests that lost their pages to others and were recomputed."""
    broken: int = 0
    """Requests that ended because the model gave NaN or infinity."""
    prompt_seconds: float = 0.0
    """Seconds of the latest launches with prompts; earlier ones count for less."""
    prompt_tokens: float = 0.0
    """Prompt tokens of the same, in proportion to the layers that were computed."""
    paces: PromptPaces = field(default_factory=PromptPaces)
    """What prompts take by their number, tokens and attention."""
    seconds: dict[tuple[LaneName, int], float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of device work, by lane and units."""

    @property
    def prompt_token_seconds(self) -> float:
        """Seconds that launches with prompts have lately taken for a prompt token; 0: not known."""
        return self.prompt_seconds / self.prompt_tokens if self.prompt_tokens else 0.0

    def note_prompts(self, seconds: float, work: PromptWork) -> None:
        """Count a launch with prompts."""
        tokens = max(work.tokens, LEAST_TOKENS * work.prompts)
        kept = 0.5 ** (tokens / HALF_LIFE_TOKENS)
        self.prompt_seconds = kept * self.prompt_seconds + seconds
        self.prompt_tokens = kept * self.prompt_tokens + tokens
        self.paces.note(work, seconds)


@dataclass(slots=True)
class State:
    """Everything that the loop changes; only the loop's thread touches it."""

    kv: KVBooks
    lanes: Lanes
    layers: int
    estimator: Estimator
    trace: Trace = field(default_factory=Trace)
    slo: Slo = field(default_factory=Slo)
    """The latency bounds of requests that bring none, as systems plan for them."""
    pacer: Pacer = field(default_factory=Pacer)
    requests: dict[str, Request] = field(default_factory=dict)
    """Those that are not finished, by id."""
    queue: list[Request] = field(default_factory=list)
    """Requests that wait and hold nothing, by rank."""
    held: dict[str, list[Request]] = field(default_factory=dict)
    """Requests that are held back until the one of that id has its first token, or ends."""
    started: list[Request] = field(default_factory=list)
    """Requests that wait between two chunks of their prompts, by rank."""
    admissions: int = 0
    """Requests admitted since the one that waited longest was last put first."""
    batches: int = 0
    """Number of prefill batches that were opened."""
    open: PrefillBatch | None = None
    """The batch that slices and hybrid passes refer to: layers are left to launch."""
    parked: PrefillBatch | None = None
    """The batch that was preempted between two slices."""
    launched: list[PrefillBatch] = field(default_factory=list)
    """Batches that are launched to the last layer and not done, oldest first."""
    decoding: list[Request] = field(default_factory=list)
    """Requests in decode, by rank."""
    flights: list[Flight] = field(default_factory=list)
    """Launches that were not reaped, in launch order."""
    landed: dict[LaneName, deque[Flight]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=LANDED_KEPT))
    )
    """The latest that were, by lane, as far as a launch of the other lane may have overlapped."""
    unlearnt: list[Flight] = field(default_factory=list)
    """Those that were reaped since the estimator last learnt, in the order of their launches."""
    progressed: dict[LaneName, float] = field(default_factory=dict)
    """When a step of a launch in each lane was last found finished, on the lanes' clock."""
    counters: Counters = field(default_factory=Counters)
    unmasked: list[Request] = field(default_factory=list)
    """Constrained requests whose mask is to be computed, for a token has been delivered."""
    owed: list[Flight] = field(default_factory=list)
    """Launches that wait for masks (`Flight.late`), in launch order."""
    outputs: dict[tuple[str, float | None], Output] = field(default_factory=dict)
    """News for the API process, by request and by when its tokens are due."""
    refused: list[Refused] = field(default_factory=list)
    launches: list[Launched] = field(default_factory=list)
    watched_until: float = -math.inf
    """What is reaped later is no news of `launches`."""
    gives_up: bool = False
    """Whether the system gives up prompts that cannot be in time for smaller ones."""
    queued: QueueCount = field(default_factory=QueueCount)
    """What was queued when that was last counted."""
    launching: LaunchCosts = field(init=False)
    offered: frozenset[int] = field(init=False)
    """Units that a lane may be given."""

    def __post_init__(self) -> None:
        self.launching = LaunchCosts(self.layers)
        self.offered = frozenset(units for level in self.lanes.levels for units in level if units)

    def now(self) -> float:
        """Seconds on the lanes' clock."""
        return self.lanes.clock()

    def count_queued(self) -> QueueCount:
        """Return what is still to be computed for the requests without a first token.

        What the prefix cache has is left out, and so are layers that are done. The answer is kept
        for `QUEUE_SECONDS` while anything is in prefill.
        """
        now = self.now()
        if len(self.requests) == len(self.decoding):
            self.queued = QueueCount(now, yielding=[] if self.gives_up else None)
        elif now - self.queued.at >= QUEUE_SECONDS or not self.queued.work.tokens:
            prompts = tokens = 0
            pairs = 0.0
            yielding: list[WaitingPrompt] = []
            for request in chain(self.queue, self.started, *self.held.values()):
                new = request.known_new
                prompts, tokens = prompts + 1, tokens + new
                pairs += new * (len(request.tokens) - new / 2)
                if not self.gives_up or not request.yields:
                    continue
                if (bound := request.slo.first_token(new)) is not None:
                    left = request.arrival + bound - now
                    yielding.append(WaitingPrompt(new, len(request.tokens) - new, left))
            work = PromptWork(prompts, tokens, pairs)
            for batch in filter(None, (self.open, self.parked, *self.launched)):
                work = work.plus(batch.work, 1 - batch.layers_done / self.layers)
            largest = heapq.nlargest(MOST_YIELDING, yielding) if self.gives_up else None
            self.queued = QueueCount(now, work, largest)
        return self.queued

    def adapters_named(self) -> set[int]:
        """The slots of adapters that requests or launches name."""
        flown = {held.adapter for flight in self.flights for _, held in flight.rows}
        return flown | {request.adapter for request in self.requests.values()}

    def wait(self, request: Request) -> None:
        """Put a request where it waits for prefill."""
        request.phase = Phase.WAITING
        line = self.started if request.started else self.queue
        bisect.insort(line, request, key=lambda r: r.rank)

    def advance_elder(self) -> None:
        """Put the request that waits longest first, once in `ELDER_SHARE` admissions: priorities
        make nobody wait for ever."""
        if self.admissions < ELDER_SHARE or not self.queue:
            return
        self.admissions = 0
        if self.queue[0].priority < self.queue[-1].priority:
            eldest = min(self.queue, key=lambda r: r.order)
            self.queue.remove(eldest)
            eldest.priority = FIRST_PRIORITY
            self.wait(eldest)

    def unwait(self, request: Request) -> None:
        """Take a request out of the waiting line."""
        if request.leader is not None:
            self.held[request.leader].remove(request)
            if not self.held[request.leader]:
                del self.held[request.leader]
        else:
            (self.started if request.started else self.queue).remove(request)

    def hold(self, request: Request, leader: str) -> None:
        """Let a request wait unseen."""
        request.leader = leader
        self.held.setdefault(leader, []).append(request)

    def release_held(self, leader: str) -> None:
        """Let the requests that were held back for the bearer of this name wait in the queue."""
        for request in self.held.pop(leader, ()):
            request.leader = None
            self.wait(request)

    def start_decode(self, request: Request) -> None:
        """Its prompt is done."""
        request.phase = Phase.DECODE
        bisect.insort(self.decoding, request, key=lambda r: r.rank)

    def release(self, request: Request) -> None:
        """Give up what the request holds; it is freed when the launches that name it have ended."""
        if request.phase is Phase.DECODE:
            self.decoding.remove(request)
        if request.allocation is not None:
            self.kv.give_up(request.allocation)
        request.allocation, request.owed = None, 0
        request.context, request.to_generate = 0, request.limit - len(request.tokens)
        request.looked_up = None  # by now it has more tokens to find
        request.prompt_logprobs = PackedLogprobs()

    def send_back(self, request: Request) -> None:
        """The request loses its pages and will be computed anew from prompt and sent tokens."""
        self.release(request)
        request.phase = Phase.WAITING
        if request.sits_out:  # or the launch that ends its prompt would wait for the mask
            self.hold(request, masks_of(request.id))
        else:
            self.wait(request)
        self.counters.preemptions += 1
        self.trace.request_event(request.id, "preempted", self.now())

    def finish(self, request: Request, reason: FinishReason, kept: int | None = None) -> None:
        """End a request that was accepted; `kept`: of its output tokens, None: all."""
        self._leave(request)
        key = request.id, request.due
        news = self.outputs.get(key) or Output(request.id, [], due=request.due)
        self.outputs[key] = replace(news, finish=reason, times=request.times())
        tokens = request.generated if kept is None else kept
        self.trace.request_end(request.id, self.now(), reason, tokens)

    def fail(
        self,
        request: Request,
        message: str,
        code: RefusedCode = "invalid",
        *,
        field: str | None = None,
    ) -> None:
        """End a request that was accepted and does not go on; the client is told why, and which
        field is at fault."""
        self._leave(request)
        self.refused.append(Refused(request.id, code, message, field))
        reason = "refused" if code == "refused" else "abort"
        self.trace.request_end(request.id, self.now(), reason, request.generated)

    def fail_grammar(self, request: Request, why: Exception) -> None:
        """The same of a request whose grammar turns out to be none that can be followed."""
        self.fail(request, f"{GRAMMAR} cannot be followed: {why}", field=GRAMMAR)

    def _leave(self, request: Request) -> None:
        if request.phase is Phase.WAITING:
            self.unwait(request)
        self.release(request)
        request.phase = Phase.FINISHED
        del self.requests[request.id]
        self.release_held(request.id)

    def say(self, request: Request, sampled: Sampled) -> None:
        """Add a token to the news of this turn; `request` has it already."""
        key = request.id, request.due
        news = self.outputs.get(key)
        if news is None and sampled.logprobs is None and request.generated > 1:
            news = Output(request.id, [sampled.token], due=request.due)
        else:
            news = _with_token(news or Output(request.id, [], due=request.due), request, sampled)
        self.outputs[key] = news

    def drop_empty_batches(self) -> None:
        """A batch whose last request has left is not launched any further."""
        if self.open and not self.open.chunks:
            self._drop(self.open)
            self.open = None
        if self.parked and not self.parked.chunks:
            self._drop(self.parked)
            self.parked = None

    def _drop(self, batch: PrefillBatch) -> None:
        if batch.layers_launched:
            self.lanes.drop(batch.id)

    def lane_views(self, now: float) -> dict[LaneName, LaneView]:
        """What is queued in each lane, and until when by prediction."""
        costs = self.launching.longest
        views = {lane: LaneView(launching=cost) for lane, cost in costs.items()}
        for flight in self.flights:
            lane, units = flight.launch.lane, flight.launch.units
            before, predicted = views[lane], flight.predicted
            lanes = {*EXCLUSIVE[lane], *(each.lane for each in flight.after if not each.done)}
            ahead = [views[name] for name in lanes if views[name].queued]
            ends = [view.until for view in ahead if view.until is not None]
            if predicted is None or len(ends) < len(ahead):
                until = None
            elif ends:
                until = max(ends) + predicted
            else:
                begun = flight.ticket.start
                until = max(now, (now if begun is None else begun) + predicted)
            views[lane] = LaneView(before.queued + 1, units, until, costs[lane])
        return views


def _with_token(news: Output, request: Request, sampled: Sampled) -> Output:
    """The news of a request and its latest token."""
    first = request.generated == 1
    asked = request.sampling.params.prompt_logprobs is not None
    logprobs = news.logprobs
    if sampled.logprobs is not None:
        logprobs = [*(logprobs or ()), sampled.logprobs]
    return Output(
        id=news.id,
        tokens=[*news.tokens, sampled.token],
        cached=request.cached if first else news.cached,
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs if first and asked else news.prompt_logprobs,
        embedding=sampled.embedding if first else news.embedding,
        due=news.due,
    )


def masks_of(request_id: str) -> str:
    """The key in `State.held` of a request whose next mask is being computed; no request has it as
    its id."""
    return f"masks of {request_id}"
