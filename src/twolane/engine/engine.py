"""The engine: the steps of one turn of the loop."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from twolane.devices import LANES, LaneName
from twolane.engine.adapters.registry import AdapterRegistry
from twolane.engine.constrained.constraints import Masks
from twolane.engine.intake import Intake, ServedModel
from twolane.engine.kv.landmarks import LandmarkWatcher
from twolane.engine.kv.publisher import KVEventPublisher
from twolane.engine.launches.fair_shares import make_room_for_turn
from twolane.engine.launches.late_masks import LateMasks
from twolane.engine.launches.launch import carry_out, joining
from twolane.engine.launches.overlap import lane_waits
from twolane.engine.launches.reap import learn, reap, tokens_before
from twolane.engine.messages import (
    Abort,
    DeliveryLateness,
    FinishReason,
    ForgetPrefixes,
    LoadAdapter,
    Outputs,
    Ping,
    Stats,
    Submit,
    ToEngine,
    UnloadAdapter,
    Vocabulary,
    Watch,
)
from twolane.engine.request import Request
from twolane.engine.state import State
from twolane.estimate.adapters import AdapterEstimator
from twolane.systems.base import System
from twolane.systems.plan import Plan
from twolane.systems.view import View

NO_JOINS: dict[LaneName, list[Request]] = {lane: [] for lane in LANES}
"""The joining requests of each lane while no batch is launched to the last layer."""
PLANNING_KEPT = 0.99
"""A long planning time counts for this fraction of it at the next plan."""
LONGEST_PLANNING = 0.01
"""Most seconds of a plan that count: a longer one was held up, by a first use or another process,
and a hundred later plans would wait for tokens as long."""


class Engine:
    """Requests in, plans carried out, tokens out. Single-threaded; never blocks.

    Args:
        system: makes the plans.
        state: the lanes, pages and estimator, without any request yet.
        model: the served model.
        pass_sizes: numbers of tokens that the device pads passes to; empty if it pads none.
        seed: seed of requests without a seed of their own.
        kv_events: publishes the pages that enter and leave the prefix tree.
        notify: wakes the loop; other threads call it when a grammar is compiled or masks are
            computed.
        adapters: the LoRA adapters that requests may name; None serves none.
    """

    def __init__(
        self,
        system: System,
        state: State,
        model: ServedModel,
        *,
        pass_sizes: Sequence[int] = (),
        seed: int = 0,
        kv_events: KVEventPublisher | None = None,
        notify: Callable[[], None] = lambda: None,
        adapters: AdapterRegistry | None = None,
    ) -> None:
        self.state = state
        state.queue.gives_up = system.gives_up
        kv = state.kv
        self.max_model_len = min(model.max_model_len, kv.tokens)
        """Largest number of tokens, prompt and output together, of one request."""
        self._landmarks = LandmarkWatcher(kv.page_size, states=kv.snapshots is not None)
        kv.tree.watchers.append(self._landmarks)
        if kv.snapshots is not None:
            kv.snapshots.watchers.append(self._landmarks)
        self._system = system
        self._memory: Any = system.start()
        self._pass_sizes = pass_sizes
        self._kv_events = kv_events
        self.adapters = adapters or AdapterRegistry(state.lanes, 0)
        """The loaded LoRA adapters."""
        fitting = replace(model, max_model_len=self.max_model_len)
        self._intake = Intake(state, fitting, self.adapters, seed, notify)
        self._masks = LateMasks(state, Masks(notify))
        self._sent_stats = self.stats()
        self._changed = False
        """Whether anything has changed since the last `Outputs` message."""
        self._pinged = False
        """Whether a `Ping` is unanswered."""
        self._planning = 0.0
        """Seconds that a plan takes: those of the latest, or what is left of longer ones."""

    def take(self, messages: Iterable[ToEngine]) -> bool:
        """Handle the messages of the API process; return whether anything changed."""
        received = False
        for message in messages:
            received = self._changed = True
            if isinstance(message, Submit):
                self._intake.submit(message)
            elif isinstance(message, Vocabulary):
                self._intake.set_vocabulary(message)
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
            elif isinstance(message, DeliveryLateness):
                self.state.pacer.hear(message.spread)
            elif isinstance(message, Ping):
                self._pinged = True
            else:
                self._end(message.id, "stop", message.tokens)
        changed = self._masks.take() | self._intake.take_compiled()
        self._changed |= changed
        return changed or received

    def reap(self) -> bool:
        """Deliver finished work; return whether there was any."""
        reaped = reap(self.state)
        self._masks.start()
        self._changed |= self.adapters.settle(self.state.adapters_named) | reaped
        return reaped

    def publish(self) -> None:
        """Publish the changes of the prefix tree since the last call."""
        if self._kv_events is not None:
            self._kv_events.publish()

    def plan(self) -> Plan:
        """Let the estimator learn from the reaped launches; return the system's plan, or one that
        waits for tokens which would otherwise wait for the plan."""
        begun = self.state.now()
        awaited = tokens_before(self.state, self._planning)
        if awaited is not None:
            return Plan(wake_at=awaited)
        learn(self.state)
        if isinstance(self.state.estimator, AdapterEstimator):
            self.state.estimator.running = len(self.state.adapters_named() - {-1})
        self.state.queue.promote_oldest()
        make_room_for_turn(self.state)
        plan, self._memory = self._system.plan(self.view(), self._memory)
        took = max(self.state.now() - begun, PLANNING_KEPT * self._planning)
        self._planning = min(took, LONGEST_PLANNING)
        return plan

    def carry_out(self, plan: Plan) -> bool:
        """Carry a plan out; return whether it did anything."""
        changed = carry_out(self.state, plan)
        self._changed |= changed
        return changed

    def outputs(self) -> Outputs | None:
        """Return the message of this turn to the API process; None if nothing has changed."""
        if not self._changed:
            return None
        self._changed = False
        state, stats = self.state, self.stats()
        adapters, self.adapters.results = self.adapters.results, []
        unchanged = not (state.outputs or state.refused or adapters) and stats == self._sent_stats
        if unchanged and not self._pinged:
            return None
        outputs = Outputs(
            list(state.outputs.values()),
            state.refused,
            stats,
            state.launches,
            lane_waits(state) if self._pinged else None,
            list(state.lanes.silences()) if self._pinged else [],
            self._landmarks.take_changes(),
            adapters,
        )
        self._pinged = False
        state.outputs, state.refused, state.launches, self._sent_stats = {}, [], [], stats
        if not state.trace.silent:
            state.trace.counters(
                state.now(),
                decoding=stats.running,
                waiting=stats.waiting,
                pages_used=stats.kv_pages - stats.kv_pages_free - stats.kv_pages_cached,
                pages_cached=stats.kv_pages_cached,
            )
        return outputs

    def stats(self) -> Stats:
        """Return the current gauges and counters."""
        state, kv = self.state, self.state.kv
        queued = state.count_queued()
        return Stats(
            running=len(state.decoding),
            prefilling=len(state.requests) - len(state.decoding) - len(state.queue),
            waiting=len(state.queue),
            kv_pages=kv.total_pages // kv.page_cost,
            kv_pages_free=kv.free_pages // kv.page_cost,
            kv_pages_cached=kv.reclaimable_pages // kv.page_cost,
            prefix_queries=state.counters.prefix_queries,
            prefix_hits=state.counters.prefix_hits,
            preemptions=state.counters.preemptions,
            broken=state.counters.broken,
            queued=queued.work,
            counted=queued.submitted,
            yielding=queued.yielding,
            prompt_token_seconds=state.counters.prompt_token_seconds,
            prompt_pace=state.counters.paces.pace,
            seconds=[(*level, spent) for level, spent in state.counters.seconds.items()],
            **kv.state_counts(),
        )

    def view(self) -> View:
        """Return the view that the system plans with."""
        state = self.state
        now = state.now()
        return View(
            now=now,
            layers=state.layers,
            units=state.lanes.units,
            levels=state.lanes.levels,
            pass_sizes=self._pass_sizes,
            waiting=state.queue.visible,
            batch=state.open,
            launched_batches=tuple(state.launched),
            parked=state.parked,
            decoding=state.rows.ready.requests,
            waiting_table=state.queue.table(),
            row_table=state.rows.table(),
            joining={lane: joining(state, lane) for lane in LANES} if state.launched else NO_JOINS,
            lanes=state.lane_views(now),
            free_pages=state.kv.free_pages,
            reclaimable_pages=state.kv.reclaimable_pages,
            free_slots=state.kv.free_slots,
            slo=state.slo,
            gaps=state.pacer.gaps,
            estimator=state.estimator,
            launch_costs=state.launch_costs,
            page_tables=state.kv.page_cost,
        )

    def _end(self, request_id: str, reason: FinishReason, kept: int | None = None) -> None:
        request = self.state.requests.get(request_id)
        if request is not None:
            self.state.finish(request, reason, kept)
            self.state.drop_empty_batches()
