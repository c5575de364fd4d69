"""The decoder on an NVIDIA GPU: `GpuProducts` for the matrix products, own kernels for all between.

The residual stream is updated in place, by the products that end a block. Where several ranks share
the model, these products are partial: the lane's channel sums them, and the next norm adds the sum
to the residual stream, which is the same on all ranks. So it is where a family normalises what is
added. A forward pass is addressable layer by
layer, like `model/decoder.py`, whose weights and order of dimensions it has.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from twolane.kernels import fused
from twolane.kernels.activations import Activations, Quantised
from twolane.kernels.collectives import reduce_norm
from twolane.kernels.delta_rule.decode import LinearLayer
from twolane.kernels.delta_rule.prefill import CHUNK
from twolane.kernels.delta_rule.rule import DeltaRule
from twolane.kernels.experts.products import ExpertBuffers
from twolane.kernels.experts.routing import ActiveRows, Combination, Routing
from twolane.kernels.pool import E4M3, Pool, RoundedPool, WrittenPool
from twolane.kernels.products.dispatch import COLD_BYTES, Case, GpuProducts, Operation, input_of
from twolane.model.attention import Allocate
from twolane.model.decoder import LayerInputs, LayerWeights, SideExperts, Weights
from twolane.model.linear_attention import DeltaWeights
from twolane.model.matrix import Matrix
from twolane.model.mlp import ACTIVATIONS, MLP_ROWS, DenseMlp
from twolane.model.page_layout import PageLayout
from twolane.model.rope import query_scales, rotations
from twolane.model.sharding import Shard, vocab_rows
from twolane.model.spec import ModelSpec, MoeSpec
from twolane.parallel.channel import Channel, NullChannel
from twolane.parallel.two_shot import Mapped, TwoShot


class GpuStatePool:
    """The states of all layers of linear attention, one of each for every slot.

    The pool starts uninitialised: a sequence's first token begins with zeros.

    Args:
        spec: Shape of this rank's part of the model.
        slots: The most requests at a time.
        dtype: Type of activations.
        device: where.
    """

    def __init__(
        self, spec: ModelSpec, slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        delta, convolution = spec.delta, spec.convolution
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        """The last inputs of a layer's convolution, [slots, taps - 1, mixed_size], and its states
        of the rule, float32 [slots, value_heads, key_dim, value_dim], by its index. Short
        convolutions have no rule."""
        inputs: tuple[int, ...] = (0,)
        state: tuple[int, ...] = (0,)
        if delta is not None:
            inputs = slots, delta.taps - 1, delta.mixed_size
            state = slots, delta.value_heads, delta.key_dim, delta.value_dim
        if convolution is not None:
            inputs = slots, convolution.taps - 1, convolution.channels
        for i in filter(spec.is_linear, range(spec.layers)):
            conv = torch.empty(inputs, dtype=dtype, device=device)
            self.layers[i] = conv, torch.empty(state, dtype=torch.float32, device=device)


class GpuKVCache:
    """Keys and values of all layers: `layers[i]` is [pages, kv_heads, 2, page_size, head_dim].
    Layers with the same place in pages have one pool (`model/page_layout.py`).

    K and V of one head's page are one run of memory, so that decode attention pulls them as one
    tile. The pool starts uninitialised; nothing reads a place before it was written. Layers that
    read those of another one have its pool. Layers of linear attention have no pages: `states` has
    theirs.

    Args:
        spec: Spec of the model.
        pages: Number of pages in each layer.
        page_size: tokens in a page.
        dtype: Type of the numbers; e4m3 has an exponent for each token and head.
        device: where.
        allocate: makes the pool's tensors there; None: PyTorch does.
        states: The states of layers of linear attention; None: there are none.
        layout: The layers' pages; None: all layers share one table.
    """

    def __init__(
        self,
        spec: ModelSpec,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        allocate: Allocate | None = None,
        states: GpuStatePool | None = None,
        layout: PageLayout | None = None,
    ) -> None:
        places = (layout or PageLayout.whole(spec)).places
        self.page_size, self.pages = page_size, pages
        self.states = states or GpuStatePool(spec, 0, dtype, device)

        def room(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        def layer(i: int, at: ModelSpec) -> Pool:
            make, count = allocate or room, 0 if spec.is_linear(i) else pages
            shape = (count, at.kv_heads, 2, page_size, at.head_dim)
            values = make(shape, dtype)
            return values if dtype != E4M3 else RoundedPool(values, make(shape[:-1], torch.int8))

        first = {place: i for i, place in reversed([*enumerate(places)])}
        own = {place: layer(i, spec.each[i]) for place, i in sorted(first.items())}
        self.layers: list[Pool] = [own[place] for place in places]

    def written(self, layer: int) -> WrittenPool:
        """Return the pools into which a layer's keys and values are written."""
        return self.layers[layer]

    @property
    def rounded(self) -> bool:
        """Whether numbers are in e4m3."""
        return any(isinstance(layer, RoundedPool) for layer in self.layers)

    def fill(self) -> None:
        """Fill the pool with random numbers (zeros are read faster), in e4m3 each page alike."""
        for layer in {id(layer): layer for layer in self.layers}.values():
            if isinstance(layer, RoundedPool):
                noise = torch.randn(layer.values.shape[1:], device=layer.values.device)
                layer.values.copy_((100 * noise).to(E4M3).expand_as(layer.values))
                layer.exponents.random_(-9, -5)
            else:
                layer.normal_()
        for inputs, rule in self.states.layers.values():
            inputs.normal_()
            rule.normal_()


class DeltaBuffers(NamedTuple):
    """Activations of layers of linear attention, a row for each token."""

    x: Tensor
    """Projected queries, keys, values and gates, [T, projected]."""
    rates: Tensor
    """Projected learning rates and decays, [T, 2 * value_heads]."""
    mixed: Tensor
    """Room for what the convolution makes of queries, keys and values, [T, mixed_size]."""
    inverse: Tensor
    """Room for the inverted systems of chunks, [T, value_heads * CHUNK]."""
    scores: Tensor
    """Room for their scores, [T, value_heads * CHUNK]."""
    sums: Tensor
    """Room for the sums of their decays, float32 [T, value_heads]."""
    out: Tensor
    """The output, [T, value_size]; short convolutions have `x` and `out` alone."""

    def part(self, first: int, last: int) -> "DeltaBuffers":
        """Return the rows `first:last`."""
        return DeltaBuffers(*(each[first:last] for each in self))


class PlanKey(NamedTuple):
    """What plans of prefill attention are made for."""

    table: int
    """The table whose pages the layers have."""
    window: int | None
    heads: int
    kv_heads: int
    dim: int
    dense: bool
    """Whether layers have keys and values of the new tokens outside the pool, too."""


class KVWriter(Protocol):
    """The tokens of one forward pass, whose keys and values are written."""

    @property
    def positions(self) -> Tensor:
        """Place of each token in its sequence, int [T]."""

    def write(self, qkv: Tensor, q: Tensor, layer: int, pool: WrittenPool) -> None:
        """Normalise and rotate queries and keys; keys and values go to the pool, queries to `q`.

        What attention wants of `qkv` may stay there.
        """


class Rows(KVWriter, Protocol):
    """The tokens of one forward pass, with their attention."""

    @property
    def active(self) -> ActiveRows:
        """Marks of the rows that are neither padding nor done."""

    def attend(self, q: Tensor, qkv: Tensor, pool: Pool, layer: int, out: Tensor) -> None:
        """Causal attention of every token over its own sequence, as the layer of this index has
        it; q and out [T, heads, head_dim]."""

    def attend_linearly(self, layer: int, buffers: DeltaBuffers, states: GpuStatePool) -> None:
        """Linear attention of every token, which moves the states of its sequence on."""


@dataclass(frozen=True)
class _Blind:
    """Rows that neither write nor see anything: products alone are left of a pass."""

    active: ActiveRows
    positions: Tensor

    def write(self, qkv: Tensor, q: Tensor, layer: int, pool: WrittenPool) -> None:
        """See `Rows.write`."""

    def attend(self, q: Tensor, qkv: Tensor, pool: Pool, layer: int, out: Tensor) -> None:
        """See `Rows.attend`."""

    def attend_linearly(self, layer: int, buffers: DeltaBuffers, states: GpuStatePool) -> None:
        """See `Rows.attend_linearly`."""
        buffers.out.zero_()


@dataclass(frozen=True, slots=True)
class PartialSum:
    """The output of a block that is summed over ranks, or normalised, before it is added."""

    partial: Tensor
    """[T, hidden]"""

    def add_into(self, residual: Tensor) -> None:
        """Add it to `residual` [T, hidden] in place."""
        residual.add_(self.partial)

    def add_and_norm(
        self, residual: Tensor, weight: Tensor, eps: float, out: fused.Out
    ) -> fused.Out:
        """`add_into`, then `out` [T, hidden] = the RMS norm of `residual`."""
        return fused.add_rms_norm(self.partial, residual, weight, eps, out)


@dataclass(frozen=True, slots=True)
class UnsummedPart:
    """This rank's part of a block's output, which one launch sums, adds and normalises."""

    partial: Tensor
    """[T, hidden]"""
    channel: TwoShot
    mapped: Mapped
    """The memory of `partial` that all ranks map."""

    def add_into(self, residual: Tensor) -> None:
        """Add it to `residual` [T, hidden] in place."""
        self._summed().add_into(residual)

    def add_and_norm(
        self, residual: Tensor, weight: Tensor, eps: float, out: fused.Out
    ) -> fused.Out:
        """`add_into`, then `out` [T, hidden] = the RMS norm of `residual`."""
        if isinstance(out, Tensor) and reduce_norm.served(self.partial, out):
            reduce_norm.reduce_norm(*self.mapped, residual, weight, eps, out)
            return out
        return self._summed().add_and_norm(residual, weight, eps, out)

    def _summed(self) -> PartialSum:
        self.channel.all_reduce(self.partial)
        return PartialSum(self.partial)


PendingResidual = PartialSum | UnsummedPart | Combination
"""A block's output that is not yet added to the residual stream."""


class Workspace:
    """The activations of one lane, made for up to this many tokens and grown when more come.

    Launches of a lane run in order, so one set of buffers serves them all; two lanes never share.

    Args:
        spec: the shape of this rank's part of the model.
        dtype: Type of the activations.
        device: The device of the activations.
        channel: Channel of the lane, if several ranks share the model.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        channel: Channel | None = None,
    ) -> None:
        self.channel = channel
        self._sizes = {
            "norm": spec.hidden_size,
            "qkv": max(at.qkv_rows for at in spec.each),
            "q": max(at.q_size for at in spec.each),
            "attended": max(at.q_size for at in spec.each),
            "norm_scales": 1,
            "q_scales": 1,
        }
        if spec.gate is not None:
            self._sizes["gates"] = max(at.gate_rows for at in spec.each)
        self._mlp_sizes = {
            "gate_up": max(2 * at.intermediate_size for at in spec.each),
            "act": max(at.intermediate_size for at in spec.each),
            "act_scales": 1,
        }
        if spec.moe is not None and spec.moe.beside_dense:
            self._sizes |= dict.fromkeys(("routed", "side"), spec.hidden_size)
        if spec.delta is not None:
            self._sizes |= _delta_sizes(spec.hidden_size, spec.delta)
        self._convolves = spec.convolution is not None
        if spec.convolution is not None:
            channels = spec.convolution.channels
            self._sizes |= {"conv_x": 3 * channels, "conv_out": channels}
            self._sizes |= {"conv_rounded": channels, "conv_rounded_scales": 1}
        if channel is not None or spec.norms_outputs:
            self._sizes["partial"] = spec.hidden_size
        self._buffers: dict[str, Tensor] = {}
        self._dtype, self._device = dtype, device
        self._vocab = spec.vocab_size
        self._logits = torch.empty(0, dtype=torch.float32, device=device)
        self._moe = spec.moe
        self._routing: Routing | None = None
        if spec.moe is not None:
            self._mlp_sizes |= _expert_sizes(spec.hidden_size, spec.moe)

    def narrow(self, name: str, rows: int, width: int) -> Tensor:
        """Return the memory of a buffer as [rows, width], for layers that need no more of it."""
        return self.get(name, rows).view(-1)[: rows * width].view(rows, width)

    def get(self, name: str, rows: int) -> Tensor:
        """Return a buffer [rows, its width]; the next caller overwrites its content."""
        width = self._sizes.get(name) or self._mlp_sizes[name]
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < rows:
            dtype = torch.float32 if name.endswith(("_scales", "_sums")) else self._dtype
            if name in ("partial", "side") and self.channel is not None:
                buffer = self.channel.buffer(rows, width, dtype, self._device)
            else:
                buffer = torch.empty((rows, width), dtype=dtype, device=self._device)
            self._buffers[name] = buffer
        return buffer[:rows]

    def input(self, name: str, rows: int, scheme: str, width: int | None = None) -> Activations:
        """Return a buffer for the input of a matrix of this scheme, [rows, its width], or
        narrower."""
        room = self.get(name, rows) if width is None else self.narrow(name, rows, width)
        return input_of(room, self.get(f"{name}_scales", rows), scheme)

    def experts(self, rows: int, scheme: str) -> ExpertBuffers:
        """Room for the experts of this many tokens, whose matrices have this scheme."""
        routing = self.routing(rows)

        def room(name: str) -> Tensor:
            return self.get(f"expert_{name}", rows).view(rows * routing.per_token, -1)

        return ExpertBuffers(
            routing,
            self.get("router", rows),
            input_of(room("x"), room("x_scales"), scheme),
            room("gate_up"),
            input_of(room("act"), room("act_scales"), scheme),
            room("outs"),
        )

    def delta(self, rows: int) -> DeltaBuffers:
        """Buffers for linear attention of this many tokens, or for short convolutions."""
        if self._convolves:
            x, out = self.get("conv_x", rows), self.get("conv_out", rows)
            return DeltaBuffers(x, x, x, x, x, x, out)
        return DeltaBuffers(*(self.get(f"delta_{name}", rows) for name in DeltaBuffers._fields))

    def routing(self, rows: int) -> Routing:
        """Buffers for the routing of this many tokens."""
        moe = self._moe
        assert moe is not None, "the model has no experts"
        if self._routing is None or len(self._routing.chosen) < rows:
            self._routing = Routing.of(moe.rule.stored, moe.rule.entries, rows, self._device)
        return self._routing.first(rows)

    def reserve(self, rows: int) -> None:
        """Make all buffers now, for passes of up to this many tokens."""
        if self._moe is not None:
            self.routing(min(rows, MLP_ROWS))
        for name in self._sizes:
            self.get(name, rows)
        for name in self._mlp_sizes:
            self.get(name, min(rows, MLP_ROWS))

    def reserve_logits(self, rows: int) -> None:
        """Make the buffer of `logit_parts` now, for up to this many rows."""
        if self.channel is not None and rows:
            self.logit_parts(rows)

    def logit_parts(self, rows: int) -> Tensor:
        """float32 [parts, rows, `vocab_rows`]: this rank's logits; on rank 0 then the
        others'."""
        assert self.channel is not None
        width = vocab_rows(self._vocab, self.channel.size)
        parts = self.channel.size if self.channel.rank == 0 else 1
        count = parts * rows * width
        if len(self._logits) < count:
            self._logits = self._logits.new_empty(count)
        return self._logits[:count].view(parts, rows, width)

    def fixed(self) -> "Workspace":
        """Return the present buffers, even if they grow later: graphs know their addresses."""
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
        routing = 0 if self._routing is None else self._routing.nbytes
        return (
            routing + sum(buffer.nbytes for buffer in self._buffers.values()) + self._logits.nbytes
        )


def _delta_sizes(hidden: int, delta: DeltaRule) -> dict[str, int]:
    """Return the widths of a token's buffers for linear attention."""
    solved = delta.value_heads * CHUNK
    return {
        "delta_norm": hidden,
        "delta_norm_scales": 1,
        "delta_x": delta.projected,
        "delta_rates": 2 * delta.value_heads,
        "delta_mixed": delta.mixed_size,
        "delta_inverse": solved,
        "delta_scores": solved,
        "delta_sums": delta.value_heads,
        "delta_out": delta.value_size,
        "delta_rounded": delta.value_size,
        "delta_rounded_scales": 1,
    }


def _expert_sizes(hidden: int, moe: MoeSpec) -> dict[str, int]:
    """Return the widths of a token's buffers for its experts."""
    entries = moe.rule.entries
    inner = entries * moe.intermediate_size
    return {
        "router": moe.rule.logits,
        "expert_x": entries * hidden,
        "expert_gate_up": 2 * inner,
        "expert_act": inner,
        "expert_outs": entries * hidden,
        "expert_x_scales": entries,
        "expert_act_scales": entries,
    }


class GpuDecoder:
    """The transformer on one GPU. It keeps no state between calls: buffers come from the caller.

    Args:
        spec: the whole model's.
        weights: this rank's part.
        rank: The rank of this process.
        ranks: number of ranks that share the model.
    """

    def __init__(self, spec: ModelSpec, weights: Weights, rank: int = 0, ranks: int = 1) -> None:
        self.shard = Shard(spec, rank, ranks)
        """This rank's part of the model."""
        self.spec = self.shard.local
        """The shape of that part; vocabulary and hidden size are the whole model's."""
        self.follows = rank > 0
        """Whether another rank has the logits, and samples."""
        self.weights = weights
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self._rotary = {
            key: fused.rotary_table(*turn, spec.max_positions)
            for key, turn in rotations(spec, self.device).items()
        }
        self.shapes = self.spec.each
        """The shapes of this rank's part of each layer."""
        self.layout = PageLayout.whole(spec)
        """Which pages the layers have; another one is set before anything is laid out."""

    def embed(self, tokens: Tensor, channel: Channel | None) -> Tensor:
        """Queue the embeddings [T, hidden] of token ids, int [T], the same on all ranks."""
        if channel is None:
            rows = functional.embedding(tokens, self.weights.embedding)
            return rows if self.spec.stream_scale == 1.0 else rows.mul_(self.spec.stream_scale)
        vocab = self.shard.vocab
        ours = (tokens >= vocab.start) & (tokens < vocab.stop)
        rows = functional.embedding((tokens - vocab.start) * ours, self.weights.embedding)
        channel.all_reduce(rows.mul_(ours[:, None] * self.spec.stream_scale))
        return rows

    def turning(self, layer: int) -> tuple[Tensor | None, float, Tensor]:
        """Return the rotation of a layer's queries and keys: norms of its heads, their epsilon, and
        cosines and sines, float32 [positions, head_dim / 2, 2]."""
        norm = self.weights.layers[layer].qk_norm if self.spec.qk_norm == "head" else None
        table = self._rotary[self.spec.rope_of(layer), self.shapes[layer].head_dim]
        return norm, self.spec.norm_eps, table

    def has_keys(self, layer: int) -> bool:
        """Return whether a layer has keys and values of its own."""
        return not self.spec.kind(layer).reads_earlier

    def plan_key(self, layer: int) -> PlanKey:
        """Return what layers with the same plans of prefill attention have in common."""
        at, window = self.shapes[layer], self.spec.window(layer)
        shape = at.heads, at.kv_heads, at.head_dim, self.has_keys(layer)
        return PlanKey(self.layout.tables[layer], window, *shape)

    def linear(self, layer: int, states: GpuStatePool) -> LinearLayer:
        """Return a layer of linear attention with the states of all slots."""
        delta, parameters = self.spec.delta, self.weights.layers[layer].delta
        assert delta is not None
        assert parameters is not None
        return LinearLayer(parameters, delta, *states.layers[layer], self.spec.norm_eps)

    def convolution(self, layer: int, states: GpuStatePool) -> tuple[Tensor, Tensor]:
        """Return the taps of a layer's short convolution, and what the slots keep for it."""
        taps = self.weights.layers[layer].taps
        assert taps is not None
        return taps, states.layers[layer][0]

    def layers(
        self,
        first: int,
        last: int,
        residual: Tensor,
        rows: Rows,
        kv: GpuKVCache,
        workspace: Workspace,
        products: GpuProducts,
        tokens: Tensor | None = None,
    ) -> None:
        """Run layers `first:last` on the current stream.

        Args:
            first: layer index.
            last: one past the last layer.
            residual: [T, hidden] from `embed` or the layer before; updated in place.
            rows: the T tokens.
            kv: the pool.
            workspace: Workspace of the lane.
            products: the matrix products for the lane's share of the SMs.
            tokens: The ids of the T tokens, for layers with inputs of their own.
        """
        pending: PendingResidual | None = None
        for i in range(first, last):
            self.before_attention(i, residual, rows, kv.written(i), workspace, products, pending)
            self.attention(i, len(residual), rows, kv, workspace)
            active = rows.active
            pending = self.after_attention(i, residual, active, workspace, products, tokens)
        if pending is not None:
            pending.add_into(residual)

    def attention(
        self, i: int, count: int, rows: Rows, kv: GpuKVCache, workspace: Workspace
    ) -> None:
        """Queue the attention of the first rows of layer i, as many as `rows` has.

        `count`: rows that `before_attention` has prepared.
        """
        if self.spec.is_linear(i):
            rows.attend_linearly(i, workspace.delta(count), kv.states)
            return
        q, qkv, out = self.attended(i, workspace, count)
        rows.attend(q, qkv, kv.layers[i], i, out)

    def attended(self, i: int, workspace: Workspace, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs of the attention of layer i, q and qkv, and its output: the same for
        all layers of its shape."""
        at = self.shapes[i]
        shape, rows = (count, at.heads, at.head_dim), self.weights.layers[i].qkv.shape[0]
        q, out = (workspace.narrow(name, count, at.q_size) for name in ("q", "attended"))
        return q.view(shape), workspace.narrow("qkv", count, rows), out.view(shape)

    def before_attention(
        self,
        i: int,
        residual: Tensor,
        rows: KVWriter,
        pool: WrittenPool,
        workspace: Workspace,
        products: GpuProducts,
        pending: PendingResidual | None = None,
    ) -> None:
        """Queue layer i up to its attention: `attended` has the inputs of that, the pool the keys
        and values.

        `pending`: The output of the layer before, which is not added yet.
        """
        w = self.weights.layers[i]
        if w.delta is not None:
            self._project(w, w.delta, residual, workspace, products, pending)
            return
        if w.taps is not None:
            x = self._read(residual, w.input_norm, w.qkv.scheme, workspace, pending)
            products.linear(x, w.qkv, None, workspace.get("conv_x", len(residual)))
            return
        q, qkv, _ = self.attended(i, workspace, len(residual))
        x = self._read(residual, w.input_norm, w.qkv.scheme, workspace, pending)
        products.linear(x, w.qkv, w.qkv_bias, qkv)
        if w.gate is not None:
            assert w.gate.scheme == w.qkv.scheme, "what both read is rounded alike"
            rows_of = self.shapes[i].gate_rows
            products.linear(x, w.gate, None, workspace.narrow("gates", len(residual), rows_of))
        if self.spec.qk_norm == "whole":
            self._norm_whole(qkv, w, workspace.channel)
        rows.write(qkv, q, i, pool)
        if (rope := self.spec.rope_of(i)).query_beta:
            q.mul_(query_scales(rope, rows.positions).to(q.dtype))

    def _project(
        self,
        w: LayerWeights,
        delta: DeltaWeights,
        residual: Tensor,
        workspace: Workspace,
        products: GpuProducts,
        pending: PendingResidual | None,
    ) -> None:
        """Queue the projections of a layer of linear attention; see `before_attention`."""
        count = len(residual)
        x = self._read(residual, w.input_norm, delta.rates.scheme, workspace, pending)
        assert isinstance(x, Tensor), "the scheme of the rates is plain"
        products.linear(x, delta.rates, None, workspace.get("delta_rates", count))
        room = workspace.input("delta_norm", count, w.qkv.scheme)
        rounded = fused.quantise(x, room) if isinstance(room, Quantised) else x
        products.linear(rounded, w.qkv, None, workspace.get("delta_x", count))

    def _read(
        self,
        residual: Tensor,
        weight: Tensor | None,
        scheme: str,
        workspace: Workspace,
        pending: PendingResidual | None,
    ) -> Activations:
        """Return a block's input from the residual stream, to which `pending` is added first."""
        norm, eps = workspace.input("norm", len(residual), scheme), self.spec.stream_eps
        if weight is None:
            if pending is not None:
                pending.add_into(residual)
            return fused.quantise(residual, norm) if isinstance(norm, Quantised) else residual
        if pending is not None:
            return pending.add_and_norm(residual, weight, eps, norm)
        return fused.rms_norm(residual, weight, eps, norm)

    def _norm_whole(self, qkv: Tensor, w: LayerWeights, channel: Channel | None) -> None:
        """Normalise, in place, all heads of the queries together, and all heads of the keys."""
        assert w.qk_norm is not None
        weight, first = w.qk_norm.flatten(), self.spec.q_size
        parts = slice(0, first), slice(first, len(weight))
        if channel is None:
            for part in parts:
                fused.rms_norm(qkv[:, part], weight[part], self.spec.norm_eps, qkv[:, part])
            return
        wide = [qkv[:, part].float() for part in parts]
        shares = zip(self.shard.norm_shares, wide, strict=True)
        means = torch.stack([share * part.square().sum(dim=1) for share, part in shares], dim=1)
        channel.all_reduce(means)
        factors = means.add_(self.spec.norm_eps).rsqrt_()
        for i, part in enumerate(parts):
            normal = wide[i].mul_(factors[:, i : i + 1]).to(qkv.dtype)
            qkv[:, part] = normal.mul_(weight[part])

    def after_attention(
        self,
        i: int,
        residual: Tensor,
        active: ActiveRows,
        workspace: Workspace,
        products: GpuProducts,
        tokens: Tensor | None = None,
    ) -> PendingResidual | None:
        """Layer i from its attention on; returns what is left to add to the residual stream. The
        ids of the `tokens` are for layers with inputs of their own."""
        w, count = self.weights.layers[i], len(residual)
        if w.delta is not None:
            attended = workspace.get("delta_out", count)
            room = workspace.input("delta_rounded", count, w.o.scheme)
        elif w.taps is not None:
            attended = workspace.get("conv_out", count)
            room = workspace.input("conv_rounded", count, w.o.scheme)
        else:
            size = self.shapes[i].q_size
            attended = workspace.narrow("attended", count, size)
            # The queries are not needed any more.
            room = workspace.input("q", count, w.o.scheme, size)
            if self.spec.gate is not None:
                self._open(attended, i, workspace)
            if self.spec.output_gate:
                gates = workspace.get("qkv", count)[:, -self.spec.q_size :]
                fused.gate(attended, gates)
        rounded = fused.quantise(attended, room) if isinstance(room, Quantised) else attended
        if not self._sums(workspace):
            assert w.mlp_norm is not None
            products.add_linear(rounded, w.o, w.o_bias, residual)
            norm = fused.Norm(w.mlp_norm, self.spec.stream_eps)
            return w.mlp.add_into(residual, norm, active, workspace, products)
        partial = workspace.get("partial", count)
        products.linear(rounded, w.o, w.o_bias, partial)
        pending = self._end_block(partial, w.attention_out_norm, workspace)
        x = self._read(residual, w.mlp_norm, w.mlp.scheme, workspace, pending)
        w.mlp.write_into(partial, x, active, workspace, products)
        if w.side is not None:
            self._add_side(w.side, residual, partial, active, workspace, products)
            assert w.mlp_out_norm is not None
            fused.rms_norm(partial, w.mlp_out_norm, self.spec.norm_eps, partial)
            pending = PartialSum(partial)
        else:
            pending = self._end_block(partial, w.mlp_out_norm, workspace)
        if w.scale is None and w.inputs is None:
            return pending
        pending.add_into(residual)
        if w.inputs is not None:
            assert tokens is not None, "layers have inputs of each token"
            self._add_inputs(i, w.inputs, residual, tokens, products)
        if w.scale is not None:
            residual.mul_(w.scale)
        return None

    def _add_inputs(
        self, i: int, w: LayerInputs, residual: Tensor, tokens: Tensor, products: GpuProducts
    ) -> None:
        """Add what layer i makes of its own inputs, which follow from the tokens alone: so nothing
        is kept of them between slices."""
        made_of, spec, width = self.weights.inputs, self.spec, self.spec.layer_inputs
        assert made_of is not None
        own = made_of.embedding[:, i * width : (i + 1) * width]
        projected, gate = (residual.new_empty((len(residual), width)) for _ in range(2))
        products.linear(self.embed(tokens, None), self._input_parts[i], None, projected)
        projected.mul_(spec.hidden_size**-0.5)
        fused.rms_norm(projected, made_of.norm, spec.norm_eps, projected)
        inputs = projected.add_(functional.embedding(tokens, own)).mul_(0.5**0.5)
        products.linear(residual, w.gate, None, gate)
        act, added = ACTIVATIONS[spec.activation](gate, inputs), torch.empty_like(residual)
        products.linear(act, w.projection, None, added)
        residual.add_(fused.rms_norm(added, w.norm, spec.norm_eps, added))

    @cached_property
    def _input_parts(self) -> Sequence[Matrix]:
        """What projects embeddings to the inputs of each layer, [layer_inputs, hidden]."""
        made_of, width = self.weights.inputs, self.spec.layer_inputs
        assert made_of is not None
        firsts = range(0, self.spec.layers * width, width)
        return [made_of.projection.part(first, first + width) for first in firsts]

    def _add_side(
        self,
        side: SideExperts,
        residual: Tensor,
        partial: Tensor,
        active: ActiveRows,
        workspace: Workspace,
        products: GpuProducts,
    ) -> None:
        """Complete and normalise the output of a dense MLP, `partial`, and add the normalised
        output of the experts beside it."""
        count, eps = len(residual), self.spec.stream_eps
        self._end_block(partial, side.mlp_out_norm, workspace)
        routed = fused.rms_norm(residual, side.router_norm, eps, workspace.get("routed", count))
        x = fused.rms_norm(residual, side.norm, eps, workspace.get("norm", count))
        out = workspace.get("side", count)
        side.experts.write_into(out, x, active, workspace, products, routed)
        self._end_block(out, side.out_norm, workspace)
        partial.add_(out)

    def _open(self, attended: Tensor, i: int, workspace: Workspace) -> None:
        """Multiply attention's output [T, q_size] of layer i with its gates, in place."""
        gate, at, count = self.spec.gate, self.shapes[i], len(attended)
        assert gate is not None
        gates = workspace.narrow("gates", count, at.gate_rows)
        if not gate.softplus and not gate.each_head:
            fused.gate(attended, gates)
            return
        opened = functional.softplus if gate.softplus else torch.sigmoid
        each = opened(gates.float()).to(attended.dtype).view(count, at.heads, -1)
        attended.view(count, at.heads, -1).mul_(each)

    def _sums(self, workspace: Workspace) -> bool:
        """Return whether blocks' outputs are incomplete when their products end: summed over ranks
        or normalised later."""
        return workspace.channel is not None or self.spec.norms_outputs

    def _end_block(
        self, partial: Tensor, weight: Tensor | None, workspace: Workspace
    ) -> PendingResidual:
        """Complete a block's output in place, or leave that to the kernel that adds it to the
        residual stream."""
        channel = workspace.channel
        if weight is None and isinstance(channel, TwoShot) and (mapped := channel.mapped(partial)):
            return UnsummedPart(partial, channel, mapped)
        if channel is not None:
            channel.all_reduce(partial)
        if weight is not None:
            fused.rms_norm(partial, weight, self.spec.out_eps, partial)
        return PartialSum(partial)

    @contextmanager
    def in_turn(self, channel: Channel | None) -> Iterator[None]:
        """Tune on rank 0 before the others do, which find on disk what it has chosen.

        Then all of them compute the same, which a router's choice of experts depends on.
        """
        ready = torch.zeros(1, dtype=torch.int32, device=self.device)
        if channel is not None and self.follows:
            channel.broadcast(ready)
            ready.item()  # waits
        yield
        if channel is not None and not self.follows:
            channel.broadcast(ready)

    def tune(self, products: GpuProducts, rows: int, *, adapted: bool = False) -> None:
        """Choose how steps of up to this many rows multiply, on torch's current stream.

        `adapted`: adapters are served, too.
        """
        head = self.weights.head
        products.tune(self._uses(), rows, lambda count: self._without_attention(products, count))
        products.tune({Case.of("logits", head): [head]}, rows)
        if adapted:
            products.tune(self._adapted_uses(), rows)

    def tune_passes(self, products: GpuProducts, *, adapted: bool = False) -> None:
        """Choose how prefill and hybrid passes multiply, on torch's current stream."""
        products.tune_passes(self._uses())
        if adapted:
            products.tune_passes(self._adapted_uses())

    def _adapted_uses(self) -> Mapping[Case, Sequence[Matrix]]:
        """Return the matrices that are multiplied in another way where rows have adapters, which
        add to gate and up before these are multiplied."""
        mlps = [layer.mlp for layer in self.weights.layers]
        matrices = [mlp.gate_up for mlp in mlps if isinstance(mlp, DenseMlp)]
        if not matrices:
            return {}
        case = Case.of("linear", matrices[0])
        return {} if case in self._uses() else {case: matrices}

    def _uses(self) -> Mapping[Case, Sequence[Matrix]]:
        """Return the matrices of all layers for each case, in the order of a layer's products."""
        uses: dict[Case, list[Matrix]] = {}
        for layer in self.weights.layers:
            for operation, matrix in self._operations(layer):
                uses.setdefault(Case.of(operation, matrix), []).append(matrix)
        return uses

    def _operations(self, layer: LayerWeights) -> Iterator[tuple[Operation, Matrix]]:
        """Yield the matrices of a layer with their operations, in order."""
        for operation, matrix in layer_matrices(layer):
            sums = self.shard.size > 1 or self.spec.norms_outputs
            partial = sums and operation == "add_linear"
            yield ("linear" if partial else operation), matrix

    def _without_attention(self, products: GpuProducts, count: int) -> Callable[[], None]:
        """Return a function that queues norms and products of the first layers, on random rows."""
        rank, ranks = self.shard.rank, self.shard.size
        alone = NullChannel(rank, ranks) if ranks > 1 else None  # each rank times its own
        workspace = Workspace(self.spec, self.dtype, self.device, alone)
        workspace.reserve(count)
        workspace.get("attended", count).normal_()
        residual = torch.randn_like(workspace.get("norm", count))
        each = sum(matrix.nbytes for _, matrix in layer_matrices(self.weights.layers[0]))
        # Layers that products are timed in, or more where these would stay in the cache.
        last = min(self.spec.layers, max(4, COLD_BYTES // each))
        return lambda: self.multiply(last, residual, workspace, products)

    def multiply(
        self, last: int, residual: Tensor, workspace: Workspace, products: GpuProducts
    ) -> None:
        """Run layers `:last` without attention on the current stream; see `layers`."""
        marks = torch.zeros(len(residual), dtype=torch.int32, device=self.device)
        rows = _Blind(ActiveRows(marks, 0), marks)
        self.layers(0, last, residual, rows, self._no_kv, workspace, products, marks)

    @cached_property
    def _no_kv(self) -> GpuKVCache:
        return GpuKVCache(self.spec, 0, 1, self.dtype, self.device)

    def last(self, hidden: Tensor, out: Tensor) -> Tensor:
        """Hidden states [R, hidden] after the last layer's norm, written to `out`."""
        fused.rms_norm(hidden, self.weights.norm, self.spec.stream_eps, out)
        return out

    def head(
        self, hidden: Tensor, logits: Tensor, workspace: Workspace, products: GpuProducts
    ) -> None:
        """Write the logits, float32 [R, vocab], of the last layer's hidden states [R, hidden].

        On ranks other than 0 nothing is written.
        """
        rows = len(hidden)
        norm = self.last(hidden, workspace.get("norm", rows))
        if (channel := workspace.channel) is None:
            products.logits(norm, self.weights.head, logits)
        else:
            parts = workspace.logit_parts(rows)
            products.logits(norm, self.weights.head, parts[0])
            channel.gather(parts)
            if channel.rank == 0:
                fused.side_by_side(parts, logits)
        if (cap := self.spec.logit_cap) is not None and not self.follows:
            logits.div_(cap).tanh_().mul_(cap)


def layer_matrices(layer: LayerWeights) -> Iterator[tuple[Operation, Matrix]]:
    """Yield the matrices of a layer with their operations, in order."""
    yield "linear", layer.qkv
    if layer.delta is not None:
        yield "linear", layer.delta.rates
    if layer.gate is not None:
        yield "linear", layer.gate
    yield "add_linear", layer.o
    yield from layer.mlp.matrices()
    if layer.side is not None:
        yield from layer.side.experts.matrices()
    if layer.inputs is not None:
        yield "linear", layer.inputs.gate
        yield "linear", layer.inputs.projection
