"""`drift`: adaptive gang scheduling with a contention-free model (Drift, §3).

The partition is one of a few groups of green contexts; latencies are predicted as if each phase ran
alone (§3.4). `best_fit.py` has Algorithm 1; here is what is Drift's own.
"""

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from twolane.common.errors import FieldError
from twolane.estimate.names import EstimatorName
from twolane.systems.base import System
from twolane.systems.common.multiplex import Level, nearest_level, shared_levels
from twolane.systems.common.settings import at_least
from twolane.systems.papers.best_fit import BestFit, Preempted
from twolane.systems.plan import Plan
from twolane.systems.view import View

GROUPS = {3: (28,), 4: (24, 36), 5: (24, 28, 36)}
"""SMs for decode of 108, in groups that share the device; with (108, 0) and (0, 108) these are 3,
4 and 5 groups (§4, §5.3.2)."""
PAPER_SMS = 108
"""SMs of the device that these numbers are given for."""


class Drift(System, msgspec.Struct, frozen=True):
    """Decode on the fewest units that keep its TBT by solo runs; prefill in blocks."""

    estimator: ClassVar[EstimatorName] = "solo-run"

    groups: int = 4
    """Partitions, those of one phase alone among them: 3, 4 or 5 (§5.3.2)."""
    preemption: bool = True
    """Whether a new prefill batch may go before the open one, at most once (§3.5)."""
    max_batch_tokens: int = 4096
    """New tokens in one prefill batch; a longer prompt is a batch of its own."""
    slice_seconds: float = 0.05
    """Seconds of a block while nothing decodes, so that the batch can be preempted."""
    lead_seconds: float = 0.005
    """The next launch is queued this long before its lane would run dry."""

    def __post_init__(self) -> None:
        if self.groups not in GROUPS:
            raise FieldError("groups", f"must be 3, 4 or 5, not {self.groups}")
        at_least(self, max_batch_tokens=1, slice_seconds=0, lead_seconds=0)

    def start(self) -> Preempted:
        """Return the memory of a system that has preempted no batch."""
        return frozenset()

    def plan(self, view: View, memory: Preempted) -> tuple[Plan, Preempted]:
        """Return the plan of one round of Algorithm 1."""
        policy = BestFit(
            levels=self.levels(view),
            guard=False,
            preemption=self.preemption,
            max_batch_tokens=self.max_batch_tokens,
            slice_seconds=self.slice_seconds,
            lead_seconds=self.lead_seconds,
        )
        return policy.plan(view, memory)

    def decode_shares(self, units: int, step: int) -> Sequence[int]:
        """See `System.decode_shares`: those of the groups, by default 24 and 36 of 108 SMs."""
        wanted = (round(share * units / PAPER_SMS / step) * step for share in GROUPS[self.groups])
        return sorted({max(step, share) for share in wanted})

    def levels(self, view: View) -> list[Level]:
        """Return the groups' shares that are on offer, each by the nearest level."""
        offered = shared_levels(view)
        chosen = {
            nearest_level(offered, units / PAPER_SMS * view.units) for units in GROUPS[self.groups]
        }
        return sorted(chosen, key=lambda level: level[1])
