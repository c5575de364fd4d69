"""One decoder for all families: embed, then layer after layer, then head.

A forward pass is addressable layer by layer, so that a prefill can stop after any layer and go on
later. Queries and keys are rotated as complex numbers: at load, each head's dimensions that turn
together become neighbours (`rope.pair_rows`), which leaves every score as it was.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from twolane.kernels.cpu import tiles
from twolane.model import int8
from twolane.model.attention import Batch, KVCache
from twolane.model.linear_attention import DeltaWeights, attend, convolve
from twolane.model.matrix import Matrix
from twolane.model.mlp import ACTIVATIONS, DenseMlp, Experts, Mlp
from twolane.model.products import Products
from twolane.model.rope import query_scales, rotations
from twolane.model.sharding import Shard
from twolane.model.spec import ModelSpec
from twolane.parallel.group import Group, SingleRank


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """The weights of one layer; q, k and v are one matrix."""

    input_norm: Tensor | None
    """The norm of what attention reads, [hidden], or None."""
    qkv: Matrix
    """[qkv_rows, hidden]: the rows of q and k, in the order of `pair_rows`, of v, and of output
    gates; [q_rows, hidden] where the layer reads the keys and values of another one; in linear
    attention [projected, hidden]: those of q, k, v and gates; in a short
    convolution [3 * channels, hidden]: those of both gates and what is convolved."""
    qkv_bias: Tensor | None
    """[qkv_rows], in the order of the rows of `qkv`, or None."""
    qk_norm: Tensor | None
    """[heads + kv_heads, head_dim], in the order of `pair_rows`, or None; [heads, head_dim] where
    the layer has no keys of its own."""
    sinks: Tensor | None
    """Score of the token of value 0 that each head sees, float32 [heads], or None."""
    attention_out_norm: Tensor | None
    """The norm of what attention adds to the residual stream, [hidden], or None."""
    o: Matrix
    """[hidden, q_size], in linear attention [hidden, value_size], in a short convolution
    [hidden, channels]."""
    o_bias: Tensor | None
    """[hidden] or None."""
    mlp_norm: Tensor | None
    """The norm of what the MLP reads, [hidden], or None."""
    mlp: Mlp
    mlp_out_norm: Tensor | None
    """The norm of what the MLP adds to the residual stream, [hidden], or None."""
    delta: DeltaWeights | None = None
    """What linear attention has beside `qkv` and `o`; None: the layer has none."""
    taps: Tensor | None = None
    """The taps of a short convolution in the place of attention, [channels, taps], the latest last;
    None: the layer has none."""
    gate: Matrix | None = None
    """The output gates of attention, [gate_rows, hidden], or None; see `ModelSpec.gate`."""
    side: "SideExperts | None" = None
    """The experts of a layer that has a dense MLP, too."""
    inputs: "LayerInputs | None" = None
    """What adds the layer's own inputs of each token to the residual stream."""
    scale: Tensor | None = None
    """The factor of what the layer returns, [1], or None."""

    @property
    def matrices(self) -> Sequence[Matrix]:
        """The matrices that rows are multiplied with."""
        mlps = (self.mlp,) if self.side is None else (self.mlp, self.side.experts)
        own = [] if self.inputs is None else [self.inputs.gate, self.inputs.projection]
        own += [] if self.gate is None else [self.gate]
        return self.qkv, self.o, *(m for mlp in mlps for _, m in mlp.matrices()), *own


@dataclass(frozen=True, eq=False)
class SideExperts:
    """The experts beside a dense MLP, and the norms of both (see `MoeSpec.beside_dense`)."""

    experts: Experts
    norm: Tensor
    """The norm of what the experts read, [hidden]."""
    router_norm: Tensor
    """The norm of what the router reads, [hidden]."""
    out_norm: Tensor
    """The norm of the experts' output, [hidden]."""
    mlp_out_norm: Tensor
    """The norm of the dense MLP's output, [hidden]."""


@dataclass(frozen=True, eq=False)
class LayerInputs:
    """The module that adds a layer's own inputs to the residual stream: its gate multiplies them,
    and they are projected and normalised before they are added."""

    gate: Matrix
    """[layer_inputs, hidden]"""
    projection: Matrix
    """[hidden, layer_inputs]"""
    norm: Tensor
    """The norm of what is added, [hidden]."""


@dataclass(frozen=True, eq=False)
class TokenInputs:
    """The inputs of all layers that follow from a token and its embedding."""

    embedding: Tensor
    """[vocab, layers * layer_inputs], times the embeddings' factor."""
    projection: Matrix
    """[layers * layer_inputs, hidden]"""
    norm: Tensor
    """The norm of the projection's part for each layer, [layer_inputs]."""


@dataclass(frozen=True, eq=False)
class Weights:
    """The weights of a whole model."""

    embedding: Tensor
    """[vocab, hidden]; int8 where it has scales; the tiles of a classifier that is tied to it."""
    layers: Sequence[LayerWeights]
    norm: Tensor
    """The norm of what the head reads, [hidden], times `ModelSpec.logit_scale`."""
    head: Matrix
    """[vocab, hidden]; its values are the embedding itself where the two are tied, but for eight
    bits, of which products have a layout of their own."""
    inputs: TokenInputs | None = None
    """What makes the layers' own inputs, if they have any."""
    embedding_scales: Tensor | None = None
    """The factor of each row of the embedding, float32 [vocab], or None."""

    @property
    def matrix_itemsize(self) -> float:
        """Bytes of an element of the layers' matrices, scales included."""
        matrices = [matrix for layer in self.layers for matrix in layer.matrices]
        return sum(m.nbytes for m in matrices) / sum(math.prod(m.shape) for m in matrices)


@dataclass(frozen=True, eq=False)
class Predictor:
    """The module that predicts the token after the next one (MTP), of which drafts can be made.

    It is that of Qwen3-Next and Qwen3.5, as vLLM computes it: the embedding of the token that
    follows, and the model's normalised hidden state, are each normalised and together projected to
    one hidden state (`joined`). It goes through layers like the model's own with softmax attention,
    a norm, and the model's classifier: a decoder of `spec` and `weights`, with a KV cache of its
    own, runs them.
    """

    spec: ModelSpec
    """The shape of its layers, with the model's vocabulary."""
    weights: Weights
    """Its layers and norm, and the model's own embeddings and classifier."""
    joins: Tensor
    """What embedding and hidden state together are multiplied with, [hidden, 2 * hidden]."""
    embedding_norm: Tensor
    """The norm of embeddings, [hidden]."""
    hidden_norm: Tensor
    """The norm of hidden states, [hidden]."""

    def joined(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Return what its first layer reads, [T, hidden].

        Args:
            embedded: The embeddings of the tokens after these, [T, hidden].
            hidden: The model's hidden states of T tokens, as `Decoder.last` returns them.
        """
        size, eps = hidden.shape[1:], self.spec.norm_eps
        parts = (
            functional.rms_norm(embedded, size, self.embedding_norm, eps),
            functional.rms_norm(hidden, size, self.hidden_norm, eps),
        )
        return functional.linear(torch.cat(parts, dim=1), self.joins)


@dataclass(frozen=True, eq=False)
class Int8Layer:
    """A layer of attention and a dense MLP in eight bits as two scripted calls.

    A decode step of few rows spends more time between operations than in them. The operations are
    those of `Decoder.layer`, so the results are the same to the last bit.
    """

    index: int
    shape: ModelSpec
    """The shape of this layer."""
    window: int | None
    """Tokens that each token sees, or None for all."""
    norms: tuple[Tensor, Tensor]
    """The norms of what attention and the MLP read, [hidden]."""
    qkv: tuple[Tensor, Tensor]
    """Packed numbers and scales, like those that follow."""
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    """[heads + kv_heads, head_dim] or None."""
    sinks: Tensor | None
    o: tuple[Tensor, Tensor]
    gate_up: tuple[Tensor, Tensor]
    down: tuple[Tensor, Tensor]

    def run(self, hidden: Tensor, batch: Batch, kv: KVCache, turn: Tensor) -> Tensor:
        """Return what `Decoder.layer` does of `hidden` [T, hidden].

        Args:
            hidden: The residual stream; left as it is.
            batch: The T tokens.
            kv: The pool of the batch's pages.
            turn: The rotation of each token, as from `Batch.rotation`.
        """
        shape, eps = self.shape, self.shape.stream_eps
        rotated, zero = shape.heads + shape.kv_heads, int8.ZERO_POINT
        normed = self.qk_norm, shape.norm_eps
        heads = int8.project_layer(
            hidden, self.norms[0], eps, *self.qkv, self.qkv_bias, zero, *normed, turn, rotated
        )
        q, i, table = heads[:, : shape.heads], self.index, kv.layout.tables[self.index]
        new = kv.write(i, batch.write_slots[table], heads[:, shape.heads :])
        attended = batch.attend(q, new, kv.layers[i], self.window, self.sinks, table)
        return int8.finish_layer(
            hidden, attended, self.norms[1], eps, self.o, self.gate_up, self.down, zero
        )


class Decoder:
    """The transformer. It keeps no state between calls, so that several threads can share it.

    Call it under `torch.inference_mode()`, which makes a decode step a few percent shorter.

    Args:
        spec: the whole model's.
        weights: this rank's part.
        group: the ranks that share the model.
    """

    def __init__(self, spec: ModelSpec, weights: Weights, group: Group | None = None) -> None:
        self.group: Group = group or SingleRank()
        """The ranks that share the model."""
        self.shard = Shard(spec, self.group.rank, self.group.size)
        """This rank's part of the model."""
        self.spec = self.shard.local
        """The shape of this rank's part."""
        self.weights = weights
        self.dtype = weights.norm.dtype
        self.device = weights.embedding.device
        self.products = Products()
        """Computes the products of passes whose rows have no adapters."""
        self._rotations = rotations(spec, self.device)
        self._shapes = self.spec.each
        """The shapes of this rank's part of each layer."""
        alone, layers = self.group.size == 1, enumerate(weights.layers)
        self._int8 = [_int8_layer(self.spec, i, w) if alone else None for i, w in layers]
        """The layers that can be run in fewer calls, None in the place of others."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Hidden states [T, stream] of token ids, int64 [T]: the residual stream, and after it the
        layers' own inputs, if they have any."""
        scale = self.spec.stream_scale
        if self.group.size == 1:
            rows = self._embedding_rows(tokens)
            rows = rows if scale == 1.0 else rows * scale
        else:
            vocab = self.shard.vocab
            ours = (tokens >= vocab.start) & (tokens < vocab.stop)
            rows = functional.embedding((tokens - vocab.start) * ours, self.weights.embedding)
            rows = self.group.all_reduce(rows * ours[:, None] * scale)
        return rows if self.weights.inputs is None else self._with_inputs(tokens, rows)

    def _with_inputs(self, tokens: Tensor, stream: Tensor) -> Tensor:
        """Return the residual stream with the layers' inputs after it, [T, stream]: the mean, times
        the square root of two, of a token's own and of those that its embedding is projected to."""
        w, spec = self.weights.inputs, self.spec
        assert w is not None
        own = functional.embedding(tokens, w.embedding)
        projected = self.products.linear(stream, w.projection) * spec.hidden_size**-0.5
        parts = projected.view(len(tokens), -1, spec.layer_inputs)
        normal = self._normalised(parts, w.norm, spec.norm_eps).flatten(1)
        return torch.cat([stream, (normal + own) * 0.5**0.5], dim=1)

    def _embedding_rows(self, tokens: Tensor) -> Tensor:
        if self.weights.embedding.dim() == 3:
            return tiles.rows(self.weights.embedding, tokens)
        rows, scales = self.weights.embedding[tokens], self.weights.embedding_scales
        return rows if scales is None else rows * scales[tokens, None]

    def layer(
        self, i: int, hidden: Tensor, batch: Batch, kv: KVCache, products: Products | None = None
    ) -> Tensor:
        """Run layer `i`: attention, then the MLP.

        Attention writes the batch's keys and values and attends over the pages; linear attention
        moves the states of the batch's slots on.

        Args:
            i: layer index.
            hidden: [T, stream] from `embed` or the layer before; left as it is.
            batch: the T tokens, in the order of `hidden`.
            kv: the pool that the batch's pages belong to.
            products: the decoder's own, with what adapters add to them; None: without.

        Returns:
            [T, stream]
        """
        w, products = self.weights.layers[i], products or self.products
        if products is self.products and (fused := self._int8[i]) is not None:
            return fused.run(hidden, batch, kv, self.turn(i, batch))
        inputs = hidden[:, self.spec.hidden_size :]
        hidden = hidden[:, : self.spec.hidden_size]
        attend = self._attended if w.delta is None else self._attended_linearly
        attend = attend if w.taps is None else self._convolved
        attended = attend(i, self._read(hidden, w.input_norm), batch, kv, products)
        if self.group.size == 1 and not self.spec.norms_outputs:
            hidden = products.add_linear(hidden, attended, w.o, w.o_bias)
            hidden = w.mlp.add(hidden, self._read(hidden, w.mlp_norm), products)
        else:
            out = self.group.all_reduce(products.linear(attended, w.o, w.o_bias))
            hidden = hidden + self._normalised(out, w.attention_out_norm, self.spec.out_eps)
            hidden = hidden + self._mlp_output(w, hidden, products)
        if w.inputs is not None:
            own = inputs.view(len(inputs), self.spec.layers, -1)[:, i]
            hidden = hidden + self._of_inputs(w.inputs, hidden, own, products)
        hidden = hidden if w.scale is None else hidden * w.scale
        return torch.cat([hidden, inputs], dim=1) if inputs.shape[1] else hidden

    def _attended(self, i: int, x: Tensor, batch: Batch, kv: KVCache, products: Products) -> Tensor:
        """Return the softmax attention of the normalised rows `x` [T, hidden], [T, q_size]."""
        shape, w, own = self._shapes[i], self.weights.layers[i], not self.spec.kind(i).reads_earlier
        heads = products.linear(x, w.qkv, w.qkv_bias).view(len(x), -1, shape.head_dim)
        kv_heads, gated = shape.kv_heads if own else 0, shape.heads if shape.output_gate else 0
        self._rotate(heads[:, : shape.heads + kv_heads], i, batch)
        q, new, gates = torch.split(heads, [shape.heads, 2 * kv_heads, gated], dim=1)
        table = kv.layout.tables[i]
        if not own:
            new = kv.layers[i].index_select(0, batch.write_slots[table])
        else:
            if self.spec.v_norm:
                new[:, kv_heads:] = self._normalised_heads(new[:, kv_heads:])
            new = kv.write(i, batch.write_slots[table], new)
        attended = batch.attend(q, new, kv.layers[i], self.spec.window(i), w.sinks, table)
        if self.spec.gate is not None and w.gate is not None:
            opened = functional.softplus if self.spec.gate.softplus else torch.sigmoid
            gates_of = opened(products.linear(x, w.gate).float()).to(attended.dtype)
            each = gates_of.view(len(x), shape.heads, -1)
            return (attended.view(len(x), shape.heads, -1) * each).flatten(1)
        return attended * gates.flatten(1).sigmoid() if gated else attended

    def _mlp_output(self, w: LayerWeights, hidden: Tensor, products: Products) -> Tensor:
        """Return what the MLP adds to the residual stream [T, hidden], of all ranks."""
        eps, side, nothing = self.spec.out_eps, w.side, torch.zeros_like(hidden)
        x = self._read(hidden, w.mlp_norm)
        out = self.group.all_reduce(w.mlp.add(nothing, x, products))
        if side is not None:
            x, routed = self._read(hidden, side.norm), self._read(hidden, side.router_norm)
            experts = self.group.all_reduce(side.experts.add(nothing, x, products, routed))
            out = self._normalised(out, side.mlp_out_norm, eps)
            out = out + self._normalised(experts, side.out_norm, eps)
        return self._normalised(out, w.mlp_out_norm, eps)

    def _of_inputs(
        self, w: LayerInputs, hidden: Tensor, inputs: Tensor, products: Products
    ) -> Tensor:
        """Return what a layer's own inputs [T, layer_inputs] add to the residual stream."""
        gate = products.linear(hidden, w.gate)
        out = products.linear(ACTIVATIONS[self.spec.activation](gate, inputs), w.projection)
        return self._normalised(out, w.norm, self.spec.norm_eps)

    def _attended_linearly(
        self, i: int, x: Tensor, batch: Batch, kv: KVCache, products: Products
    ) -> Tensor:
        """Return the linear attention of the normalised rows `x` [T, hidden], [T, value_size]."""
        spec, w = self.spec, self.weights.layers[i]
        assert spec.delta is not None
        assert w.delta is not None
        projected, rates = products.linear(x, w.qkv), products.linear(x, w.delta.rates)
        rows = batch.state_rows
        return attend(projected, rates, w.delta, spec.delta, rows, kv.states, i, spec.norm_eps)

    def _convolved(
        self, i: int, x: Tensor, batch: Batch, kv: KVCache, products: Products
    ) -> Tensor:
        """Return the short convolution of the normalised rows `x` [T, hidden], [T, channels]."""
        w, rows = self.weights.layers[i], batch.state_rows
        assert w.taps is not None
        before, after, values = products.linear(x, w.qkv).chunk(3, dim=1)
        return after * convolve(before * values, w.taps, rows, kv.states.conv[i])

    def head(self, hidden: Tensor) -> Tensor:
        """Logits, float32 [R, vocab], of hidden states [R, stream] after the last layer.

        On a rank other than 0 those of its part of the vocabulary.
        """
        x = self.last(hidden)
        logits = self.group.gather_columns(self.products.linear(x, self.weights.head).float())
        logits, cap = logits[:, : self.spec.vocab_size], self.spec.logit_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def last(self, hidden: Tensor) -> Tensor:
        """Hidden states [R, hidden] after the last layer's norm, which the classifier reads."""
        return self._read(hidden[:, : self.spec.hidden_size], self.weights.norm)

    def _read(self, stream: Tensor, weight: Tensor | None) -> Tensor:
        """Return a block's input from the residual stream."""
        return self._normalised(stream, weight, self.spec.stream_eps)

    def _normalised(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        return x if weight is None else functional.rms_norm(x, weight.shape, weight, eps)

    def _normalised_heads(self, heads: Tensor) -> Tensor:
        """Return each head [T, heads, head_dim] over its root mean square."""
        return functional.rms_norm(heads, heads.shape[-1:], None, self.spec.norm_eps)

    def _normalised_whole(self, qk: Tensor) -> Tensor:
        """Return all heads' queries, then keys, of all ranks, over their root mean squares."""
        parts = qk[:, : self.spec.heads], qk[:, self.spec.heads :]
        means = torch.stack(
            [
                share * part.float().square().sum(dim=(1, 2))
                for share, part in zip(self.shard.norm_shares, parts, strict=True)
            ],
            dim=1,
        )
        factors = (self.group.all_reduce(means) + self.spec.norm_eps).rsqrt()[:, :, None, None]
        normal = [part.float() * factors[:, i] for i, part in enumerate(parts)]
        return torch.cat(normal, dim=1).to(qk.dtype)

    def _rotate(self, qk: Tensor, i: int, batch: Batch) -> None:
        """Normalise and rotate, in place, `qk` [T, heads + kv_heads, head_dim] of layer `i`."""
        spec, weight, x = self.spec, self.weights.layers[i].qk_norm, qk
        if weight is not None and spec.norms_rotated:
            x = self._normalised_heads(qk)  # a rotation leaves the root mean square as it is
        elif weight is not None:
            normal = self._normalised_whole if spec.qk_norm == "whole" else self._normalised_heads
            x = normal(qk) * weight
        rope, turn = spec.rope_of(i), self.turn(i, batch)
        pairs = torch.view_as_complex(x.float().view(*x.shape[:2], -1, 2)).mul_(turn)
        if x is not qk or x.dtype != torch.float32:
            qk.copy_(torch.view_as_real(pairs).flatten(2))
        if weight is not None and spec.norms_rotated:
            qk *= weight
        if rope.query_beta:
            qk[:, : self._shapes[i].heads] *= query_scales(rope, batch.positions).to(qk.dtype)

    def turn(self, i: int, batch: Batch) -> Tensor:
        """Return the rotation of each token in layer `i`, complex64 [T, 1, head_dim / 2]."""
        rope = self.spec.rope_of(i)
        return batch.rotation(self._rotations[rope, self._shapes[i].head_dim], rope)


def is_plain(spec: ModelSpec, i: int, w: LayerWeights) -> bool:
    """Return whether layer `i` is attention and a dense MLP without anything unusual."""
    mlp = w.mlp
    unusual = (w.delta, w.taps, w.gate, w.side, w.inputs, w.scale, w.o_bias)
    if not isinstance(mlp, DenseMlp) or any(part is not None for part in unusual):
        return False
    plain = not (spec.norms_outputs or spec.v_norm or spec.each[i].output_gate)
    plain &= not (spec.kind(i).reads_earlier or spec.rope_of(i).query_beta)
    plain &= w.qk_norm is None or (spec.qk_norm == "head" and not spec.norms_rotated)
    plain &= mlp.activation == "silu" and mlp.gate_up_bias is None and mlp.down_bias is None
    return plain and w.input_norm is not None and w.mlp_norm is not None


def _int8_layer(spec: ModelSpec, i: int, w: LayerWeights) -> Int8Layer | None:
    """Return layer `i` in the form of fewer calls, or None if they do not compute all of it."""
    shape, mlp = spec.each[i], w.mlp
    if not is_plain(spec, i, w) or w.input_norm is None or w.mlp_norm is None:
        return None
    assert isinstance(mlp, DenseMlp)
    qkv, o, gate_up, down = map(_packed, (w.qkv, w.o, mlp.gate_up, mlp.down))
    if qkv is None or o is None or gate_up is None or down is None:
        return None
    norms, bias = (w.input_norm, w.mlp_norm), w.qkv_bias
    return Int8Layer(
        i, shape, spec.window(i), norms, qkv, bias, w.qk_norm, w.sinks, o, gate_up, down
    )


def _packed(matrix: Matrix) -> tuple[Tensor, Tensor] | None:
    """Return the numbers and scales of a matrix of eight bits; None: it is another."""
    if matrix.scheme != "int8_channel" or matrix.scales is None:
        return None
    return matrix.values, matrix.scales
