"""`prefill-first`: the throughput-oriented baseline (continuous batching as Orca and early vLLM).

Waiting prompts are prefilled as soon as they fit, whole, on the whole device; decode stands
still meanwhile. The "inflight batching" of MuxWise §1 and of DuetServe's SGLang-Default (§5.1).
"""

from typing import ClassVar

import msgspec

from twolane.systems.base import System
from twolane.systems.common.admission import next_chunks
from twolane.systems.common.settings import at_least
from twolane.systems.plan import DecodeSteps, Launch, Plan, PrefillSlice
from twolane.systems.view import View


class PrefillFirst(System, msgspec.Struct, frozen=True):
    """Whole prompts first, decode when none waits; one phase at a time on the whole device."""

    reads_slos: ClassVar[bool] = False
    splits: ClassVar[bool] = False

    max_batch_tokens: int = 4096
    """New tokens in one prefill batch; a longer prompt is a batch of its own."""
    lead_seconds: float = 0.005
    """The next launch is queued this long before the device would run dry."""

    def __post_init__(self) -> None:
        at_least(self, max_batch_tokens=1, lead_seconds=0)

    def plan(self, view: View, memory: None) -> tuple[Plan, None]:
        """Prefill if a prompt waits and fits; otherwise launch one decode step."""
        lane = view.lanes["device"]
        if not lane.due(view.now, self.lead_seconds):
            return Plan(wake_at=lane.due_at(self.lead_seconds)), None
        chunks = next_chunks(view, self.max_batch_tokens, split=False)
        if chunks:
            launch = Launch("device", view.units, PrefillSlice(0, view.layers))
            return Plan(admit=chunks, launches=(launch,), reason="prefill first"), None
        if view.rows("device"):
            launch = Launch("device", view.units, DecodeSteps())
            return Plan(launches=(launch,), reason="no prompt waits"), None
        return Plan(), None
