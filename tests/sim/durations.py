"""A device whose launches take fixed times."""

from collections.abc import Sequence
from dataclasses import dataclass

from twolane.lanes.work import DecodeWork, PrefillWork, Work
from twolane.sim.lanes import Demand


@dataclass(frozen=True)
class FixedDurations:
    """Seconds, independent of size, of units and of the other lane."""

    prefill_layer: float = 0.010
    decode_step: float = 0.020
    hybrid: float = 0.050

    def steps(self, work: Work, units: int) -> Sequence[Demand]:
        """See `Device.steps`."""
        if isinstance(work, DecodeWork):
            return [Demand(self.decode_step)] * work.k
        if isinstance(work, PrefillWork):
            return [Demand(self.prefill_layer * (work.last - work.first))]
        return [Demand(self.hybrid)]

    def seconds(self, running: Sequence[Demand]) -> Sequence[float]:
        """See `Device.seconds`."""
        return [demand.fixed for demand in running]

    def host_seconds(self, work: Work) -> tuple[float, float]:
        """See `Device.host_seconds`."""
        return 0.0, 0.0
