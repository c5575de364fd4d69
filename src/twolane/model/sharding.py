"""Parts of tensors by rank (Shoeybi et al. 2019, Megatron-LM, section 3).

Queries, keys, values, gate and up are cut by rows, the projections back to the hidden size by
columns, embedding and classifier by vocabulary. Experts are cut inside, as other MLPs are, so that
every rank has an equal part of whatever experts tokens go to. A KV head is on several ranks where
there are more ranks than KV heads.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from twolane.common.errors import FieldError
from twolane.model.spec import Heads, LayerKind, ModelSpec


class Cut(NamedTuple):
    """The part `start:stop` of one dimension."""

    dim: int
    start: int
    stop: int


def vocab_rows(vocab: int, ranks: int) -> int:
    """Return the rows of each rank's embedding and classifier; those without a token are zeros.

    Where the number of ranks does not divide the vocabulary, they are a multiple of 64.
    """
    return vocab // ranks if vocab % ranks == 0 else -(-vocab // (ranks * 64)) * 64


@dataclass(frozen=True)
class Shard:
    """A rank's part of a model.

    Raises:
        FieldError: this number of ranks cannot share the model.
    """

    spec: ModelSpec
    """The whole model."""
    rank: int
    size: int

    def __post_init__(self) -> None:
        spec, size = self.spec, self.size
        counts = [(at.heads, "attention heads") for at in spec.each]
        for i, at in enumerate(spec.each):
            if spec.has_dense(i):
                counts.append((at.intermediate_size, "MLP columns"))
        if spec.delta is not None:
            counts.append((spec.delta.key_heads, "key heads of linear attention"))
        if spec.convolution is not None:
            counts.append((spec.convolution.channels, "channels of a short convolution"))
        if spec.moe is not None:
            counts.append((spec.moe.intermediate_size, "columns of an expert"))
        for count, what in counts:
            if count % size:
                raise _refusal(f"{size} does not divide the model's {count} {what}")
        for count in {at.kv_heads for at in spec.each}:
            if count % size and size % count:
                raise _refusal(f"{size} ranks cannot share {count} KV heads evenly")

    @cached_property
    def local(self) -> ModelSpec:
        """The shape of what this rank computes; vocabulary and hidden size are the model's."""
        spec, moe, size = self.spec, self.spec.moe, self.size
        if moe is not None:
            moe = replace(moe, intermediate_size=moe.intermediate_size // size)
        delta = spec.delta
        if delta is not None:
            keys, values = delta.key_heads // size, delta.value_heads // size
            delta = replace(delta, key_heads=keys, value_heads=values)
        convolution = spec.convolution
        if convolution is not None:
            convolution = replace(convolution, channels=convolution.channels // self.size)
        return replace(
            spec,
            moe=moe,
            delta=delta,
            convolution=convolution,
            heads=spec.heads // size,
            kv_heads=max(1, spec.kv_heads // size),
            intermediate_size=spec.intermediate_size // size,
            kinds=tuple(_local(kind, size) for kind in spec.kinds),
        )

    @property
    def vocab(self) -> range:
        """Token ids whose embeddings and logits this rank has."""
        rows, most = self.vocab_rows, self.spec.vocab_size
        return range(min(self.rank * rows, most), min((self.rank + 1) * rows, most))

    @property
    def vocab_rows(self) -> int:
        """See the function."""
        return vocab_rows(self.spec.vocab_size, self.size)

    def cut(self, name: str) -> Cut | None:
        """Return the part of the tensor of this Hugging Face name; None: all of it."""
        layer = int(name.split(".")[2]) if name.startswith("model.layers.") else None
        spec, local = self.spec, self.local
        if layer is not None:
            spec, local = spec.at(layer), local.at(layer)
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            return Cut(0, self.vocab.start, self.vocab.stop)
        if name.endswith(".sinks"):
            return Cut(0, self.rank * local.heads, (self.rank + 1) * local.heads)
        kind = name.split(".")[-2]
        if kind in ("q_norm", "k_norm") and spec.qk_norm != "whole":
            return None
        if kind in ("k_proj", "v_proj", "k_norm"):
            first = self.rank * spec.kv_heads // self.size * spec.head_dim
            return Cut(0, first, first + local.kv_size)
        inner = local.intermediate_size
        if local.moe is not None and ".experts." in name:
            inner = local.moe.intermediate_size
        elif local.moe is not None and ".shared_expert" in name:
            inner = local.moe.intermediate_size * local.moe.shared
        parts = {
            "q_proj": (0, local.q_rows),
            "q_norm": (0, local.q_size),
            "g_proj": (0, local.gate_rows),
            "o_proj": (1, local.q_size),
            "out_proj": (1, _state_outputs(local)),
            **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), (0, inner)),
            **dict.fromkeys(("down_proj", "w2"), (1, inner)),
        }
        if kind not in parts:
            return None
        dim, width = parts[kind]
        if dim and name.endswith("bias"):
            return None
        return Cut(dim, self.rank * width, (self.rank + 1) * width)

    @property
    def norm_shares(self) -> tuple[float, float]:
        """Weights of a sum over this rank's queries, and of one over its keys, in the mean over all
        ranks' (`qk_norm` of "whole"): KV heads that several ranks have count once."""
        copies = max(1, self.size // self.spec.kv_heads)
        return 1.0 / self.spec.q_size, 1.0 / (copies * self.spec.kv_size)

    def left_out(self, name: str) -> bool:
        """Return whether another rank adds this tensor: rank 0 adds a bias to a sum, once."""
        return self.rank > 0 and name.endswith(("o_proj.bias", "down_proj.bias"))


def _state_outputs(spec: ModelSpec) -> int:
    """Return what a token's linear attention or short convolution gives to the projection back."""
    if spec.delta is not None:
        return spec.delta.value_size
    return 0 if spec.convolution is None else spec.convolution.channels


def _local(kind: LayerKind, size: int) -> LayerKind:
    """Return a rank's part of the layers of a kind."""
    heads, width = kind.heads, kind.intermediate_size
    if heads is not None:
        heads = Heads(heads.queries // size, max(1, heads.keys // size), heads.dim)
    return replace(kind, heads=heads, intermediate_size=width and width // size)


def _refusal(problem: str) -> FieldError:
    return FieldError("tensor_parallel_size", f"does not fit: {problem}")
