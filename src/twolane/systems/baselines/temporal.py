"""`temporal`: layer slices between decode steps, one at a time on the whole device.

Tropical runs a prefill where decode has slack for all of it; this is the improved variant of
MuxWise §6, which splits the prefill into layers to fit small slacks.
"""

import math
from collections.abc import Sequence
from typing import ClassVar

import msgspec

from twolane.estimate.query import decode_step, prefill_slice
from twolane.systems.base import System
from twolane.systems.common.admission import next_chunks
from twolane.systems.common.multiplex import PrefillJob, decode_load, tbt_slo
from twolane.systems.common.settings import at_least
from twolane.systems.plan import Chunk, DecodeSteps, Launch, Plan, PrefillSlice
from twolane.systems.view import RequestView, View


class Temporal(System, msgspec.Struct, frozen=True):
    """Layer slices in the slack between decode steps, one phase at a time on the whole device."""

    splits: ClassVar[bool] = False

    max_batch_tokens: int = 4096
    """New tokens in one prefill batch; a longer prompt is a batch of its own."""
    lead_seconds: float = 0.005
    """The next launch is queued this long before the device would run dry."""

    def __post_init__(self) -> None:
        at_least(self, max_batch_tokens=1, lead_seconds=0)

    def start(self) -> bool:
        """Return whether decode has the next turn, because a slice was launched last."""
        return False

    def plan(self, view: View, memory: bool) -> tuple[Plan, bool]:
        """Take turns; a slice and a decode step together fit into the TBT SLO."""
        lane = view.lanes["device"]
        if not lane.due(view.now, self.lead_seconds):
            return Plan(wake_at=lane.due_at(self.lead_seconds)), memory
        rows = view.rows("device")
        chunks: tuple[Chunk, ...] = ()
        if view.batch is None and not (rows and memory):
            chunks = next_chunks(view, self.max_batch_tokens, split=False)
        prompts = PrefillJob.of(view.batch) if view.batch else PrefillJob.coming(view, chunks)
        if rows and (memory or prompts is None):
            launch = Launch("device", view.units, DecodeSteps())
            return Plan(launches=(launch,), reason="decode's turn"), False
        if prompts is None:
            return Plan(), False
        layers, reason = _slice(view, prompts, rows)
        part = PrefillSlice(prompts.first, min(prompts.first + layers, view.layers))
        launch = Launch("device", view.units, part)
        return Plan(admit=chunks, launches=(launch,), reason=reason), bool(rows)


def _slice(view: View, prompts: PrefillJob, rows: Sequence[RequestView]) -> tuple[int, str]:
    """Return how many layers fit between two decode steps, at least one, and the reason."""
    slo = tbt_slo(rows)
    if math.isinf(slo):
        return view.layers, "no TBT bound"
    ask = view.estimator
    step = ask.predict(decode_step(decode_load(rows)), view.units, bound=True)
    batch = prefill_slice(prompts.load, view.layers, finishes=True)
    whole = ask.predict(batch, view.units, bound=True)
    if step is None or not whole:
        return 1, "no prediction"
    layers = int((slo - step) / whole * view.layers)
    slack = f"slack {(slo - step) * 1e3:.1f} ms beside a step of {step * 1e3:.1f} ms"
    return max(1, layers), f"{slack}: {layers} layers"
