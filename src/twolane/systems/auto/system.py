"""`auto`: at each scheduling point the way of running the prompts that promises the most.

A user gives SLOs. Prefill goes as fast as they allow: of all ways to run the prompts at hand beside
the requests that decode (`candidates`), `auto` takes the one with the fastest prefill whose bound
on the time between two tokens keeps the tightest TBT SLO among those requests (`target`). Decode
gets all that is left, and the whole device where no prompt waits. Prompts go by deadline (`order`),
by what they cost (`costs`). `turns` launches what was chosen.

The bound is the estimator's (P99 for `calibrated`); `margin` corrects it by the gaps that were
late. A little less than the SLO is enough while no prompt is in a hurry, and more than the SLO is
planned for while tokens are held back (`engine.pacing`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import msgspec

from twolane.devices import LANES
from twolane.estimate.query import Load, decode_step
from twolane.systems.auto.candidates import Candidate, Candidates, choose
from twolane.systems.auto.costs import PrefillCosts
from twolane.systems.auto.margin import Margin
from twolane.systems.auto.order import ServiceOrder, order_requests
from twolane.systems.auto.queues import due, next_due, prefill_free_at
from twolane.systems.auto.target import TbtTarget, target_tbt
from twolane.systems.auto.turns import LastTurns, LaunchPlanner, Prompts, prefill_alone
from twolane.systems.base import System
from twolane.systems.common.admission import next_chunks
from twolane.systems.common.multiplex import batch_load, requests_of, shared_levels
from twolane.systems.common.settings import at_least
from twolane.systems.plan import Hybrid, Plan
from twolane.systems.view import RequestView, View

BATCH_SECONDS = 0.2
"""A prefill batch takes at most this many seconds on the whole device, or `MIN_BATCH_TOKENS`."""
UNBOUND_BATCH_SECONDS = 1.0
"""A prefill batch takes at most this many seconds while no waiting request has a TTFT bound or
another priority, and one API key has sent all. It makes no request miss a bound then, and delays no
other key's. Larger batches compute faster: they read weights less often, and their attention leaves
fewer SMs without a tile in its last turn."""
UNBOUND_BATCH_FACTOR = 4
"""Factor by which the largest number of new tokens is greater in such a batch."""
MIN_BATCH_TOKENS = 256
"""A prefill batch may have this many new tokens, however long they take."""
CHOICE_SECONDS = 0.1
"""A choice stands for this many seconds while what it was made for stays the same."""
SLACK_PARTS = 8
"""A choice is made anew when the slack of tokens has changed by one part in this many of the TBT
bound."""
MIN_PACE = 0.05
"""Queued prompts are taken to prefill at this fraction of the whole device's pace at least."""


@dataclass(frozen=True, slots=True)
class CurrentChoice:
    """The current choice and the state for which it was made."""

    choice: Candidate | None = None
    made_for: tuple[object, ...] = ()
    """Rows, batch, slowdown of the device and slack of tokens for which it was made."""
    made_at: float = -math.inf
    """Time of the choice, in seconds."""
    pass_tokens: int = 0
    """The tokens of the largest hybrid pass that kept the bound when passes were last looked at."""


@dataclass(frozen=True, slots=True)
class AutoMemory:
    """The state that `auto` keeps from plan to plan."""

    current: CurrentChoice = field(default_factory=CurrentChoice)
    margin: Margin = field(default_factory=Margin)
    costs: PrefillCosts = field(default_factory=PrefillCosts)
    turn: LastTurns = field(default_factory=LastTurns)
    hurried: bool = True
    """Whether a prompt had little time left when the waiting requests were last put in order."""


class Auto(System, msgspec.Struct, frozen=True):
    """The way of running the prompts that prefills fastest within the SLOs by prediction."""

    gives_up: ClassVar[bool] = True

    max_batch_tokens: int = 2048
    """A prefill batch has at most this many new tokens, or four times as many while no waiting
    request has a TTFT bound, another priority or another API key; longer prompts are cut."""
    hysteresis: float = 0.05
    """The current way stays until another is better by more than this fraction."""
    lead_seconds: float = 0.010
    """The next launch is queued this many seconds before its lane would run dry."""

    def __post_init__(self) -> None:
        at_least(self, max_batch_tokens=1, hysteresis=0, lead_seconds=0)

    def start(self) -> AutoMemory:
        """Return the memory of a system that has decided nothing yet."""
        return AutoMemory()

    def plan(self, view: View, memory: AutoMemory) -> tuple[Plan, AutoMemory]:
        """Return the next launches of the lanes that are due."""
        lead = self.lead_seconds
        if not (due(view, "prefill", lead) or due(view, "decode", lead)):
            return Plan(wake_at=next_due(view, lead)), memory
        memory = replace(memory, margin=_watched(view, memory.margin))
        service = ServiceOrder((), ())
        if view.waiting and view.batch is None and due(view, "prefill", lead):
            memory = replace(memory, costs=memory.costs.updated(view))
            service = _service_order(view, memory)
            memory = replace(memory, hurried=service.hurried)
        prompts = self._prompts(view, service, memory.costs)
        plan, memory = self._next_launches(view, memory, service.order, prompts)
        memory = replace(memory, turn=memory.turn.after(plan))
        wakes = [
            at for at in (plan.wake_at, next_due(view, lead)) if at is not None and at > view.now
        ]
        plan = msgspec.structs.replace(
            plan, refuse=tuple(service.refusals), wake_at=min(wakes, default=None)
        )
        return plan, memory

    def _prompts(self, view: View, service: ServiceOrder, costs: PrefillCosts) -> Prompts | None:
        """Return the open batch, or the next one."""
        if view.batch is not None:
            chunks = view.batch.chunks
            ends = [c.start + c.n for c in chunks if c.n == c.request.new]
            return Prompts(batch_load(view.batch), view.batch.layers_launched, (), ends)
        most, seconds = self.max_batch_tokens, BATCH_SECONDS
        if service.unbound and not view.prompts.shared:
            most, seconds = UNBOUND_BATCH_FACTOR * most, UNBOUND_BATCH_SECONDS
        order = service.order
        fitting = costs.tokens_in(seconds) or 0.0
        tokens = min(int(max(MIN_BATCH_TOKENS, fitting)), most)
        coming = next_chunks(view, tokens, split=True, waiting=order)
        if not coming:
            return None
        pairs = [
            (r, chunk.n) for r, chunk in zip(requests_of(view, coming, order), coming, strict=True)
        ]
        load = Load([n for _, n in pairs], [r.reused for r, _ in pairs])
        return Prompts(load, 0, coming, [r.reused + n for r, n in pairs if n == r.new])

    def _next_launches(
        self, view: View, memory: AutoMemory, order: Sequence[RequestView], prompts: Prompts | None
    ) -> tuple[Plan, AutoMemory]:
        """Return the next launches, by the choice that stands or by a new one."""
        joining = [request for lane in LANES for request in view.joining[lane]]
        if not view.decoding and not joining:
            return prefill_alone(view, prompts, self.lead_seconds), memory
        decode = view.decode_rows.load(joining)
        step = view.estimator.predict(decode_step(decode), view.units, bound=True)
        promises = view.estimator.promises
        fraction = memory.margin.fraction(hurried=memory.hurried, promises=promises)
        target = target_tbt(view, joining, step, fraction)
        if prompts is not None:
            made_for = _made_for(view, decode.requests, prompts, target)
            if prompts.chunks or _outdated(memory.current, made_for, view.now):
                if prompts.chunks and _no_room(view, decode, prompts, target):
                    prompts = None
                else:
                    current = self._choose(view, memory.current, prompts, decode, step, target)
                    current = replace(current, made_for=made_for, made_at=view.now)
                    memory = replace(memory, current=current)
        choice, turn = memory.current.choice, memory.turn
        lead = self.lead_seconds
        plan, turn = LaunchPlanner(view, lead, order, prompts, step, target, choice, turn).plan()
        return plan, replace(memory, turn=turn)

    def _choose(
        self,
        view: View,
        current: CurrentChoice,
        prompts: Prompts,
        decode: Load,
        step: float | None,
        target: TbtTarget,
    ) -> CurrentChoice:
        """Choose among all ways to run the prompts; without predictions, a layer between two steps.

        The batch's own requests join decode only at its end: the next batch's choice counts them.
        """
        unknown = Candidate("temporal", (view.units,) * 2, 1, 0.0, 0, math.inf, 1.0, 0.0)
        candidates: list[Candidate] = []
        if step:
            levels = [level for level in shared_levels(view) if level[0] + level[1] <= view.units]
            ways = Candidates(
                view.estimator,
                view.layers,
                view.units,
                levels,
                decode,
                step,
                prompts.load,
                target.planned,
                view.launch_costs.seconds(Hybrid()),
                view.pass_sizes,
                stagger=_backlogged(view, prompts),
            )
            candidates = ways.all(sliced=not prompts.chunks, chunk=current.pass_tokens)
        tokens = max((way.tokens for way in candidates), default=0) or current.pass_tokens
        choice = choose(candidates or [unknown], target.planned, current.choice, self.hysteresis)
        return replace(current, choice=choice, pass_tokens=tokens)


def _backlogged(view: View, prompts: Prompts) -> bool:
    """Return whether all prompts are unbound and as many tokens wait as the batch has."""
    table = view.prompts
    waiting = int(table.new.sum()) - sum(chunk.n for chunk in prompts.chunks)
    begun = [chunk.request for chunk in view.batch.chunks] if view.batch else []
    if waiting < prompts.load.new or any(request.deadline is not None for request in begun):
        return False
    priorities = {*table.priority[:1].tolist(), *(request.priority for request in begun)}
    return len(priorities) <= 1 and table.unbound(table.by_deadline)


def _made_for(view: View, rows: int, prompts: Prompts, target: TbtTarget) -> tuple[object, ...]:
    """Return what a choice depends on, roughly."""
    slowdown = round(view.estimator.slowdown, 1)
    slack = round(SLACK_PARTS * target.latest / target.bound)
    return rows, tuple(prompts.load.n), tuple(prompts.load.r), slowdown, slack


def _outdated(current: CurrentChoice, made_for: tuple[object, ...], now: float) -> bool:
    return made_for != current.made_for or now > current.made_at + CHOICE_SECONDS


def _no_room(view: View, decode: Load, prompts: Prompts, target: TbtTarget) -> bool:
    """Return whether decode, with the requests that would join it, misses the bound alone."""
    joined = Load.decode([*decode.r, *prompts.joiners])
    then = view.estimator.predict(decode_step(joined), view.units, bound=True)
    return then is not None and then > target.bound


def _watched(view: View, margin: Margin) -> Margin:
    """Return the margin after a look at the engine's latest gaps."""
    return margin.watch(
        view.now,
        view.gaps,
        bound=view.decode_rows.tightest_tbt,
        decoding=len(view.decoding),
        promises=view.estimator.promises,
    )


def _service_order(view: View, memory: AutoMemory) -> ServiceOrder:
    """Return the waiting requests in order."""
    rows = view.decoding or any(view.joining.values())
    choice = memory.current.choice
    pace = max(MIN_PACE, choice.pace) if choice and rows else 1.0

    costs = memory.costs.seconds / pace
    refuse = view.estimator.promises
    return order_requests(view.prompts, prefill_free_at(view), costs, refuse=refuse)
