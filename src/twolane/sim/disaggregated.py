"""Prefill and decode on separate GPUs (1P1D), as lanes that share only a link.

The lanes of one engine stand for two equal groups of GPUs: the prefill lane is one of them, the
decode lane the other, each with all of its units. Keys and values of a prompt are pushed layer by
layer while it is computed, and it has been prefilled when the last ones have arrived. Both groups
keep every page, so prefixes are shared and the pool has the size of one group's.
"""

from collections.abc import Sequence

from twolane.lanes.work import PrefillWork
from twolane.sim.device import DeviceModel
from twolane.sim.lanes import Demand
from twolane.sim.operators import Cost


class DisaggregatedDevice(DeviceModel):
    """A device model whose lanes do not slow each other down, and whose prompts' KV pages are
    transferred."""

    power_known = False

    def seconds(self, running: Sequence[Demand]) -> Sequence[float]:
        """See `Device.seconds`: each has a group to itself."""
        return [super(DisaggregatedDevice, self).seconds([demand])[0] for demand in running]

    def _slice(self, work: PrefillWork, units: int) -> Cost:
        """Return the demand of a slice, and the extra seconds until its last pages arrive."""
        cost = super()._slice(work, units)
        layers = work.last - work.first
        tokens = sum([row.count for row in work.rows])
        layer = tokens * self.layer_kv_bytes / self.gpu.link_bandwidth
        computed = cost.alone / layers
        late = self.gpu.link_seconds + layer + (layers - 1) * max(0.0, layer - computed)
        return cost._replace(fixed=cost.fixed + late)
