"""Device models: how long the simulated lanes' work takes on a GPU.

A step is a sum over the model's operators. Matrix products and attention over a prompt take
`(c^p + m^p)^(1/p)` seconds, c by arithmetic and m by memory: a roofline with a round corner, for
the two overlap, but not wholly. Arithmetic is linear in the SMs. Bandwidth grows with the SMs and
saturates, early for the attention kernels of this project and late for the products of decode.
Then come the small kernels, all-reduces in rings, and noise.

Two lanes share the power, the memory and, where their levels overlap, the SMs:

- *power*: the clock falls until the arithmetic at that clock (a power of it) and the traffic fit
  under the cap. So even alone, products on all SMs run slower, SM for SM, than on half of them.
- *memory*: where both ask for more than there is, each gets the same fraction of what it asked.
- *SMs*: work on more units than the device has is slowed alike.

No policy reads any of this: estimators are fitted on what comes out.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from twolane.lanes.sim import Demand
from twolane.lanes.work import DecodeWork, HybridWork, PrefillWork, PromptRow, Work
from twolane.model.spec import ModelSpec

ITEM = 2
"""Bytes of an element: weights, activations and KV are bfloat16."""


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
    """p: how round the roofline's corner is."""
    kernel_seconds: float = 2.1e-6
    """Of one small kernel in a CUDA graph, beside its bytes."""
    eager_layer_seconds: float = 2.5e-4
    """The least time of a layer that is launched kernel by kernel."""
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
    bandwidth=4.32e12,
    unit_bandwidth=0.15e12,
    product_units=25.6,
    power_units=68.5,
    traffic_units=52.8,
    power_exponent=4.12,
    product_share=0.91,
    prompt_attention_share=0.58,
    decode_attention_share=0.90,
    corner=3.0,
    kernel_seconds=1.86e-6,
    sampling_seconds=1.34e-4,
    link_bandwidth=360e9,
)
"""Fitted to this project's own measurements: docs/simulation.md has them beside the model's."""
H100 = msgspec.structs.replace(
    H200,
    name="h100",
    memory=85.0e9,
    bandwidth=3.07e12,
    product_units=25.6 * 3.07 / 4.32,
    traffic_units=52.8 * 3.07 / 4.32,
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
    kernel_seconds=2.5e-6,
    link_bandwidth=230e9,
)
"""Data sheet; products at 77 to 80 % of the peak (Bullet §2.3); decode is slowed by prefill by up
to 20 % (MuxWise §3.3.2)."""
FORMULAS = 2
"""Raised when what is computed of a GPU's parameters changes."""


def revision(gpu: Gpu) -> str:
    """Of the parameters and the formulas: what was measured with others is of another device."""
    return hashlib.sha256(msgspec.json.encode((FORMULAS, gpu))).hexdigest()[:10]


GPUS: dict[str, Gpu] = {gpu.name: gpu for gpu in (A100, H100, H200)}
KERNELS = 10
"""Small kernels of a layer."""
PADDING = 80
"""Tokens that a prefill slice computes beyond those there are: its tiles are whole."""


class _Shapes(NamedTuple):
    """Of one GPU's part of the model: parameters, and elements of one token, in a layer."""

    layers: int
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
    return _Shapes(
        layers=spec.layers,
        weights=(h * (2 * q + 2 * kv) + 3 * h * mlp) / tp,
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
    arithmetic: float = 0.0
    """FLOPs, weighted by the power that they draw."""
    bytes: float = 0.0

    def times(self, count: float) -> "_Cost":
        a, b, c, d, e = self
        return _Cost(count * a, count * b, count * c, count * d, count * e)

    def plus(self, other: "_Cost") -> "_Cost":
        a, b, c, d, e = self
        f, g, h, i, j = other
        return _Cost(a + f, b + g, c + h, d + i, e + j)


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
        self._layers: dict[tuple[int, int], _Cost] = {}
        self._heads: dict[tuple[int, int], _Cost] = {}
        self._steps: dict[tuple[int, int], _Cost] = {}

    # --- what the lanes ask -------------------------------------------------------------------

    def steps(self, work: Work, units: int) -> Sequence[Demand]:
        """See `Device.steps`."""
        if isinstance(work, DecodeWork):
            return self._decode(work, units)
        if isinstance(work, PrefillWork):
            return [self._demand(self._slice(work, units), units)]
        return [self._demand(self._hybrid(work, units), units)]

    def seconds(self, running: Sequence[Demand]) -> Sequence[float]:
        """See `Device.seconds`."""
        gpu = self.gpu
        traffic = draw = 0.0
        units = 0
        for demand in running:
            traffic += demand.traffic
            draw += demand.draw
            units += demand.units
        share = min(1.0, gpu.bandwidth / traffic) if traffic else 1.0
        drawn = gpu.traffic_units * min(1.0, traffic / gpu.bandwidth)
        clock = 1.0
        if drawn + draw > gpu.power_units:
            room = max(gpu.power_units - drawn, 1e-3) / draw
            clock = max(gpu.lowest_clock, room ** (1 / gpu.power_exponent))
        pace = max(1.0, units / gpu.units) / clock
        return [d.fixed + d.clocked * pace + d.streamed / share for d in running]

    def host_seconds(self, work: Work) -> float:
        """See `Device.host_seconds`: measured for decode steps of 64 and of 256 requests."""
        if isinstance(work, DecodeWork):
            return 1.4e-4 + 9.4e-7 * len(work.rows)
        return 4.0e-4

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
            demands.append(self._demand(cost, units))
        return demands

    def _slice(self, work: PrefillWork, units: int) -> _Cost:
        tokens = PADDING + sum([len(row.tokens) for row in work.rows])
        layer = self._eager(self._layer(tokens, units).plus(self._attend(work.rows, units)))
        cost = layer.times(work.last - work.first)
        if not work.finishes:
            return cost
        return cost.plus(self._head(_ends(work.rows), units))

    def _hybrid(self, work: HybridWork, units: int) -> _Cost:
        decode, prompts = len(work.decode), work.prompts
        tokens = decode + sum([len(row.tokens) for row in prompts])
        layer = self._eager(self._layer(tokens, units).plus(self._attend(prompts, units)))
        read = self._read(sum([row.position + 1 for row in work.decode]), units)
        head = self._head(decode + _ends(prompts), units)
        return layer.times(self._shapes.layers).plus(head).plus(read)

    def _products(self, rows: int, units: int) -> _Cost:
        """All of a decode step but its attention."""
        key = (rows, units)
        cost = self._steps.get(key)
        if cost is None:
            cost = self._layer(rows, units).times(self._shapes.layers)
            cost = self._steps[key] = cost.plus(self._head(rows, units))
        return cost

    # --- operators ----------------------------------------------------------------------------

    def _layer(self, tokens: int, units: int) -> _Cost:
        """The matrix products, small kernels and all-reduces of a layer."""
        key = (tokens, units)
        cost = self._layers.get(key)
        if cost is None:
            shapes = self._shapes
            fixed = KERNELS * self.gpu.kernel_seconds
            if self.tp > 1:
                fixed += 2 * self._all_reduce(tokens)
            small = self._stream(tokens * shapes.small_bytes, units)._replace(fixed=fixed)
            cost = small.plus(self._product(tokens, shapes.weights, shapes.product_width, units))
            self._layers[key] = cost
        return cost

    def _head(self, rows: int, units: int) -> _Cost:
        """The classifier for so many rows, and choosing their tokens."""
        if not rows:
            return _Cost()
        key = (rows, units)
        cost = self._heads.get(key)
        if cost is None:
            product = self._product(rows, self._shapes.head, 0.0, units)
            cost = product._replace(fixed=self.gpu.sampling_seconds)
            self._heads[key] = cost
        return cost

    def _product(self, tokens: int, weights: float, width: float, units: int) -> _Cost:
        """Matrix products of so many rows with weights of so many elements."""
        gpu = self.gpu
        flops = 2.0 * tokens * weights
        moved = ITEM * (weights + tokens * width)
        share = 1.0 - math.exp(-units / gpu.product_units)
        c = flops / (units * gpu.unit_flops * gpu.product_share)
        saturated = moved / gpu.bandwidth
        cost = self._round(c, saturated / share, saturated)
        return cost._replace(arithmetic=flops, bytes=moved + gpu.spill * flops)

    def _attend(self, rows: Sequence[PromptRow], units: int) -> _Cost:
        """Attention of the chunks of a prefill batch, in one layer."""
        gpu, shapes = self.gpu, self._shapes
        pairs = seen = 0.0
        for row in rows:
            n = len(row.tokens)
            pairs += max(n, 32) * (row.start + 0.5 * n + 64)  # tiles on the diagonal are whole
            seen += row.start + n
        flops = 4.0 * shapes.q_size * pairs
        moved = seen * shapes.kv_bytes
        c = flops / (units * gpu.unit_flops * gpu.prompt_attention_share)
        saturated = moved / gpu.bandwidth
        m = moved / min(units * gpu.unit_bandwidth, gpu.bandwidth)
        cost = self._round(c, m, saturated)
        return cost._replace(arithmetic=ATTENTION_POWER * flops, bytes=moved)

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
        streamed = moved / self.gpu.bandwidth
        return _Cost(clocked=moved / reach - streamed, streamed=streamed, bytes=moved)

    def _round(self, c: float, m: float, saturated: float) -> _Cost:
        """Seconds of arithmetic c and memory m together; the latter `saturated` with all SMs."""
        p = self.gpu.corner
        seconds = (c**p + m**p) ** (1 / p)
        memory = seconds * m**p / (c**p + m**p) if m else 0.0
        streamed = memory * saturated / m if m else 0.0
        return _Cost(clocked=seconds - streamed, streamed=streamed)

    def _all_reduce(self, tokens: int) -> float:
        """A ring: each GPU sends and receives 2 (tp − 1) / tp of the bytes (DuetServe §4.1)."""
        moved = 2 * (self.tp - 1) / self.tp * tokens * self._shapes.hidden * ITEM
        return self.gpu.link_seconds + moved / self.gpu.link_bandwidth

    def _eager(self, layer: _Cost) -> _Cost:
        """A layer launched kernel by kernel is not faster than its launches."""
        short = self.gpu.eager_layer_seconds - layer.clocked - layer.streamed - layer.fixed
        return layer._replace(fixed=layer.fixed + short) if short > 0 else layer

    def _demand(self, cost: _Cost, units: int) -> Demand:
        alone = cost.fixed + cost.clocked + cost.streamed
        scale = self._next_noise()
        busy = self.gpu.unit_flops * self.gpu.product_share * alone
        return Demand(
            cost.fixed * scale,
            cost.clocked * scale,
            cost.streamed * scale,
            units,
            cost.arithmetic / busy,
            cost.bytes / alone,
        )

    def _next_noise(self) -> float:
        if not self._noise:
            draws = self._rng.normal(0.0, self.gpu.noise, 4096) if self.gpu.noise else np.zeros(1)
            self._noise = np.exp(draws).tolist()
        return self._noise.pop()


def _ends(rows: Sequence[PromptRow]) -> int:
    """How many prompts end with their chunk."""
    return sum([row.sampling is not None for row in rows])
