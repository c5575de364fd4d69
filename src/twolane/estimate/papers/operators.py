"""FLOPs and bytes of a forward pass's operators, which the rooflines are made of."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from twolane.estimate.query import Floats, Load
from twolane.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Operators:
    """Some operators of one layer (or of the whole pass), each with its FLOPs and bytes."""

    flops: tuple[float, ...]
    bytes: tuple[float, ...]

    def seconds(self, flop_rate: float, byte_rate: float) -> float:
        """Return the sum of each operator's roofline seconds, at this many FLOP/s and bytes/s."""
        total = 0.0
        for flops, moved in zip(self.flops, self.bytes, strict=True):
            compute, memory = flops / flop_rate, moved / byte_rate
            total += compute if compute > memory else memory
        return total

    def __add__(self, other: "Operators") -> "Operators":
        return Operators(self.flops + other.flops, self.bytes + other.bytes)


def _mean(values: Iterable[float]) -> float:
    """Return the mean of a number over the layers of a model."""
    each = list(values)
    return sum(each) / len(each)


class Shape:
    """A model's shape on one of this many GPUs, as the formulas need it: a layer of mean size.

    Args:
        spec: the model.
        itemsize: bytes of an element of activations and classifier.
        tensor_parallel: GPUs that share every layer.
        weight_itemsize: bytes of an element of the layers' matrices; None: `itemsize`.
        kv_itemsize: bytes of an element of the KV cache; None: `itemsize`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        itemsize: int,
        tensor_parallel: int = 1,
        weight_itemsize: float | None = None,
        kv_itemsize: float | None = None,
    ) -> None:
        self.spec, self.itemsize, self.tensor_parallel = spec, itemsize, tensor_parallel
        self._weight_itemsize = itemsize if weight_itemsize is None else weight_itemsize
        d, share, layers = spec.hidden_size, 1.0 / tensor_parallel, list(enumerate(spec.each))
        linear = spec.linear_share
        seen = (1 - linear) * _mean(at.q_size for _, at in layers)
        m = _mean(at.intermediate_size * spec.has_dense(i) for i, at in layers)
        inputs = d, seen * share, d, m * share
        # A KV head is on several ranks where there are more.
        kv = {i: at.head_dim * max(1.0, at.kv_heads * share) for i, at in layers}
        rows = seen * share * (spec.q_rows + spec.gate_rows) / spec.q_size
        qkv = rows + 2 * sum(kv[i] for i in spec.kv_layers) / spec.layers
        outputs = qkv, d, 2 * m * share, d
        products = [(i * o, i + o) for i, o in zip(inputs, outputs, strict=True)]
        self.state_bytes = 0.0
        """Bytes of a request's state that a layer reads and writes."""
        if (delta := spec.delta) is not None:
            wide = (delta.projected + 2 * delta.value_heads) * share
            sizes = (d, wide), (delta.value_size * share, d)
            products += [(linear * i * o, linear * (i + o)) for i, o in sizes]
            self.state_bytes = 2.0 * linear * delta.state_bytes(itemsize) * share
        self._products = tuple((float(weights), float(width)) for weights, width in products)
        """Weights of each linear operator, and the elements it reads and writes for a token."""
        inner = 0.0
        self._experts: tuple[tuple[float, float], ...] = ()
        """Operators of one expert, for each token that goes to it."""
        if spec.moe is not None:
            inner = spec.expert_share * spec.moe.intermediate_size * share
            self._experts = (d * 2 * inner, d + 2 * inner), (inner * d, inner + d)
            inner *= spec.moe.entries
        self._small = 4.0 * d, 4.0 * d, 3.0 * (m * share + inner)
        self._pair_flops = (4.0 * seen + 2.0 * (1 - linear) * spec.heads) * share
        self._query_bytes = 2.0 * seen * itemsize * share
        kv_itemsize = itemsize if kv_itemsize is None else kv_itemsize
        self._context_bytes = 2.0 * kv_itemsize * (1 - linear) * _mean(kv.values())
        weights, wide = (sum(parts) for parts in zip(*self._products, strict=True))
        self._weights, self._wide = float(weights), float(wide)

    def linears(self, tokens: int) -> Operators:
        """QKV, output, gate-up and down projections of one layer (DuetServe §4.1):
        F = 2·n·di·do, B = (n·di + di·do + n·do)·b.

        Those of experts compute n·k rows, and read the experts that are expected to be active.
        """
        dense = Operators(
            tuple([2.0 * tokens * weights for weights, _ in self._products]),
            tuple([self._moved(tokens, wide, weights) for weights, wide in self._products]),
        )
        if not self._experts:
            return dense
        rows, active = self._routed(tokens)
        return dense + Operators(
            tuple([2.0 * rows * weights for weights, _ in self._experts]),
            tuple([self._moved(rows, wide, active * weights) for weights, wide in self._experts]),
        )

    def _routed(self, tokens: int) -> tuple[int, float]:
        """Rows of all experts, and the experts that are active."""
        moe = self.spec.moe
        return (0, 0.0) if moe is None else (tokens * moe.entries, moe.active(tokens))

    def active(self, tokens: int) -> float:
        """Experts of a layer that this many tokens wake; 0 for a model without."""
        return self._routed(tokens)[1]

    def _moved(self, rows: float, wide: float, weights: float) -> float:
        """Return bytes of a product of this many rows."""
        return rows * wide * self.itemsize + weights * self._weight_itemsize

    def elementwise(self, tokens: int) -> Operators:
        """Norms with their residuals and the activation of one layer: what they move."""
        elements = [tokens * width for width in self._small]
        return Operators(
            tuple([2.0 * each for each in elements]), tuple([e * self.itemsize for e in elements])
        )

    def reduced_bytes(self, tokens: int) -> float:
        """Return bytes of one linear operator's output, which an all-reduce sums over the ranks."""
        return float(tokens * self.spec.hidden_size * self.itemsize)

    def classifier(self, rows: int) -> Operators:
        """Return the final projection onto the vocabulary, of rows that are sampled."""
        d, vocab = self.spec.hidden_size, self.spec.vocab_size / self.tensor_parallel
        moved = (rows * d + d * vocab + rows * vocab) * self.itemsize
        return Operators((2.0 * rows * d * vocab,), (moved,))

    def attention(self, load: Load, flop_rate: Floats, byte_rate: Floats) -> Floats:
        """Return the seconds in one layer, the roofline of each request summed, at each pair of
        rates (DuetServe §4.1), q new tokens over c cached ones: F = 4·hq·q·(q+c)·dh + 2·hq·q·(q+c),
        B = 2·hq·q·dh·b + 2·hkv·(q+c)·dh·b. Linear attention adds the bytes of the states."""
        q, c = np.array(load.n, dtype=float), np.array(load.r, dtype=float)
        seen = q + c
        flops = self._pair_flops * q * seen
        moved = self._query_bytes * q + self._context_bytes * seen + self.state_bytes
        each = np.maximum(flops / flop_rate[:, None], moved / byte_rate[:, None])
        return np.asarray(each.sum(axis=1))

    def together(self, load: Load) -> Operators:
        """Attention of all requests as one kernel: the sums of their F and B."""
        moved = self._query_bytes * load.new + self._context_bytes * (load.new + load.reused)
        moved += self.state_bytes * load.requests
        return Operators((self._pair_flops * (load.squares + load.products),), (moved,))

    def layer(self, rows: int, new: int, reused: int, pairs: int) -> tuple[float, float]:
        """Return bytes and FLOPs of one layer's products of `rows` rows and of the attention over
        `new` and `reused` tokens, with Σ n·(n + r) `pairs`."""
        tokens = new + reused
        moved = self._moved(rows, self._wide, self._weights) + self._context_bytes * tokens
        flops = 2.0 * rows * self._weights + self._pair_flops * pairs
        routed, active = self._routed(rows)
        for weights, wide in self._experts:
            moved += self._moved(routed, wide, active * weights)
            flops += 2.0 * routed * weights
        return moved + self._query_bytes * new, flops
