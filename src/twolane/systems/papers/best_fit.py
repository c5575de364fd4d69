"""The policy that Drift (§3.3, §3.5) and MuxWise (§3.2.3, §3.4) have in common.

Decode gets the fewest units that keep its TBT SLO by prediction, prefill the rest. A prefill batch
is launched in slices of as many layers as a decode step takes long, decode first; its requests join
the decode batch when its end is seen. A new batch may preempt the open one, once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from twolane.devices import LaneName
from twolane.estimate.query import prefill_slice
from twolane.systems.common.admission import next_chunks
from twolane.systems.common.multiplex import (
    Level,
    PrefillJob,
    decode_load,
    decode_seconds,
    decoding_soon,
    layers_for,
    level_in_flight,
    prefilling,
    tbt_slo,
    wake_at,
)
from twolane.systems.plan import Chunk, DecodeSteps, Launch, Plan, PrefillSlice
from twolane.systems.view import View

Preempted = frozenset[str]
"""Memory: the requests of the batch that was preempted last, which is not preempted again."""


@dataclass(frozen=True, slots=True)
class PrefillTurn:
    """The next prefill batch, and the changes that make it the open one."""

    prompts: PrefillJob | None
    admit: tuple[Chunk, ...] = ()
    preempt: bool = False
    resume: bool = False


@dataclass(frozen=True, slots=True)
class Split:
    """A partition, and how long a decode step is expected to take on its share."""

    level: Level
    seconds: float | None
    slo: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BestFit:
    """The policy, with the settings in which the two systems differ."""

    levels: Sequence[Level]
    """Partitions to choose from, fewest units for decode first."""
    guard: bool
    """Whether decode is planned by the bound beside prefill, or as if it were alone."""
    preemption: bool = True
    only_if_late: bool = False
    """Whether a batch preempts only if it would miss its deadline otherwise."""
    layer_wise: bool = True
    query_sync: bool = True
    max_batch_tokens: int
    slice_seconds: float
    """Seconds of a slice while nothing decodes."""
    lead_seconds: float

    def plan(self, view: View, preempted: Preempted) -> tuple[Plan, Preempted]:
        """Keep both lanes fed; decode is launched first."""
        prefill_due, decode_due = (self._due(view, lane) for lane in ("prefill", "decode"))
        wake = wake_at(view, self.lead_seconds)
        if not (prefill_due or decode_due):
            return Plan(wake_at=wake), preempted
        open_batch = PrefillJob.of(view.batch) if view.batch else None
        turn = self._turn(view, open_batch, preempted) if prefill_due else PrefillTurn(open_batch)
        split = self._split(view, turn.prompts)
        decode = self._decode(view, split)
        prefill = self._prefill(view, turn.prompts, split, decode) if prefill_due else None
        if prefill is None:  # nothing is admitted or parked before it can be launched
            turn = PrefillTurn(open_batch)
        plan = Plan(
            preempt=turn.preempt,
            admit=turn.admit,
            resume=turn.resume,
            launches=tuple(launch for launch in (decode, prefill) if launch),
            wake_at=wake,
            reason=_reason(turn, split) if decode or prefill else "",
        )
        return plan, open_batch.ids if turn.preempt and open_batch else preempted

    def _due(self, view: View, lane: LaneName) -> bool:
        return view.lanes[lane].due(view.now, self.lead_seconds)

    def _turn(self, view: View, open_batch: PrefillJob | None, preempted: Preempted) -> PrefillTurn:
        """Return the next prefill batch (Drift Algorithm 1, GeneratePB)."""
        if open_batch is None and view.parked is not None:
            return PrefillTurn(PrefillJob.of(view.parked), resume=True)
        if open_batch is None and view.launched_batches and not self.query_sync:
            return PrefillTurn(None)  # decode merges with what ends first
        if open_batch and (not self.preemption or view.parked or preempted & open_batch.ids):
            return PrefillTurn(open_batch)
        chunks = next_chunks(view, self.max_batch_tokens, split=False)
        new = PrefillJob.coming(view, chunks)
        if open_batch is None:
            return PrefillTurn(new, chunks)
        if new and self._preempts(view, open_batch, new):
            return PrefillTurn(new, chunks, preempt=True)
        return PrefillTurn(open_batch)

    def _preempts(self, view: View, current: PrefillJob, new: PrefillJob) -> bool:
        """Return whether the open batch keeps its deadline if the new one goes first."""
        split = self._split(view, current)
        units = split.level[0] if split else view.units
        predict, layers = view.estimator.predict, view.layers
        rest = predict(prefill_slice(current.load, layers - current.first, finishes=True), units)
        first = predict(prefill_slice(new.load, layers, finishes=True), units)
        if rest is None or first is None:
            return False
        both = max(view.now, view.lanes["prefill"].until or 0.0) + rest + first
        return both <= current.deadline and (both > new.deadline or not self.only_if_late)

    def _split(self, view: View, prompts: PrefillJob | None) -> Split | None:
        """Return the best-fit partition; None while at most one phase has work.

        Between two decode steps it is the one that the step in flight runs at, so that the lanes
        do not overlap. Where no level keeps the SLO, decode gets the most.
        """
        rows = decoding_soon(view)
        beside = prompts.load if prompts else prefilling(view)
        if not rows or beside is None:
            return None
        flying = None if self._due(view, "decode") else level_in_flight(view, self.levels)
        levels = [flying] if flying else self.levels
        slo = tbt_slo(rows)
        seconds = decode_seconds(
            view, decode_load(rows), levels, beside if self.guard else None, bound=self.guard
        )
        if seconds is None:
            return Split(levels[-1], None, slo)
        fit = next((i for i, s in enumerate(seconds) if s <= slo), len(levels) - 1)
        return Split(levels[fit], seconds[fit], slo)

    def _decode(self, view: View, split: Split | None) -> Launch | None:
        if not view.decoding or not self._due(view, "decode"):
            return None
        if view.launched_batches and not self.query_sync:
            return None
        return Launch("decode", split.level[1] if split else view.units, DecodeSteps())

    def _prefill(
        self, view: View, prompts: PrefillJob | None, split: Split | None, decode: Launch | None
    ) -> Launch | None:
        """Return the next slice; None while a decode step in flight has its units."""
        if prompts is None:
            return None
        units = split.level[0] if split else view.units
        lane = view.lanes["decode"]
        if decode is None and lane.queued and lane.units + units > view.units:
            return None
        layers = view.layers
        if not self.layer_wise:  # whatever that costs the host
            return Launch("prefill", units, PrefillSlice(prompts.first, layers))
        whole = view.estimator.predict(prefill_slice(prompts.load, layers, finishes=True), units)
        layers = layers_for(split.seconds if split else self.slice_seconds, whole, layers)
        return prompts.slice(view, layers, units)


def _reason(turn: PrefillTurn, split: Split | None) -> str:
    how = "preempt, " if turn.preempt else "resume, " if turn.resume else ""
    if split is None:
        return how + "one phase has work"
    (p, d), seconds = split.level, split.seconds
    step = "unknown" if seconds is None else f"{seconds * 1e3:.1f} ms"
    bound = "no bound" if math.isinf(split.slo) else f"{split.slo * 1e3:g} ms"
    return f"{how}({p}, {d}): step {step} of {bound}"
