"""The engine's state: where each request is, and which launches are in flight."""

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from twolane.devices import EXCLUSIVE, LaneName
from twolane.engine.decode_rows import DecodingRequests
from twolane.engine.kv.manager import KVCacheManager
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
from twolane.engine.prompt_work import PromptPaces, PromptWork
from twolane.engine.request import InFlightLaunch, Phase, PrefillBatch, Request
from twolane.engine.trace import Trace
from twolane.engine.waiting_queue import QueueCount, WaitingQueue, masks_of
from twolane.estimate.base import Estimator
from twolane.lanes.base import Lanes, Sampled
from twolane.slo import Slo
from twolane.systems.view import LaneView

FINISHED_KEPT = 256
"""Number of finished launches of each lane that are remembered."""
QUEUE_SECONDS = 0.02
"""The queued tokens are counted again after this many seconds; a long queue takes a while to
count."""
MIN_TOKENS = 64.0
"""Each prompt counts as one of at least this many tokens: shorter ones take as long."""


@dataclass(slots=True)
class Counters:
    """Counters since the engine's start."""

    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    """Prompt tokens found in the prefix cache."""
    preemptions: int = 0
    """Requests that lost their pages to others and were recomputed."""
    broken: int = 0
    """Requests that ended because their logits were NaN or infinite."""
    prompt_seconds: float = 0.0
    """Seconds of launches with prompts, a sum in which earlier launches have less weight."""
    prompt_tokens: float = 0.0
    """Prompt tokens of these launches, each counted by the share of the layers that they
    computed."""
    paces: PromptPaces = field(default_factory=PromptPaces)
    """Measured seconds for each prompt, each token and each pair of tokens that attention reads."""
    seconds: dict[tuple[LaneName, int], float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of device work, by lane and units."""

    @property
    def prompt_token_seconds(self) -> float:
        """Mean seconds of the latest launches for one prompt token; 0 if there were none."""
        return self.prompt_seconds / self.prompt_tokens if self.prompt_tokens else 0.0

    def note_prompts(self, seconds: float, work: PromptWork) -> None:
        """Count a launch with prompts."""
        tokens = max(work.tokens, MIN_TOKENS * work.prompts)
        # The weight of earlier launches with prompts halves within this many prompt tokens: a few
        # short prompts do not outweigh a queue of long ones.
        kept = 0.5 ** (tokens / 16384.0)
        self.prompt_seconds = kept * self.prompt_seconds + seconds
        self.prompt_tokens = kept * self.prompt_tokens + tokens
        self.paces.note(work, seconds)


@dataclass(slots=True)
class State:
    """Everything that the loop changes. Only the loop's thread uses it."""

    kv: KVCacheManager
    lanes: Lanes
    layers: int
    estimator: Estimator
    trace: Trace = field(default_factory=Trace)
    slo: Slo = field(default_factory=Slo)
    """The latency bounds, as systems plan for them, of requests without bounds of their own."""
    pacer: Pacer = field(default_factory=Pacer)
    requests: dict[str, Request] = field(default_factory=dict)
    """Unfinished requests by id."""
    queue: WaitingQueue = field(default_factory=WaitingQueue)
    """The requests that wait for prefill."""
    submitted: int = 0
    """Number of requests submitted since the start, those refused included."""
    batches: int = 0
    """Number of prefill batches opened so far."""
    open: PrefillBatch | None = None
    """The prefill batch with layers left to launch, which slices and hybrid passes refer to."""
    parked: PrefillBatch | None = None
    """The prefill batch that was preempted between two slices."""
    launched: list[PrefillBatch] = field(default_factory=list)
    """Prefill batches launched to the last layer and not finished, oldest first."""
    rows: DecodingRequests = field(init=False)
    """The requests in decode."""
    in_flight: list[InFlightLaunch] = field(default_factory=list)
    """Launches that have not been reaped, in launch order."""
    finished: dict[LaneName, deque[InFlightLaunch]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=FINISHED_KEPT))
    )
    """The latest reaped launches by lane that an unreaped launch of the other lane may have
    overlapped."""
    unobserved: list[InFlightLaunch] = field(default_factory=list)
    """Reaped launches that the estimator has not learnt from, in launch order."""
    progressed: dict[LaneName, float] = field(default_factory=dict)
    """Seconds on the lanes' clock at which a finished step of each lane was last found."""
    counters: Counters = field(default_factory=Counters)
    masks_to_compute: list[Request] = field(default_factory=list)
    """Constrained requests that got a token since their last mask was computed."""
    awaiting_masks: list[InFlightLaunch] = field(default_factory=list)
    """Launches that wait for token masks (`InFlightLaunch.late`), in launch order."""
    outputs: dict[tuple[str, float | None], Output] = field(default_factory=dict)
    """Tokens for the API process, by request and by the time at which they are due."""
    refused: list[Refused] = field(default_factory=list)
    launches: list[Launched] = field(default_factory=list)
    watched_until: float = -math.inf
    """Launches reaped after this time are not added to `launches`."""
    queued: QueueCount = field(default_factory=QueueCount)
    """The latest count of queued prompts."""
    launch_costs: LaunchCosts = field(init=False)
    offered: frozenset[int] = field(init=False)
    """Numbers of units that a launch may name."""

    def __post_init__(self) -> None:
        self.queue.rows.tree = self.kv.tree
        self.rows = DecodingRequests(self.kv.total_slots, self.kv.page_size)
        self.launch_costs = LaunchCosts(self.layers)
        self.offered = frozenset(units for level in self.lanes.levels for units in level if units)

    @property
    def decoding(self) -> Sequence[Request]:
        """Requests in decode, by rank."""
        return self.rows.requests

    def now(self) -> float:
        """Return the seconds on the lanes' clock."""
        return self.lanes.clock()

    def count_queued(self) -> QueueCount:
        """Return the work left for requests without a first token.

        It excludes tokens in the prefix cache and layers that are done. The count is kept for
        `QUEUE_SECONDS` while a request is in prefill.
        """
        now = self.now()
        if len(self.requests) == len(self.decoding):
            self.queued = QueueCount(now, yielding=[] if self.queue.gives_up else None)
            self.queued = self.queued._replace(submitted=self.submitted)
        elif now - self.queued.at >= QUEUE_SECONDS or not self.queued.work.tokens:
            count = self.queue.count(now)
            work = count.work
            for batch in filter(None, (self.open, self.parked, *self.launched)):
                work = work.plus(batch.work, 1 - batch.layers_done / self.layers)
            self.queued = count._replace(work=work, submitted=self.submitted)
        return self.queued

    def adapters_named(self) -> set[int]:
        """Return the adapter slots that requests or launches name."""
        launched = {held.adapter for flight in self.in_flight for _, held in flight.rows}
        return launched | {request.adapter for request in self.requests.values()}

    def start_decode(self, request: Request) -> None:
        """Move a request whose prompt is done to decode."""
        request.phase = Phase.DECODE
        self.rows.add(request)

    def release(self, request: Request) -> None:
        """Release a request's slot and pages, which are freed when the last launch that names them
        ends."""
        if request.phase is Phase.DECODE:
            self.rows.remove(request)
        if request.allocation is not None:
            self.rows.unsent.discard(request.allocation)
            self.kv.give_up(request.allocation)
        request.allocation, request.awaiting_masks = None, 0
        request.context, request.to_generate = 0, request.limit - len(request.tokens)
        request.looked_up = None  # by now it has more tokens to find
        request.prompt_logprobs = PackedLogprobs()

    def send_back(self, request: Request) -> None:
        """Preempt a request: it loses its pages and is recomputed from its prompt and delivered
        tokens."""
        self.release(request)
        request.phase = Phase.WAITING
        if request.sits_out:  # or the launch that ends its prompt would wait for the mask
            self.queue.hold(request, masks_of(request.id))
        else:
            self.queue.enqueue(request)
        self.counters.preemptions += 1
        self.trace.request_event(request.id, "preempted", self.now())

    def finish(self, request: Request, reason: FinishReason, kept: int | None = None) -> None:
        """End an accepted request whose answer is complete; `kept` of its output tokens count, or
        all."""
        self._leave(request)
        key = request.id, request.due
        output = self.outputs.get(key) or Output(request.id, [], due=self.pacer.delivery(request))
        self.outputs[key] = replace(output, finish=reason, times=request.times())
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
        """End an accepted request with an error, which names the field at fault if there is one."""
        self._leave(request)
        self.refused.append(Refused(request.id, code, message, field))
        reason = "refused" if code == "refused" else "abort"
        self.trace.request_end(request.id, self.now(), reason, request.generated)

    def fail_grammar(self, request: Request, why: Exception) -> None:
        """End an accepted request whose grammar cannot be followed."""
        self.fail(request, f"{GRAMMAR} cannot be followed: {why}", field=GRAMMAR)

    def _leave(self, request: Request) -> None:
        if request.phase is Phase.WAITING:
            self.queue.dequeue(request)
        self.release(request)
        request.phase = Phase.FINISHED
        del self.requests[request.id]
        self.queue.release(request.id)

    def add_output(self, request: Request, sampled: Sampled) -> None:
        """Add a token, which `request.tokens` already has, to the outputs of this turn."""
        key, due = (request.id, request.due), self.pacer.delivery(request)
        output = self.outputs.get(key)
        if output is None and sampled.logprobs is None and request.generated > 1:
            output = Output(request.id, [sampled.token], due=due)
        else:
            output = _with_token(output or Output(request.id, [], due=due), request, sampled)
        self.outputs[key] = output

    def drop_empty_batches(self) -> None:
        """Drop the open and the parked batch if their last request has left."""
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
        """Return each lane's number of queued launches and the predicted time at which it runs
        dry."""
        costs = self.launch_costs.longest
        views = {lane: LaneView(launch_cost=cost) for lane, cost in costs.items()}
        for flight in self.in_flight:
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


def _with_token(output: Output, request: Request, sampled: Sampled) -> Output:
    """Return a request's output with its latest token added."""
    first = request.generated == 1
    scored = request.sampling.params.prompt_logprobs is not None
    logprobs = output.logprobs
    if sampled.logprobs is not None:
        logprobs = [*(logprobs or ()), sampled.logprobs]
    return Output(
        id=output.id,
        tokens=[*output.tokens, sampled.token],
        cached=request.cached if first else output.cached,
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs if first and scored else output.prompt_logprobs,
        embedding=sampled.embedding if first else output.embedding,
        due=output.due,
    )
