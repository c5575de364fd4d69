"""Passes and decode steps in two nano-batches (NanoFlow, arXiv 2408.12757), on one device.

Half of the tokens are one nano-batch and half the other. Products of one run while the other reads
its KV cache and sums over GPUs: in every layer first the first half's products beside the second
half's reads and sums, then the other way round. Each half reads the weights, which is the price.
Attention over a chunk is bound by arithmetic, as products are, and is not divided.

The two sides share SMs, memory and power as lanes do, and move no more bytes than the memory's
bandwidth; the one that ends first leaves all SMs to the other. Reads and sums have the number of
SMs that is best for the pass, and none where overlap does not pay: the paper searches for that in
advance. A layer in all goes one thing after the other, for one side has no partner in half of the
first layer and in half of the last.

That is the most that nano-batches gain. Attention of one half does fit beside the output, the MLP
and the next layer's inputs of the other. But a sum waits for the product before it, and the product
after it waits for the sum; kernels of different kinds disturb each other, and the host launches
twice as many. These are left out.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from twolane.kernels.sizes import BUCKET_STEP, BUCKETS, padded
from twolane.lanes.work import DecodeRow, HybridWork, PrefillWork, Work
from twolane.sim.device import DeviceModel
from twolane.sim.lanes import Demand
from twolane.sim.operators import TILE, Cost

SHARE_STEP = 8
"""Units between two SM counts that reads and all-reduces may get beside products."""


class _NanoBatch(NamedTuple):
    """Demands of one nano-batch in all layers, by the number of SMs."""

    products: Callable[[int], Demand]
    """Demand of products, small kernels, and half of the attention over prompts."""
    others: Callable[[int], Demand]
    """Demand of KV reads by decode rows, and of all-reduces."""


Beside = Sequence[tuple[Demand, Demand]]
"""Products of one half and the other half's remaining work: with all SMs each, then at every
division of the SMs."""


class NanoBatchDevice(DeviceModel):
    """A device model that runs hybrid passes and decode steps in two nano-batches.

    Nothing else may run meanwhile: their demand is a time that nothing changes. A single row is not
    divided.
    """

    power_known = False

    def steps(self, work: Work, units: int) -> Sequence[Demand]:
        """See `Device.steps`."""
        if isinstance(work, PrefillWork):
            return super().steps(work, units)
        if isinstance(work, HybridWork):
            tokens = len(work.decode) + sum([row.count for row in work.prompts])
            parts = (_cut(tokens), work.decode[::2]), (tokens - _cut(tokens), work.decode[1::2])
            halves = [self._of_pass(work, count, rows) for count, rows in parts if count]
            sampled = len(work.decode) + sum([row.samples for row in work.prompts])
            return [self._divided(halves, sampled, units)]
        demands = []
        for step in range(work.k):
            rows = [row for row in work.rows if not step or step < row.steps]
            halves = [self._of_step(part, step) for part in (rows[::2], rows[1::2]) if part]
            sampled = padded(len(rows), BUCKETS, BUCKET_STEP)
            demands.append(self._divided(halves, sampled, units))
        return demands

    def _divided(self, halves: Sequence[_NanoBatch], sampled: int, units: int) -> Demand:
        """Return the demand of a pass or step in these nano-batches, which may be one."""
        head = self._read(self._operators.head(sampled, units), units)
        few = range(SHARE_STEP, units // 2, SHARE_STEP) if len(halves) == 2 else ()
        besides: list[Beside] = [
            [
                (half.products(units), other.others(units)),
                *[(half.products(units - n), other.others(n)) for n in few],
            ]
            for half, other in zip(halves, reversed(halves), strict=True)
        ]
        everything = [head, *[demand for beside in besides for demand in beside[0]]]
        # Power counts on average over the pass, as in that of one piece.
        seconds = self._seconds(1.0, head, besides)
        draw = sum([demand.draw * _alone(demand) for demand in everything])
        clock = self._clock(_moved(everything) / seconds, draw / seconds)
        return Demand(self._seconds(clock, head, besides) * self._next_noise(), units=units)

    def _seconds(self, clock: float, head: Demand, besides: Sequence[Beside]) -> float:
        """Return the seconds of all layers and the classifier at this clock."""
        [seconds] = self._at(clock, [head])
        layers = self.spec.layers
        for whole, *shared in besides:
            alone = [self._at(clock, [demand])[0] for demand in whole]
            in_turn = sum(alone)
            together = [self._beside(clock, both, alone) for both in shared]
            least = max(min(together, default=in_turn), _moved(whole) / self.gpu.bandwidth)
            seconds += (in_turn + (layers - 1) * min(in_turn, least)) / layers
        return seconds

    def _beside(self, clock: float, both: tuple[Demand, Demand], alone: Sequence[float]) -> float:
        """Return the seconds of two concurrent sides; the rest of the longer one runs on all SMs,
        where it takes `alone` seconds."""
        if not min(alone):
            return sum(alone)
        takes = self._at(clock, both)
        ends = min(takes)
        return ends + sum([(1.0 - ends / t) * a for t, a in zip(takes, alone, strict=True)])

    def _of_pass(self, work: HybridWork, tokens: int, rows: Sequence[DecodeRow]) -> _NanoBatch:
        """Return the nano-batch of `tokens` of a pass, of which these rows decode, with their share
        of its attention."""
        layers, decode = self.spec.layers, len(work.decode)
        whole = decode + sum([row.count for row in work.prompts])
        read = self._operators.seen([row.position + 1 for row in rows])

        def products(units: int) -> Demand:
            attention = self._attend(self._multiply(whole, units), decode, work.prompts, units)
            layer = self._multiply(tokens, units)._replace(linked=0.0)
            cost = layer.plus(attention.times(tokens / whole))
            return self._pass(cost.times(layers), units, scale=1.0)

        def others(units: int) -> Demand:
            return self._others(read, self._multiply(tokens, units).linked, units)

        return _NanoBatch(products, others)

    def _of_step(self, rows: Sequence[DecodeRow], step: int) -> _NanoBatch:
        computed = padded(len(rows), BUCKETS, BUCKET_STEP)
        read = self._operators.seen([row.position + step + 1 for row in rows])

        def layer(units: int) -> Cost:
            return self._operators.layer(computed, units, decode=True, routed=len(rows))

        def products(units: int) -> Demand:
            cost = layer(units)._replace(linked=0.0).times(self.spec.layers)
            return self._read(cost, units)

        def others(units: int) -> Demand:
            return self._others(read, layer(units).linked, units)

        return _NanoBatch(products, others)

    def _others(self, read: float, linked: float, units: int) -> Demand:
        """Return the demand of reading the KV of this many tokens and of all-reduces that take
        `linked` seconds in each layer."""
        cost = self._operators.read(read, units)._replace(linked=linked * self.spec.layers)
        return self._read(cost, units)

    def _read(self, cost: Cost, units: int) -> Demand:
        """Return the demand of kernels that keep as many bytes in flight as the SMs can while they
        wait for memory; some passes have none."""
        if not cost.alone:
            return Demand(0.0, units=units)
        demand = self._step(cost, units, scale=1.0)
        return demand._replace(reads=demand.reads * cost.memory / cost.alone)


def _alone(demand: Demand) -> float:
    """Return the seconds at the top clock, with nothing beside it."""
    return demand.fixed + demand.clocked + demand.streamed + demand.linked


def _moved(demands: Sequence[Demand]) -> float:
    """Return the bytes to and from memory."""
    return sum([demand.traffic * _alone(demand) for demand in demands])


def _cut(tokens: int) -> int:
    """Return the number of tokens of a pass's first half, in whole tiles if there are several."""
    return -(-tokens // (2 * TILE)) * TILE if tokens > 2 * TILE else -(-tokens // 2)
