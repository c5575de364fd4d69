"""`static-split`: both lanes at once at one fixed partition (MuxServe's way; MuxWise §4.4).

Prefill runs in layer slices beside decode, each on its own units. A phase that is alone has the
whole device. The partition never adapts: that is what the four systems add.
"""

import msgspec

from twolane.estimate import Load
from twolane.systems.admission import next_chunks
from twolane.systems.plan import Chunk, DecodeSteps, Launch, Plan, PrefillSlice
from twolane.systems.view import BatchView, View


class StaticSplit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prefill and decode side by side, at one fixed partition of the device."""

    decode_units: int = 0
    """Units of the decode lane while both phases have work; 0 is half of the device."""
    look_ahead: int = 1
    """Decode steps in one launch. More steps cost fewer launches; newcomers join later."""
    slice_seconds: float = 0.05
    """A layer slice is as many layers as take this long by prediction (DESIGN: not in tokens)."""
    max_batch_tokens: int = 2048
    """New tokens in one prefill batch; a longer prompt is a batch of its own."""
    lead_seconds: float = 0.005
    """The next launch is queued this long before its lane would run dry."""

    def __post_init__(self) -> None:
        if self.look_ahead < 1:
            raise ValueError(f"look_ahead must be at least 1, not {self.look_ahead}")
        if self.decode_units < 0:
            raise ValueError(f"decode_units must not be negative, not {self.decode_units}")

    def start(self) -> None:
        """No memory is kept between plans."""

    def plan(self, view: View, memory: None) -> tuple[Plan, None]:
        """Keep both lanes fed; decode is launched first (MuxWise §3.2.2)."""
        chunks: tuple[Chunk, ...] = ()
        if view.batch is None and view.lanes["prefill"].due(view.now, self.lead_seconds):
            chunks = next_chunks(view, self.max_batch_tokens, split=False)
        prefill = self._prefill(view, chunks)
        decode = self._decode(view, beside_prefill=bool(chunks or _prefilling(view)))
        launches = tuple(launch for launch in (decode, prefill) if launch)
        wakes = (view.lanes[lane].due_at(self.lead_seconds) for lane in ("prefill", "decode"))
        wake_at = min((w for w in wakes if w is not None and w > view.now), default=None)
        reason = " + ".join(f"{ln.lane} on {ln.units}" for ln in launches)
        return Plan(admit=chunks, launches=launches, wake_at=wake_at, reason=reason), None

    def partition(self, view: View) -> tuple[int, int]:
        """The level on offer with the wanted decode units, or the nearest one."""
        wanted = self.decode_units or view.units // 2
        both = [level for level in view.levels if all(level)]
        return min(both, key=lambda pd: abs(pd[1] - wanted), default=(view.units, view.units))

    def _decode(self, view: View, *, beside_prefill: bool) -> Launch | None:
        if not view.decoding or not view.lanes["decode"].due(view.now, self.lead_seconds):
            return None
        units = self.partition(view)[1] if beside_prefill else view.units
        return Launch("decode", units, DecodeSteps(self.look_ahead))

    def _prefill(self, view: View, chunks: tuple[Chunk, ...]) -> Launch | None:
        if not view.lanes["prefill"].due(view.now, self.lead_seconds):
            return None
        if not view.batch and not chunks:
            return None
        first = view.batch.layers_launched if view.batch else 0
        alone = not view.decoding and view.lanes["decode"].queued == 0
        if alone:
            return Launch("prefill", view.units, PrefillSlice(first, view.layers))
        units = self.partition(view)[0]
        layers = self._slice_layers(view, _load(view, view.batch, chunks), units)
        return Launch("prefill", units, PrefillSlice(first, min(first + layers, view.layers)))

    def _slice_layers(self, view: View, load: Load, units: int) -> int:
        seconds = view.estimator.prefill_slice(load, 1, units)
        return max(1, int(self.slice_seconds / seconds)) if seconds else 1


def _prefilling(view: View) -> bool:
    return bool(view.batch or view.launched_batches)


def _load(view: View, batch: BatchView | None, chunks: tuple[Chunk, ...]) -> Load:
    """Of the open batch, or of the one that these chunks will be."""
    if batch:
        return Load([c.n for c in batch.chunks], [c.start for c in batch.chunks])
    reused = {request.id: request.reused for request in view.waiting}
    return Load([c.n for c in chunks], [reused[c.request] for c in chunks])
