"""FLOPs and bytes of a forward pass's operators, which the rooflines are made of."""

from dataclasses import dataclass

import numpy as np

from twolane.estimate import Floats, Load
from twolane.model.spec import ModelSpec


@dataclass(frozen=True)
class Operators:
    """Some operators of one layer (or of the whole pass), each with its FLOPs and bytes."""

    flops: Floats
    bytes: Floats

    def seconds(self, flop_rate: Floats, byte_rate: Floats) -> Floats:
        """The roofline of each, summed, at so many FLOP/s and bytes/s (arrays of one length)."""
        compute = self.flops[:, None] / flop_rate
        return np.asarray(np.maximum(compute, self.bytes[:, None] / byte_rate).sum(axis=0))

    def __add__(self, other: "Operators") -> "Operators":
        return Operators(
            np.concatenate([self.flops, other.flops]), np.concatenate([self.bytes, other.bytes])
        )


class Shape:
    """A model's shape on one of so many GPUs, as the formulas need it.

    Args:
        spec: the model.
        itemsize: bytes of an element.
        tensor_parallel: GPUs that share every layer.
    """

    def __init__(self, spec: ModelSpec, itemsize: int, tensor_parallel: int = 1) -> None:
        self.spec, self.itemsize, self.tensor_parallel = spec, itemsize, tensor_parallel
        d, q, m = spec.hidden_size, spec.q_size, spec.intermediate_size
        share = 1.0 / tensor_parallel
        self._inputs = np.array([d, q * share, d, m * share])
        self._outputs = np.array([(q + 2 * spec.kv_size) * share, d, 2 * m * share, d])

    def linears(self, tokens: int) -> Operators:
        """QKV, output, gate-up and down projections of one layer (DuetServe §4.1):
        F = 2·n·di·do, B = (n·di + di·do + n·do)·b."""
        i, o = self._inputs, self._outputs
        return Operators(2.0 * tokens * i * o, (tokens * (i + o) + i * o) * self.itemsize)

    def elementwise(self, tokens: int) -> Operators:
        """Norms with their residuals and the activation of one layer: what they move."""
        d, m = self.spec.hidden_size, self.spec.intermediate_size / self.tensor_parallel
        moved = tokens * self.itemsize * np.array([4.0 * d, 4.0 * d, 3.0 * m])
        return Operators(2.0 * moved / self.itemsize, moved)

    def classifier(self, rows: int) -> Operators:
        """The final projection onto the vocabulary, of rows that are sampled."""
        d, vocab = self.spec.hidden_size, self.spec.vocab_size / self.tensor_parallel
        return Operators(
            np.array([2.0 * rows * d * vocab]),
            np.array([(rows * d + d * vocab + rows * vocab) * self.itemsize]),
        )

    def attention(self, load: Load) -> Operators:
        """Of each request in one layer (DuetServe §4.1), q new tokens over c cached ones:
        F = 4·hq·q·(q+c)·dh + 2·hq·q·(q+c), B = 2·hq·q·dh·b + 2·hkv·(q+c)·dh·b."""
        q, c = np.array(load.n, dtype=float), np.array(load.r, dtype=float)
        spec, share = self.spec, 1.0 / self.tensor_parallel
        pairs, heads, kv_heads = q * (q + c), spec.heads * share, spec.kv_heads * share
        flops = (4.0 * spec.head_dim + 2.0) * heads * pairs
        moved = 2.0 * spec.head_dim * self.itemsize * (heads * q + kv_heads * (q + c))
        return Operators(flops, moved)

    def together(self, load: Load) -> Operators:
        """Attention of all requests as one kernel."""
        each = self.attention(load)
        return Operators(each.flops.sum(keepdims=True), each.bytes.sum(keepdims=True))
