"""The shape of a model, without its weights."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Literal, NamedTuple

from twolane.common.errors import FieldError
from twolane.kernels.delta_rule.rule import DeltaRule
from twolane.kernels.experts.rule import RoutingRule

RopeType = Literal[
    "default", "linear", "dynamic", "llama3", "yarn", "factors", "longrope", "proportional", "none"
]
LayerNorm = Literal["input_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm"]
"""Places of norms in a layer, by the fields of `LayerWeights`: before and after each block."""
QkNorm = Literal["head", "whole"]
"""What queries and keys are normalised over before rotation: each head (Qwen3), or all heads of
queries and all heads of keys (OLMo 2)."""
Attention = Literal["softmax", "linear"]

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
"""Activations of MLPs that lanes compute."""
EXPERT_ACTIVATIONS = (*ACTIVATIONS, "clamped_swiglu")
"""Activations of models with experts; the last one is gpt-oss': gate * sigmoid(1.702 * gate) *
(up + 1), with the gate at most 7 and up from -7 to 7."""

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
    files store it; "longrope" does so by one of two lists (arXiv:2402.13753); "proportional" turns
    the first `share` of the pairs of whole heads (Gemma 4). "none" rotates nothing.
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
    share: float = 1.0
    """The share of pairs that turn (proportional)."""
    query_beta: float = 0.0
    """Growth of queries with the logarithm of their position in units of `original_positions`
    (Ministral 3); 0: none."""


UNROTATED = RopeSpec(type="none")
"""The rotation of layers without one (NoPE)."""


class Heads(NamedTuple):
    """The heads of a layer's attention."""

    queries: int
    keys: int
    """Heads of keys, and of values."""
    dim: int


@dataclass(frozen=True)
class LayerKind:
    """How layers of one kind attend, where this differs from the model's other layers."""

    attention: Attention = "softmax"
    window: int | None = None
    """A token sees itself and this many - 1 tokens before it; None: all tokens before it."""
    rope: RopeSpec | None = None
    """The rotation of queries and keys; None: that of the model."""
    heads: Heads | None = None
    """The heads; None: those of the model."""
    intermediate_size: int | None = None
    """The width of the dense MLP; None: that of the model."""
    reads_earlier: bool = False
    """Whether keys and values are those of the last layer before it that has its own and the same
    window."""
    keys_are_values: bool = False
    """Whether values are the keys before their norm and rotation (Gemma 4)."""


FULL = LayerKind()
"""The layers that attend to all tokens as the model says."""
LINEAR = LayerKind(attention="linear")
"""The layers that keep a state of constant size in the place of keys and values."""


@dataclass(frozen=True)
class GateModule:
    """Gates that a module of their own (`g_proj`) makes of what attention reads; attention's output
    is multiplied with them."""

    softplus: bool = False
    """Whether a gate is the softplus of its number, otherwise the sigmoid."""
    each_head: bool = False
    """Whether there is one gate for a head, otherwise one for each of its dimensions."""

    def rows(self, heads: int, head_dim: int) -> int:
        """Return the rows of the module for this many heads."""
        return heads if self.each_head else heads * head_dim


@dataclass(frozen=True)
class ShortConvolution:
    """The shape of layers with a short causal convolution between two gates (LFM2).

    Of the projected B, C and x, all as wide as the channels, such a layer makes C * conv(B * x).
    """

    channels: int
    """Channels of a rank; those of all ranks are the hidden size."""
    taps: int
    """Tokens that the convolution sees, the current one among them."""

    def __post_init__(self) -> None:
        if self.taps < 2:
            raise ValueError(f"short convolutions need 2 taps, not {self.taps}")

    def parameters(self, hidden_size: int) -> int:
        """Return the weights of one layer's convolution and its projections."""
        return 4 * self.channels * hidden_size + self.taps * self.channels

    def state_bytes(self, itemsize: float) -> int:
        """Return the bytes of one request's state in one layer: activations of `itemsize`."""
        return round(itemsize * self.channels * (self.taps - 1))


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
    sigmoid: bool = False
    """See `RoutingRule`, here and below."""
    biased: bool = False
    scale: float = 1.0
    shared: int = 0
    """Experts of the same width that all tokens go to; one that is wider counts as several."""
    gated: bool = False
    beside_dense: bool = False
    """Whether layers have a dense MLP beside their experts. Both read the residual stream by norms
    of their own, and so does the router; their outputs are normalised, then added (Gemma 4)."""
    biases: bool = False
    """Whether the router and the experts have biases."""

    @property
    def rule(self) -> RoutingRule:
        """How experts are chosen."""
        scores = self.normalised, self.sigmoid, self.biased, self.scale
        return RoutingRule(self.experts, self.per_token, *scores, self.shared, self.gated)

    @property
    def entries(self) -> int:
        """Experts of each token, shared ones included."""
        return self.per_token + self.shared

    def active(self, tokens: float) -> float:
        """Return the expected number of experts that some of these tokens go to, shared ones
        included.

        The sum of 1 - (1 - q) ** n over all experts, for n tokens of which each goes to an expert
        with probability q (see `shares`), whatever the others do.
        """
        return _active(self.experts, self.per_token, self.skew, tokens) + self.shared

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
    """The shape of a decoder-only transformer, and all that a decoder asks of its family."""

    family: str
    """Name of the family in `model.families`."""
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
    sinks: bool = False
    """Whether each head sees one more token, with a learnt score and the value 0."""
    mlp_bias: bool = False
    qk_norm: QkNorm | None = None
    """What queries and keys are normalised over; None: they are not."""
    norms_rotated: bool = False
    """Whether they are normalised after their rotation (Hunyuan); over each head only."""
    v_norm: bool = False
    """Whether each head of values is divided by its root mean square."""
    norms: tuple[LayerNorm, ...] = ("input_norm", "mlp_norm")
    """The norms of a layer."""
    activation: str = "silu"
    """The function of the MLP's gate."""
    kinds: tuple[LayerKind, ...] = ()
    """The kind of each layer; empty where all are `FULL`."""
    attention_scale: float | None = None
    """Factor of attention's scores; None: head_dim ** -0.5."""
    embedding_scale: float = 1.0
    """Factor of the embeddings (Granite)."""
    residual_scale: float = 1.0
    """Factor of what attention and MLP add to the residual stream (Granite)."""
    logit_scale: float = 1.0
    """Factor of the logits (Granite)."""
    logit_cap: float | None = None
    """Logits are cap * tanh(logits / cap), if there is a cap (Gemma 4)."""
    layer_scales: bool = False
    """Whether what each layer returns is multiplied by a number of the checkpoint."""
    layer_inputs: int = 0
    """Numbers that each layer is given of every token, beside the residual stream (Gemma 4's
    per-layer embeddings); 0: none."""
    eos_token_ids: tuple[int, ...] = ()
    moe: MoeSpec | None = None
    """The experts, or None where every layer has a dense MLP."""
    output_gate: bool = False
    """Whether attention's output is multiplied with the sigmoid of as many gates, whose rows the
    projection of the queries has, too."""
    gate: GateModule | None = None
    """The gates of attention's output that a module of their own makes; None: there are none."""
    out_norm_eps: float | None = None
    """The epsilon of norms of outputs; None: `norm_eps`."""
    norms_embeddings: bool = False
    """Whether each embedding is divided by its root mean square (Muse)."""
    bare_qk_norm: bool = False
    """Whether the norms of queries and keys have no weights (Muse)."""
    delta: DeltaRule | None = None
    """The shape of the layers of linear attention, or None where there are none."""
    convolution: ShortConvolution | None = None
    """The shape of the layers that have a short convolution in the place of attention, or None
    where there are none."""

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
        if len(self.kinds) not in (0, self.layers):
            raise ValueError(f"{len(self.kinds)} kinds of layers are given for {self.layers}")
        for layer in range(len(self.kinds)):
            self.kv_layer(layer)
        if self.moe is not None and not 0 < self.moe.per_token <= self.moe.experts:
            raise ValueError(
                f"a token cannot go to {self.moe.per_token} of {self.moe.experts} experts"
            )
        states = [state for state in (self.delta, self.convolution) if state is not None]
        if len(states) != min(self.linear_layers, 1):
            needed = "a delta rule or a short convolution"
            raise ValueError(f"layers of linear attention need {needed}, and the other way round")
        self._check_factors()

    def _check_factors(self) -> None:
        ropes = {self.rope, *(kind.rope for kind in self.kinds if kind.rope)}
        for rope in ropes:
            if not 1.0 < rope.theta < math.inf:
                raise ValueError(f"rope theta must be above 1 and finite, not {rope.theta}")
        factors = (
            *(("rope factor", rope.factor) for rope in ropes),
            *(("rope attention_factor", rope.attention_factor) for rope in ropes),
            *(("rope divisors", n) for r in ropes for n in (*r.divisors, *r.short_divisors)),
            ("attention_scale", 1.0 if self.attention_scale is None else self.attention_scale),
            ("embedding_scale", self.embedding_scale),
            ("residual_scale", self.residual_scale),
            ("logit_scale", self.logit_scale),
            ("logit_cap", 1.0 if self.logit_cap is None else self.logit_cap),
        )
        for name, factor in factors:
            if not 0.0 < factor < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, not {factor}")

    def has_experts(self, layer: int) -> bool:
        """Return whether the MLP of a layer is a mixture of experts."""
        return self.moe is not None and layer not in self.moe.dense_layers

    def has_dense(self, layer: int) -> bool:
        """Return whether a layer has a dense MLP."""
        return not self.has_experts(layer) or (self.moe is not None and self.moe.beside_dense)

    @property
    def expert_layers(self) -> int:
        """Number of layers that have experts."""
        return sum(map(self.has_experts, range(self.layers)))

    @property
    def expert_share(self) -> float:
        """Share of the layers that have experts."""
        return self.expert_layers / self.layers

    def kind(self, layer: int) -> LayerKind:
        """Return the kind of a layer."""
        return self.kinds[layer] if self.kinds else FULL

    @property
    def state(self) -> DeltaRule | ShortConvolution | None:
        """What layers with a state in the place of keys and values compute, if there are any."""
        return self.delta or self.convolution

    def is_linear(self, layer: int) -> bool:
        """Return whether a layer keeps a state in the place of keys and values."""
        return self.kind(layer).attention == "linear"

    @property
    def linear_layers(self) -> int:
        """Number of layers that keep a state."""
        return sum(kind.attention == "linear" for kind in self.kinds)

    def at(self, layer: int) -> "ModelSpec":
        """Return the spec of a model all of whose layers have the heads and MLP of this layer."""
        kind = self.kind(layer)
        if kind.heads is None and kind.intermediate_size is None:
            return self
        heads = kind.heads or Heads(self.heads, self.kv_heads, self.head_dim)
        return replace(
            self,
            heads=heads.queries,
            kv_heads=heads.keys,
            head_dim=heads.dim,
            intermediate_size=kind.intermediate_size or self.intermediate_size,
            kinds=(),
        )

    @property
    def each(self) -> Sequence["ModelSpec"]:
        """The specs of `at`, one for each layer."""
        specs = {kind: self.at(self.kinds.index(kind)) for kind in dict.fromkeys(self.kinds)}
        return [specs[kind] for kind in self.kinds] or [self] * self.layers

    @property
    def alike(self) -> bool:
        """Whether the matrices of attention and dense MLP have the same shapes in all layers."""
        own = {(k.heads, k.intermediate_size, k.reads_earlier) for k in self.kinds}
        return len(own) <= 1 and not any(kind.keys_are_values for kind in self.kinds)

    @property
    def kind_examples(self) -> Sequence[int]:
        """The first layer of each kind, with experts and without."""
        layers = range(self.layers)
        kinds = [(self.kind(i), self.has_dense(i), self.has_experts(i)) for i in layers]
        return [kinds.index(kind) for kind in dict.fromkeys(kinds)]

    def kv_layer(self, layer: int) -> int:
        """Return the layer whose keys and values a layer reads: itself, unless it `reads_earlier`.

        Raises:
            ValueError: no layer before it has its window, and keys and values of its own.
        """
        if not (kind := self.kind(layer)).reads_earlier:
            return layer
        for other in range(layer - 1, -1, -1):
            own = self.kind(other)
            if not own.reads_earlier and own.window == kind.window:
                return other
        raise ValueError(f"layer {layer} finds no keys and values in the layers before it")

    @property
    def kv_layers(self) -> Sequence[int]:
        """The layers that have keys and values of their own."""
        layers = range(self.layers)
        return [i for i in layers if not self.kind(i).reads_earlier and not self.is_linear(i)]

    @property
    def linear_share(self) -> float:
        """Share of the layers that keep a state."""
        return self.linear_layers / self.layers

    def window(self, layer: int) -> int | None:
        """Return the sliding window of a layer in tokens, or None where all tokens are seen."""
        return self.kind(layer).window

    def rope_of(self, layer: int) -> RopeSpec:
        """Return the rotation of a layer's queries and keys."""
        return self.kind(layer).rope or self.rope

    @property
    def windows(self) -> Sequence[tuple[int, float]]:
        """The sliding windows of layers, each with its share of a token's keys and values in all
        layers."""
        sizes = [0 if self.is_linear(i) else at.kv_size for i, at in enumerate(self.each)]
        shares = Counter[int]()
        for layer, size in enumerate(sizes):
            if (window := self.window(layer)) is not None:
                shares[window] += size
        return [(window, size / sum(sizes)) for window, size in shares.items()]

    @property
    def norms_outputs(self) -> bool:
        """Whether the outputs of attention or MLP are normalised before they are added."""
        return "attention_out_norm" in self.norms or "mlp_out_norm" in self.norms

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
    def out_eps(self) -> float:
        """The epsilon of norms of outputs."""
        return self.norm_eps if self.out_norm_eps is None else self.out_norm_eps

    @property
    def gate_rows(self) -> int:
        """Rows of the module of output gates."""
        return 0 if self.gate is None else self.gate.rows(self.heads, self.head_dim)

    @property
    def q_size(self) -> int:
        """Elements of one token's queries."""
        return self.heads * self.head_dim

    @property
    def q_rows(self) -> int:
        """Rows of the projection of the queries, which may have output gates beside them."""
        return self.q_size * (2 if self.output_gate else 1)

    @property
    def qkv_rows(self) -> int:
        """Rows of the projections of queries, keys, values and output gates together."""
        return self.q_rows + 2 * self.kv_size

    @property
    def kv_size(self) -> int:
        """Elements of one token's keys (or values) in one layer."""
        return self.kv_heads * self.head_dim

    def layer_parameters(self, layer: int) -> int:
        """Return the number of weights in a layer."""
        at, kind, hidden = self.at(layer), self.kind(layer), self.hidden_size
        stored = 0 if kind.reads_earlier else 1 if kind.keys_are_values else 2
        qkv = at.q_rows + stored * at.kv_size
        own = min(stored, 1)
        heads = {None: 0, "head": (1 + own) * at.head_dim, "whole": at.q_size + own * at.kv_size}
        norms = len(self.norms) * hidden + (0 if self.bare_qk_norm else heads[self.qk_norm])
        biases = (qkv if self.qkv_bias else 0) + (hidden if self.o_bias else 0)
        biases += at.heads if self.sinks else 0
        inputs = 2 * self.layer_inputs * hidden + hidden if self.layer_inputs else 0
        total = norms + biases + inputs + self.layer_scales
        if self.state is not None and self.is_linear(layer):
            total += self.state.parameters(hidden) - (heads["head"] if self.qk_norm else 0)
        else:
            total += (qkv + at.q_size + at.gate_rows) * hidden
        if self.has_dense(layer):
            width, more = at.intermediate_size, 2 * at.intermediate_size + hidden
            total += 3 * width * hidden + (more if self.mlp_bias else 0)
        return total + (self._expert_parameters if self.has_experts(layer) else 0)

    @property
    def _expert_parameters(self) -> int:
        """Weights of a layer's experts and their router."""
        assert self.moe is not None
        rule, hidden, inner = self.moe.rule, self.hidden_size, self.moe.intermediate_size
        weights = rule.stored * 3 * inner + rule.logits
        beside = 4 * hidden + rule.experts if self.moe.beside_dense else 0  # norms and scales
        if self.moe.biases:
            beside += rule.logits + rule.stored * (2 * inner + hidden)
        return hidden * weights + (rule.experts if rule.biased else 0) + beside

    @property
    def parameters(self) -> int:
        """Weights in the whole model; tied embeddings count once."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        width = self.layer_inputs
        inputs = width * self.layers * (self.vocab_size + self.hidden_size) + width
        layers = sum(map(self.layer_parameters, range(self.layers)))
        return embeddings + inputs + layers + self.hidden_size

    def kv_bytes_per_token(self, itemsize: float) -> int:
        """Return the bytes of a token's keys and values, at `itemsize` bytes an element."""
        each = self.each
        return round(2 * sum(each[i].kv_size for i in self.kv_layers) * itemsize)

    def state_bytes(self, itemsize: float) -> int:
        """Return the bytes of a request's states in all layers that keep one; see `DeltaRule`."""
        return 0 if self.state is None else self.linear_layers * self.state.state_bytes(itemsize)

    def kv_itemsize(self, cache: str, itemsize: int) -> float:
        """Return bytes of an element of the KV cache.

        Args:
            cache: "fp8", which has a byte for each token and head beside, or "auto", which is as
                wide as activations.
            itemsize: bytes of an element of activations.
        """
        if cache != "fp8":
            return itemsize
        own = [self.each[i] for i in self.kv_layers]
        return 1 + sum(at.kv_heads for at in own) / sum(at.kv_size for at in own)


def check_served(spec: ModelSpec) -> None:
    """Refuse a model that asks for something that lanes do not compute.

    Raises:
        UnsupportedModel: it does; the message says what.
    """
    works = ACTIVATIONS if spec.moe is None else EXPERT_ACTIVATIONS
    if spec.activation not in works:
        raise UnsupportedModel.because("activation", spec.activation, works)


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
