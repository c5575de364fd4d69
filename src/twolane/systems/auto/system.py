"""`auto`: at each scheduling point hybrid, temporal or spatial, whichever promises the most.

What a user gives is SLOs. Prefill goes as fast as the bounds allow: of all ways to run the prompts
at hand beside the requests that decode (`choices.py`), the one with the fastest prefill whose bound
on the time between two tokens keeps the tightest TBT SLO among those requests. Decode gets all
that is left, and the whole device where no prompt waits. Prompts go by deadline (`deadlines.py`).

The bound is the estimator's (P99 for `calibrated`). For what it cannot know, and for estimators
that promise nothing, the TBT that is planned for shrinks while more than one step in two hundred is
above the SLO, and grows again, up to the SLO, while fewer are. A little less than the SLO is enough
while no prompt is in a hurry; and more than the SLO is left while tokens are held back.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import msgspec

from twolane.common.vocabulary import EXCLUSIVE, LANES, EstimatorName, LaneName
from twolane.estimate.query import Load, decode_step, prefill_slice
from twolane.systems.auto.candidates import Candidate, Candidates, choose
from twolane.systems.auto.order import Line, make_line
from twolane.systems.common.admission import next_chunks
from twolane.systems.common.multiplex import batch_load, requests_of, shared_levels, tbt_slo
from twolane.systems.common.settings import at_least
from twolane.systems.plan import Chunk, DecodeSteps, Hybrid, Launch, Plan, PrefillSlice
from twolane.systems.view import LaneView, RequestView, View

UNBOUND_TBT = 0.05
"""TBT that is planned for where no SLO bounds it, in seconds."""
UNBOUND_STEPS = 4
"""The same in decode steps on the whole device, if that is longer."""
UNPROMISED = 0.9
"""Of the TBT SLO, what is planned for at first if the estimator promises nothing."""
UNHURRIED = 0.95
"""Of the TBT SLO and what is added to it, what is planned for at most while no prompt is in a
hurry."""
AHEAD = 0.33
"""Of the time for which tokens are held back, what is added to the TBT SLO; the rest is for
launches that take longer than predicted. With more of it, it is often used up, and what is late
then is late for everybody."""
AHEAD_STEPS = 8
"""Parts of a TBT bound: when that time has changed by one, a choice is made anew."""
FULL_TOKENS = 1024
"""A request costs what it adds to a batch of so many new tokens."""
BATCH_SECONDS = 0.2
"""Of a prefill batch on the whole device, at most, unless `LEAST_TOKENS` take longer."""
LEAST_TOKENS = 256
"""New tokens that a prefill batch may have, however long they take."""
MOST_STEPS = 8
"""Steps in one launch: where they are shorter than the lead, or a pass is launched behind them."""
CHOICE_SECONDS = 0.1
"""For which a choice stands while batch, number of requests, the device and what tokens are ahead
stay the same."""
FIRST = 0.5
"""Of a launch of a slice, after which the device begins with it; with a pass, at its end."""
SLOWER = 2.0
"""Than the longest launch of late may one be that decode shall not have to wait for."""
STEPS_FIRST = "steps first: a pass would come late"
"""A plan's reason."""
GUARD = 0.0005
"""Seconds from a step's end to the start of one that was not launched ahead of it."""
IN_LINE = 1.15
"""Times what is predicted for it, a prompt in line is reckoned with: many launches, of whose sum
the bound that one in a hundred of them exceeds says little, however high it is."""
LEAST_PACE = 0.05
"""Of prefill, in that of the whole device alone, that is reckoned with."""
CHECK_SECONDS = 0.1
"""Between two looks at the recent gaps between tokens."""
ALLOWED = 0.005
"""Of the gaps may be above the TBT SLO, which is on their P99: late ones come dozens at a time, and
half a minute has too few of such times for more to stay below one in a hundred."""
STEP = 1.0
"""By which share the TBT that is planned for shrinks with each late decode step, for each second of
the bound: by 1 % at 10 ms."""
LEAST_MARGIN, LEAST_PROMISED = 0.6, 0.8
"""Where the estimator promises its bounds, gaps that are late whatever is planned, for the host or
the device stood still, shall not leave prefill a few units."""
FORGET_SECONDS = 1.0
"""Without a gap, after which the margin is 1 again: what came before was another load."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What is kept from plan to plan."""

    choice: Candidate | None = None
    """The last one."""
    about: tuple[object, ...] = ()
    """Rows and batch that it was made for, how slow the device was, how far tokens were ahead."""
    chunk: int = 0
    """Tokens of the largest pass that kept the bound, when passes were last looked at."""
    chosen: float = -math.inf
    """When, in seconds."""
    spent: float = 0.0
    """Bound on the seconds of prefill that the whole device got since it last decoded."""
    ends: float = -math.inf
    """When the prompts launched last in the prefill lane will be done by prediction, in seconds."""
    hurried: bool = True
    """Whether a prompt of the last line was."""
    margin: float = 1.0
    """Of the TBT SLO, what is planned for then."""
    checked: float = -math.inf
    """When the margin was last looked at."""
    seen: int = 0
    """Gaps that had come by then."""
    last: Literal["pass", "steps first", ""] = ""
    """What was launched last, if that."""
    base: float | None = None
    """Seconds of `FULL_TOKENS` on the whole device."""
    seconds: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    """New tokens of a waiting request, and the seconds that they add on the whole device."""


@dataclass(frozen=True, slots=True)
class _Tbt:
    """Seconds between two tokens."""

    bound: float
    """The tightest SLO that is kept."""
    target: float
    """What is planned for."""
    latest: float
    """After which the next one is late: what is held back leaves more time than the bound."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """The prompts that a plan is about: the open batch, or the one that it opens."""

    load: Load
    first: int
    """Layers launched."""
    chunks: tuple[Chunk, ...]
    """To admit; none if it is open."""
    joiners: Sequence[int]
    """Contexts of those who will decode after it."""


class Auto(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hybrid, temporal or spatial, whichever prefills fastest within the SLOs by prediction."""

    estimator: ClassVar[EstimatorName] = "calibrated"
    reads_slos: ClassVar[bool] = True

    max_batch_tokens: int = 2048
    """New tokens in one prefill batch; longer prompts are cut."""
    hysteresis: float = 0.05
    """What is done now stays until another way is better by more than this share."""
    lead_seconds: float = 0.010
    """The next launch is queued this long before its lane would run dry."""

    def __post_init__(self) -> None:
        at_least(self, max_batch_tokens=1, hysteresis=0, lead_seconds=0)

    def start(self) -> Memory:
        """Nothing was decided yet."""
        return Memory()

    def plan(self, view: View, memory: Memory) -> tuple[Plan, Memory]:
        """What the lanes that are due do next."""
        if not (self._due(view, "prefill") or self._due(view, "decode")):
            return Plan(wake_at=self._wake(view)), memory
        memory = _watch(view, memory)
        line = Line((), ())
        if view.waiting and view.batch is None and self._due(view, "prefill"):
            memory = _costs(view, memory)
            line = _line(view, memory)
            memory = replace(memory, hurried=line.hurried)
        batch = self._batch(view, line.order, memory)
        plan, memory = self._go_on(view, memory, line.order, batch)
        if any(not isinstance(launch.work, PrefillSlice) for launch in plan.launches):
            memory = replace(memory, spent=0.0)
        if plan.launches:
            memory = replace(memory, last=_launched(plan))
        wakes = [at for at in (plan.wake_at, self._wake(view)) if at is not None and at > view.now]
        wake = min(wakes, default=None)
        return msgspec.structs.replace(plan, refuse=tuple(line.refusals), wake_at=wake), memory

    # --- when ---------------------------------------------------------------------------------

    def _due(self, view: View, lane: LaneName, within: float = 0.0) -> bool:
        """Whether the lane, and the whole device, which excludes it, are idle or soon will be; at
        any rate within so many seconds."""
        return _queue(view, lane).due(view.now, max(self.lead_seconds, within))

    def _wake(self, view: View) -> float | None:
        """When the first lane will be due that is not due now."""
        wakes = (_queue(view, lane).due_at(self.lead_seconds) for lane in LANES)
        return min((at for at in wakes if at is not None and at > view.now), default=None)

    # --- what ---------------------------------------------------------------------------------

    def _batch(self, view: View, order: Sequence[RequestView], memory: Memory) -> _Batch | None:
        """The open batch, or the next one."""
        if view.batch is not None:
            chunks = view.batch.chunks
            ends = [c.start + c.n for c in chunks if c.n == c.request.new]
            return _Batch(batch_load(view.batch), view.batch.layers_launched, (), ends)
        tokens = float(LEAST_TOKENS)
        if memory.base:
            tokens = max(tokens, BATCH_SECONDS * FULL_TOKENS / memory.base)
        coming = _take(view, order, min(int(tokens), self.max_batch_tokens))
        if not coming:
            return None
        pairs = [(r, chunk.n) for r, chunk in zip(requests_of(view, coming), coming, strict=True)]
        load = Load([n for _, n in pairs], [r.reused for r, _ in pairs])
        return _Batch(load, 0, coming, [r.reused + n for r, n in pairs if n == r.new])

    def _go_on(
        self, view: View, memory: Memory, order: Sequence[RequestView], batch: _Batch | None
    ) -> tuple[Plan, Memory]:
        rows = [*view.decoding, *(r for lane in LANES for r in view.joining[lane])]
        if not rows:
            return self._prefill_alone(view, batch), memory
        decode = Load.decode([request.context for request in rows])
        step = view.estimator.predict(decode_step(decode), view.units, bound=True)
        tbt = _tbt(view, memory, _bound(view, rows, step))
        if batch is None:
            return self._decode_alone(view, memory, step, tbt)
        slow, ahead = round(view.estimator.lately, 1), round(AHEAD_STEPS * tbt.latest / tbt.bound)
        about = (len(rows), tuple(batch.load.n), tuple(batch.load.r), slow, ahead)
        if batch.chunks or about != memory.about or view.now > memory.chosen + CHOICE_SECONDS:
            if batch.chunks and _leave_no_room(view, decode, batch.joiners, tbt.bound):
                return self._decode_alone(view, memory, step, tbt)
            # Those who join decode when the batch is done; the next one's choice reckons with them.
            choice, chunk = self._choose(view, memory, batch, decode, step, tbt.target)
            memory = replace(memory, choice=choice, chunk=chunk, about=about, chosen=view.now)
        assert memory.choice is not None
        return self._as_chosen(view, memory, order, batch, memory.choice, step, tbt)

    def _choose(
        self,
        view: View,
        memory: Memory,
        batch: _Batch,
        decode: Load,
        step: float | None,
        target: float,
    ) -> tuple[Candidate, int]:
        """Of all ways to run the batch, and the largest pass; a layer between two steps while
        nothing is known."""
        unknown = Candidate("temporal", (view.units,) * 2, 1, 0.0, 0, math.inf, 1.0, 0.0)
        if not step:
            return unknown, memory.chunk
        levels = [level for level in shared_levels(view) if level[0] + level[1] <= view.units]
        ways = Candidates(
            view.estimator,
            view.layers,
            view.units,
            levels,
            decode,
            step,
            batch.load,
            target,
            view.launching.seconds(Hybrid()),
            view.pass_sizes,
        )
        found = ways.all(sliced=not batch.chunks, chunk=memory.chunk)
        chunk = max((way.tokens for way in found), default=0) or memory.chunk
        return choose(found or [unknown], target, memory.choice, self.hysteresis), chunk

    def _as_chosen(
        self,
        view: View,
        memory: Memory,
        order: Sequence[RequestView],
        batch: _Batch,
        choice: Candidate,
        step: float | None,
        tbt: _Tbt,
    ) -> tuple[Plan, Memory]:
        if choice.mode == "spatial" and not memory.spent:
            return self._spatial(view, memory, batch, choice, tbt)
        if not self._due(view, "device") or _slices_end_late(view, choice, tbt.latest):
            return self._drain(view, choice, tbt), memory
        if choice.mode == "temporal" and (
            slices := self._temporal(view, memory, batch, choice, tbt)
        ):
            return slices
        if memory.spent:
            launch = Launch("device", view.units, DecodeSteps())
            return Plan(launches=(launch,), reason="a step first: prefill had its turn"), memory
        if steps := _steps_first(view, memory, choice, step, tbt.latest):
            launch = Launch("device", view.units, DecodeSteps(steps))
            return Plan(launches=(launch,), reason=STEPS_FIRST), memory
        chunks = _take(view, order, choice.tokens)
        launch = Launch("device", view.units, Hybrid())
        reason = _reason(choice, tbt)
        return Plan(admit=chunks, launches=(launch,), reason=reason), memory

    def _temporal(
        self, view: View, memory: Memory, batch: _Batch, choice: Candidate, tbt: _Tbt
    ) -> tuple[Plan, Memory] | None:
        """As many layers as the bound leaves time for, then a step; if the batch ends before that
        and there is more to prefill, the next one's first layers come in between. None if another
        batch had all the time."""
        room = tbt.target - (choice.gap - choice.layers * choice.layer)
        layers = int((room - memory.spent) / choice.layer) if choice.layer else 1
        if memory.spent and layers < 1:
            return None
        last = min(batch.first + max(1, layers), view.layers)
        spent = memory.spent + (last - batch.first) * choice.layer
        launches = [Launch("device", view.units, PrefillSlice(batch.first, last))]
        prompts = len(view.waiting) + len(view.batch.chunks if view.batch else ())
        more = prompts > len(batch.joiners)
        if last < view.layers or not more or spent + choice.layer > room:
            launches.append(Launch("device", view.units, DecodeSteps()))
        reason = _reason(choice, tbt)
        plan = Plan(admit=batch.chunks, launches=tuple(launches), reason=reason)
        return plan, replace(memory, spent=spent)

    def _prefill_alone(self, view: View, batch: _Batch | None) -> Plan:
        if batch is None or not self._due(view, "device"):
            return Plan()
        launch = Launch("device", view.units, PrefillSlice(batch.first, view.layers))
        return Plan(admit=batch.chunks, launches=(launch,), reason="nothing decodes")

    def _decode_alone(
        self, view: View, memory: Memory, step: float | None, tbt: _Tbt
    ) -> tuple[Plan, Memory]:
        if view.lanes["prefill"].queued and memory.choice:
            if memory.choice.mode == "spatial":
                return self._spatial(view, memory, None, memory.choice, tbt)
            return self._drain(view, memory.choice, tbt), memory
        if not self._due(view, "device"):
            return Plan(), memory
        k = max(1, int(min(MOST_STEPS, self.lead_seconds / step))) if step else 1
        launch = Launch("device", view.units, DecodeSteps(1 if view.waiting else k))
        return Plan(launches=(launch,), reason="no prompt to run"), memory

    # --- both lanes ---------------------------------------------------------------------------

    def _spatial(
        self, view: View, memory: Memory, batch: _Batch | None, choice: Candidate, tbt: _Tbt
    ) -> tuple[Plan, Memory]:
        """Both lanes are kept fed; decode is launched first (MuxWise §3.2.2)."""
        before, meanwhile = memory, 0.0
        admit: tuple[Chunk, ...] = ()
        launches: list[Launch] = []
        if batch is not None and self._due(view, "prefill"):
            part, ends = _next_slice(view, batch, choice)
            admit, meanwhile = batch.chunks, SLOWER * view.launching.seconds(part)
            launches = [Launch("prefill", choice.level[0], part)]
            if part.last == view.layers:
                memory = replace(memory, ends=ends)
        if step := self._step(view, before, choice, meanwhile):
            launches = [step, *launches]
        reason = _reason(choice, tbt) if launches else ""
        return Plan(admit=admit, launches=tuple(launches), reason=reason), memory

    def _step(
        self, view: View, memory: Memory, choice: Candidate, meanwhile: float
    ) -> Launch | None:
        """A decode step in its lane, if that would be due by the time at which the host has done
        what else it shall launch, which takes it so many seconds.

        It waits for prompts that end before it could begin, at any rate if nobody else decodes.
        """
        if not (view.decoding or any(view.joining.values())):
            return None
        if not self._due(view, "decode", meanwhile):
            return None
        early = not view.decoding or memory.ends <= _boundary(view)
        waits = early or bool(view.joining["device"])
        return Launch("decode", choice.level[1], DecodeSteps(waits=waits))

    def _drain(self, view: View, choice: Candidate, tbt: _Tbt) -> Plan:
        """Decode goes on beside the last slices, unless it can wait for what comes after."""
        lane = view.lanes["prefill"]
        if not lane.queued or not view.decoding or not self._due(view, "decode"):
            return Plan()
        latest = _latest(view, choice, tbt.latest)
        if lane.until is not None and lane.until <= latest and view.now < latest:
            return Plan(wake_at=latest)
        rest = min(shared_levels(view), key=lambda level: abs(level[0] - lane.units))
        return Plan(launches=(Launch("decode", rest[1], DecodeSteps()),), reason="last slices")


def _latest(view: View, choice: Candidate, tbt: float) -> float:
    """When what is chosen has to begin behind decode in its lane to keep the bound, in seconds."""
    return _boundary(view) + tbt - choice.gap - GUARD


def _slices_end_late(view: View, choice: Candidate, tbt: float) -> bool:
    """Whether slices beside decode last too long, by prediction, for decode to wait for them."""
    lane = view.lanes["prefill"]
    if not lane.queued or lane.until is None or not view.decoding:
        return False
    return lane.until > _latest(view, choice, tbt)


def _queue(view: View, lane: LaneName) -> LaneView:
    """The lane with what keeps it busy, on the whole device, too; its units are not told.

    What comes next may be launched in this lane or in one of those, and take the host as long as
    the dearest launch there.
    """
    lanes = EXCLUSIVE[lane]
    busy = [view.lanes[name] for name in lanes if view.lanes[name].queued]
    untils = [each.until for each in busy]
    known = [until for until in untils if until is not None]
    until = max(known, default=None) if len(known) == len(untils) else None
    beside = max(view.lanes[name].queued for name in lanes if name != "device")
    queued = view.lanes["device"].queued + beside
    launching = max(each.launching for each in (*busy, view.lanes[lane]))
    return LaneView(queued=queued, until=until, launching=launching)


def _launched(plan: Plan) -> Literal["pass", "steps first", ""]:
    if isinstance(plan.launches[-1].work, Hybrid):
        return "pass"
    return "steps first" if plan.reason == STEPS_FIRST else ""


def _steps_first(
    view: View, memory: Memory, choice: Candidate, step: float | None, tbt: float
) -> int:
    """Decode steps that go before a pass which would begin so late, for its launch takes the host
    longer than what is queued lasts, that the TBT bound is missed: as many as last for the launch.

    None behind such steps: they may be shorter, or the launch longer, than predicted, and the pass
    would never come. Nor if the pass were late behind `MOST_STEPS`, too.
    """
    if memory.last == "steps first":
        return 0
    launching = view.launching.seconds(Hybrid())
    late = view.now + launching - (_queue(view, "device").until or view.now)
    missed = bool(view.decoding) and late > 0.0 and choice.gap + late > tbt
    if not missed or not step or MOST_STEPS * step < launching:
        return 0
    return min(MOST_STEPS, math.ceil(launching / step))


def _free(view: View) -> float:
    """When the prefill lane has nothing left to do, in seconds; now, if that is not known."""
    return max(view.now, _queue(view, "prefill").until or 0.0)


def _next_slice(view: View, batch: _Batch, choice: Candidate) -> tuple[PrefillSlice, float]:
    """The layers, and when they end by prediction, in seconds."""
    layers = min(choice.layers, view.launching.layers_at_once)
    last = batch.first + layers
    if view.layers - last <= layers // 2:
        last = view.layers
    part = PrefillSlice(batch.first, last)
    begin = max(_free(view), view.now + FIRST * view.launching.seconds(part))
    return part, begin + (last - batch.first) * choice.layer


def _boundary(view: View) -> float:
    """When the step under way ends, or the last one ended, in seconds."""
    until = _queue(view, "decode").until
    if until is not None:
        return until
    return max((r.last_token_at for r in view.decoding if r.last_token_at), default=view.now)


def _slo(request: RequestView) -> float | None:
    """Its bound on TBT, a TPOT bound where there is none, in seconds."""
    return request.slo.tpot if request.slo.tbt is None else request.slo.tbt


def _bound(view: View, rows: Sequence[RequestView], step: float | None) -> float:
    """The tightest bound among them that decode alone can keep, in seconds.

    What not even one of them alone on the whole device could keep binds nobody; where that many
    cannot, nobody joins.
    """
    bounds = [bound for bound in {_slo(r) for r in rows} if bound is not None]
    kept = [bound for bound in bounds if not step or bound >= step]
    if bounds and not kept:
        one = Load.decode([min(r.context for r in rows)])
        least = view.estimator.predict(decode_step(one), view.units, bound=True)
        kept = [bound for bound in bounds if not least or bound >= least]
    return min(kept, default=max(UNBOUND_TBT, UNBOUND_STEPS * (step or 0.0)))


def _leave_no_room(view: View, decode: Load, joiners: Sequence[int], tbt: float) -> bool:
    """Whether decode, with those who would join it, could not even alone keep the bound."""
    joined = Load.decode([*decode.r, *joiners])
    then = view.estimator.predict(decode_step(joined), view.units, bound=True)
    return then is not None and then > tbt


def _tbt(view: View, memory: Memory, bound: float) -> _Tbt:
    """What is planned for under that bound, and what would be late."""
    told = ((_slo(r), r.slack) for r in view.decoding if r.last_token_at is not None)
    latest = min((slo + ahead for slo, ahead in told if slo and slo >= bound), default=bound)
    margin = memory.margin if memory.hurried else min(UNHURRIED, memory.margin)
    margin *= 1.0 if view.estimator.promises else UNPROMISED
    return _Tbt(bound, margin * (bound + AHEAD * (latest - bound)), latest)


def _watch(view: View, memory: Memory) -> Memory:
    """Plan for less while more gaps than allowed are above the tightest SLO, for more while fewer.

    The margin rests where as many are as allowed: `STEP` down for each, `STEP * ALLOWED` up for
    every gap (Robbins and Monro 1951, for a quantile). The gaps of a step, of all who decode, are
    late together and count as one: a stall, or a device that is slow for a moment, does not move it
    for long, however many requests there are. It moves by as much in a second under all bounds.
    """
    if view.now < memory.checked + CHECK_SECONDS:
        return memory
    gaps, bound = view.gaps, tbt_slo(view.decoding)
    new = gaps.total - memory.seen
    if not new:
        idle = view.now > memory.checked + FORGET_SECONDS
        return replace(memory, margin=1.0, checked=view.now) if idle else memory
    spare = ALLOWED * new - gaps.above(bound, new) if bound < math.inf else 0.0
    moved = STEP * spare * min(bound, 1.0) / max(1, len(view.decoding))
    promises = view.estimator.promises
    least, most = (LEAST_PROMISED, 1.0) if promises else (LEAST_MARGIN, 1.0 / UNPROMISED)
    margin = min(most, max(least, memory.margin * math.exp(moved)))
    return replace(memory, margin=margin, checked=view.now, seen=gaps.total)


def _costs(view: View, memory: Memory) -> Memory:
    """Predict once what each waiting request adds to a full batch on the whole device."""
    base = memory.base
    full = Load([FULL_TOKENS], [0])
    if base is None or not memory.seconds:
        base = _in_line(view, full)
    if base is None:
        return memory
    seconds = {}
    for request in view.waiting:
        new, reused = request.new, request.reused
        known = memory.seconds.get(request.id)
        if known is None or known[0] != new:
            known = new, base * new / FULL_TOKENS
            if max(new, reused) > FULL_TOKENS:  # attention counts
                load = Load([FULL_TOKENS, new], [0, reused])
                known = new, max(0.0, (_in_line(view, load) or base) - base)
        seconds[request.id] = known
    return replace(memory, base=base, seconds=seconds)


def _in_line(view: View, load: Load) -> float | None:
    """Seconds that are reckoned with for that prefill on the whole device."""
    predicted = view.estimator.predict(prefill_slice(load, view.layers), view.units)
    return None if predicted is None else IN_LINE * predicted


def _line(view: View, memory: Memory) -> Line:
    """The waiting requests in order."""
    rows = view.decoding or any(view.joining.values())
    pace = max(LEAST_PACE, memory.choice.pace) if memory.choice and rows else 1.0

    def seconds(request: RequestView) -> float:
        return memory.seconds.get(request.id, (0, 0.0))[1] / pace

    return make_line(view.waiting, _free(view), seconds, refuse=view.estimator.promises)


def _take(view: View, order: Sequence[RequestView], tokens: int) -> tuple[Chunk, ...]:
    return next_chunks(view, tokens, split=True, waiting=order)


def _reason(choice: Candidate, tbt: _Tbt) -> str:
    """With predictions, for the trace: beside what is planned for, and the bound."""
    what = {
        "hybrid": f"{choice.tokens} tokens a pass",
        "temporal": f"{choice.layers} layers between steps",
        "spatial": f"{choice.level[0]} + {choice.level[1]} units",
    }[choice.mode]
    wanted = f"{tbt.target * 1e3:.1f} ms, bound {tbt.bound * 1e3:.1f}"
    gap = f"gap <= {choice.gap * 1e3:.1f} of {wanted}, late after {tbt.latest * 1e3:.1f}"
    return f"{choice.mode}: {what}, {gap}, prefill at {choice.pace:.0%}"
