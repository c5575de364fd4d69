"""Seconds, FLOPs and bytes of a model's operators on one GPU, at the top clock and alone."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from twolane.kernels.sizes import EMPTY_KEYS, FILLED, tile_tokens
from twolane.lanes.work import PromptRow
from twolane.model.spec import ModelSpec, MoeSpec
from twolane.sim.gpus import Gpu

ITEM = 2
"""Bytes of an element of activations, the embedding and the classifier: bfloat16."""
FP8_RATE, FP8_STEP_RATE = 1.9, 1.3
"""FLOP/s of matrix products in e4m3 over those in bfloat16: of large ones, from products of 8,192
rows on an H100 and an H200, and of decode steps, from steps on 24 and 32 SMs of an H200."""
FP8_SECONDS = 1.6e-5
"""Seconds added to a layer with products in e4m3, besides those of their rates."""
KERNELS, EXPERT_KERNELS = 10, 11
"""Number of small kernels in a layer, and how many experts add: the router's two, four that route
and gather, an activation, and those that add up."""
OWN_ROWS, TRITON_ROWS = 16, 256
"""Rows of an expert, on average, up to which products of a pass are the project's own, and up to
which they are Triton's; beyond that they are PyTorch's (`kernels/experts/products.py`)."""
TRITON_GROUPED, TORCH_GROUPED, FP8_GROUPED = 0.59, 0.67, 1.4
"""Rates of these two over that of one large product, and of theirs in e4m3 over bfloat16: from
slices of Qwen3-30B-A3B, Qwen3.5-35B-A3B and gpt-oss-20b on an H200
(docs/notes/device-model.md#experts-in-passes)."""
RULE_SHARE = 0.0856
"""Share of the arithmetic rate that linear attention of many prompts reaches: its products are
small and wait for each other. This and the next constants are fitted to a layer of Qwen3.5-35B-A3B
on an H200 (docs/notes/kernels-h200.md)."""
FITTED_HEAD, WIDE_READS, WIDE_PROMPTS, NARROW_PROMPTS = 128, 0.38, 0.33, 0.7
"""The heads of the fitted attention kernels, and the rates over theirs at which kernels of wider
heads read on an SM, and compute prompts, and at which those of narrower heads do, which take as
many exponentials for fewer products: from Qwen3.5-35B-A3B and gpt-oss-20b on an H200."""
CHAIN_SECONDS, CHAIN_WORK = 3.04e-8, 2.2e-6
"""Seconds that each token of a prompt waits for those before it, since states go from chunk to
chunk; and the seconds of one SM for a token that `RULE_SHARE` has for this work."""
STATE_UNIT, STATE_REACH, STATE_CORNER = 0.37, 0.82, 3.0
"""Rates at which decode steps move states, as shares of an SM's and of the memory's bandwidth, and
the exponent that says how round the corner between them is."""
STATE_SECONDS, RULE_SECONDS = 8.0e-6, 2.0e-5
"""Seconds that the kernels of linear attention add to a layer of a decode step, and of a pass."""
GROUPED_BYTES, GROUPED_MXFP4_BYTES = 4.6e10, 2.3e10
"""Bytes/s of experts' matrices that an SM multiplies in a decode step by the kernels for experts
with biases: from steps of gpt-oss-20b on 32 SMs of an H200."""
TILE = 64
"""Number of rows in a tile of a product; rows count in whole tiles."""
TILE_KEYS, SPLIT_KEYS = 288, 1900
"""Cost of a large tile of attention besides its keys, and of splitting some tiles, in keys."""


class Storage(NamedTuple):
    """Widths of weights and KV cache in bytes of an element, scales included."""

    weights: float = ITEM
    """Width of the layers' matrices; those of one byte are multiplied in e4m3, narrower ones in
    bfloat16, to which passes widen them first."""
    kv: float = ITEM
    own: float | None = None
    """Width of experts' matrices, where it differs from that of others (MXFP4)."""

    @property
    def experts(self) -> float:
        """Width of experts' matrices."""
        return self.weights if self.own is None else self.own


BFLOAT16 = Storage()


class LayerShapes(NamedTuple):
    """One GPU's part of a layer: counts of parameters, and of elements for one token."""

    layers: int
    products: Sequence[tuple[float, float]]
    """Inputs and outputs of the matrix products."""
    weights: float
    """Number of parameters of those products."""
    product_width: float
    """Number of elements that the products read and write for a token."""
    small_bytes: float
    """Bytes that the small kernels move for a token."""
    q_size: float
    """Elements of the queries of a token that attend to others: a mean layer's."""
    kv_bytes: float
    """Bytes of the keys and values of a token: a mean layer's."""
    state_bytes: float
    """Bytes of a request's state that a decode step reads and writes: a mean layer's."""
    rule_flops: float
    """FLOPs of linear attention for a prompt's token: a mean layer's."""
    head: float
    """Number of parameters of the classifier."""
    hidden: int


def kv_parts(spec: ModelSpec, tp: int) -> int:
    """Return the number of parts that the KV heads are divided into: with more GPUs than KV heads,
    several GPUs have the same one.

    Raises:
        ValueError: the model's heads cannot be shared by this many GPUs.
    """
    if tp < 1 or (spec.kv_heads % tp and tp % spec.kv_heads):
        raise ValueError(f"tp {tp} does not divide the model's {spec.kv_heads} KV heads")
    return min(tp, spec.kv_heads)


def shapes_of(spec: ModelSpec, tp: int, storage: Storage = BFLOAT16) -> LayerShapes:
    """Return the shapes of one GPU's part of a model: those of a layer of mean size."""
    layers, h = list(enumerate(spec.each)), spec.hidden_size
    q = sum(at.q_size for _, at in layers) / spec.layers
    each = [at.kv_size / kv_parts(at, tp) for _, at in layers]
    kv, own = sum(each) / spec.layers, sum(each[i] for i in spec.kv_layers) / spec.layers
    linear, state, rule = spec.linear_share, 0.0, 0.0
    seen = (1 - linear) * q
    rows = seen * (spec.q_rows + spec.gate_rows) / spec.q_size
    if (delta := spec.delta) is not None:
        rows += linear * (delta.projected + 2 * delta.value_heads)
        q, kv = seen + linear * delta.value_size, (1 - linear) * kv
        state = 2.0 * linear * delta.state_bytes(ITEM) / tp
        rule = linear * delta.prompt_flops / tp
    dense = spec.moe is None or spec.moe.beside_dense
    mlp = sum(at.intermediate_size for _, at in layers) / spec.layers if dense else 0
    wide = (q + 2 * mlp) / tp + 2 * own
    products = ((h, rows / tp + 2 * own), (q / tp, h), (h, 2 * mlp / tp), (mlp / tp, h))
    return LayerShapes(
        layers=spec.layers,
        products=products,
        weights=sum(inputs * outputs for inputs, outputs in products),
        product_width=4 * h + wide + (q + mlp) / tp,
        small_bytes=ITEM * (8 * h + 4 * own + (2 * q + 3 * mlp) / tp),
        q_size=seen / tp,
        kv_bytes=2 * kv * storage.kv,
        state_bytes=state,
        rule_flops=rule,
        head=h * spec.vocab_size / tp,
        hidden=h,
    )


class Cost(NamedTuple):
    """Seconds of some operators at the top clock and alone, FLOPs (by power) and bytes."""

    fixed: float = 0.0
    clocked: float = 0.0
    streamed: float = 0.0
    memory: float = 0.0
    """Seconds among `clocked` and `streamed` that wait for memory."""
    arithmetic: float = 0.0
    """Number of FLOPs, weighted by the power that they draw."""
    bytes: float = 0.0
    linked: float = 0.0
    """Seconds of all-reduces."""

    @property
    def alone(self) -> float:
        """Seconds at the top clock, with nothing beside it."""
        return self.fixed + self.clocked + self.streamed + self.linked

    def times(self, count: float) -> "Cost":
        """Return the cost of `count` repetitions."""
        return Cost(*[count * part for part in self])

    def plus(self, other: "Cost") -> "Cost":
        """Return the cost of both in sequence."""
        return Cost(*[a + b for a, b in zip(self, other, strict=True)])


class OperatorCosts:
    """Costs of the operators of a forward pass.

    Args:
        gpu: the data sheet.
        spec: the model's shape.
        tp: GPUs that share each layer (tensor parallelism).
        storage: widths of weights and KV cache.
    """

    def __init__(self, gpu: Gpu, spec: ModelSpec, tp: int, storage: Storage = BFLOAT16) -> None:
        self._gpu, self._spec, self._tp, self._storage = gpu, spec, tp, storage
        self._shapes = shapes_of(spec, tp, storage)
        self._windows = spec.windows
        self._layers: dict[tuple[int, int, int, bool], Cost] = {}
        self._heads: dict[tuple[int, int], Cost] = {}

    def layer(self, tokens: int, units: int, *, decode: bool, routed: int | None = None) -> Cost:
        """Return the cost of a layer's matrix products, small kernels and all-reduces.

        `routed`: tokens that go to experts, which padding does not; None: all of them.
        """
        routed = tokens if routed is None or self._spec.moe is None else routed
        key = (tokens, routed, units, decode)
        cost = self._layers.get(key)
        if cost is None:
            shapes = self._shapes
            fixed = KERNELS * self._gpu.kernel_seconds
            if self._tp > 1:
                gpu = self._gpu
                fixed += 2 * (gpu.behind_seconds if decode else gpu.pass_behind_seconds)
            small = self._stream(tokens * shapes.small_bytes, units)._replace(
                fixed=fixed, linked=2 * self._all_reduce(tokens, units)
            )
            weights = self._storage.weights
            widened = weights < 1 and not decode
            read = ITEM if widened else weights
            moved = read * shapes.weights + ITEM * tokens * shapes.product_width
            rate = (FP8_STEP_RATE if decode else FP8_RATE) if 1 <= weights < ITEM else 1.0
            products = self._product(
                tokens, shapes.products, moved, units, decode=decode, rate=rate
            )
            cost = small.plus(products)
            if shapes.state_bytes:
                cost = cost.plus(self.linear(tokens, units, decode=decode))
            if rate > 1:
                cost = cost.plus(self._fp8(units, decode=decode))
            if widened:
                cost = cost.plus(self._stream((weights + ITEM) * shapes.weights, units))
            if self._spec.moe is not None:
                cost = cost.plus(self._experts(routed, self._spec.moe, units, decode=decode))
            self._layers[key] = cost
        return cost

    def linear(self, tokens: int, units: int, *, decode: bool) -> Cost:
        """Return the cost of linear attention in a mean layer: decode steps move a state for each
        row, prompts compute in chunks; `chain` has what a long prompt waits."""
        gpu = self._gpu
        if decode:
            moved = tokens * self._shapes.state_bytes
            c = moved / (units * STATE_UNIT * gpu.unit_bandwidth)
            m = moved / (STATE_REACH * gpu.bandwidth)
            cost = self._round(c, m, m, STATE_CORNER)
            return cost._replace(fixed=STATE_SECONDS * self._spec.linear_share, bytes=moved)
        flops = tokens * self._shapes.rule_flops
        clocked = flops / (units * gpu.unit_flops * RULE_SHARE)
        fixed = RULE_SECONDS * self._spec.linear_share
        return Cost(fixed=fixed, clocked=clocked, arithmetic=flops)

    def states(self, decode: int, units: int) -> Cost:
        """Return the cost of the states that decode rows move on in a layer of a hybrid pass."""
        moves = decode and self._shapes.state_bytes
        return self.linear(decode, units, decode=True) if moves else Cost()

    def chain(self, rows: Sequence[PromptRow], units: int) -> Cost:
        """Return the cost by which the longest of these chunks delays linear attention: its states
        go from one part of it to the next, on few of the SMs."""
        if not self._shapes.rule_flops or not rows:
            return Cost()
        tokens, longest = sum([row.count for row in rows]), max([row.count for row in rows])
        waited = max(0.0, CHAIN_SECONDS * longest - CHAIN_WORK * tokens / units)
        return Cost(clocked=waited * self._spec.linear_share)

    def _fp8(self, units: int, *, decode: bool) -> Cost:
        """Return the cost that products in e4m3 add to a layer with any number of rows."""
        if decode:
            return Cost(fixed=FP8_SECONDS)
        gpu = self._gpu
        # Rows whose time is added to the products of a pass in e4m3. It and `FP8_SECONDS` were
        # fitted to a profile of Qwen3-8B on an H200.
        flops = 2.0 / FP8_RATE * 120 * self._shapes.weights
        seconds = flops / (units * gpu.unit_flops * gpu.product_share)
        return Cost(fixed=FP8_SECONDS, clocked=seconds)

    def _experts(self, tokens: int, moe: MoeSpec, units: int, *, decode: bool) -> Cost:
        """Return the cost of a layer's router and experts: active ones are read, rows count in
        whole tiles."""
        h, inner = self._spec.hidden_size, moe.intermediate_size / self._tp
        rows, active = tokens * moe.entries, moe.active(tokens)
        each = rows / active
        computed = active * (math.ceil(each / TILE) * TILE if each > TILE else each)
        weights = 3 * h * inner
        rate = 1.0
        if not decode and (each > OWN_ROWS or moe.biases):
            computed = rows + active * TILE / 2  # the last tile of an expert is half empty
            rate = self._grouped_rate(each, moe)
        flops = 2.0 * (computed * weights + tokens * h * moe.experts)
        stored = self._storage.experts * active * weights
        moved = stored + ITEM * (h * moe.experts + rows * (2 * h + 3 * inner))
        cost = self._bounded(flops / rate, flops, moved, units, decode=decode)
        # Other kernels gather the rows, activate and add up.
        cost = cost.plus(self._stream(ITEM * rows * (2 * h + 3 * inner), units))
        if decode and moe.biases:
            read = GROUPED_BYTES if self._storage.own is None else GROUPED_MXFP4_BYTES
            late = max(0.0, stored / (units * read) - cost.alone)
            cost = cost._replace(clocked=cost.clocked + late)
        return cost._replace(fixed=EXPERT_KERNELS * self._gpu.kernel_seconds)

    def _grouped_rate(self, each: float, moe: MoeSpec) -> float:
        """Return the rate of a pass's products with `each` rows of an expert, over that of one
        large product in bfloat16."""
        triton = moe.biases or each <= TRITON_ROWS
        in_e4m3 = 1 <= self._storage.experts < ITEM
        return (TRITON_GROUPED if triton else TORCH_GROUPED) * (FP8_GROUPED if in_e4m3 else 1.0)

    def head(self, rows: int, units: int) -> Cost:
        """Return the cost of the classifier and of sampling for this many rows."""
        if not rows:
            return Cost()
        key = (rows, units)
        cost = self._heads.get(key)
        if cost is None:
            hidden, head = self._shapes.hidden, self._shapes.head
            product = self._product(
                rows, ((hidden, head / hidden),), ITEM * head, units, decode=True
            )
            cost = product._replace(fixed=self._gpu.sampling_seconds)
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
        rate: float = 1.0,
    ) -> Cost:
        """Return the cost of products of `tokens` rows with weights of these shapes that move
        `moved` bytes, at `rate` times bfloat16's arithmetic rate and the same power."""
        gpu = self._gpu
        rows = -(-tokens // TILE) * TILE if tokens > TILE else tokens
        flops = [2.0 / rate * rows * inputs * outputs for inputs, outputs in products]
        work = sum(flops)
        if self._tp > 1 and not decode:
            work = sum(
                f * self._half_tiles(rows, outputs, units)
                for f, (_, outputs) in zip(flops, products, strict=True)
            )
        if tokens >= 2 * TILE and not decode:
            # A kernel with 132 blocks takes as long on 116 SMs as on 66: twice as long as on 132.
            turns = math.ceil(gpu.units / units) * units / gpu.units
            sizes = [max(1.0, tokens * outputs) for _, outputs in products]
            parts = [gpu.one_grid / (gpu.one_grid + size) for size in sizes]
            work += (turns - 1.0) * sum(f * part for f, part in zip(flops, parts, strict=True))
        return self._bounded(work, sum(flops), moved, units, decode=decode)

    def _half_tiles(self, rows: int, outputs: float, units: int) -> float:
        """Return the factor on the time of a pass's product whose rows 128 does not divide.

        Of some hundred rows its kernel has tiles of 64 rows and 128 outputs. It is slower, and the
        SMs take these in turns. Of more rows it has tiles of 128, the last of which is half empty.
        Only the former was measured, and on two ranks.
        """
        share = self._gpu.half_tile_share
        if not share or rows <= 2 * TILE or rows % (2 * TILE) == 0 or not outputs:
            return 1.0
        # Rows from which products always have tiles of twice as many rows.
        if rows >= 512:
            return (rows + TILE) / rows
        tiles = rows / TILE * math.ceil(outputs / (2 * TILE))
        turns = math.ceil(tiles / units) * units / (rows / TILE * outputs / (2 * TILE))
        return turns / share

    def square(self, size: int, units: int) -> Cost:
        """Return the cost of a product of two square matrices of this size, in bfloat16."""
        return self._product(size, ((size, size),), 3.0 * ITEM * size**2, units, decode=False)

    def up_gate(self, rows: int, units: int) -> Cost:
        """Return the cost of the up and gate projection of a prefill batch with this many rows."""
        spec = self._spec
        inner = 2 * spec.intermediate_size / self._tp
        moved = ITEM * (spec.hidden_size * inner + rows * (spec.hidden_size + inner))
        product = ((float(spec.hidden_size), inner),)
        return self._product(rows, product, moved, units, decode=False)

    def _bounded(
        self, work: float, flops: float, moved: float, units: int, *, decode: bool
    ) -> Cost:
        """Return the cost of products with `flops`, in the time of `work` FLOPs, that move `moved`
        bytes."""
        gpu = self._gpu
        c = work / (units * gpu.unit_flops * gpu.product_share)
        share = 1.0 - math.exp(-units / gpu.product_units)
        saturated = moved / gpu.bandwidth
        corner = gpu.whole_corner if units == gpu.units else gpu.corner
        corner = gpu.step_corner if decode else corner
        cost = self._round(c, saturated / share, saturated, corner)
        return cost._replace(arithmetic=flops, bytes=moved + gpu.spill * flops)

    def attend(self, rows: Sequence[PromptRow], units: int, tiled: float | None = None) -> Cost:
        """Return the cost of attention of a prefill batch's chunks in one layer; `tiled`: see
        `_tiles`."""
        gpu, shapes = self._gpu, self._shapes
        pairs = hidden = seen = 0.0
        for row in rows:
            n = row.count
            # Tiles on the diagonal are whole.
            pairs += (n + gpu.attention_rows) * (row.start + 0.5 * n + 64)
            hidden += (n + gpu.attention_rows) * self._hidden_keys(row)
            seen += self.seen([row.start]) + n
        visible = 1.0 - hidden / pairs if hidden else 1.0
        pairs = visible * (pairs * self._idle(rows, units) if tiled is None else tiled)
        flops = 4.0 * shapes.q_size * pairs
        moved = seen * shapes.kv_bytes
        share = gpu.prompt_attention_share
        if self._spec.head_dim != FITTED_HEAD:
            share *= WIDE_PROMPTS if self._spec.head_dim > FITTED_HEAD else NARROW_PROMPTS
        c = flops / (units * gpu.unit_flops * share)
        saturated = moved / gpu.bandwidth
        m = moved / min(units * gpu.unit_bandwidth, gpu.bandwidth)
        cost = self._round(c, m, saturated, gpu.corner)
        # Power of a FLOP of attention relative to one of a matrix product: on all SMs the clock
        # falls less.
        return cost._replace(arithmetic=0.6 * flops, bytes=moved)

    def seen(self, contexts: Sequence[int]) -> float:
        """Return the tokens of these contexts that windows show to a next one in a mean layer."""
        return sum(contexts) - sum(
            share * sum([max(0, context - window) for context in contexts])
            for window, share in self._windows
        )

    def _hidden_keys(self, row: PromptRow) -> float:
        """Return the keys that windows hide from a mean token of a chunk in a mean layer."""
        keys, n = 0.0, row.count
        for window, share in self._windows:
            last = max(0, row.start + n - window)
            partly = min(n, last)
            keys += share * partly / n * (last - 0.5 * partly)
        return keys

    def _idle(self, rows: Sequence[PromptRow], units: int) -> float:
        """Return the factor on the time of attention by wave quantisation (Bullet §2.2)."""
        tile = self._gpu.attention_tile
        if not tile:
            return 1.0
        count = self._spec.heads / self._tp * sum([-(-row.count // tile) for row in rows])
        return math.ceil(count / units) * units / count

    def tiles(self, rows: Sequence[PromptRow], units: int) -> tuple[float, bool] | None:
        """Return the pairs of rows and keys that all SMs could compute for a head until the busiest
        is done, in large tiles, as in a pass's graph, and whether some are split; None: there are
        small tiles, since large ones were nearly empty.

        `kernels/prefill_attention/schedule.py` deals tiles, and splits the longest if that is
        faster; `Replayed` of `kernels/prefill_attention/flashinfer_kernels.py` says what is nearly
        empty.
        """
        tile, heads = tile_tokens(self._spec.head_dim), self._spec.heads / self._tp
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
        # Tiles are split if that takes less than this fraction of the time of whole ones.
        split = mean + SPLIT_KEYS < 0.97 * busiest
        return (mean + SPLIT_KEYS if split else busiest) * tile * units / heads, split

    def read(self, seen: float, units: int) -> Cost:
        """Return the cost of a decode step's attention: layers read the KV of this many tokens of a
        mean layer (`seen`)."""
        gpu, shapes = self._gpu, self._shapes
        # Bytes/s that an SM reads of a KV cache in e4m3 over those of one in bfloat16: it converts
        # as fast as it can (docs/notes/kernels-h200.md).
        each = gpu.unit_bandwidth * (0.575 if self._storage.kv < ITEM else 1.0)
        each *= WIDE_READS if self._spec.head_dim > FITTED_HEAD else 1.0
        reach = min(units * each, gpu.bandwidth * gpu.decode_attention_share)
        return self._by_reach(seen * shapes.kv_bytes * shapes.layers, reach)

    def _stream(self, moved: float, units: int) -> Cost:
        """Return the cost of small kernels that read and write this many bytes."""
        reach = self._gpu.bandwidth * (1.0 - math.exp(-units / self._gpu.product_units))
        return self._by_reach(moved, reach)

    def _by_reach(self, moved: float, reach: float) -> Cost:
        """Return the cost of pure memory traffic; the part not bound by memory scales with the
        clock."""
        seconds = moved / reach
        streamed = moved / self._gpu.bandwidth
        return Cost(clocked=seconds - streamed, streamed=streamed, memory=seconds, bytes=moved)

    def _round(self, c: float, m: float, saturated: float, p: float) -> Cost:
        """Return the seconds of arithmetic c and memory m combined; m is `saturated` with all
        SMs."""
        seconds = (c**p + m**p) ** (1 / p)
        memory = seconds * m**p / (c**p + m**p) if m else 0.0
        streamed = memory * saturated / m if m else 0.0
        return Cost(clocked=seconds - streamed, streamed=streamed, memory=memory)

    def _all_reduce(self, tokens: int, units: int) -> float:
        """Return the cost of a ring all-reduce: each GPU sends and receives 2 (tp − 1) / tp of the
        bytes (DuetServe §4.1).

        Few bytes go with a flag beside each word, so that the link carries twice as many bytes, but
        nothing has to wait; many go without flags, after a longer start (NCCL's LL and Simple).
        NCCL changes from one to the other by the number of bytes, before the second is faster.
        """
        if self._tp == 1:
            return 0.0
        gpu, hops = self._gpu, 2 * (self._tp - 1)
        summed = tokens * self._shapes.hidden * ITEM
        moved = hops / self._tp * summed / gpu.link_bandwidth
        quick = gpu.link_seconds + hops * gpu.hop_seconds + 2 * moved
        bulk = gpu.bulk_seconds + moved
        seconds = bulk if summed > gpu.bulk_bytes else min(quick, bulk)
        return seconds * max(1.0, gpu.link_units / units)
