"""`two-stream`: both phases on all units at once (WindServe's streams; MuxWise §6).

Nobody partitions the device and no prefill is sliced: what runs when is left to the hardware, and
the contention is not controlled.
"""

from typing import ClassVar

import msgspec

from twolane.systems.base import System
from twolane.systems.common.admission import next_chunks
from twolane.systems.common.multiplex import wake_at
from twolane.systems.common.settings import at_least
from twolane.systems.plan import Chunk, DecodeSteps, Launch, Plan, PrefillSlice
from twolane.systems.view import View


class TwoStream(System, msgspec.Struct, frozen=True):
    """Prefill and decode side by side, both on the whole device: no partition."""

    reads_slos: ClassVar[bool] = False
    splits: ClassVar[bool] = False

    max_batch_tokens: int = 4096
    """New tokens in one prefill batch; a longer prompt is a batch of its own."""
    lead_seconds: float = 0.005
    """The next launch is queued this long before its lane would run dry."""

    def __post_init__(self) -> None:
        at_least(self, max_batch_tokens=1, lead_seconds=0)

    def plan(self, view: View, memory: None) -> tuple[Plan, None]:
        """Launch whole prompts in one lane and decode steps in the other."""
        chunks: tuple[Chunk, ...] = ()
        if view.lanes["prefill"].due(view.now, self.lead_seconds):
            chunks = next_chunks(view, self.max_batch_tokens, split=False)
        launches = []
        if view.decoding and view.lanes["decode"].due(view.now, self.lead_seconds):
            launches.append(Launch("decode", view.units, DecodeSteps()))
        if chunks:
            launches.append(Launch("prefill", view.units, PrefillSlice(0, view.layers)))
        reason = " + ".join(launch.lane for launch in launches)
        wake = wake_at(view, self.lead_seconds)
        return Plan(admit=chunks, launches=tuple(launches), wake_at=wake, reason=reason), None
