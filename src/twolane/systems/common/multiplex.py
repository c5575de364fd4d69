"""Shared computations of systems with two lanes: loads, deadlines, levels and sizes of slices.

Nothing here decides what to launch.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from twolane.estimate.query import Corunner, Load, decode_step
from twolane.systems.plan import Chunk, Launch, PrefillSlice
from twolane.systems.rows import TTFT_PER_TOKEN
from twolane.systems.view import BatchView, RequestView, View

Level = tuple[int, int]
"""(prefill units, decode units)"""


@dataclass(frozen=True, slots=True)
class PrefillJob:
    """The prefill batch that a plan works on: an open or parked one, or one that it opens."""

    load: Load
    first: int
    """Layers launched: where the next slice begins."""
    deadline: float
    """Earliest deadline in seconds of the requests that have no token yet."""
    ids: frozenset[str]

    @classmethod
    def of(cls, batch: BatchView) -> "PrefillJob":
        """Return the job of an admitted batch."""
        chunks = batch.chunks
        return cls(
            batch_load(batch),
            batch.layers_launched,
            min((deadline(c.request, c.n) for c in chunks), default=math.inf),
            frozenset(c.request.id for c in chunks),
        )

    @classmethod
    def coming(cls, view: View, chunks: Sequence[Chunk]) -> "PrefillJob | None":
        """Return the job of the batch that these chunks will form; None without chunks."""
        if not chunks:
            return None
        requests = requests_of(view, chunks)
        load = Load([c.n for c in chunks], [r.reused for r in requests])
        first = min(deadline(r, r.new) for r in requests)
        return cls(load, 0, first, frozenset(r.id for r in requests))

    def slice(self, view: View, layers: int, units: int) -> Launch:
        """Return a launch of the next `layers` layers at most, in the prefill lane.

        While requests decode, there are no more layers than the host launches without delaying
        them.
        """
        if view.decoding:
            layers = min(layers, view.launch_costs.layers_at_once)
        last = min(self.first + layers, view.layers)
        return Launch("prefill", units, PrefillSlice(self.first, last))


def deadline(request: RequestView, new: int) -> float:
    """Return the time in seconds at which the first token is due; infinite if it was delivered.

    A request without a TTFT SLO has 1 s for each 1,024 of its `new` tokens.
    """
    if request.generated:
        return math.inf
    wanted = request.deadline
    return request.arrival + TTFT_PER_TOKEN * new if wanted is None else wanted


def tbt_slo(requests: Iterable[RequestView]) -> float:
    """Return the tightest TBT bound of these requests in seconds; infinite without any."""
    return min((r.slo.tbt for r in requests if r.slo.tbt is not None), default=math.inf)


def batch_load(batch: BatchView) -> Load:
    """Return the load of an admitted batch."""
    chunks = batch.chunks
    return Load([c.n for c in chunks], [c.start for c in chunks])


def decode_load(requests: Iterable[RequestView]) -> Load:
    """Return the load of a decode step that serves these requests now."""
    return Load.decode([request.context for request in requests])


def shared_levels(view: View) -> list[Level]:
    """Return the levels with units for both lanes, fewest for decode first.

    If there are none, both lanes have the whole device.
    """
    both = sorted((level for level in view.levels if all(level)), key=lambda level: level[1])
    return both or [(view.units, view.units)]


def nearest_level(levels: Sequence[Level], decode_units: float) -> Level:
    """Return the level whose decode units are nearest; of two as near, the one with more."""
    return min(levels, key=lambda level: (abs(level[1] - decode_units), -level[1]))


def level_in_flight(view: View, levels: Sequence[Level]) -> Level | None:
    """Return the level of the decode step that was launched last, if it is queued and among
    these."""
    lane = view.lanes["decode"]
    return next((lv for lv in levels if lane.queued and lv[1] == lane.units), None)


def decode_seconds(
    view: View, load: Load, levels: Sequence[Level], beside: Load | None, *, bound: bool
) -> Sequence[float] | None:
    """Return a decode step's predicted seconds at each level; None without predictions.

    Args:
        view: has the estimator.
        load: load of the step.
        levels: levels to predict for.
        beside: load of the prefill batch in the other lane; None ignores the other lane.
        bound: Whether to return the estimator's bounds instead of its estimates.
    """
    p, d = np.array(levels).T
    other = None if beside is None else Corunner(beside, p)
    seconds = view.estimator.predict(decode_step(load), d, other, bound=bound)
    return None if seconds is None else [float(s) for s in seconds]


def requests_of(
    view: View, chunks: Sequence[Chunk], waiting: Sequence[RequestView] | None = None
) -> list[RequestView]:
    """Return the waiting request of each chunk.

    Args:
        view: The engine's view.
        chunks: The chunks.
        waiting: The waiting requests in another order than the view's.
    """
    seen: dict[str, RequestView] = {}
    for request in view.waiting if waiting is None else waiting:
        if all(chunk.request in seen for chunk in chunks):
            break  # the queue may be long
        seen[request.id] = request
    return [seen[chunk.request] for chunk in chunks]


def layers_for(seconds: float | None, whole: float | None, layers: int) -> int:
    """Return ⌈seconds · layers / whole⌉, the number of layers that take `seconds`.

    This is N_PL of MuxWise §3.4.2; `whole` is the seconds of all layers. The result is at least 1,
    and 1 without predictions.
    """
    if seconds is None or not whole:
        return 1
    return max(1, math.ceil(min(seconds * layers / whole, layers) - 1e-9))


def decoding_soon(view: View) -> Sequence[RequestView]:
    """Return the decoding requests or, without any, those whose prompts are launched to the end."""
    if view.decoding:
        return view.decoding
    return [c.request for b in view.launched_batches for c in b.chunks if c.request.to_generate]


def prefilling(view: View) -> Load | None:
    """Return the load that the prefill lane computes now or next; None without any."""
    batch = view.batch or (view.launched_batches[-1] if view.launched_batches else None)
    return None if batch is None else batch_load(batch)


def wake_at(view: View, lead: float) -> float | None:
    """Return the time in seconds at which the next lane will be due; None if a launch ends
    first."""
    wakes = (view.lanes[lane].due_at(lead) for lane in ("prefill", "decode"))
    return min((at for at in wakes if at is not None and at > view.now), default=None)
