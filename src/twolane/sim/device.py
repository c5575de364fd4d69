"""Device models: how long the simulated lanes' work takes on a GPU.

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
- *SMs*: work on more units than the device has is slowed alike.

No policy reads any of this: estimators are fitted on what comes out.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from twolane.kernels.sizes import (
    BUCKET_STEP,
    BUCKETS,
    EMPTY_KEYS,
    FILLED,
    SIZES,
    WHOLE,
    padded,
    tile_tokens,
)
from twolane.lanes.work import DecodeWork, HybridWork, PrefillWork, PromptRow, Work
from twolane.model.spec import ModelSpec
from twolane.sim.lanes import Demand

ITEM = 2
"""Bytes of an element: weights, activations and KV are bfloat16."""
HOST_SLICE, HOST_OPENS, HOST_SAMPLES = 4.0e-4, 1.4e-3, 1.2e-3
"""Seconds of the host for a launch of prefill beside its layers; to lay out a batch; to sample."""
HOST_PASS = 1.25e-3
"""For a hybrid pass that is graphs, the first of which is launched in the middle of it: nine in ten
behind others take less than a third more."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU, as its data sheet and measurements give it."""

    name: str
    units: int
    """SMs."""
    memory: float
    """Bytes that a process can have."""
    unit_flops: float
    """Dense bfloat16 FLOP/s of one SM at the top clock."""
    bandwidth: float
    """Bytes/s that reading reaches at most."""
    unit_bandwidth: float
    """Bytes/s that one SM pulls in attention's read, before the memory saturates."""
    product_units: float
    """SMs over which the bandwidth of few-row products saturates: B (1 - exp(-SMs / this))."""
    power_units: float
    """SMs that can be busy with matrix products at the top clock under the power cap."""
    traffic_units: float
    """What traffic at full bandwidth draws, in those units."""
    power_exponent: float = 4.1
    """Of arithmetic's power over the clock."""
    lowest_clock: float = 0.5
    """Of the top clock; the power cap does not push it lower."""
    product_share: float = 0.878
    """Of `unit_flops` that large matrix products reach."""
    prompt_attention_share: float = 0.70
    """Of `unit_flops` that attention over prompts reaches."""
    decode_attention_share: float = 0.87
    """Of `bandwidth` that attention of decode steps reaches."""
    spill: float = 0.0036
    """Bytes to and from memory for a FLOP of a large product, beyond operands read once."""
    corner: float = 1.2
    """p: how round the roofline's corner is on a share of the device."""
    whole_corner: float = 1.2
    """p on all of it, which kernels are chosen for."""
    step_corner: float = 1.2
    """p for the products of decode steps."""
    one_grid: float = 0.0
    """Elements of a result of which half is computed by kernels with a block for each SM of the
    device: a share of the SMs runs all of its blocks before the others (`_product`)."""
    attention_rows: float = 48.0
    """Rows that attention over a prompt computes beyond those there are: its tiles are whole."""
    in_flight: float = 1.9
    """What a prefill slice or hybrid pass keeps in flight, of what its mean traffic needs."""
    product_waits: float = 0.75
    """Of the time that a prefill slice waits for memory, the part that grows with the latency."""
    arithmetic_waits: float = 0.125
    """Of the time that its arithmetic takes."""
    kernel_seconds: float = 2.1e-6
    """Of one small kernel in a CUDA graph, beside its bytes."""
    pass_layer_seconds: float = 1.9e-5
    """Of a prefill slice's or hybrid pass's layer, for its graphs and attention begin apart."""
    large_tiles: bool = False
    """Whether a hybrid pass that is graphs has FlashInfer's attention for Hopper (`_tiles`)."""
    whole_layer_seconds: float = 0.0
    """Of the layer of such a pass."""
    split_seconds: float = 0.0
    """Of the further kernels of its attention if tiles are split."""
    sampling_seconds: float = 1.5e-4
    """Of a step's end."""
    link_bandwidth: float = 0.0
    """Bytes/s and direction between GPUs that all-reduce reaches."""
    link_seconds: float = 1.0e-5
    """Of an all-reduce, beside its bytes."""
    noise: float = 0.01
    """Standard deviation of a step's time, of the time (log-normal)."""


H200 = Gpu(
    name="h200",
    units=132,
    memory=150.1e9,
    unit_flops=8.11e12,
    bandwidth=4.11e12,
    unit_bandwidth=0.147e12,
    product_units=19.0,
    power_units=59.4,
    traffic_units=19.3,
    power_exponent=3.35,
    product_share=0.881,
    prompt_attention_share=0.596,
    decode_attention_share=0.943,
    spill=0.00321,
    corner=1.5,
    whole_corner=1.97,
    step_corner=2.27,
    one_grid=18.3e6,
    attention_rows=51.7,
    in_flight=1.72,
    product_waits=0.806,
    arithmetic_waits=0.182,
    kernel_seconds=2.06e-6,
    pass_layer_seconds=1.70e-5,
    large_tiles=True,
    whole_layer_seconds=5.66e-6,
    split_seconds=2.04e-5,
    sampling_seconds=5.73e-5,
    link_bandwidth=360e9,
)
"""Fitted by `benchmarks/fit_device.py`; docs/design/simulation.md compares it with measurements."""
_HBM3 = 3.35 / 4.8  # of the H200's bytes a second, by the data sheets
H100 = msgspec.structs.replace(
    H200,
    name="h100",
    memory=85.0e9,
    bandwidth=H200.bandwidth * _HBM3,
    product_units=H200.product_units * _HBM3,
    traffic_units=H200.traffic_units * _HBM3,
)
"""The same chip with HBM3: data sheet, with the H200's shares of it."""
A100 = Gpu(
    name="a100-80gb",
    units=108,
    memory=85.0e9,
    unit_flops=2.889e12,
    bandwidth=1.83e12,
    unit_bandwidth=0.06e12,
    product_units=18.0,
    power_units=85.0,
    traffic_units=35.0,
    spill=0.006,
    product_share=0.80,
    prompt_attention_share=0.65,
    in_flight=0.55,
    arithmetic_waits=0.04,
    kernel_seconds=2.5e-6,
    link_bandwidth=230e9,
)
"""Data sheet; products at 77 to 80 % of the peak (Bullet §2.3); decode is slowed by prefill by up
to 20 % (MuxWise §3.3.2)."""
FORMULAS = 8
"""Raised when what is computed of a GPU's parameters changes."""


def revision(gpu: Gpu) -> str:
    """Of the parameters and the formulas: what was measured with others is of another device."""
    return hashlib.sha256(msgspec.json.encode((FORMULAS, gpu))).hexdigest()[:10]


GPUS: dict[str, Gpu] = {gpu.name: gpu for gpu in (A100, H100, H200)}
KERNELS = 10
"""Small kernels of a layer."""
TILE = 64
"""Rows that products are counted in."""
TILE_KEYS, SPLIT_KEYS = 288, 1900
"""A large tile of attention beside its keys, and that some are split, in the time of a key."""
SPLIT_GAIN = 0.97
"""Tiles are split if that takes less than so much of what whole ones take."""


class _Shapes(NamedTuple):
    """Of one GPU's part of the model: parameters, and elements of one token, in a layer."""

    layers: int
    products: Sequence[tuple[float, float]]
    """(inputs, outputs) of the matrix products."""
    weights: float
    product_width: float
    """Elements that the products read and write for a token."""
    small_bytes: float
    """Bytes that the small kernels move for a token."""
    q_size: float
    kv_bytes: float
    """Of a token, keys and values."""
    head: float
    """Parameters of the classifier."""
    hidden: int


def _shapes(spec: ModelSpec, tp: int) -> _Shapes:
    h, q, kv, mlp = spec.hidden_size, spec.q_size, spec.kv_size, spec.intermediate_size
    wide = (q + 2 * kv + 2 * mlp) / tp
    products = ((h, (q + 2 * kv) / tp), (q / tp, h), (h, 2 * mlp / tp), (mlp / tp, h))
    return _Shapes(
        layers=spec.layers,
        products=products,
        weights=sum(inputs * outputs for inputs, outputs in products),
        product_width=4 * h + wide + (q + mlp) / tp,
        small_bytes=ITEM * (8 * h + (2 * (q + 2 * kv) + 3 * mlp) / tp),
        q_size=q / tp,
        kv_bytes=2 * kv * ITEM / tp,
        head=h * spec.vocab_size / tp,
        hidden=h,
    )


class _Cost(NamedTuple):
    """Seconds of some operators at the top clock and alone, FLOPs (by power) and bytes."""

    fixed: float = 0.0
    clocked: float = 0.0
    streamed: float = 0.0
    memory: float = 0.0
    """Of the seconds clocked and streamed, those that wait for memory."""
    arithmetic: float = 0.0
    """FLOPs, weighted by the power that they draw."""
    bytes: float = 0.0

    @property
    def alone(self) -> float:
        """Seconds at the top clock, with nothing beside it."""
        return self.fixed + self.clocked + self.streamed

    def times(self, count: float) -> "_Cost":
        a, b, c, d, e, f = self
        return _Cost(count * a, count * b, count * c, count * d, count * e, count * f)

    def plus(self, other: "_Cost") -> "_Cost":
        a, b, c, d, e, f = self
        g, h, i, j, k, m = other
        return _Cost(a + g, b + h, c + i, d + j, e + k, f + m)


ATTENTION_POWER = 0.6
"""Power of a FLOP of attention, of one of a matrix product: on all SMs the clock falls less."""


class DeviceModel:
    """One model on some GPUs of a kind: the simulated lanes' device.

    Args:
        gpu: which.
        spec: the model's shape.
        tp: GPUs that share each layer (tensor parallelism).
        seed: of the noise.

    Raises:
        ValueError: the model's heads cannot be shared by so many GPUs.
    """

    def __init__(self, gpu: Gpu, spec: ModelSpec, tp: int = 1, seed: int = 0) -> None:
        if tp < 1 or spec.kv_heads % tp:
            raise ValueError(f"tp {tp} does not divide the model's {spec.kv_heads} KV heads")
        self.gpu = gpu
        self.spec = spec
        self.tp = tp
        self._shapes = _shapes(spec, tp)
        self._rng = np.random.default_rng([seed, 0x4E4F4953])
        self._noise: list[float] = []
        self._layers: dict[tuple[int, int, bool], _Cost] = {}
        self._heads: dict[tuple[int, int], _Cost] = {}
        self._steps: dict[tuple[int, int], _Cost] = {}

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
        gpu = self.gpu
        traffic = draw = reads = 0.0
        units = 0
        for demand in running:
            traffic += demand.traffic
            draw += demand.draw
            reads += demand.reads
            units += demand.units
        drawn = gpu.traffic_units * min(1.0, traffic / gpu.bandwidth)
        clock = 1.0
        if drawn + draw > gpu.power_units:
            room = max(gpu.power_units - drawn, 1e-3) / draw
            clock = max(gpu.lowest_clock, room ** (1 / gpu.power_exponent))
        pace = max(1.0, units / gpu.units) / clock
        if len(running) == 1:
            return [d.fixed + d.clocked * pace + d.streamed for d in running]
        # Reads queue as more are in flight than the memory needs to be busy: hypot is a max with
        # a round corner. What a step does to itself is in its own seconds.
        latency = math.hypot(1.0, reads)
        longer = [latency / math.hypot(1.0, d.reads) - 1.0 for d in running]
        return [
            d.fixed + d.clocked * pace + d.streamed + d.waits * more
            for d, more in zip(running, longer, strict=True)
        ]

    def host_seconds(self, work: Work) -> tuple[float, float]:
        """See `Device.host_seconds`: measured for steps of 64 and 256, and while 8B was served. All
        hybrid passes of up to `WHOLE` tokens count as graphs, on every GPU."""
        if isinstance(work, DecodeWork):
            seconds = 2.3e-4 + 9.4e-7 * len(work.rows)
            return seconds, seconds
        if isinstance(work, PrefillWork):
            opens, layers, samples = work.first == 0, work.last - work.first, work.finishes
            tokens = _count(work.rows)
        else:
            opens, layers, samples = True, self._shapes.layers, True
            tokens = len(work.decode) + _count(work.prompts)
            if work.decode and tokens <= WHOLE:
                return HOST_PASS / 2, HOST_PASS
        first = HOST_SLICE + HOST_OPENS * opens
        return first, first + layers * _host_layer(tokens) + HOST_SAMPLES * samples

    # --- a step of each kind ------------------------------------------------------------------

    def _decode(self, work: DecodeWork, units: int) -> list[Demand]:
        contexts = sum([row.position for row in work.rows])
        demands = []
        for step in range(work.k):
            rows = len(work.rows)
            if step:
                rows = sum(step < row.steps for row in work.rows)
            contexts += rows  # each token reads itself, too
            cost = self._products(rows, units).plus(self._read(contexts, units))
            demands.append(self._step(cost, units))
        return demands

    def _slice(self, work: PrefillWork, units: int) -> _Cost:
        layer = self._pass_layer(_count(work.rows), work.rows, units)
        cost = layer.times(work.last - work.first)
        if not work.finishes:
            return cost
        return cost.plus(self._head(_ends(work.rows), units))

    def _hybrid(self, work: HybridWork, units: int) -> _Cost:
        decode, prompts = len(work.decode), work.prompts
        tokens = decode + _count(prompts)
        whole = self.gpu.large_tiles and decode and tokens <= WHOLE
        tiles = self._tiles(prompts, units) if whole else None
        if tiles is not None:
            pairs, split = tiles
            attention = self._attend(prompts, units, pairs)
            layer = self._layer(padded(tokens, SIZES), units, decode=False).plus(attention)
            more = self.gpu.whole_layer_seconds + split * self.gpu.split_seconds
            layer = layer._replace(fixed=layer.fixed + more)
        else:
            layer = self._pass_layer(tokens, prompts, units)
        read = self._read(sum([row.position + 1 for row in work.decode]), units)
        head = self._head(decode + _ends(prompts), units)
        return layer.times(self._shapes.layers).plus(head).plus(read)

    def _pass_layer(self, tokens: int, prompts: Sequence[PromptRow], units: int) -> _Cost:
        """A layer of a prefill slice or a hybrid pass; not faster than the host launches it."""
        computed = padded(tokens, SIZES)
        layer = self._layer(computed, units, decode=False).plus(self._attend(prompts, units))
        more = max(self.gpu.pass_layer_seconds, _least_layer(tokens) - layer.alone)
        return layer._replace(fixed=layer.fixed + more)

    def _products(self, rows: int, units: int) -> _Cost:
        """All of a decode step but its attention."""
        key = (rows, units)
        cost = self._steps.get(key)
        if cost is None:
            computed = padded(rows, BUCKETS, BUCKET_STEP)
            cost = self._layer(computed, units, decode=True).times(self._shapes.layers)
            cost = self._steps[key] = cost.plus(self._head(computed, units))
        return cost

    # --- operators ----------------------------------------------------------------------------

    def _layer(self, tokens: int, units: int, *, decode: bool) -> _Cost:
        """The matrix products, small kernels and all-reduces of a layer."""
        key = (tokens, units, decode)
        cost = self._layers.get(key)
        if cost is None:
            shapes = self._shapes
            fixed = KERNELS * self.gpu.kernel_seconds
            if self.tp > 1:
                fixed += 2 * self._all_reduce(tokens)
            small = self._stream(tokens * shapes.small_bytes, units)._replace(fixed=fixed)
            moved = ITEM * (shapes.weights + tokens * shapes.product_width)
            cost = small.plus(self._product(tokens, shapes.products, moved, units, decode=decode))
            self._layers[key] = cost
        return cost

    def _head(self, rows: int, units: int) -> _Cost:
        """The classifier for so many rows, and choosing their tokens."""
        if not rows:
            return _Cost()
        key = (rows, units)
        cost = self._heads.get(key)
        if cost is None:
            hidden, head = self._shapes.hidden, self._shapes.head
            product = self._product(
                rows, ((hidden, head / hidden),), ITEM * head, units, decode=True
            )
            cost = product._replace(fixed=self.gpu.sampling_seconds)
            self._heads[key] = cost
        return cost

    def _product(
        self,
        tokens: int,
        products: Sequence[tuple[float, float]],
        moved: float,
        units: int,
        *,
        decode: bool,
    ) -> _Cost:
        """Matrix products of so many rows with weights of those shapes; they move so many bytes."""
        gpu = self.gpu
        rows = -(-tokens // TILE) * TILE if tokens > TILE else tokens
        flops = [2.0 * rows * inputs * outputs for inputs, outputs in products]
        work = sum(flops)
        if tokens >= 2 * TILE and not decode:
            # A kernel with 132 blocks takes as long on 116 SMs as on 66: twice as long as on 132.
            turns = math.ceil(gpu.units / units) * units / gpu.units
            sizes = [tokens * outputs for _, outputs in products]
            parts = [gpu.one_grid / (gpu.one_grid + size) for size in sizes]
            work += (turns - 1.0) * sum(f * part for f, part in zip(flops, parts, strict=True))
        c = work / (units * gpu.unit_flops * gpu.product_share)
        share = 1.0 - math.exp(-units / gpu.product_units)
        saturated = moved / gpu.bandwidth
        corner = gpu.whole_corner if units == gpu.units else gpu.corner
        corner = gpu.step_corner if decode else corner
        cost = self._round(c, saturated / share, saturated, corner)
        total = sum(flops)
        return cost._replace(arithmetic=total, bytes=moved + gpu.spill * total)

    def _attend(self, rows: Sequence[PromptRow], units: int, tiled: float | None = None) -> _Cost:
        """Attention of the chunks of a prefill batch, in one layer; `tiled`: see `_tiles`."""
        gpu, shapes = self.gpu, self._shapes
        pairs = seen = 0.0
        for row in rows:
            n = row.count
            # Tiles on the diagonal are whole.
            pairs += (n + gpu.attention_rows) * (row.start + 0.5 * n + 64)
            seen += row.start + n
        pairs = pairs if tiled is None else tiled
        flops = 4.0 * shapes.q_size * pairs
        moved = seen * shapes.kv_bytes
        c = flops / (units * gpu.unit_flops * gpu.prompt_attention_share)
        saturated = moved / gpu.bandwidth
        m = moved / min(units * gpu.unit_bandwidth, gpu.bandwidth)
        cost = self._round(c, m, saturated, gpu.corner)
        return cost._replace(arithmetic=ATTENTION_POWER * flops, bytes=moved)

    def _tiles(self, rows: Sequence[PromptRow], units: int) -> tuple[float, bool] | None:
        """Pairs of rows and keys that all SMs would compute for a head while the busiest is, in
        large tiles, as in the graph of a pass, and whether some are split; None: there are small
        ones, for these were nearly empty.

        `kernels/prefill_attention_schedule.py` deals tiles, and splits the longest if that is
        faster; `kernels/prefill_attention_flashinfer.py` (`Replayed`) says what is nearly empty.
        """
        tile, heads = tile_tokens(self.spec.head_dim), self.spec.heads / self.tp
        keys = [
            row.start + min(row.count, first + tile)
            for row in rows
            for first in range(0, row.count, tile)
        ]
        new = sum([row.count * (row.start + row.count) for row in rows])
        if heads * sum(keys) > EMPTY_KEYS * units and new < FILLED * tile * sum(keys):
            return None
        count, longest = heads * len(keys), max(keys) + TILE_KEYS
        mean = (heads * sum(keys) + count * TILE_KEYS) / units
        rounds = math.ceil(count / units)
        busiest = max(mean, longest) if rounds == 1 else mean * rounds * units / count
        split = mean + SPLIT_KEYS < SPLIT_GAIN * busiest
        return (mean + SPLIT_KEYS if split else busiest) * tile * units / heads, split

    def _read(self, contexts: int, units: int) -> _Cost:
        """Attention of a decode step: all layers read the keys and values of these tokens."""
        gpu, shapes = self.gpu, self._shapes
        reach = min(units * gpu.unit_bandwidth, gpu.bandwidth * gpu.decode_attention_share)
        return self._by_reach(contexts * shapes.kv_bytes * shapes.layers, reach)

    def _stream(self, moved: float, units: int) -> _Cost:
        """Small kernels that read and write so many bytes."""
        reach = self.gpu.bandwidth * (1.0 - math.exp(-units / self.gpu.product_units))
        return self._by_reach(moved, reach)

    def _by_reach(self, moved: float, reach: float) -> _Cost:
        """Pure memory traffic: what the memory does not bound goes with the clock."""
        seconds = moved / reach
        streamed = moved / self.gpu.bandwidth
        return _Cost(clocked=seconds - streamed, streamed=streamed, memory=seconds, bytes=moved)

    def _round(self, c: float, m: float, saturated: float, p: float) -> _Cost:
        """Seconds of arithmetic c and memory m together; the latter `saturated` with all SMs."""
        seconds = (c**p + m**p) ** (1 / p)
        memory = seconds * m**p / (c**p + m**p) if m else 0.0
        streamed = memory * saturated / m if m else 0.0
        return _Cost(clocked=seconds - streamed, streamed=streamed, memory=memory)

    def _all_reduce(self, tokens: int) -> float:
        """A ring: each GPU sends and receives 2 (tp − 1) / tp of the bytes (DuetServe §4.1)."""
        moved = 2 * (self.tp - 1) / self.tp * tokens * self._shapes.hidden * ITEM
        return self.gpu.link_seconds + moved / self.gpu.link_bandwidth

    def _step(self, cost: _Cost, units: int) -> Demand:
        """Of a decode step: its kernels keep as much in flight as the SMs hold."""
        reads = units * self.gpu.unit_bandwidth / self.gpu.bandwidth
        return self._demand(cost, units, reads, cost.memory)

    def _pass(self, cost: _Cost, units: int) -> Demand:
        """Of a prefill slice or a hybrid pass."""
        gpu = self.gpu
        reads = gpu.in_flight * cost.bytes / (cost.alone * gpu.bandwidth)
        busy = cost.clocked + cost.streamed - cost.memory
        waits = gpu.product_waits * cost.memory + gpu.arithmetic_waits * busy
        return self._demand(cost, units, reads, waits)

    def _demand(self, cost: _Cost, units: int, reads: float, waits: float) -> Demand:
        alone = cost.alone
        scale = self._next_noise()
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
        )

    def _next_noise(self) -> float:
        if not self._noise:
            draws = self._rng.normal(0.0, self.gpu.noise, 4096) if self.gpu.noise else np.zeros(1)
            self._noise = np.exp(draws).tolist()
        return self._noise.pop()


def _host_layer(tokens: int) -> float:
    """Seconds of the host for a layer of so many tokens: by graphs, or kernel by kernel."""
    return 4.0e-5 if tokens <= SIZES[-1] else 2.8e-4


def _least_layer(tokens: int) -> float:
    """Seconds of a layer of so many tokens that nothing was queued ahead of, at least."""
    return 6.0e-5 + 3.5e-8 * tokens if tokens <= SIZES[-1] else 3.9e-4


def _count(rows: Sequence[PromptRow]) -> int:
    return sum([row.count for row in rows])


def _ends(rows: Sequence[PromptRow]) -> int:
    """How many prompts end with their chunk."""
    return sum([row.samples for row in rows])
