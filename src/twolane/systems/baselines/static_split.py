"""`static-split`: both lanes at once at one fixed partition (MuxServe's way; MuxWise §4.4).

Prefill runs in layer slices beside decode, each on its own units. A phase that is alone has the
whole device. The partition never adapts: that is what the four systems add.
"""

from typing import ClassVar

import msgspec

from twolane.estimate.query import prefill_slice
from twolane.systems.base import System
from twolane.systems.common.admission import next_chunks
from twolane.systems.common.multiplex import (
    Level,
    PrefillJob,
    layers_for,
    nearest_level,
    shared_levels,
    wake_at,
)
from twolane.systems.common.settings import at_least
from twolane.systems.plan import Chunk, DecodeSteps, Launch, Plan
from twolane.systems.view import View

ALONE_SECONDS = 1.0
"""Seconds of a slice while nothing decodes, after which others are served if its clients left."""


class StaticSplit(System, msgspec.Struct, frozen=True):
    """Prefill and decode side by side, at one fixed partition of the device."""

    reads_slos: ClassVar[bool] = False

    decode_units: int = 0
    """Units of the decode lane while both phases have work; 0 is half of the device."""
    look_ahead: int = 1
    """Decode steps in one launch. More steps cost fewer launches; newcomers join later."""
    slice_seconds: float = 0.05
    """A layer slice is as many layers as take this long by prediction."""
    max_batch_tokens: int = 2048
    """New tokens in one prefill batch; a longer prompt is a batch of its own."""
    lead_seconds: float = 0.005
    """The next launch is queued this long before its lane would run dry."""

    def __post_init__(self) -> None:
        at_least(
            self, decode_units=0, look_ahead=1, max_batch_tokens=1, slice_seconds=0, lead_seconds=0
        )

    def plan(self, view: View, memory: None) -> tuple[Plan, None]:
        """Keep both lanes fed; decode is launched first (MuxWise §3.2.2)."""
        chunks: tuple[Chunk, ...] = ()
        if view.batch is None and view.lanes["prefill"].due(view.now, self.lead_seconds):
            chunks = next_chunks(view, self.max_batch_tokens, split=False)
        prompts = PrefillJob.of(view.batch) if view.batch else PrefillJob.coming(view, chunks)
        decode = self._decode(view, beside_prefill=bool(prompts or view.launched_batches))
        prefill = self._prefill(view, prompts)
        launches = tuple(launch for launch in (decode, prefill) if launch)
        reason = " + ".join(f"{ln.lane} on {ln.units}" for ln in launches)
        wake = wake_at(view, self.lead_seconds)
        return Plan(admit=chunks, launches=launches, wake_at=wake, reason=reason), None

    def _level(self, view: View) -> Level:
        return nearest_level(shared_levels(view), self.decode_units or view.units // 2)

    def _decode(self, view: View, *, beside_prefill: bool) -> Launch | None:
        if not view.decoding or not view.lanes["decode"].due(view.now, self.lead_seconds):
            return None
        units = self._level(view)[1] if beside_prefill else view.units
        return Launch("decode", units, DecodeSteps(self.look_ahead))

    def _prefill(self, view: View, prompts: PrefillJob | None) -> Launch | None:
        if prompts is None or not view.lanes["prefill"].due(view.now, self.lead_seconds):
            return None
        alone = not view.decoding and view.lanes["decode"].queued == 0
        units = view.units if alone else self._level(view)[0]
        whole = view.estimator.predict(prefill_slice(prompts.load, view.layers), units)
        if alone and whole is None:
            return prompts.slice(view, view.layers, units)
        seconds = ALONE_SECONDS if alone else self.slice_seconds
        return prompts.slice(view, layers_for(seconds, whole, view.layers), units)
