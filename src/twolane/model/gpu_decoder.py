"""The decoder on an NVIDIA GPU: `Products` for the matrix products, own kernels for all between.

The residual stream is updated in place, by the products that end a block. A forward pass is
addressable layer by layer, like `model/decoder.py`, whose weights and order of dimensions it has.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from twolane.kernels import fused
from twolane.kernels.activations import Activations, Quantised
from twolane.kernels.products.dispatch import COLD_BYTES, Case, Operation, Products, input_of
from twolane.model.decoder import LayerWeights, Weights
from twolane.model.matrix import Matrix
from twolane.model.mlp import MLP_ROWS
from twolane.model.rope import frequencies
from twolane.model.spec import ModelSpec

TUNED_LAYERS = 4
"""Layers that products are timed in, or more where these would stay in the cache."""


class GpuKVCache:
    """Keys and values of all layers: `layers[i]` is [pages, kv_heads, 2, page_size, head_dim].

    K and V of one head's page are one run of memory, so that decode attention pulls them as one
    tile. The pool starts uninitialised; nothing reads a place before it was written.
    """

    def __init__(
        self, spec: ModelSpec, pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.page_size = page_size
        shape = (pages, spec.kv_heads, 2, page_size, spec.head_dim)
        self.layers = [torch.empty(shape, dtype=dtype, device=device) for _ in range(spec.layers)]


class Writes(Protocol):
    """The tokens of one forward pass: where their keys go."""

    def write(self, qkv: Tensor, q: Tensor, weights: LayerWeights, pool: Tensor) -> None:
        """Normalise and rotate queries and keys; keys and values go to the pool, queries to `q`.

        What attention wants of `qkv` may stay there.
        """
        ...


class Rows(Writes, Protocol):
    """And what they see."""

    def attend(self, q: Tensor, qkv: Tensor, pool: Tensor, window: int | None, out: Tensor) -> None:
        """Causal attention of every token over its own sequence; q and out [T, heads, head_dim]."""
        ...


class _Blind:
    """Rows that neither write nor see anything: products alone are left of a pass."""

    def write(self, qkv: Tensor, q: Tensor, weights: LayerWeights, pool: Tensor) -> None:
        """See `Rows.write`."""

    def attend(self, q: Tensor, qkv: Tensor, pool: Tensor, window: int | None, out: Tensor) -> None:
        """See `Rows.attend`."""


class Workspace:
    """The activations of one lane, made for up to this many tokens and grown when more come.

    Launches of a lane run in order, so one set of buffers serves them all; two lanes never share.
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        self._sizes = {
            "norm": spec.hidden_size,
            "qkv": spec.q_size + 2 * spec.kv_size,
            "q": spec.q_size,
            "attended": spec.q_size,
            "norm_scales": 1,
            "q_scales": 1,
        }
        self._mlp_sizes = {
            "gate_up": 2 * spec.intermediate_size,
            "act": spec.intermediate_size,
            "act_scales": 1,
        }
        self._buffers: dict[str, Tensor] = {}
        self._dtype, self._device = dtype, device

    def get(self, name: str, rows: int) -> Tensor:
        """A buffer [rows, its width]; what it held is lost to the next who asks."""
        width = self._sizes.get(name) or self._mlp_sizes[name]
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < rows:
            dtype = torch.float32 if name.endswith("_scales") else self._dtype
            buffer = torch.empty((rows, width), dtype=dtype, device=self._device)
            self._buffers[name] = buffer
        return buffer[:rows]

    def input(self, name: str, rows: int, scheme: str) -> Activations:
        """A buffer for what a matrix of this scheme is multiplied with, [rows, its width]."""
        return input_of(self.get(name, rows), self.get(f"{name}_scales", rows), scheme)

    def reserve(self, rows: int) -> None:
        """Make all buffers now, for passes of up to this many tokens."""
        for name in self._sizes:
            self.get(name, rows)
        for name in self._mlp_sizes:
            self.get(name, min(rows, MLP_ROWS))

    def fixed(self) -> "Workspace":
        """The buffers of now, to whatever these are grown: for graphs, which know addresses."""
        same = copy.copy(self)
        same._buffers = dict(self._buffers)
        return same

    @property
    def rows(self) -> int:
        """Tokens of a pass that all buffers hold."""
        return min(map(len, (self._buffers[name] for name in self._sizes)))

    @property
    def bytes(self) -> int:
        """Bytes held."""
        return sum(buffer.nbytes for buffer in self._buffers.values())


class GpuDecoder:
    """The transformer on one GPU. It keeps no state between calls: buffers come from the caller."""

    def __init__(self, spec: ModelSpec, weights: Weights) -> None:
        self.spec = spec
        self.weights = weights
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self.rotary = fused.rotary_table(
            frequencies(spec.rope, spec.head_dim).to(self.device),
            spec.rope.attention_factor,
            spec.max_positions,
        )
        """Cosines and sines, float32 [positions, head_dim / 2, 2]."""

    def layers(
        self,
        first: int,
        last: int,
        residual: Tensor,
        rows: Rows,
        kv: GpuKVCache,
        workspace: Workspace,
        products: Products,
    ) -> None:
        """Run layers `first:last` on the current stream.

        Args:
            first: layer index.
            last: one past the last layer.
            residual: [T, hidden] from `embed` or the layer before; updated in place.
            rows: the T tokens.
            kv: the pool.
            workspace: of the lane.
            products: the matrix products for the lane's share of the SMs.
        """
        pool = kv.layers
        q, qkv, out = self.attended(workspace, len(residual))
        for i in range(first, last):
            self.before_attention(i, residual, rows, pool[i], workspace, products)
            rows.attend(q, qkv, pool[i], self.spec.window(i), out)
            self.after_attention(i, residual, workspace, products)

    def attended(self, workspace: Workspace, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """What attention reads, q and qkv, and what it writes: the same for every layer."""
        shape = (count, self.spec.heads, self.spec.head_dim)
        q, out = workspace.get("q", count), workspace.get("attended", count)
        return q.view(shape), workspace.get("qkv", count), out.view(shape)

    def before_attention(
        self,
        i: int,
        residual: Tensor,
        rows: Writes,
        pool: Tensor,
        workspace: Workspace,
        products: Products,
    ) -> None:
        """Layer i up to its attention: `attended` has what that reads, the pool what is kept."""
        w, count = self.weights.layers[i], len(residual)
        norm = workspace.input("norm", count, w.qkv.scheme)
        q, qkv, _ = self.attended(workspace, count)
        fused.rms_norm(residual, w.input_norm, self.spec.norm_eps, norm)
        products.linear(norm, w.qkv, w.qkv_bias, qkv)
        rows.write(qkv, q, w, pool)

    def after_attention(
        self, i: int, residual: Tensor, workspace: Workspace, products: Products
    ) -> None:
        """Layer i from its attention on."""
        w, count = self.weights.layers[i], len(residual)
        attended = workspace.get("attended", count)
        room = workspace.input("q", count, w.o.scheme)  # the queries are not needed any more
        rounded = fused.quantise(attended, room) if isinstance(room, Quantised) else attended
        products.add_linear(rounded, w.o, w.o_bias, residual)
        norm = workspace.input("norm", count, w.mlp.scheme)
        fused.rms_norm(residual, w.post_norm, self.spec.norm_eps, norm)
        w.mlp.add_into(residual, norm, workspace, products)

    def tune(self, products: Products, rows: int) -> None:
        """Choose how steps of up to this many rows multiply, on torch's current stream."""
        head = self.weights.head
        products.tune(self._uses(), rows, lambda count: self._without_attention(products, count))
        products.tune({Case.of("logits", head): [head]}, rows)

    def tune_passes(self, products: Products) -> None:
        """Choose how prefill and hybrid passes multiply, on torch's current stream."""
        products.tune_passes(self._uses())

    def _uses(self) -> Mapping[Case, Sequence[Matrix]]:
        """The matrices of all layers for each case, in the order of a layer's products."""
        uses: dict[Case, list[Matrix]] = {}
        for layer in self.weights.layers:
            for operation, matrix in layer_matrices(layer):
                uses.setdefault(Case.of(operation, matrix), []).append(matrix)
        return uses

    def _without_attention(self, products: Products, count: int) -> Callable[[], None]:
        """What queues norms and products of the first layers, for this many random rows."""
        workspace = Workspace(self.spec, self.dtype, self.device)
        workspace.reserve(count)
        workspace.get("attended", count).normal_()
        residual = torch.randn_like(workspace.get("norm", count))
        each = sum(matrix.nbytes for _, matrix in layer_matrices(self.weights.layers[0]))
        last = min(self.spec.layers, max(TUNED_LAYERS, COLD_BYTES // each))
        return lambda: self.multiply(last, residual, workspace, products)

    def multiply(
        self, last: int, residual: Tensor, workspace: Workspace, products: Products
    ) -> None:
        """Run layers `:last` without attention on the current stream; see `layers`."""
        self.layers(0, last, residual, _Blind(), self._no_kv, workspace, products)

    @cached_property
    def _no_kv(self) -> GpuKVCache:
        return GpuKVCache(self.spec, 0, 1, self.dtype, self.device)

    def head(
        self, hidden: Tensor, logits: Tensor, workspace: Workspace, products: Products
    ) -> None:
        """Write the logits, float32 [R, vocab], of the last layer's hidden states [R, hidden]."""
        norm = workspace.get("norm", len(hidden))
        fused.rms_norm(hidden, self.weights.norm, self.spec.norm_eps, norm)
        products.logits(norm, self.weights.head, logits)


def layer_matrices(layer: LayerWeights) -> Iterator[tuple[Operation, Matrix]]:
    """The matrices of a layer and what multiplies with them, in their order."""
    yield "linear", layer.qkv
    yield "add_linear", layer.o
    yield from layer.mlp.matrices()
