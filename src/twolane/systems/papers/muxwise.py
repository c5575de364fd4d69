"""`muxwise`: bubble-less multiplexing with worst-case decode latencies (MuxWise, §3).

Every partition on offer (16 SMs apart) is a candidate; decode is planned by the contention guard's
bound (§3.3.2); a batch is preempted for one that would miss its TTFT SLO (§3.4.2). `best_fit.py`
has the dispatching; here is what is MuxWise's own.
"""

from typing import ClassVar

import msgspec

from twolane.estimate.names import EstimatorName
from twolane.systems.base import System
from twolane.systems.common.multiplex import shared_levels
from twolane.systems.common.settings import at_least
from twolane.systems.papers.best_fit import BestFit, Preempted
from twolane.systems.plan import Plan
from twolane.systems.view import View


class MuxWise(System, msgspec.Struct, frozen=True):
    """Decode on the fewest units that keep its TBT in the worst case; prefill layer by layer."""

    estimator: ClassVar[EstimatorName] = "guard"

    layer_wise: bool = True
    """Off: a prefill batch is launched whole, and can neither be preempted nor change its level
    (§4.4.2)."""
    query_sync: bool = True
    """Off: decode stands still while the last layers of a prefill batch run, and merges then
    (§4.4.2)."""
    preemption: bool = True
    """Off: batches end in the order in which they began (§4.4.3)."""
    guard: bool = True
    """Off: decode is planned by its solo-run latency (§3.3.2)."""
    max_batch_tokens: int = 4096
    """New tokens in one prefill batch; a longer prompt is a batch of its own."""
    slice_seconds: float = 0.05
    """Seconds of a slice while nothing decodes, so that the batch can be preempted."""
    lead_seconds: float = 0.005
    """The next launch is queued this long before its lane would run dry."""

    def __post_init__(self) -> None:
        at_least(self, max_batch_tokens=1, slice_seconds=0, lead_seconds=0)

    def start(self) -> Preempted:
        """Return the memory of a system that has preempted no batch."""
        return frozenset()

    def plan(self, view: View, memory: Preempted) -> tuple[Plan, Preempted]:
        """Return the next plan, as after each prefill batch and decode step (§3.4.2)."""
        settings = msgspec.structs.asdict(self)
        return BestFit(levels=shared_levels(view), only_if_late=True, **settings).plan(view, memory)
