"""`duetserve`: hybrid batches while they keep the TBT bound, otherwise a split (DuetServe).

Each iteration is planned as chunked prefill (§4): decoding requests first, chunks of prompts with
what they leave of the token budget. The batch runs as one forward pass if that is predicted to
keep the TBT bound τ. Otherwise Algorithm 1 divides the device: the chunks on S_p units beside k
decode steps on S_d, whichever (S_p, S_d, k) yields the most tokens a second while
a decode step keeps τ (§4.2). The next iteration begins when both sides are through.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar

import msgspec
import numpy as np

from twolane.common.errors import FieldError
from twolane.estimate.names import EstimatorName
from twolane.estimate.query import Corunner, Load, decode_step, hybrid_pass, prefill_slice
from twolane.systems.base import System
from twolane.systems.common.admission import next_chunks
from twolane.systems.common.multiplex import PrefillJob, decode_load, nearest_level
from twolane.systems.common.settings import at_least
from twolane.systems.plan import Chunk, DecodeSteps, Hybrid, Launch, Plan, PrefillSlice
from twolane.systems.view import RequestView, View

UNSEEN_TOKENS = 256
"""Prompt tokens of a pass while the estimator knows of none."""


@dataclass(frozen=True, slots=True)
class Side:
    """A level on offer, with the predicted seconds of its two sides."""

    prefill_units: int
    decode_units: int
    prefill_seconds: float
    """t_p(S_p), of the batch's chunks."""
    decode_seconds: float
    """t_d(S_d), of one step."""


def best_split(
    sides: Sequence[Side], bound: float, prefill_tokens: int, decode_tokens: int
) -> tuple[Side, int]:
    """Algorithm 1, lines 7 to 21: the level and the k with the highest token throughput

        ρ = (k·T_decode + T_prefill) / max(k·t_d, t_p),  k in ⌊t_p / t_d⌋, ⌊t_p / t_d⌋ + 1,

    among the levels at which a decode step keeps the bound. k is at least 1; where no level keeps
    the bound, the one with the most decode units is taken. Of equals, the fewest decode units.
    """
    ascending = sorted(sides, key=lambda side: side.decode_units)
    feasible = [side for side in ascending if side.decode_seconds <= bound] or ascending[-1:]
    ratios = [(side, int(side.prefill_seconds / side.decode_seconds)) for side in feasible]
    options = [(side, k) for side, least in ratios for k in (least, least + 1) if k]

    def throughput(option: tuple[Side, int]) -> float:
        side, k = option
        seconds = max(k * side.decode_seconds, side.prefill_seconds)
        return (k * decode_tokens + prefill_tokens) / seconds

    return max(options, key=throughput)


class DuetServe(System, msgspec.Struct, frozen=True):
    """Hybrid batches by default; prefill beside look-ahead decode when TBT would suffer."""

    estimator: ClassVar[EstimatorName] = "attention-roofline"

    token_budget: int = 8192
    """Tokens of an iteration, decode and prefill together; the paper's on an H100 (§5.1)."""
    tbt_seconds: float = 0.1
    """τ for requests without a TBT SLO (§3)."""
    decode_units: int = 0
    """Above 0, the static split of Figure 9: always the level nearest to this many decode units
    when both phases have work, never a hybrid batch."""
    lead_seconds: float = 0.005
    """The next pass is queued this long before the device would run dry."""

    def __post_init__(self) -> None:
        if not 0.0 < self.tbt_seconds < inf:
            raise FieldError("tbt_seconds", f"must be above 0, not {self.tbt_seconds}")
        at_least(self, token_budget=1, decode_units=0, lead_seconds=0)

    def start(self) -> None:
        """No memory is kept between plans."""

    def decode_shares(self, units: int, step: int) -> Sequence[int]:
        """See `System.decode_shares`: all that leave one to prefill (Algorithm 1, line 8)."""
        return range(step, units - step + 1, step)

    def plan(self, view: View, memory: None) -> tuple[Plan, None]:
        """Plan one iteration: a pass on the whole device, or a split."""
        if view.lanes["prefill"].queued or view.lanes["decode"].queued:
            return Plan(), None  # both sides join before the next iteration
        lane = view.lanes["device"]
        if not lane.due(view.now, self.lead_seconds):
            return Plan(wake_at=lane.due_at(self.lead_seconds)), None
        decoding = [*view.decoding, *view.joining["device"]]
        # A budget that decode alone exhausts must not starve prefill for ever.
        budget = max(self.token_budget - len(decoding), 1)
        chunks = next_chunks(view, budget, split=True)
        prompts = PrefillJob.coming(view, chunks)
        if prompts is not None:
            return self._iteration(view, decoding, chunks, prompts.load), None
        if not decoding:
            return Plan(), None
        launch = Launch("device", view.units, DecodeSteps())
        return Plan(launches=(launch,), reason="no prompt waits"), None

    def _iteration(
        self, view: View, decoding: Sequence[RequestView], chunks: tuple[Chunk, ...], prefill: Load
    ) -> Plan:
        """Return the plan of Algorithm 1."""
        decode = decode_load(decoding)
        mixed = Load([*decode.n, *prefill.n], [*decode.r, *prefill.r])
        together = view.estimator.predict(hybrid_pass(mixed), view.units)
        if together is None:
            chunks = next_chunks(view, min(UNSEEN_TOKENS, prefill.new), split=True)
        bound = min((r.slo.tbt or self.tbt_seconds for r in decoding), default=inf)
        sides: list[Side] = []
        if together is not None and decoding and (together > bound or self.decode_units):
            sides = self._sides(view, decode, prefill, together)
        if not sides:
            reason = f"{len(decoding)} decode + {prefill.new} prefill tokens in {_ms(together)}"
            launch = Launch("device", view.units, Hybrid())
            return Plan(admit=chunks, launches=(launch,), reason=f"{reason}, bound {_ms(bound)}")
        if view.lanes["device"].queued:
            return Plan()  # who ends its prompt in the pass under way decodes in the split
        side, k = best_split(sides, inf if self.decode_units else bound, prefill.new, len(decoding))
        reason = (
            f"{prefill.new} prefill tokens in {_ms(side.prefill_seconds)} beside {k} steps of "
            f"{len(decoding)} in {_ms(side.decode_seconds)}; in one pass {_ms(together)}, "
            f"bound {_ms(bound)}"
        )
        steps = Launch("decode", side.decode_units, DecodeSteps(k))
        layers = Launch("prefill", side.prefill_units, PrefillSlice(0, view.layers))
        return Plan(admit=chunks, launches=(steps, layers), reason=reason)

    def _sides(self, view: View, decode: Load, prefill: Load, together: float) -> list[Side]:
        """Return the levels to choose from, with predictions for both sides.

        A side of which nothing is known is taken to last as long as the pass of both, and longer
        in proportion on fewer units.
        """
        levels = [level for level in view.levels if all(level)]
        if self.decode_units and levels:
            levels = [nearest_level(levels, self.decode_units)]
        if not levels:
            return []
        p, d = np.array(levels).T
        whole = prefill_slice(prefill, view.layers, finishes=True)
        t_p = view.estimator.predict(whole, p, Corunner(decode, d))
        t_d = view.estimator.predict(decode_step(decode), d, Corunner(prefill, p))
        if t_p is None:
            t_p = together * view.units / p
        if t_d is None:
            t_d = together * view.units / d
        rows = zip(levels, t_p.tolist(), t_d.tolist(), strict=True)
        return [Side(*level, prefills, steps) for level, prefills, steps in rows]


def _ms(seconds: float | None) -> str:
    return "? ms" if seconds is None else f"{seconds * 1e3:.1f} ms"
