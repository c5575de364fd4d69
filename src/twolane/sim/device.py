"""Device models: times of the simulated lanes' work on a GPU.

A step is a sum over the model's operators. Matrix products and attention over a prompt take
`(c^p + m^p)^(1/p)` seconds, c by arithmetic and m by memory: a roofline with a round corner, for
the two overlap, but not wholly. Arithmetic is linear in the SMs, but for small products of prefill,
whose kernels are made for all SMs of the device. Bandwidth grows with the SMs and saturates, early
for the attention kernels of this project and late for products. Then come the small kernels,
all-reduces in rings, and noise. Steps and passes have the sizes that graphs are made for.

Two lanes share the power, the memory and, where their levels overlap, the SMs:

- *power*: the clock falls until the arithmetic at that clock (a power of it) and the traffic fit
  under the cap. So even alone, products on all SMs run slower, SM for SM, than on half of them.
- *memory*: a read takes longer, the more is in flight, in both lanes together (Little's law).
  A lane on many SMs has more in flight than one on few, and slows the other more than itself.
  Waiting for memory grows as much; of arithmetic, which hides most of its reads, a part does.
- *link*: collectives of both lanes share it. A lane finds it busy for the fraction of the time that
  the other lane's collectives take.
- *SMs*: work on more units than the device has is slowed alike.

No policy reads any of this: estimators are fitted on what comes out.
"""

import math
from collections.abc import Sequence

import numpy as np

from twolane.estimate.profile import ContendedProbe, Probe
from twolane.kernels import sizes
from twolane.lanes.work import DecodeWork, HybridWork, PrefillWork, PromptRow, Work
from twolane.model.spec import ModelSpec
from twolane.sim.gpus import Gpu
from twolane.sim.lanes import Demand
from twolane.sim.operators import BFLOAT16, Cost, OperatorCosts, Storage, shapes_of

HOST_SLICE, HOST_OPENS, HOST_SAMPLES = 4.0e-4, 1.4e-3, 1.2e-3
"""Host seconds of a prefill launch besides its layers, of laying out a batch, and of sampling."""
HOST_RANK = 2.0e-5
"""Host seconds of a launch for each rank that replays it: a write to its log (assumed, not
measured)."""
HOST_PASS = 1.25e-3
"""Host seconds of a hybrid pass in graphs, the first of which starts halfway: nine in ten passes
after others take less than a third more."""


class DeviceModel:
    """A model on some GPUs of one kind, the device of simulated lanes.

    Args:
        gpu: data sheet of the GPUs.
        spec: the model's shape.
        tp: GPUs that share each layer (tensor parallelism).
        seed: Seed of the noise.
        storage: widths of weights and KV cache.
        pass_sizes: tokens that passes are padded to, ascending; None: those that are worth it.

    Raises:
        ValueError: the model's heads cannot be shared by this many GPUs.
    """

    def __init__(
        self,
        gpu: Gpu,
        spec: ModelSpec,
        tp: int = 1,
        seed: int = 0,
        storage: Storage = BFLOAT16,
        pass_sizes: Sequence[int] | None = None,
    ) -> None:
        self.gpu = gpu
        self.spec = spec
        self.tp = tp
        self._operators = OperatorCosts(gpu, spec, tp, storage)
        self.layer_kv_bytes = shapes_of(spec, tp, storage).kv_bytes
        """Bytes of a token's keys and values in a layer on one GPU."""
        self._rng = np.random.default_rng([seed, 0x4E4F4953])
        self._noise: list[float] = []
        self._steps: dict[tuple[int, int], Cost] = {}
        if pass_sizes is None:
            pass_sizes = sizes.worth_padding_to(
                {size: self._multiplied(size) for size in sizes.SIZES}
            )
        self.pass_sizes = pass_sizes

    power_known = True
    """Whether its demands say what power they draw."""

    # --- what the lanes ask -------------------------------------------------------------------

    def steps(self, work: Work, units: int) -> Sequence[Demand]:
        """See `Device.steps`."""
        if isinstance(work, DecodeWork):
            return self._decode(work, units)
        if isinstance(work, PrefillWork):
            return [self._pass(self._slice(work, units), units)]
        return [self._pass(self._hybrid(work, units), units)]

    def seconds(self, running: Sequence[Demand]) -> Sequence[float]:
        """See `Device.seconds`."""
        traffic = sum([demand.traffic for demand in running])
        draw = sum([demand.draw for demand in running])
        return self._at(self._clock(traffic, draw), running)

    def watts(self, running: Sequence[Demand], seconds: Sequence[float]) -> float:
        """Return the power of all GPUs while these steps take these seconds, up to the cap: a
        constant, and energy for each byte and each FLOP (docs/design/simulation.md)."""
        gpu, watts = self.gpu, self.gpu.idle_watts
        for one, takes in zip(running, seconds, strict=True):
            alone = one.fixed + one.clocked + one.streamed + one.linked
            flops = one.draw * gpu.unit_flops * gpu.product_share
            rate = gpu.joules_per_byte * one.traffic + gpu.joules_per_flop * flops
            watts += rate * alone / takes if takes else 0.0
        return self.tp * min(gpu.cap_watts, watts)

    def _clock(self, traffic: float, draw: float) -> float:
        """Return the clock under the power cap, as a fraction of the top clock."""
        gpu = self.gpu
        drawn = gpu.traffic_units * min(1.0, traffic / gpu.bandwidth)
        if drawn + draw <= gpu.power_units:
            return 1.0
        room: float = max(gpu.power_units - drawn, 1e-3) / draw
        clock: float = room ** (1 / gpu.power_exponent)
        return max(gpu.lowest_clock, clock)

    def _at(self, clock: float, running: Sequence[Demand]) -> Sequence[float]:
        """See `Device.seconds`, at this clock."""
        pace = max(1.0, sum([demand.units for demand in running]) / self.gpu.units) / clock
        if len(running) == 1:
            return [d.fixed + d.clocked * pace + d.streamed + d.linked for d in running]
        # Reads queue as more are in flight than the memory needs to be busy: hypot is a max with
        # a round corner. What a step does to itself is in its own seconds.
        latency = math.hypot(1.0, sum([demand.reads for demand in running]))
        longer = [latency / math.hypot(1.0, d.reads) - 1.0 for d in running]
        seconds = [
            d.fixed + d.clocked * pace + d.streamed + d.waits * more + d.linked
            for d, more in zip(running, longer, strict=True)
        ]
        if self.tp == 1:
            return seconds
        busy = [d.linked / alone for d, alone in zip(running, seconds, strict=True)]
        return [
            alone + d.linked * (sum(busy) - own)
            for d, alone, own in zip(running, seconds, busy, strict=True)
        ]

    def host_seconds(self, work: Work) -> tuple[float, float]:
        """See `Device.host_seconds`: measured for steps of 64 and 256, and while 8B was served. All
        hybrid passes of up to `WHOLE` tokens count as graphs, on every GPU."""
        first, whole = self._launch_seconds(work)
        ranks = HOST_RANK * (self.tp - 1)
        return first + ranks, whole + ranks

    def _launch_seconds(self, work: Work) -> tuple[float, float]:
        """Return one rank's host seconds until the device can begin, and in total."""
        if isinstance(work, DecodeWork):
            seconds = 2.3e-4 + 9.4e-7 * len(work.rows)
            return seconds, seconds
        if isinstance(work, PrefillWork):
            opens, layers, samples = work.first == 0, work.last - work.first, work.finishes
            tokens = _count(work.rows)
        else:
            opens, layers, samples = True, self.spec.layers, True
            tokens = len(work.decode) + _count(work.prompts)
            if work.decode and tokens <= sizes.WHOLE:
                return HOST_PASS / 2, HOST_PASS
        first = HOST_SLICE + HOST_OPENS * opens
        return first, first + layers * _host_layer(tokens) + HOST_SAMPLES * samples

    def probe(self, units: int) -> Probe:
        """Return the rates of a product of 8,192 rows and of a large copy (DuetServe §4.2)."""
        size = 8192
        [seconds] = self.seconds([self._pass(self._operators.square(size, units), units)])
        return Probe(units, 2.0 * size**3 / seconds, self._copy(units).traffic)

    def contended(self, units: int, rows: int) -> ContendedProbe:
        """Return the rate of a large copy beside the up and gate projection (Bullet §3.2.3).

        Args:
            units: The units of the copy; the product has the others.
            rows: The rows of the product.
        """
        others, copy = self.gpu.units - units, self._copy(units)
        product = self._pass(self._operators.up_gate(rows, others), others, scale=1.0)
        seconds, _ = self.seconds([copy, product])
        return ContendedProbe(units, rows, copy.traffic / seconds)

    def _copy(self, units: int) -> Demand:
        """Return the demand of a copy for one second on these units, alone."""
        gpu = self.gpu
        reached = gpu.bandwidth * (1.0 - math.exp(-units / gpu.copy_units))
        streamed = reached / gpu.bandwidth
        cost = Cost(clocked=1.0 - streamed, streamed=streamed, memory=1.0, bytes=reached)
        return self._step(cost, units, scale=1.0)

    # --- a step of each kind ------------------------------------------------------------------

    def _decode(self, work: DecodeWork, units: int) -> list[Demand]:
        seen = self._operators.seen([row.position for row in work.rows])
        demands = []
        for step in range(work.k):
            rows = len(work.rows)
            if step:
                rows = sum(step < row.steps for row in work.rows)
            seen += rows  # each token reads itself, too
            cost = self._products(rows, units).plus(self._operators.read(seen, units))
            demands.append(self._step(cost, units))
        return demands

    def _slice(self, work: PrefillWork, units: int) -> Cost:
        layer = self._pass_layer(0, work.rows, units)
        cost = layer.times(work.last - work.first)
        if not work.finishes:
            return cost
        return cost.plus(self._operators.head(_ends(work.rows), units))

    def _hybrid(self, work: HybridWork, units: int) -> Cost:
        decode = len(work.decode)
        layer = self._pass_layer(decode, work.prompts, units)
        seen = self._operators.seen([row.position + 1 for row in work.decode])
        read = self._operators.read(seen, units)
        head = self._operators.head(decode + _ends(work.prompts), units)
        return layer.times(self.spec.layers).plus(head).plus(read)

    def _pass_layer(self, decode: int, prompts: Sequence[PromptRow], units: int) -> Cost:
        """Return the cost of a layer of a prefill slice or hybrid pass, without the KV reads of
        decode rows."""
        layer = self._multiply(decode + _count(prompts), units)
        layer = layer.plus(self._operators.chain(prompts, units))
        layer = layer.plus(self._operators.states(decode, units))
        return layer.plus(self._attend(layer, decode, prompts, units))

    def _multiply(self, tokens: int, units: int) -> Cost:
        """Return the cost of a pass's layer without attention."""
        computed = sizes.padded(tokens, self.pass_sizes)
        return self._operators.layer(computed, units, decode=False, routed=tokens)

    def _attend(self, layer: Cost, decode: int, prompts: Sequence[PromptRow], units: int) -> Cost:
        """Return the cost of attention over prompts in a layer, and the layer's extra seconds since
        it is launched separately; it is not faster than its launch."""
        gpu, tokens = self.gpu, decode + _count(prompts)
        whole = gpu.large_tiles and decode and tokens <= sizes.WHOLE
        tiles = self._operators.tiles(prompts, units) if whole else None
        if tiles is None:
            attention = self._operators.attend(prompts, units)
            late = _least_layer(tokens) - layer.plus(attention).alone
            return attention._replace(fixed=max(gpu.pass_layer_seconds, late))
        pairs, split = tiles
        attention = self._operators.attend(prompts, units, pairs)
        return attention._replace(fixed=gpu.whole_layer_seconds + split * gpu.split_seconds)

    def _products(self, rows: int, units: int) -> Cost:
        """Return the cost of a decode step without attention."""
        key = (rows, units)
        cost = self._steps.get(key)
        if cost is None:
            computed = sizes.padded(rows, sizes.BUCKETS, sizes.BUCKET_STEP)
            layer = self._operators.layer(computed, units, decode=True, routed=rows)
            cost = layer.times(self.spec.layers)
            cost = self._steps[key] = cost.plus(self._operators.head(computed, units))
        return cost

    def _step(self, cost: Cost, units: int, scale: float | None = None) -> Demand:
        """Return the demand of a decode step, whose kernels keep as many bytes in flight as the SMs
        can; `scale`: see `_pass`."""
        reads = units * self.gpu.unit_bandwidth / self.gpu.bandwidth
        return self._demand(cost, units, reads, cost.memory, scale)

    def _multiplied(self, tokens: int) -> float:
        """Return the seconds of a pass's layer without attention, on the whole device and without
        noise."""
        units = self.gpu.units
        layer = self._operators.layer(tokens, units, decode=False)
        [seconds] = DeviceModel.seconds(self, [self._pass(layer, units, scale=1.0)])
        return seconds

    def _pass(self, cost: Cost, units: int, scale: float | None = None) -> Demand:
        """Return the demand of a prefill slice or hybrid pass; `scale` replaces the noise of its
        seconds."""
        gpu = self.gpu
        reads = gpu.in_flight * cost.bytes / (cost.alone * gpu.bandwidth)
        busy = cost.clocked + cost.streamed - cost.memory
        waits = gpu.product_waits * cost.memory + gpu.arithmetic_waits * busy
        return self._demand(cost, units, reads, waits, scale)

    def _demand(
        self, cost: Cost, units: int, reads: float, waits: float, scale: float | None = None
    ) -> Demand:
        alone = cost.alone
        scale = self._next_noise() if scale is None else scale
        busy = self.gpu.unit_flops * self.gpu.product_share * alone
        return Demand(
            cost.fixed * scale,
            cost.clocked * scale,
            cost.streamed * scale,
            waits * scale,
            units,
            cost.arithmetic / busy,
            cost.bytes / alone,
            reads,
            cost.linked * scale,
        )

    def _next_noise(self) -> float:
        if not self._noise:
            draws = self._rng.normal(0.0, self.gpu.noise, 4096) if self.gpu.noise else np.zeros(1)
            self._noise = np.exp(draws).tolist()
        return self._noise.pop()


def _host_layer(tokens: int) -> float:
    """Return the host seconds of a layer with this many tokens: by graphs, or kernel by kernel."""
    return 4.0e-5 if tokens <= sizes.SIZES[-1] else 2.8e-4


def _least_layer(tokens: int) -> float:
    """Return the least seconds of a layer with this many tokens when nothing was queued before
    it."""
    return 6.0e-5 + 3.5e-8 * tokens if tokens <= sizes.SIZES[-1] else 3.9e-4


def _count(rows: Sequence[PromptRow]) -> int:
    return sum([row.count for row in rows])


def _ends(rows: Sequence[PromptRow]) -> int:
    """Return the number of prompts that end with their chunk."""
    return sum([row.samples for row in rows])
