"""Hybrid passes whose attention is one kernel for both phases (POD-Attention, arXiv 2410.18038).

SMs that compute attention of the prompts' chunks read the KV cache of the decode rows meanwhile, so
the two take hardly longer than the longer one, with the round corner of the device's roofline. This
is SGLang's baseline in MuxWise (§4.1), whose FlashInfer kernel has both kinds of rows.
"""

from twolane.lanes.work import HybridWork
from twolane.sim.device import DeviceModel
from twolane.sim.operators import Cost


class FusedAttentionDevice(DeviceModel):
    """A device model that overlaps both attentions of a hybrid pass."""

    def _hybrid(self, work: HybridWork, units: int) -> Cost:
        """See `DeviceModel._hybrid`."""
        decode, layers = len(work.decode), self.spec.layers
        tokens = decode + sum([row.count for row in work.prompts])
        layer = self._multiply(tokens, units)
        chunks = self._attend(layer, decode, work.prompts, units)
        seen = self._operators.seen([row.position + 1 for row in work.decode])
        read = self._operators.read(seen, units)
        attention = overlapped(chunks, read.times(1 / layers), self.gpu.corner)
        sampled = decode + sum([row.samples for row in work.prompts])
        return layer.plus(attention).times(layers).plus(self._operators.head(sampled, units))


def overlapped(one: Cost, other: Cost, corner: float) -> Cost:
    """Return the cost of two operators that overlap: (a^p + b^p)^(1/p) seconds for a and b alone.

    Args:
        one: The cost of one operator.
        other: The cost of the other operator.
        corner: The exponent p.
    """
    both = one.plus(other)
    a, b = one.alone - one.fixed, other.alone - other.fixed
    share = (a**corner + b**corner) ** (1 / corner) / (a + b) if a + b else 1.0
    return both._replace(
        clocked=share * both.clocked, streamed=share * both.streamed, memory=share * both.memory
    )
