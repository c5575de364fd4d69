"""The shape of a model, without its weights."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Literal

from twolane.common.errors import FieldError

Family = Literal[
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "phi3",
    "granite",
    "smollm3",
    "olmo2",
    "glm",
    "glm4",
]
RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn", "factors", "longrope"]

MAX_SHARE = 0.45
"""Largest share of tokens that one expert gets under a skew. A router of random numbers without a
bias cannot prefer an expert for half of the tokens or more."""

MAX_LAYERS, MAX_HEADS = 4096, 65536
"""Numbers of layers and of heads beyond these are a damaged file, not a model."""


class UnsupportedModel(ValueError):
    """The model asks for something that is not built; the message names it and what works."""

    @classmethod
    def because(cls, what: str, value: object, works: Iterable[str]) -> "UnsupportedModel":
        """Return the refusal of one value of `what`, with the list of those that work."""
        return cls(f"unsupported {what} {value!r}; these work: {', '.join(works)}")


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding: base frequency and how it is stretched.

    "linear" divides all frequencies by `factor`; "dynamic" raises the base of a model that serves
    more than `original_positions` to that of its longest sequence; "llama3" and "yarn" stretch the
    low frequencies (Llama 3.1; arXiv:2309.00071); "factors" divides each by its own number, as GGUF
    files store it; "longrope" does so by one of two lists (arXiv:2402.13753).
    """

    theta: float = 10_000.0
    type: RopeType = "default"
    factor: float = 1.0
    original_positions: int = 0
    """Positions the model was trained for before stretching (dynamic, llama3, yarn, longrope)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Whether yarn rounds the borders of its ramp to whole dimensions."""
    attention_factor: float = 1.0
    """Multiplies cosine and sine (yarn, longrope)."""
    divisors: tuple[float, ...] = ()
    """Divisors, one for each frequency (factors, longrope)."""
    short_divisors: tuple[float, ...] = ()
    """The numbers that hold instead for a model that serves no more than `original_positions`
    (longrope)."""
    rotated: int | None = None
    """The first dimensions of each head that are rotated; None: all of them."""
    interleaved: bool = False
    """Whether checkpoints have the dimensions that turn together as neighbours (GLM)."""
    query_beta: float = 0.0
    """Growth of queries with the logarithm of their position in units of `original_positions`
    (Ministral 3); 0: none."""


@dataclass(frozen=True)
class MoeSpec:
    """The experts of a mixture-of-experts model."""

    experts: int
    """Experts in each layer that has any."""
    per_token: int
    """Experts that each token goes to."""
    intermediate_size: int
    """Width of one expert."""
    normalised: bool = True
    """Whether the chosen experts' probabilities are divided by their sum."""
    dense_layers: tuple[int, ...] = ()
    """The layers that have a dense MLP instead."""
    skew: float = 0.0
    """Exponent of Zipf's law by which a token likes some experts better; 0: all of them alike."""

    def active(self, tokens: float) -> float:
        """Return the expected number of experts that some of these tokens go to.

        The sum of 1 - (1 - q) ** n over all experts, for n tokens of which each goes to an expert
        with probability q (see `shares`), whatever the others do.
        """
        return _active(self.experts, self.per_token, self.skew, tokens)

    @property
    def shares(self) -> tuple[float, ...]:
        """Probability that a token goes to each expert; together they are `per_token`.

        They follow Zipf's law, but none is above `MAX_SHARE`.
        """
        return _shares(self.experts, self.per_token, self.skew)


@cache
def _shares(experts: int, per_token: int, skew: float) -> tuple[float, ...]:
    even = per_token / experts
    if skew == 0.0 or even >= MAX_SHARE:
        return (even,) * experts
    weights = [(rank + 1) ** -skew for rank in range(experts)]
    capped = 0  # the experts that Zipf's law would give more than the most
    while weights[capped] * (left := per_token - MAX_SHARE * capped) > MAX_SHARE * (
        rest := sum(weights[capped:])
    ):
        capped += 1
    return (MAX_SHARE,) * capped + tuple(left * weight / rest for weight in weights[capped:])


@lru_cache(maxsize=4096)
def _active(experts: int, per_token: int, skew: float, tokens: float) -> float:
    if skew == 0.0:
        return float(experts * (1.0 - (1.0 - per_token / experts) ** tokens))
    shares = _shares(experts, per_token, skew)
    return float(sum(1.0 - (1.0 - share) ** tokens for share in shares))


@dataclass(frozen=True)
class ModelSpec:
    """The shape of a decoder-only transformer of one of the supported families."""

    family: Family
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    norm_eps: float = 1e-6
    rope: RopeSpec = RopeSpec()
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether queries and keys are normalised before rotation, each head apart (Qwen3)."""
    qk_norm_whole: bool = False
    """Whether `qk_norm` is over all heads of queries and all heads of keys instead (OLMo 2)."""
    pre_norms: bool = True
    """Whether attention and MLP read the residual stream through a norm."""
    post_norms: bool = False
    """Whether the outputs of attention and MLP are normalised before they are added (GLM-4)."""
    unrotated_layers: tuple[int, ...] = ()
    """The layers whose queries and keys are not rotated (SmolLM3)."""
    attention_scale: float | None = None
    """Factor of attention's scores; None: head_dim ** -0.5."""
    embedding_scale: float = 1.0
    """Factor of the embeddings (Granite)."""
    residual_scale: float = 1.0
    """Factor of what attention and MLP add to the residual stream (Granite)."""
    logit_scale: float = 1.0
    """Factor of the logits (Granite)."""
    sliding_window: int | None = None
    """A token of a sliding layer sees itself and this many - 1 tokens before it."""
    sliding_layers: tuple[int, ...] = ()
    """The layers that `sliding_window` holds for."""
    eos_token_ids: tuple[int, ...] = ()
    moe: MoeSpec | None = None
    """The experts, or None where every layer has a dense MLP."""

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "vocab_size", "kv_heads", "head_dim"):
            if (size := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be 1 or more, not {size}")
        if not 0.0 <= self.norm_eps < math.inf:
            raise ValueError(f"norm_eps must be 0 or more, not {self.norm_eps}")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads cannot share {self.kv_heads} key-value heads")
        if self.head_dim % 2:
            raise ValueError(f"rotary embedding needs an even head_dim, not {self.head_dim}")
        if (self.rope.rotated or 2) % 2 or (self.rope.rotated or 0) > self.head_dim:
            raise ValueError(f"heads of {self.head_dim} cannot have {self.rope.rotated} rotated")
        if self.moe is not None and not 0 < self.moe.per_token <= self.moe.experts:
            raise ValueError(
                f"a token cannot go to {self.moe.per_token} of {self.moe.experts} experts"
            )

        self._check_factors()

    def _check_factors(self) -> None:
        rope = self.rope
        if not 1.0 < rope.theta < math.inf:
            raise ValueError(f"rope theta must be above 1 and finite, not {rope.theta}")
        factors = (
            ("rope factor", rope.factor),
            ("rope attention_factor", rope.attention_factor),
            *(("rope divisors", each) for each in (*rope.divisors, *rope.short_divisors)),
            ("attention_scale", 1.0 if self.attention_scale is None else self.attention_scale),
            ("embedding_scale", self.embedding_scale),
            ("residual_scale", self.residual_scale),
            ("logit_scale", self.logit_scale),
        )
        for name, factor in factors:
            if not 0.0 < factor < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, not {factor}")

    def has_experts(self, layer: int) -> bool:
        """Return whether the MLP of a layer is a mixture of experts."""
        return self.moe is not None and layer not in self.moe.dense_layers

    @property
    def expert_layers(self) -> int:
        """Number of layers that have experts."""
        return sum(map(self.has_experts, range(self.layers)))

    @property
    def expert_share(self) -> float:
        """Share of the layers that have experts."""
        return self.expert_layers / self.layers

    def window(self, layer: int) -> int | None:
        """Return the sliding window of a layer in tokens, or None where all tokens are seen."""
        return self.sliding_window if layer in self.sliding_layers else None

    @property
    def stream_scale(self) -> float:
        """Factor of the embeddings in the residual stream that decoders keep.

        They keep it divided by `residual_scale`, so that what blocks add needs no factor, and norms
        with `stream_eps` make the same of it.
        """
        return self.embedding_scale / self.residual_scale

    @property
    def stream_eps(self) -> float:
        """The epsilon of norms of that stream."""
        return self.norm_eps / self.residual_scale**2

    @property
    def q_size(self) -> int:
        """Elements of one token's queries."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of one token's keys (or values) in one layer."""
        return self.kv_heads * self.head_dim

    @property
    def layer_parameters(self) -> int:
        """Weights in one layer with a dense MLP."""
        qkv = self.q_size + 2 * self.kv_size
        attention = (qkv + self.q_size) * self.hidden_size
        mlp = 3 * self.hidden_size * self.intermediate_size
        heads = self.q_size + self.kv_size if self.qk_norm_whole else 2 * self.head_dim
        blocks = 2 * (self.pre_norms + self.post_norms)
        norms = blocks * self.hidden_size + (heads if self.qk_norm else 0)
        biases = (
            (qkv if self.qkv_bias else 0)
            + (self.hidden_size if self.o_bias else 0)
            + (2 * self.intermediate_size + self.hidden_size if self.mlp_bias else 0)
        )
        return attention + mlp + norms + biases

    @property
    def parameters(self) -> int:
        """Weights in the whole model; tied embeddings count once."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        dense = embeddings + self.layers * self.layer_parameters + self.hidden_size
        if self.moe is None:
            return dense
        experts = self.moe.experts * (3 * self.moe.intermediate_size + 1)  # and the router's row
        more = self.hidden_size * (experts - 3 * self.intermediate_size)
        return dense + more * self.expert_layers

    def kv_bytes_per_token(self, itemsize: float) -> int:
        """Return the bytes of a token's keys and values, at `itemsize` bytes an element."""
        return round(2 * self.layers * self.kv_size * itemsize)

    def kv_itemsize(self, cache: str, itemsize: int) -> float:
        """Return bytes of an element of the KV cache.

        Args:
            cache: "fp8", which has a byte for each token and head beside, or "auto", which is as
                wide as activations.
            itemsize: bytes of an element of activations.
        """
        return 1 + 1 / self.head_dim if cache == "fp8" else itemsize


def skewed(spec: ModelSpec, skew: float) -> ModelSpec:
    """Return the spec of dummy weights whose routers like some experts better.

    Raises:
        FieldError: there are no experts.
    """
    if not skew:
        return spec
    if spec.moe is None:
        raise FieldError("router_skew", "is for models with experts")
    return replace(spec, moe=replace(spec.moe, skew=skew))


def merge_eos(vocab_size: int, *ids: int | Iterable[int] | None) -> tuple[int, ...]:
    """Return all end tokens that any source names, each once, in order.

    Those outside the vocabulary (-1 for none, tokens that were never added) are left out: they
    cannot be chosen, and there is no logit to ban before `min_tokens`.
    """
    flat = [i for group in ids for i in ([group] if isinstance(group, int) else group or ())]
    return tuple(i for i in dict.fromkeys(flat) if 0 <= i < vocab_size)
