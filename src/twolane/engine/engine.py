"""The engine: what the loop calls, turn by turn."""

import random
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from twolane.common.errors import FieldError
from twolane.common.vocabulary import LANES, LaneName
from twolane.engine.adapters.registry import AdapterRegistry
from twolane.engine.constrained.constraints import Constraint, GrammarError, Grammars, Masks
from twolane.engine.constrained.late_masks import LateMasks
from twolane.engine.kv import KVBooks, Lookup
from twolane.engine.kv_events.publisher import KVEventPublisher
from twolane.engine.landmarks import LandmarkWatcher
from twolane.engine.launch import carry_out, decodes, joining
from twolane.engine.messages import (
    Abort,
    FinishReason,
    ForgetPrefixes,
    LoadAdapter,
    Outputs,
    Ping,
    Refused,
    Stats,
    Submit,
    ToEngine,
    UnloadAdapter,
    Vocabulary,
    Watch,
)
from twolane.engine.overlap import lane_waits
from twolane.engine.pacing import Pacer
from twolane.engine.reap import learn, reap
from twolane.engine.request import Request
from twolane.engine.state import State
from twolane.engine.trace import Trace
from twolane.estimate.adapters import AdapterEstimator
from twolane.estimate.base import Estimator
from twolane.lanes.base import Lanes
from twolane.lanes.work import Sampling
from twolane.slo import Slo
from twolane.systems.plan import Plan
from twolane.systems.registry import System
from twolane.systems.view import View

NOBODY: dict[LaneName, list[Request]] = {lane: [] for lane in LANES}
"""Who joins when no batch is launched to the end."""


@dataclass(frozen=True)
class ServedModel:
    """What the engine knows of the model that it serves."""

    layers: int
    """Number of the decoder's layers."""
    vocab_size: int
    """Number of tokens in the model's vocabulary."""
    eos_token_ids: Sequence[int]
    """Tokens that end a request unless it ignores them."""
    max_model_len: int
    """The most tokens, prompt and output together, that one request can have."""


class Engine:
    """Requests in, plans carried out, tokens out. Single-threaded; never blocks.

    Args:
        system: decides.
        lanes: where work runs.
        kv: slots and pages.
        model: what is served.
        pass_sizes: tokens that the device pads passes to; empty: to none.
        estimator: predicts.
        seed: of requests without a seed of their own.
        slo: the latency bounds of requests that bring none.
        pacer: decides when each token is due.
        trace: where to report what happened.
        kv_events: publishes what enters and leaves the prefix tree.
        notify: wakes the loop; called from another thread when a grammar has been compiled, and
            when masks are there.
        adapters: those that requests may ask for; None: there are none.
    """

    def __init__(
        self,
        system: System,
        lanes: Lanes,
        kv: KVBooks,
        *,
        model: ServedModel,
        pass_sizes: Sequence[int] = (),
        estimator: Estimator,
        seed: int = 0,
        slo: Slo | None = None,
        pacer: Pacer | None = None,
        trace: Trace | None = None,
        kv_events: KVEventPublisher | None = None,
        notify: Callable[[], None] = lambda: None,
        adapters: AdapterRegistry | None = None,
    ) -> None:
        pacer = pacer or Pacer()
        bounds = pacer.planned(slo or Slo())
        self.state = State(kv, lanes, model.layers, estimator, trace or Trace(), bounds, pacer)
        self.state.gives_up = system.gives_up
        self.max_model_len = min(model.max_model_len, kv.total_pages * kv.page_size)
        self._landmarks = LandmarkWatcher(kv.page_size)
        kv.tree.watchers.append(self._landmarks)
        self._system = system
        self._memory: Any = system.start()
        self._vocab_size = model.vocab_size
        self._pass_sizes = pass_sizes
        self._eos_token_ids = tuple(model.eos_token_ids)
        self._seeds = random.Random(seed)
        self._kv_events = kv_events
        self._notify = notify
        self.adapters = adapters or AdapterRegistry(lanes, 0)
        """Those that are loaded."""
        self._grammars: Grammars | None = None
        """None until the API process has sent the vocabulary."""
        self._masks = LateMasks(self.state, Masks(notify))
        self._compiling: dict[str, Future[tuple[Constraint, bytes]]] = {}
        """Grammars of requests that are held back until they are compiled, by the requests' ids."""
        self._arrivals = 0
        self._told = self.stats()
        self._moved = False
        """Since the API process was last told."""
        self._pinged = False
        """Whether the API process waits for an answer to a `Ping`."""

    def take(self, messages: Iterable[ToEngine]) -> bool:
        """New requests, aborts, stops and watchers; whether there were any."""
        news = False
        for message in messages:
            news = self._moved = True
            if isinstance(message, Submit):
                self._submit(message)
            elif isinstance(message, Vocabulary):
                names = self._vocab_size, self._eos_token_ids
                self._grammars = Grammars(message.tokenizer, *names, self._notify)
            elif isinstance(message, Abort):
                self._end(message.id, "abort")
            elif isinstance(message, Watch):
                until = self.state.now() + message.seconds
                self.state.watched_until = max(self.state.watched_until, until)
            elif isinstance(message, ForgetPrefixes):
                self.state.kv.forget_prefixes()
            elif isinstance(message, LoadAdapter):
                self.adapters.load(message.name, message.path)
            elif isinstance(message, UnloadAdapter):
                self.adapters.unload(message.name)
            elif isinstance(message, Ping):
                self._pinged = True
            else:
                self._end(message.id, "stop", message.tokens)
        masked = self._masks.take()
        self._moved |= masked
        return self._take_compiled() or masked or news

    def reap(self) -> bool:
        """Deliver finished work; whether there was any."""
        moved = reap(self.state)
        self._masks.start()
        self._moved |= self.adapters.settle(self.state.adapters_named) | moved
        return moved

    def publish(self) -> None:
        """Publish what entered and left the prefix tree since the last call."""
        if self._kv_events is not None:
            self._kv_events.publish()

    def plan(self) -> Plan:
        """Ask the system, when the estimator has learnt from all that was reaped."""
        learn(self.state)
        if isinstance(self.state.estimator, AdapterEstimator):
            self.state.estimator.running = len(self.state.adapters_named() - {-1})
        self.state.advance_elder()
        plan, self._memory = self._system.plan(self.view(), self._memory)
        return plan

    def carry_out(self, plan: Plan) -> bool:
        """Do what the plan says; whether it said anything."""
        moved = carry_out(self.state, plan)
        self._moved |= moved
        return moved

    def news(self) -> Outputs | None:
        """What the API process should hear since the last call, gauges too; None: nothing."""
        if not self._moved:
            return None
        self._moved = False
        state, stats = self.state, self.stats()
        adapters, self.adapters.news = self.adapters.news, []
        unchanged = not (state.outputs or state.refused or adapters) and stats == self._told
        if unchanged and not self._pinged:
            return None
        news = Outputs(
            list(state.outputs.values()),
            state.refused,
            stats,
            state.launches,
            lane_waits(state) if self._pinged else None,
            list(state.lanes.silences()) if self._pinged else [],
            self._landmarks.news(),
            adapters,
        )
        self._pinged = False
        state.outputs, state.refused, state.launches, self._told = {}, [], [], stats
        if not state.trace.silent:
            state.trace.counters(
                state.now(),
                decoding=stats.running,
                waiting=stats.waiting,
                pages_used=stats.kv_pages - stats.kv_pages_free - stats.kv_pages_cached,
                pages_cached=stats.kv_pages_cached,
            )
        return news

    def stats(self) -> Stats:
        """Gauges and counters now."""
        state, kv = self.state, self.state.kv
        queued = state.count_queued()
        waiting = len(state.queue) + len(state.started) + sum(map(len, state.held.values()))
        return Stats(
            running=len(state.decoding),
            prefilling=len(state.requests) - len(state.decoding) - waiting,
            waiting=waiting,
            kv_pages=kv.total_pages,
            kv_pages_free=kv.free_pages,
            kv_pages_cached=kv.reclaimable_pages,
            prefix_queries=state.counters.prefix_queries,
            prefix_hits=state.counters.prefix_hits,
            preemptions=state.counters.preemptions,
            broken=state.counters.broken,
            queued=queued.work,
            yielding=queued.yielding,
            prompt_token_seconds=state.counters.prompt_token_seconds,
            prompt_pace=state.counters.paces.pace,
            seconds=[(*level, spent) for level, spent in state.counters.seconds.items()],
        )

    def view(self) -> View:
        """What the system may know now."""
        state = self.state
        now = state.now()
        return View(
            now=now,
            layers=state.layers,
            units=state.lanes.units,
            levels=state.lanes.levels,
            pass_sizes=self._pass_sizes,
            waiting=[*state.started, *state.queue] if state.started else state.queue,
            batch=state.open,
            launched_batches=tuple(state.launched),
            parked=state.parked,
            decoding=[request for request in state.decoding if decodes(request)],
            joining={lane: joining(state, lane) for lane in LANES} if state.launched else NOBODY,
            lanes=state.lane_views(now),
            free_pages=state.kv.free_pages,
            reclaimable_pages=state.kv.reclaimable_pages,
            free_slots=state.kv.free_slots,
            slo=state.slo,
            gaps=state.pacer.gaps,
            estimator=state.estimator,
            launching=state.launching,
        )

    def _submit(self, message: Submit) -> None:
        state = self.state
        problem = self._problem(message)
        if problem is not None:
            state.refused.append(problem)
            return
        # As an array: ints of their own take four times the memory, and pages' keys longer.
        now, tokens = state.now(), array("q", message.prompt)
        request = Request.from_submit(
            message,
            order=self._arrivals,
            now=now,
            max_model_len=self.max_model_len,
            tokens=tokens,
            sampling=self._sampling(message),
            slo=state.pacer.planned(message.slo).over(state.slo),
            lookup=self._lookup,
            adapter=None if message.lora is None else self.adapters.find(message.lora),
        )
        self._arrivals += 1
        if message.params.grammar is not None:
            self._compile(request, message.params.grammar)
        elif message.leader is not None and self._worth_holding(request, message.leader):
            state.hold(request, message.leader)
        else:
            state.wait(request)
        state.requests[request.id] = request
        state.trace.request_begin(request.id, now, prompt_tokens=len(message.prompt))

    def _compile(self, request: Request, grammar: str) -> None:
        """Hold a request back until its grammar is compiled."""
        assert self._grammars is not None
        self._compiling[request.id] = self._grammars.constraint(grammar, request.stops)
        self.state.hold(request, _compiler_of(request.id))

    def _take_compiled(self) -> bool:
        """Let requests go on whose grammars are compiled; whether there were any."""
        compiled = [id for id, found in self._compiling.items() if found.done()]
        for id in compiled:
            found, state = self._compiling.pop(id), self.state
            for request in list(state.held.get(_compiler_of(id), ())):
                try:
                    request.constraint, request.mask = found.result()
                except GrammarError as error:
                    state.fail(request, f"grammar {error}")
                else:
                    state.release_held(_compiler_of(id))
        self._moved |= bool(compiled)
        return bool(compiled)

    def _worth_holding(self, request: Request, leader_id: str) -> bool:
        """Whether it would find full pages of its leader's prompt if it waited."""
        kv, leader = self.state.kv, self.state.requests.get(leader_id)
        if leader is None or leader.generated or request.scores_prompt:
            return False
        return kv.prefix_cache and request.prompt_tokens > kv.page_size

    def _problem(self, message: Submit) -> Refused | None:
        if message.id in self.state.requests:
            return Refused(message.id, "invalid", f"request id {message.id!r} is in use")
        if message.lora is not None and self.adapters.find(message.lora) is None:
            text = f"model {message.lora!r} does not exist: no adapter of that name is loaded"
            return Refused(message.id, "unknown_model", text, "model")
        if len(message.prompt) >= self.max_model_len:
            text = (
                f"prompt has {len(message.prompt)} tokens, which leaves no room for output: "
                f"the context length is {self.max_model_len}"
            )
            return Refused(message.id, "too_long", text, "prompt")
        try:
            self._check_tokens(message)
        except FieldError as error:
            return Refused(message.id, "invalid", str(error), error.field)
        return None

    def _check_tokens(self, message: Submit) -> None:
        """Refuse a request whose tokens the model does not have, or that leaves none to choose.

        Raises:
            FieldError: naming the request's field.
        """
        if not message.prompt:
            raise FieldError("prompt", "is empty")
        params, known = message.params, range(self._vocab_size)
        named: dict[str, Collection[int]] = {
            "prompt": message.prompt,
            "stop_token_ids": params.stop_token_ids,
            "logit_bias": params.logit_bias,
        }
        for name, tokens in named.items():
            if tokens and not (min(tokens) in known and max(tokens) in known):
                raise FieldError(name, f"has a token id outside 0 to {known[-1]}")
        if params.grammar is not None and self._grammars is None:
            raise FieldError("grammar", "needs a model with a tokenizer")
        if params.min_tokens and len({*params.stop_token_ids, *self._eos_token_ids}) == len(known):
            raise FieldError("stop_token_ids", "leave no token to choose before min_tokens")

    def _sampling(self, message: Submit) -> Sampling:
        drawn = self._seeds.getrandbits(63)
        seed = drawn if message.params.seed is None else message.params.seed
        params = replace(message.params, grammar=None)  # lanes are told masks
        return Sampling(params, seed, len(message.prompt), self._eos_token_ids)

    def _lookup(self, request: Request) -> Lookup:
        kv = self.state.kv
        if request.looked_up is None or request.looked_up.version != kv.tree.version:
            request.looked_up = kv.lookup(
                request.tokens,
                reuse=not request.scores_prompt,
                before=request.looked_up,
                salt=request.salt,
            )
        return request.looked_up

    def _end(self, request_id: str, reason: FinishReason, kept: int | None = None) -> None:
        request = self.state.requests.get(request_id)
        if request is not None:
            self.state.finish(request, reason, kept)
            self.state.drop_empty_batches()


def _compiler_of(request_id: str) -> str:
    """For whom a request is held back whose grammar is being compiled: no request has this id."""
    return f"compiler of {request_id}"
