"""One decoder for all families: embed, then layer after layer, then head.

A forward pass is addressable layer by layer, so that a prefill can stop after any layer and go on
later. Queries and keys are rotated as complex numbers: at load, each head's dimension d and
d + head_dim / 2 become neighbours (`pair_rows`), which leaves every score as it was.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from twolane.model.attention import Batch, KVCache
from twolane.model.products import products_for
from twolane.model.rope import frequencies
from twolane.model.spec import ModelSpec


@dataclass(frozen=True)
class LayerWeights:
    """One layer; matrices are [out, in]. q, k, v are one matrix, and so are gate and up."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    """[q_size + 2 * kv_size, hidden]; the rows of q and k in the order of `pair_rows`."""
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None
    """[heads + kv_heads, head_dim], in the order of `pair_rows`."""
    o: torch.Tensor
    o_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


@dataclass(frozen=True)
class Weights:
    """A whole model; `head` is the embedding itself where the two are tied."""

    embedding: torch.Tensor
    """[vocab, hidden]"""
    layers: Sequence[LayerWeights]
    norm: torch.Tensor
    head: torch.Tensor
    """[vocab, hidden]"""


def pair_rows(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Order the rows of each head as 0, D/2, 1, D/2 + 1, ...; rows are [heads * head_dim, ...]."""
    heads = tensor.view(-1, 2, head_dim // 2, *tensor.shape[1:])
    return heads.transpose(1, 2).flatten(0, 2)


class Decoder:
    """The transformer. It keeps no state between calls, so that several threads can share it.

    Call it under `torch.inference_mode()`, which makes a decode step a few percent shorter.
    """

    def __init__(self, spec: ModelSpec, weights: Weights) -> None:
        self.spec = spec
        self.weights = weights
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self._products = products_for(weights.embedding)
        self._frequencies = frequencies(spec.rope, spec.head_dim).to(self.device)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, hidden] of token ids, int64 [T]."""
        return functional.embedding(tokens, self.weights.embedding)

    def layer(self, i: int, hidden: torch.Tensor, batch: Batch, kv: KVCache) -> torch.Tensor:
        """Run layer `i`: write the batch's keys and values, attend over the pages, then the MLP.

        Args:
            i: layer index.
            hidden: [T, hidden] from `embed` or the layer before; left as it is.
            batch: the T tokens, in the order of `hidden`.
            kv: the pool that the batch's pages belong to.

        Returns:
            [T, hidden]
        """
        spec, w = self.spec, self.weights.layers[i]
        x = self._products.linear(self._norm(hidden, w.input_norm), w.qkv, w.qkv_bias)
        heads = x.view(len(x), -1, spec.head_dim)
        self._rotate(heads[:, : spec.heads + spec.kv_heads], w, batch)
        q, new = heads[:, : spec.heads], heads[:, spec.heads :]
        pool = kv.layers[i]
        pool.index_copy_(0, batch.write_slots, new)
        attended = batch.attend(q, new, pool, spec.window(i))
        hidden = self._products.add_linear(hidden, attended, w.o, w.o_bias)
        return self._mlp(hidden, w)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits, float32 [R, vocab], of hidden states [R, hidden] after the last layer."""
        x = self._norm(hidden, self.weights.norm)
        return self._products.linear(x, self.weights.head).float()

    def _mlp(self, hidden: torch.Tensor, w: LayerWeights) -> torch.Tensor:
        x = self._products.linear(self._norm(hidden, w.post_norm), w.gate_up, w.gate_up_bias)
        gate, up = x.chunk(2, dim=1)
        return self._products.add_linear(
            hidden, functional.silu(gate).mul_(up), w.down, w.down_bias
        )

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, weight.shape, weight, self.spec.norm_eps)

    def _rotate(self, qk: torch.Tensor, w: LayerWeights, batch: Batch) -> None:
        """Normalise (Qwen3) and rotate, in place, `qk` [T, heads + kv_heads, head_dim]."""
        x = qk
        if w.qk_norm is not None:
            dims = (self.spec.head_dim,)
            x = functional.rms_norm(qk, dims, None, self.spec.norm_eps) * w.qk_norm
        turn = batch.rotation(self._frequencies, self.spec.rope.attention_factor)
        pairs = torch.view_as_complex(x.float().view(*x.shape[:2], -1, 2)).mul_(turn)
        if x is not qk or x.dtype != torch.float32:
            qk.copy_(torch.view_as_real(pairs).flatten(2))
