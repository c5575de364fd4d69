"""Carries a choice out launch by launch: which phase has its turn, and with what work."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from twolane.devices import LaneName
from twolane.estimate.query import Load
from twolane.systems.auto.candidates import Candidate
from twolane.systems.auto.queues import due, prefill_free_at, queue, step_boundary
from twolane.systems.auto.target import TbtTarget
from twolane.systems.common.admission import next_chunks
from twolane.systems.common.multiplex import shared_levels
from twolane.systems.plan import Chunk, DecodeSteps, Hybrid, Launch, Plan, PrefillSlice
from twolane.systems.view import RequestView, View

MAX_STEPS = 8
"""At most this many decode steps are one launch, where steps are shorter than the lead or a pass is
launched after them."""
SLICE_START_FRACTION = 0.5
"""The device begins with a slice after this fraction of the slice's launch; with a hybrid pass it
begins at the end of the launch."""
LAUNCH_SAFETY_FACTOR = 2.0
"""A decode step is launched first if a slice launch this many times its recent maximum would delay
it."""
RELAUNCH_GAP_SECONDS = 0.0005
"""The seconds from a step's end to the start of one that was not launched ahead of it."""
STEPS_FIRST = "steps first: a pass would come late"
"""The reason of a plan that lets decode steps go before a pass."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts that a plan is about: the open batch, or the one that it opens."""

    load: Load
    first: int
    """The number of layers that are launched."""
    chunks: tuple[Chunk, ...]
    """Chunks to admit; empty if the batch is open."""
    joiners: Sequence[int]
    """The contexts of the requests that will decode after it."""


@dataclass(frozen=True, slots=True)
class LastTurns:
    """The outcome of the last turns, kept from plan to plan."""

    spent: float = 0.0
    """A bound on the seconds of prefill that the whole device got since it last decoded."""
    prompts_end: float = -math.inf
    """Predicted end of the prompts launched last in the prefill lane, in seconds."""
    steps_first: bool = False
    """Whether the last launch was of steps that went before a pass."""

    def after(self, plan: Plan) -> "LastTurns":
        """Return the turn after a plan's launches."""
        turn = self
        if any(not isinstance(launch.work, PrefillSlice) for launch in plan.launches):
            turn = replace(turn, spent=0.0)
        if plan.launches:
            turn = replace(turn, steps_first=plan.reason == STEPS_FIRST)
        return turn


@dataclass(frozen=True, slots=True)
class LaunchPlanner:
    """The inputs of the next launches while requests decode.

    Args:
        view: The engine's view.
        lead: the next launch is queued this many seconds before its lane would run dry.
        order: the waiting requests in their order of service.
        prompts: the prompts to go on with; None: only decode goes on.
        step: a bound on the seconds of a decode step on the whole device, if known.
        target: the time between two tokens.
        choice: The way in which prompts run.
        turn: The last turns.
    """

    view: View
    lead: float
    order: Sequence[RequestView]
    prompts: Prompts | None
    step: float | None
    target: TbtTarget
    choice: Candidate | None
    turn: LastTurns

    def plan(self) -> tuple[Plan, LastTurns]:
        """Return the next launches and the turn that they make."""
        if self.prompts is None or self.choice is None:
            return self._decode_alone()
        choice, prompts = self.choice, self.prompts
        if choice.mode == "spatial" and not self.turn.spent:
            return self._spatial(choice, prompts)
        if choice.mode == "staggered":
            return self._staggered(choice, prompts)
        if not self._due("device") or self._slices_end_late(choice):
            return self._drain(choice), self.turn
        if choice.mode == "temporal" and (slices := self._temporal(choice, prompts)):
            return slices
        if self.turn.spent:
            return self._on_device(DecodeSteps(), "a step first: prefill had its turn"), self.turn
        if steps := self.steps_before(choice):
            return self._on_device(DecodeSteps(steps), STEPS_FIRST), self.turn
        chunks = next_chunks(self.view, choice.tokens, split=True, waiting=self.order)
        plan = self._on_device(Hybrid(), self._reason(choice))
        return Plan(admit=chunks, launches=plan.launches, reason=plan.reason), self.turn

    # --- one after the other ------------------------------------------------------------------

    def _decode_alone(self) -> tuple[Plan, LastTurns]:
        """Decode while no prompt goes on; beside the last slices, if there are any."""
        view = self.view
        if view.lanes["prefill"].queued and self.choice:
            if self.choice.mode in ("spatial", "staggered"):
                return self._spatial(self.choice, None)
            return self._drain(self.choice), self.turn
        if not self._due("device"):
            return Plan(), self.turn
        steps = max(1, int(min(MAX_STEPS, self.lead / self.step))) if self.step else 1
        work = DecodeSteps(1 if view.waiting else steps)
        return self._on_device(work, "no prompt to run"), self.turn

    def _temporal(self, choice: Candidate, prompts: Prompts) -> tuple[Plan, LastTurns] | None:
        """Launch as many layers as the bound leaves time for, then a step.

        If the batch ends before that and more prompts wait, the next batch's first layers come in
        between. None: another batch had all the time.
        """
        view, spent = self.view, self.turn.spent
        room = self.target.planned - (choice.gap - choice.layers * choice.layer)
        layers = int((room - spent) / choice.layer) if choice.layer else 1
        if spent and layers < 1:
            return None
        last = min(prompts.first + max(1, layers), view.layers)
        spent += (last - prompts.first) * choice.layer
        launches = [Launch("device", view.units, PrefillSlice(prompts.first, last))]
        waiting = len(view.waiting) + len(view.batch.chunks if view.batch else ())
        more = waiting > len(prompts.joiners)
        if last < view.layers or not more or spent + choice.layer > room:
            launches.append(Launch("device", view.units, DecodeSteps()))
        plan = Plan(admit=prompts.chunks, launches=tuple(launches), reason=self._reason(choice))
        return plan, replace(self.turn, spent=spent)

    def steps_before(self, choice: Candidate) -> int:
        """Return how many decode steps go before a hybrid pass whose launch would make it late.

        The launch takes the host longer than what is queued lasts, so steps bridge the time. No
        further steps follow them: they may be shorter, or the launch longer, than predicted, and
        the pass would never come. Nor do any go if the pass were late even after `MAX_STEPS`.
        """
        view, step = self.view, self.step
        if self.turn.steps_first:
            return 0
        launch_cost = view.launch_costs.seconds(Hybrid())
        late = view.now + launch_cost - (queue(view, "device").until or view.now)
        missed = bool(view.decoding) and late > 0.0 and choice.gap + late > self.target.latest
        if not missed or not step or MAX_STEPS * step < launch_cost:
            return 0
        return math.ceil(launch_cost / step)

    def _on_device(self, work: DecodeSteps | Hybrid, reason: str) -> Plan:
        return Plan(launches=(Launch("device", self.view.units, work),), reason=reason)

    # --- side by side -------------------------------------------------------------------------

    def _spatial(self, choice: Candidate, prompts: Prompts | None) -> tuple[Plan, LastTurns]:
        """Keep both lanes fed; decode is launched first (MuxWise §3.2.2)."""
        view, turn, meanwhile = self.view, self.turn, 0.0
        admit: tuple[Chunk, ...] = ()
        launches: list[Launch] = []
        if prompts is not None and self._due("prefill"):
            part, end = self._next_slice(choice, prompts)
            admit = prompts.chunks
            meanwhile = LAUNCH_SAFETY_FACTOR * view.launch_costs.seconds(part)
            launches = [Launch("prefill", choice.level[0], part)]
            if part.last == view.layers:
                turn = replace(turn, prompts_end=end)
        if step := self._step_beside(choice, meanwhile):
            launches = [step, *launches]
        reason = self._reason(choice) if launches else ""
        return Plan(admit=admit, launches=tuple(launches), reason=reason), turn

    def _staggered(self, choice: Candidate, prompts: Prompts) -> tuple[Plan, LastTurns]:
        """Launch layers on the whole device while the next step has time, else side by side."""
        view, ended, free = self.view, self._step_ended(), prefill_free_at(self.view)
        latest = ended + self.target.planned - choice.beside - RELAUNCH_GAP_SECONDS
        beside = round((ended - free) / choice.layer)
        layers = int((latest - max(free, ended)) / choice.ahead)
        if beside > 0 or layers < 1:
            layers = min(choice.layers, beside) if beside > 0 else choice.layers
            return self._spatial(replace(choice, layers=layers), prompts)
        if not self._due("prefill"):
            return Plan(), self.turn
        last = min(prompts.first + layers, view.layers)
        spent = self.turn.spent + (last - prompts.first) * choice.ahead
        launch = Launch("device", view.units, PrefillSlice(prompts.first, last))
        plan = Plan(admit=prompts.chunks, launches=(launch,), reason=self._reason(choice))
        return plan, replace(self.turn, spent=spent)

    def _step_ended(self) -> float:
        """Return when the decode step under way ends, or when the last one ended, in seconds."""
        if not self.turn.spent:
            return step_boundary(self.view)
        oldest = self.view.decode_rows.last_token(first=True)
        return self.view.now if oldest is None else oldest

    def _next_slice(self, choice: Candidate, prompts: Prompts) -> tuple[PrefillSlice, float]:
        """Return the next layers, and when they end by prediction, in seconds."""
        view = self.view
        layers = min(choice.layers, view.launch_costs.layers_at_once)
        last = prompts.first + layers
        if view.layers - last <= layers // 2:
            last = view.layers
        part = PrefillSlice(prompts.first, last)
        launched = view.now + SLICE_START_FRACTION * view.launch_costs.seconds(part)
        begin = max(prefill_free_at(view), launched)
        return part, begin + (last - prompts.first) * choice.layer

    def _step_beside(self, choice: Candidate, meanwhile: float) -> Launch | None:
        """Return a decode step if its lane is due once the host has launched the rest.

        The step waits for prompts that end before it could begin, and in any case if no other
        request decodes.

        Args:
            choice: has the units.
            meanwhile: the seconds that the host takes for what else is launched.
        """
        view = self.view
        if not self._due("decode", meanwhile):
            return None
        early = not view.decoding or self.turn.prompts_end <= step_boundary(view)
        waits = early or bool(view.joining["device"])
        return Launch("decode", choice.level[1], DecodeSteps(waits=waits))

    def _drain(self, choice: Candidate) -> Plan:
        """Continue decode beside the last slices, unless it can wait for their end."""
        view, lane = self.view, self.view.lanes["prefill"]
        if not lane.queued or not view.decoding or not self._due("decode"):
            return Plan()
        latest = self._latest_start(choice)
        if lane.until is not None and lane.until <= latest and view.now < latest:
            return Plan(wake_at=latest)
        rest = min(shared_levels(view), key=lambda level: abs(level[0] - lane.units))
        return Plan(launches=(Launch("decode", rest[1], DecodeSteps()),), reason="last slices")

    def _slices_end_late(self, choice: Candidate) -> bool:
        """Return whether slices beside decode last too long for decode to wait for them."""
        lane = self.view.lanes["prefill"]
        if lane.until is None or not self.view.decoding:
            return False
        return lane.until > self._latest_start(choice)

    def _latest_start(self, choice: Candidate) -> float:
        """Return when the choice has to begin, after decode, to keep the bound, in seconds."""
        return step_boundary(self.view) + self.target.latest - choice.gap - RELAUNCH_GAP_SECONDS

    def _due(self, lane: LaneName, within: float = 0.0) -> bool:
        return due(self.view, lane, max(self.lead, within))

    def _reason(self, choice: Candidate) -> str:
        """Return the choice with its predictions and bounds, for the trace."""
        what = {
            "hybrid": f"{choice.tokens} tokens a pass",
            "temporal": f"{choice.layers} layers between steps",
            "spatial": f"{choice.level[0]} + {choice.level[1]} units",
            "staggered": f"all, then {choice.level[0]} + {choice.level[1]} units",
        }[choice.mode]
        target = self.target
        wanted = f"{target.planned * 1e3:.1f} ms, bound {target.bound * 1e3:.1f}"
        gap = f"gap <= {choice.gap * 1e3:.1f} of {wanted}, late after {target.latest * 1e3:.1f}"
        return f"{choice.mode}: {what}, {gap}, prefill at {choice.pace:.0%}"


def prefill_alone(view: View, prompts: Prompts | None, lead: float) -> Plan:
    """Give the whole device to the prompts while nothing decodes."""
    if prompts is None or not due(view, "device", lead):
        return Plan()
    launch = Launch("device", view.units, PrefillSlice(prompts.first, view.layers))
    return Plan(admit=prompts.chunks, launches=(launch,), reason="nothing decodes")
