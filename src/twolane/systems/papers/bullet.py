"""`bullet`: both lanes at once, the units given anew at every step of prefill (Bullet).

Prefill runs a fixed number of layers a step (§3.3.1). Before each, Algorithm 1 predicts the TTFT
of the requests in prefill and waiting, and the TPOT of those in decode, and gives decode the fewest
units that keep the TPOT SLO; prefill has the rest. Decode launches its steps by itself, on what it
was given last, so that the lanes overlap while units change hands (§3.3.1). Waiting requests are
served by ascending predicted latency as far as no TTFT SLO suffers, and decode stands still for a
step if prefill is late and the TPOT SLO bears it (§3.3.2).
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, floor, inf
from typing import ClassVar

import msgspec
import numpy as np

from twolane.common.errors import FieldError
from twolane.estimate.names import EstimatorName
from twolane.estimate.query import Corunner, Floats, Load, decode_step, prefill_slice
from twolane.slo import Slo
from twolane.systems.base import System
from twolane.systems.common.admission import next_chunks
from twolane.systems.common.multiplex import (
    Level,
    PrefillJob,
    decode_load,
    nearest_level,
    shared_levels,
    wake_at,
)
from twolane.systems.common.settings import at_least
from twolane.systems.plan import Chunk, DecodeSteps, Launch, Plan, PrefillSlice
from twolane.systems.view import RequestView, View

MAX_PREDICTED = 64
"""Waiting requests whose latency is predicted, and which may be reordered; the others come after
them as they are."""
PERCENTILE = 90.0
"""Percentile of TTFT and of TPOT over requests (Algorithm 1, lines 10 to 18)."""
MIN_GROWTH = 0.01
"""Share by which a request must raise a batch's predicted tokens a second for another to join."""


def reorder(
    groups: Sequence[object], seconds: Sequence[float], due: Sequence[float], start: float
) -> list[int]:
    """Return the places of the waiting requests in the order of service (Algorithm 1, line 5).

    By ascending latency, as far as no TTFT SLO suffers (§3.3.2). A request that would be late in
    the given order keeps its place, and none after it passes it, so none starves. Those between two
    such requests are sorted unless that made one of them late.

    Args:
        groups: The group of each request; only requests of one group change places.
        seconds: The predicted seconds of each request's prefill.
        due: The time at which each request's TTFT SLO wants the first token.
        start: The time at which the first of them begins.
    """
    ends = start + np.cumsum(seconds)
    late = ends > np.asarray(due)
    order: list[int] = []
    for (_, held), run in itertools.groupby(
        range(len(seconds)), key=lambda i: (groups[i], i if late[i] else None)
    ):
        members = list(run)
        ascending = sorted(members, key=lambda i: seconds[i])
        begins = ends[members[0]] - seconds[members[0]]
        moved = begins + np.cumsum([seconds[i] for i in ascending])
        harms = held is None and bool((moved > [due[i] for i in ascending]).any())
        order += members if harms else ascending
    return order


def percentile(values: Floats, q: float) -> Floats:
    """Return the q-th percentile (0 to 100) of each row, ten times as fast as `np.percentile`."""
    ordered = np.sort(values, axis=1)
    place = q / 100 * (values.shape[1] - 1)
    low, high = ordered[:, floor(place)], ordered[:, ceil(place)]
    return np.asarray(low + (high - low) * (place % 1))


def provision(ttft: Floats, tpot: Floats, current: int) -> int:
    """Return the index of the level to take (Algorithm 1, lines 14 to 19).

    Both are predictions as shares of their SLOs, [levels], fewest decode units first; `current` is
    the level that holds.
    """
    if tpot[current] <= 1.0:  # ReduceDecodeSM: the minimum that keeps the SLO
        return int(np.argmax(tpot <= 1.0))
    if ttft[current] <= 1.0:  # ReducePrefillSM: until TPOT is kept, or as far as TTFT bears it
        kept = np.flatnonzero(tpot <= 1.0)
        return int(kept[0] if len(kept) else np.flatnonzero(ttft <= 1.0)[-1])
    return int(np.argmin(np.maximum(ttft, tpot)))  # SetBalancedSM


@dataclass(frozen=True, slots=True)
class BulletMemory:
    """The decision at the last prefill step."""

    level: Level | None = None
    """The partition of that step; None: there was none."""
    paused: bool = False
    """Whether decode stands still until that step has ended."""
    note: str = "nothing provisioned"
    latencies: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    """For each waiting request, its new tokens and the predicted seconds of its prefill alone."""


@dataclass(frozen=True, slots=True)
class BulletWork:
    """The prefill batch, open or about to be, and the requests whose TTFT it determines."""

    prompts: PrefillJob
    chunks: tuple[Chunk, ...]
    """Chunks that the new batch admits; empty: the batch is open already."""
    start: float
    """Time at which the prefill lane begins it, in seconds."""
    requests: Sequence[RequestView]
    """Requests in the batch and, if it is a new one, those after it in the queue."""
    shares: Sequence[float]
    """Each request's first-token time, in multiples of the batch's time left after `start`."""
    percentile: float
    """Percentile of TTFT over those requests."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Token times and bounds of the decoding requests, each an array over requests, in seconds."""

    first: Floats
    """Time of each request's first token."""
    last: Floats
    """Start of the gap that the next step ends."""
    tpot: Floats
    """Time that its tokens may take, including the next step's."""
    tbt: Floats
    """Bound on the gap."""

    def shares(self, ends: Floats) -> Floats:
        """Return TPOT as a share of its SLO if the next step ends then; P90 over requests, [ends].

        A TBT SLO is held against the gap.
        """
        at = ends[:, None]
        shares = np.maximum((at - self.first) / self.tpot, (at - self.last) / self.tbt)
        return percentile(shares, PERCENTILE)


def _intensity_limit(view: View, memory: BulletMemory, chunks: Sequence[Chunk]) -> int:
    """Return the number of first chunks that bring a batch to its limit of arithmetic intensity.

    The chunk that reaches the limit is in the batch (Algorithm 1, lines 12 and 13). The execution
    state is that of the moment: the units of prefill, and decode beside it.
    """
    known = {request.id: request for request in view.waiting}
    units, beside = view.units, None
    if view.decoding and memory.level is not None:
        units, beside = memory.level[0], Corunner(decode_load(view.decoding), memory.level[1])
    new = [chunk.n for chunk in chunks]
    reused = [known[chunk.request].reused for chunk in chunks]
    rate = 0.0
    for count in range(1, len(chunks) + 1):
        whole = prefill_slice(Load(new[:count], reused[:count]), view.layers, finishes=True)
        seconds = view.estimator.predict(whole, units, beside)
        if seconds is None:
            break
        before, rate = rate, sum(new[:count]) / seconds
        if rate < before * (1 + MIN_GROWTH):
            return count
    return len(chunks)


class Bullet(System, msgspec.Struct, frozen=True):
    """Layer-wise prefill beside decode; units follow predicted TTFT and TPOT at every step."""

    estimator: ClassVar[EstimatorName] = "sm-roofline"

    ttft_per_token: float = 0.003
    """Normalised TTFT SLO, seconds for each prompt token, of requests that have no TTFT SLO
    (Table 4, ShareGPT)."""
    tpot_seconds: float = 0.150
    """TPOT SLO of requests that have neither a TPOT nor a TBT SLO (Table 4, ShareGPT)."""
    step_layers: int = 4
    """Layers of a prefill step; the paper names no number."""
    max_batch_tokens: int = 8192
    """New tokens in one prefill batch; a longer prompt is a batch of its own."""
    by_intensity: bool = True
    """Whether a batch ends with the request that raises its predicted rate by less than 1 %:
    arithmetic intensity has its limit there under the execution state (§3.3.2)."""
    partition: bool = True
    """Whether units are partitioned; false: scheduler only (Figure 23), lanes on all units."""
    schedule: bool = True
    """Whether prompts are reordered and decode may pause; false: neither (Figure 23: with
    partitions only; if `partition` is false, too: naive)."""
    prefill_units: int = 0
    """Above 0: prefill always on about this many units, decode on all (Figure 22)."""
    lead_seconds: float = 0.005
    """The next launch is queued this long before its lane would run dry."""

    def __post_init__(self) -> None:
        for name in ("ttft_per_token", "tpot_seconds"):
            if not 0.0 < getattr(self, name) < inf:
                raise FieldError(name, f"must be above 0, not {getattr(self, name)}")
        at_least(self, step_layers=1, max_batch_tokens=1, prefill_units=0, lead_seconds=0)

    def start(self) -> BulletMemory:
        """Return the memory of a system that has provisioned nothing."""
        return BulletMemory()

    def plan(self, view: View, memory: BulletMemory) -> tuple[Plan, BulletMemory]:
        """Feed both lanes; decode is launched first, for its launch is short."""
        step: Launch | None = None
        chunks: tuple[Chunk, ...] = ()
        if view.lanes["prefill"].due(view.now, self.lead_seconds):
            work, memory = self._work(view, memory)
            if work is not None:
                units, memory = self._provisioned(view, memory, work)
                step, chunks = work.prompts.slice(view, self.step_layers, units), work.chunks
        more = len(view.waiting) > len(chunks)
        launches = tuple(each for each in (self._decode(view, memory, step, more), step) if each)
        wake = wake_at(view, self.lead_seconds)
        if not launches:
            return Plan(wake_at=wake), memory
        reason = memory.note if step or view.lanes["prefill"].queued else "decode alone"
        return Plan(admit=chunks, launches=launches, wake_at=wake, reason=reason), memory

    def _work(self, view: View, memory: BulletMemory) -> tuple[BulletWork | None, BulletMemory]:
        """Return the open batch or a new one (Algorithm 1, lines 5 to 13)."""
        start = max(view.now, view.lanes["prefill"].until or 0.0)
        if view.batch is not None:
            requests = [chunk.request for chunk in view.batch.chunks]
            shares = [1.0] * len(requests)
            return BulletWork(PrefillJob.of(view.batch), (), start, requests, shares, 100.0), memory
        if not next_chunks(view, 1, split=False):
            return None, memory  # none waits, or the first one for memory: none passes it
        latencies = self._latencies(view, memory)
        memory = replace(memory, latencies=latencies)
        waiting = self._ordered(view, latencies, start)
        chunks = next_chunks(view, self.max_batch_tokens, split=False, waiting=waiting)
        if self.by_intensity:
            chunks = chunks[: _intensity_limit(view, memory, chunks)]
        prompts, count = PrefillJob.coming(view, chunks), len(chunks)
        assert prompts is not None
        # The batch may have more requests than are predicted: many short ones.
        requests = waiting[: max(count, len(latencies))]
        seconds = [latencies[r.id][1] for r in requests if r.id in latencies]
        ends = np.cumsum(seconds[count:]) / sum(seconds[:count]) if latencies else np.empty(0)
        shares = [1.0] * count + (1.0 + ends).tolist()
        return BulletWork(prompts, chunks, start, requests, shares, PERCENTILE), memory

    def _latencies(self, view: View, memory: BulletMemory) -> dict[str, tuple[int, float]]:
        """Return the first waiting requests' latencies, predicted once; empty if unknown."""
        known: dict[str, tuple[int, float]] = {}
        for request in view.waiting[:MAX_PREDICTED]:
            entry, new = memory.latencies.get(request.id), request.new
            if entry is None or entry[0] != new:
                load = Load([new], [request.reused])
                whole = prefill_slice(load, view.layers, finishes=True)
                seconds = view.estimator.predict(whole, view.units)
                if seconds is None:
                    return {}
                entry = new, seconds
            known[request.id] = entry
        return known

    def _ordered(
        self, view: View, latencies: Mapping[str, tuple[int, float]], start: float
    ) -> list[RequestView]:
        """Return the waiting requests in order of service; the first of them fits into memory."""
        waiting = list(view.waiting)
        if not self.schedule or not latencies:
            return waiting
        queue = waiting[:MAX_PREDICTED]
        order = reorder(
            [(request.started, request.priority) for request in queue],
            [latencies[request.id][1] for request in queue],
            [self._due(request) for request in queue],
            start,
        )
        ordered = [queue[i] for i in order] + waiting[MAX_PREDICTED:]
        fits = next_chunks(view, 1, split=False, waiting=ordered)
        return ordered if fits else waiting

    def _due(self, request: RequestView) -> float:
        """Return the time at which the TTFT SLO wants the first token; infinite after it."""
        if request.generated:
            return inf
        if request.deadline is not None:
            return request.deadline
        return request.arrival + self.ttft_per_token * (request.new + request.reused)

    def _provisioned(
        self, view: View, memory: BulletMemory, work: BulletWork
    ) -> tuple[int, BulletMemory]:
        """Return the units of the next prefill step; decide the level and whether decode pauses."""
        if not view.decoding:
            return view.units, replace(memory, paused=False, note="prefill alone")
        levels, decode = self._levels(view), decode_load(view.decoding)
        held = memory.level if memory.level in levels else nearest_level(levels, view.units / 2)
        p, d = np.array(levels).T
        left = view.layers - work.prompts.first
        rest = prefill_slice(work.prompts.load, left, finishes=True)
        seconds = view.estimator.predict(rest, p, Corunner(decode, d))
        steps = view.estimator.predict(decode_step(decode), d, Corunner(work.prompts.load, p))
        if seconds is None or steps is None:
            note = f"prefill {held[0]}, decode {held[1]}: nothing to predict from"
            return held[0], replace(memory, level=held, paused=False, note=note)
        ready = max(view.now, view.lanes["decode"].until or 0.0)
        pace = self._pace(view, ready)
        ttft, tpot = self._ttft(work, seconds), pace.shares(ready + steps)
        chosen = provision(ttft, tpot, levels.index(held))
        step, late = float(steps[chosen]), bool(ttft[chosen] > 1.0)
        paused = self.schedule and late and self._can_pause(view, work, pace, ready, step)
        note = (
            f"prefill {levels[chosen][0]}, decode {levels[chosen][1]}: "
            f"TTFT {ttft[chosen]:.2f} and TPOT {tpot[chosen]:.2f} of their SLOs, "
            f"{left} layers in {seconds[chosen] * 1e3:.1f} ms, step {step * 1e3:.1f} ms"
        ) + ("; decode waits for a step of prefill" if paused else "")
        units = view.units if paused else levels[chosen][0]
        return units, replace(memory, level=levels[chosen], paused=paused, note=note)

    def _levels(self, view: View) -> list[Level]:
        """Return the levels to choose from, fewest decode units first."""
        if self.prefill_units:
            units = {units for level in view.levels for units in level if units}
            return [(min(units, key=lambda u: abs(u - self.prefill_units)), view.units)]
        return shared_levels(view) if self.partition else [(view.units, view.units)]

    def _ttft(self, work: BulletWork, seconds: Floats) -> Floats:
        """Return predicted TTFT / SLO if the batch takes `seconds`; both are [levels]."""
        arrivals = np.array([request.arrival for request in work.requests])
        due = np.array([self._due(request) for request in work.requests])
        latency = work.start + np.outer(seconds, work.shares) - arrivals
        return percentile(latency / (due - arrivals), work.percentile)

    def _pace(self, view: View, ready: float) -> Pace:
        """Return the pace of the requests of the next step, which begins when decode is `ready`."""
        queued, slos = view.lanes["decode"].queued, [request.slo for request in view.decoding]
        last = [request.last_token_at for request in view.decoding]
        tokens = [request.generated + queued for request in view.decoding]
        return Pace(
            first=np.array([request.first_token_at for request in view.decoding], dtype=float),
            last=np.full(len(last), ready) if queued else np.array(last, dtype=float),
            tpot=np.maximum(1, tokens) * [self._tpot_slo(slo) for slo in slos],
            tbt=np.array([slo.tbt or inf for slo in slos]),
        )

    def _tpot_slo(self, slo: Slo) -> float:
        if slo.tpot is not None:
            return slo.tpot
        return self.tpot_seconds if slo.tbt is None else inf

    def _can_pause(
        self, view: View, work: BulletWork, pace: Pace, ready: float, step: float
    ) -> bool:
        """Return whether the TPOT SLO holds if decode, which is `ready`, waits for a prefill step
        on the whole device, and then takes its `step`."""
        layers = min(self.step_layers, view.layers - work.prompts.first)
        seconds = view.estimator.predict(prefill_slice(work.prompts.load, layers), view.units)
        if seconds is None:
            return False
        resumes = max(ready, work.start + seconds)
        return bool(pace.shares(np.array([resumes + step]))[0] <= 1.0)

    def _decode(
        self, view: View, memory: BulletMemory, step: Launch | None, more: bool
    ) -> Launch | None:
        """Return the next decode step: on its last share, or on all units where prefill has nothing
        more to launch, though its last step may still run (§3.3.1)."""
        if not view.decoding or not view.lanes["decode"].due(view.now, self.lead_seconds):
            return None
        if step is None and not view.lanes["prefill"].queued:
            return Launch("decode", view.units, DecodeSteps())
        if memory.paused:
            return None
        last = view.batch is None if step is None else _is_last(step, view.layers)
        level = memory.level or nearest_level(self._levels(view), view.units / 2)
        units = view.units if last and not more else level[1]
        return Launch("decode", units, DecodeSteps())


def _is_last(step: Launch, layers: int) -> bool:
    return isinstance(step.work, PrefillSlice) and step.work.last == layers
