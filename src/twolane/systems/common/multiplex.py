"""What the systems that run prefill and decode side by side share: no decisions, only means.

Loads of batches, deadlines, the partitions on offer, slices sized by prediction.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from twolane.estimate.query import Corunner, Load, decode_step
from twolane.systems.plan import Chunk, Launch, PrefillSlice
from twolane.systems.view import BatchView, RequestView, View

Level = tuple[int, int]
"""(prefill units, decode units)"""

TTFT_PER_TOKEN = 1.0 / 1024
"""Seconds of TTFT for each new token: 1 s per 1K (Drift §5.1)."""


@dataclass(frozen=True, slots=True)
class PrefillJob:
    """The prefill batch that a plan works on: an open or parked one, or one that it opens."""

    load: Load
    first: int
    """Layers launched: where the next slice begins."""
    deadline: float
    """The earliest of its requests' that have no token yet, in seconds."""
    ids: frozenset[str]

    @classmethod
    def of(cls, batch: BatchView) -> "PrefillJob":
        """Prompts of a batch that was admitted."""
        chunks = batch.chunks
        return cls(
            batch_load(batch),
            batch.layers_launched,
            min((deadline(c.request, c.n) for c in chunks), default=math.inf),
            frozenset(c.request.id for c in chunks),
        )

    @classmethod
    def coming(cls, view: View, chunks: Sequence[Chunk]) -> "PrefillJob | None":
        """Prompts of the batch that these chunks will be; None without chunks."""
        if not chunks:
            return None
        requests = requests_of(view, chunks)
        load = Load([c.n for c in chunks], [r.reused for r in requests])
        first = min(deadline(r, r.new) for r in requests)
        return cls(load, 0, first, frozenset(r.id for r in requests))

    def slice(self, view: View, layers: int, units: int) -> Launch:
        """The next this many layers, or those that are left, in the prefill lane.

        They are fewer where decode would run dry while the host launches them.
        """
        if view.decoding:
            layers = min(layers, view.launching.layers_at_once)
        last = min(self.first + layers, view.layers)
        return Launch("prefill", units, PrefillSlice(self.first, last))


def deadline(request: RequestView, new: int) -> float:
    """When the first token is wanted, in seconds; infinite if it was delivered already.

    Of a request without a TTFT SLO, with this many tokens to compute, by the rule of 1 s per 1K.
    """
    if request.generated:
        return math.inf
    wanted = request.deadline
    return request.arrival + TTFT_PER_TOKEN * new if wanted is None else wanted


def tbt_slo(requests: Iterable[RequestView]) -> float:
    """The tightest TBT bound among them in seconds; infinite without any."""
    return min((r.slo.tbt for r in requests if r.slo.tbt is not None), default=math.inf)


def batch_load(batch: BatchView) -> Load:
    """Load of an admitted batch."""
    chunks = batch.chunks
    return Load([c.n for c in chunks], [c.start for c in chunks])


def decode_load(requests: Iterable[RequestView]) -> Load:
    """Load of a decode step that serves these requests, launched now."""
    return Load.decode([request.context for request in requests])


def shared_levels(view: View) -> list[Level]:
    """The partitions with units for both lanes, fewest for decode first.

    Where none is on offer both lanes have the whole device.
    """
    both = sorted((level for level in view.levels if all(level)), key=lambda level: level[1])
    return both or [(view.units, view.units)]


def nearest_level(levels: Sequence[Level], decode_units: float) -> Level:
    """The one with about this many units for decode; of two as near, the one with more."""
    return min(levels, key=lambda level: (abs(level[1] - decode_units), -level[1]))


def level_in_flight(view: View, levels: Sequence[Level]) -> Level | None:
    """The level of the decode step that was launched last, if it is one of these and queued."""
    lane = view.lanes["decode"]
    return next((lv for lv in levels if lane.queued and lv[1] == lane.units), None)


def decode_seconds(
    view: View, load: Load, levels: Sequence[Level], beside: Load | None, *, bound: bool
) -> Sequence[float] | None:
    """A decode step's predicted seconds at each level; None: nothing is known yet.

    Args:
        view: for its estimator.
        load: of the step.
        levels: at which to predict.
        beside: the prefill batch that runs meanwhile; None leaves it out of account.
        bound: whether to ask for what the estimator promises will not be exceeded.
    """
    p, d = np.array(levels).T
    other = None if beside is None else Corunner(beside, p)
    seconds = view.estimator.predict(decode_step(load), d, other, bound=bound)
    return None if seconds is None else [float(s) for s in seconds]


def requests_of(view: View, chunks: Sequence[Chunk]) -> list[RequestView]:
    """The waiting requests that these chunks are of, one for each."""
    ids = {chunk.request for chunk in chunks}
    found = {r.id: r for r in view.waiting if r.id in ids}
    return [found[chunk.request] for chunk in chunks]


def layers_for(seconds: float | None, whole: float | None, layers: int) -> int:
    """⌈seconds · layers / whole⌉: the layers that take `seconds` where all of them take `whole`.

    MuxWise §3.4.2, N_PL. At least one layer, and one while nothing is known.
    """
    if seconds is None or not whole:
        return 1
    return max(1, math.ceil(min(seconds * layers / whole, layers) - 1e-9))


def decoding_soon(view: View) -> Sequence[RequestView]:
    """Whom the next decode steps serve: those in decode, or while there are none, those whose
    prompts are launched to the end."""
    if view.decoding:
        return view.decoding
    return [c.request for b in view.launched_batches for c in b.chunks if c.request.to_generate]


def prefilling(view: View) -> Load | None:
    """What the prefill lane computes, or would compute next; None: nothing."""
    batch = view.batch or (view.launched_batches[-1] if view.launched_batches else None)
    return None if batch is None else batch_load(batch)


def wake_at(view: View, lead: float) -> float | None:
    """When the first lane will be due that is not due now; None: a launch's end tells."""
    wakes = (view.lanes[lane].due_at(lead) for lane in ("prefill", "decode"))
    return min((at for at in wakes if at is not None and at > view.now), default=None)
