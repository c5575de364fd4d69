"""`chunked`: chunked prefill with hybrid batches (Sarathi-Serve; MuxWise §2.3.2).

Every forward pass has at most `token_budget` tokens: first one for each decoding request, then
chunks of prompts in order. The budget bounds the time of a pass, and with it the TBT.
"""

from typing import ClassVar, Literal

import msgspec

from twolane.common.errors import FieldError
from twolane.systems.base import System
from twolane.systems.common.admission import next_chunks
from twolane.systems.common.settings import at_least
from twolane.systems.plan import DecodeSteps, Hybrid, Launch, Plan
from twolane.systems.view import View


class Chunked(System, msgspec.Struct, frozen=True):
    """Decode tokens and prompt chunks in one forward pass, within a token budget."""

    reads_slos: ClassVar[bool] = False
    splits: ClassVar[bool] = False

    token_budget: int = 256
    """Tokens in a forward pass, decode and prefill together."""
    lead_seconds: float = 0.005
    """The next pass is queued this long before the device would run dry."""
    nano_batches: Literal[1, 2] = 1
    """Parts of a pass that run beside each other, products of one beside attention and sums of the
    other, as in NanoFlow; 2 only in simulation."""
    fused_attention: bool = False
    """Whether attention of both phases is one kernel, as in POD-Attention and in SGLang with
    FlashInfer; true only in simulation."""

    def __post_init__(self) -> None:
        at_least(self, token_budget=1, lead_seconds=0)
        if self.fused_attention and self.nano_batches > 1:
            raise FieldError("fused_attention", "does not go with nano_batches")

    def plan(self, view: View, memory: None) -> tuple[Plan, None]:
        """Launch a pass: a token for each decoding request, and prefill within the budget."""
        lane = view.lanes["device"]
        if not lane.due(view.now, self.lead_seconds):
            return Plan(wake_at=lane.due_at(self.lead_seconds)), None
        decoding = len(view.rows("device"))
        # A budget that decode alone exhausts must not starve prefill for ever.
        budget = max(self.token_budget - decoding, 1)
        chunks = next_chunks(view, budget, split=True)
        if chunks:
            launch = Launch("device", view.units, Hybrid())
            reason = f"{decoding} decode + {sum(c.n for c in chunks)} prefill tokens"
            return Plan(admit=chunks, launches=(launch,), reason=reason), None
        if decoding:
            launch = Launch("device", view.units, DecodeSteps())
            return Plan(launches=(launch,), reason="no prompt waits"), None
        return Plan(), None
