"""What is known of a family of models: its configs, and the record that each file here fills in."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, get_args

import msgspec

from twolane.common.checked_json import converted
from twolane.model.families.rope import read_rope
from twolane.model.spec import (
    MAX_HEADS,
    MAX_LAYERS,
    UNROTATED,
    LayerKind,
    LayerNorm,
    ModelSpec,
    QkNorm,
    RopeSpec,
    RopeType,
    UnsupportedModel,
)

ROPE_TYPES: Mapping[str, RopeType] = {
    name: name for name in get_args(RopeType) if name not in ("factors", "none", "proportional")
}


class DualChunkConfig(msgspec.Struct):
    """Attention of Qwen2.5-1M, which is not built: positions are compared within chunks."""

    chunk_size: int = 8192
    local_size: int = 1024


class HFConfig(msgspec.Struct, kw_only=True):
    """The fields that are read of a `config.json`.

    Fields that are not there have the defaults of the family's class in `transformers`. That is not
    asked: its import takes longer than all else that starts an engine, PyTorch's included. Where a
    family computes something else from its fields, its class overrides a method.
    """

    rope_types: ClassVar[Mapping[str, RopeType]] = ROPE_TYPES
    """The types of `rope_parameters` that the family knows, and what they are."""

    known_layer_types: ClassVar[tuple[str, ...]] = ("full_attention", "sliding_attention")
    """The values of `layer_types` that the family may have."""

    ropes_by_type: ClassVar[bool] = False
    """Whether `rope_parameters` may have those of each of `layer_types`."""

    vocab_size: int = 32_000
    hidden_size: int = 4096
    intermediate_size: int = 11_008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    is_causal: bool | None = True
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_token_id: int | list[int] | None = 2
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    """The older name of `rope_parameters`, without theta."""
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    original_max_position_embeddings: int | None = None
    dual_chunk_attention_config: DualChunkConfig | None = None

    def check(self) -> None:
        """Compare numbers of parts before anything is made for each of them, and refuse options
        that are not built.

        Raises:
            UnsupportedModel: an option is not built.
            ValueError: a number is not that of a model.
        """
        layers, heads = self.num_hidden_layers, self.num_attention_heads
        if not 1 <= layers <= MAX_LAYERS:
            raise ValueError(f"num_hidden_layers must be 1 to {MAX_LAYERS}, not {layers}")
        if not 1 <= heads <= MAX_HEADS:
            raise ValueError(f"num_attention_heads must be 1 to {MAX_HEADS}, not {heads}")
        self.check_above_0("max_position_embeddings")
        if other := {*(self.layer_types or ())} - {*self.known_layer_types}:
            raise UnsupportedModel.because("layer_types", min(other), self.known_layer_types)
        if self.is_causal is False:  # each token would be attended to by those before it, too
            raise UnsupportedModel.because("is_causal", self.is_causal, ("True",))

    def check_above_0(self, name: str) -> None:
        """Check a field of whole numbers.

        Raises:
            ValueError: it is below 1.
        """
        if (value := getattr(self, name)) < 1:
            raise ValueError(f"config.json: {name} must be 1 or more, not {value}")

    def head_size(self) -> int:
        """Return the numbers of one attention head.

        Raises:
            ValueError: the config does not say it, and the hidden state has no equal parts.
        """
        if self.head_dim:
            return self.head_dim
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"config.json: hidden_size {self.hidden_size} is no multiple of "
                f"num_attention_heads {self.num_attention_heads}, and there is no head_dim"
            )
        return self.hidden_size // self.num_attention_heads

    def own_fields(self) -> dict[str, Any]:
        """Return the fields of `ModelSpec` that the family has, or reads in its own way.

        Raises:
            ValueError: the config lacks one, or one that is divided by is 0.
        """
        return {}

    def unrotated_layers(self) -> Iterable[int]:
        """Return the layers whose queries and keys are not rotated.

        Raises:
            ValueError: the config does not say it for each layer.
        """
        return ()

    def sliding_layers(self) -> Iterable[int]:
        """Return the layers that have a sliding window, if the config has one at all."""
        return ()

    def kinds(self) -> tuple[LayerKind, ...]:
        """Return the kind of each layer; none where all are alike and see all tokens.

        A window of 0 is none, as in vLLM and llama.cpp.

        Raises:
            ValueError: the window is negative, or a list has not one value for each layer.
        """
        sliding = {*self.sliding_layers()} if self.sliding_window else set()
        unrotated = {*self.unrotated_layers()}
        if not sliding and not unrotated:
            return ()
        if sliding and (window := self.sliding_window or 0) < 0:
            raise ValueError(f"config.json: sliding_window must be 1 or more, not {window}")
        return tuple(
            LayerKind(
                window=self.sliding_window if i in sliding else None,
                rope=UNROTATED if i in unrotated else None,
            )
            for i in range(self.num_hidden_layers)
        )

    def typed_layers(
        self, otherwise: Iterable[int], kind: str = "sliding_attention"
    ) -> Iterable[int]:
        """Return the layers of one of `layer_types`, or `otherwise` without types.

        Raises:
            ValueError: `layer_types` has not one value for each layer.
        """
        types = self.layer_types
        if types is None:
            return otherwise
        if len(types) != self.num_hidden_layers:
            problem = f"has {len(types)} values for {self.num_hidden_layers} layers"
            raise ValueError(f"config.json: layer_types {problem}")
        return [i for i, each in enumerate(types) if each == kind]

    def all_but_each(self, count: int) -> Sequence[int]:
        """Return all layers but each `count`th one."""
        return [i for i in range(self.num_hidden_layers) if (i + 1) % count]

    def stated_rope(self) -> dict[str, Any]:
        """Return what the config says of the rotary embedding, in the form of `rope_parameters`.

        The older name comes first, as in `transformers`. A scaling that was added to a newer config
        says nothing of the base and of what is rotated: these stay. The original positions of the
        config itself come before those of the scaling.
        """
        newer, older = self.rope_parameters or {}, self.rope_scaling
        if self.ropes_by_type:
            newer = newer.get("full_attention") or newer
        kept = ("rope_theta", "partial_rotary_factor") if older else tuple(newer)
        stated = {name: newer[name] for name in kept if name in newer} | (older or {})
        original = "original_max_position_embeddings"
        stated[original] = self.original_max_position_embeddings or stated.get(original)
        stated["rope_theta"] = stated.get("rope_theta") or self.rope_theta
        stated.setdefault("partial_rotary_factor", self.partial_rotary_factor)
        return stated

    def sliding_rope(self) -> dict[str, Any] | None:
        """Return the same of the layers that have a window, if it differs from that of others."""
        return (self.rope_parameters or {}).get("sliding_attention") if self.ropes_by_type else None

    def positions(self, rope: RopeSpec) -> int:
        """Return the most tokens of a sequence, given the model's rotary embedding."""
        positions, chunks = self.max_position_embeddings, self.dual_chunk_attention_config
        if rope.type == "yarn":  # those of the config may be the ones before stretching
            positions = round(rope.original_positions * rope.factor)
        if chunks is not None:  # shorter ones are within one chunk
            positions = min(positions, chunks.chunk_size - chunks.local_size)
        return positions


PRE_NORMS: Mapping[LayerNorm, str] = {
    "input_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}
"""Names of norms of the inputs of attention and MLP, as most families have them."""
POST_NORMS: Mapping[LayerNorm, str] = {
    "attention_out_norm": "post_attention_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
"""Names of norms of the outputs alone."""
ALL_NORMS: Mapping[LayerNorm, str] = {
    "input_norm": "input_layernorm",
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
"""Names of norms of the inputs and the outputs (Gemma)."""
_ACTIVATIONS = {"swish": "silu"}
"""Second names of activations in configs."""
JOINED_QKV, JOINED_GATE_UP = "self_attn.qkv_proj", "mlp.gate_up_proj"
PARTS: Mapping[str, tuple[str, ...]] = {
    JOINED_QKV: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    JOINED_GATE_UP: ("mlp.gate_proj", "mlp.up_proj"),
}
"""The modules whose rows a joined module has, in their order."""


@dataclass(frozen=True)
class ExpertNames:
    """Names of the parts of a mixture of experts in a family's checkpoints."""

    router: str = "mlp.gate"
    expert: str = "mlp.experts.{}"
    """Name of one expert, in which its number is filled in."""
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    bias: str = "mlp.gate.e_score_correction_bias"
    """Name of the tensor that is added to scores where experts are chosen."""
    shared: str = "mlp.shared_experts"
    """Name of the MLP that all tokens go to."""
    shared_gate: str = "mlp.shared_expert_gate"
    """Name of the module whose sigmoid the output of that is multiplied with."""
    stack: str = "mlp.experts"
    """Name of all experts in checkpoints that store them as one tensor."""
    side: Mapping[str, str] = field(default_factory=dict)
    """Names of the tensors of `SideExperts` by its fields, where experts are beside a dense MLP."""
    scales: str = "router.per_expert_scale"
    """Name of the factors of the experts' outputs there, one for each expert."""
    in_turn: bool = False
    """Whether checkpoints have all experts of a layer in one tensor, [experts, columns, rows], in
    which rows of gate and up take turns (gpt-oss)."""


Key = Callable[[str, float], float]
"""Returns the number that a GGUF file has for a key of its architecture, or the default."""


class GGUFKeys(Protocol):
    """What a family reads of a GGUF file."""

    def key(self, name: str, default: Any = None) -> Any:
        """Return the value of a key of the architecture, a list if it differs from layer to layer.

        Raises:
            ValueError: it is not there and has no default.
        """

    def numbers(self, tensor: str) -> Sequence[float]:
        """Return the numbers of a tensor of floats.

        Raises:
            ValueError: it is not there.
        """

    def has(self, tensor: str) -> bool:
        """Return whether the file has a tensor."""


def _no_factors(key: Key) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class GGUFFacts:
    """What is known of a family's GGUF files; `gguf` itself knows the names of their tensors."""

    architectures: tuple[str, ...]
    """Values of `general.architecture`, the usual one first."""
    permuted: bool = False
    """Whether files have the rotary rows in llama.cpp's own order."""
    experts: Mapping[str, Any] | None = None
    """Fields of `MoeSpec` where a file does not say them; None: the family has no experts."""
    full_each: int = 0
    """Where a file has a window and does not say for which layers, each of this many layers has
    none; 0: all layers have it."""
    rotates_full: bool = True
    """Whether layers without a window are rotated in files that have one."""
    unrotated_each: int = 0
    """Each of this many layers is not rotated; 0: all are."""
    sliding_base: Callable[[RopeSpec], float] | None = None
    """Returns the base of the rotation of layers with a window, which is not stretched, given the
    model's; None: they have the model's rotation."""
    truncates: bool = True
    """Whether YaRN's ramp is rounded to whole dimensions; no file says it."""
    factors: Callable[[Key], Mapping[str, Any]] = _no_factors
    """Returns fields of `ModelSpec` that scale activations, or that all models of the family have
    alike."""
    config: "Callable[[GGUFKeys], Mapping[str, Any]] | None" = None
    """Returns the fields of `config.json` that a file says; None: the usual keys say all. Files of
    such a family may have experts or none."""


@dataclass(frozen=True)
class Family:
    """A family of models: how its configs are read, and what its tensors are called.

    Nothing outside this package asks which family a model belongs to: what is computed stands in
    its `ModelSpec`, and what files call it stands here.
    """

    name: str
    """The `model_type` of its configs."""
    architectures: tuple[str, ...]
    """Values of `architectures` in its configs, the usual one first."""
    vision: Mapping[str, str] = field(default_factory=dict)
    """Architectures of checkpoints for text and images whose text part is a model of this family,
    with the `model_type` of each."""
    config: type[HFConfig] = HFConfig
    """The fields that are read of its `config.json`, with its defaults."""
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Other values of `model_type`, with the defaults that differ."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Parts of names of tensors in safetensors files, and what is in their place in the names that
    most families have; an earlier one is replaced first."""
    norms_less_1: str = ""
    """End of the names of norms of which safetensors files store the weights less 1; empty: of
    none."""
    norms: Mapping[LayerNorm, str] = field(default_factory=lambda: PRE_NORMS)
    """Names of a layer's norms in checkpoints."""
    qk_norm: QkNorm | None = None
    """What queries and keys are normalised over."""
    experts: ExpertNames = ExpertNames()
    joined: tuple[str, ...] = ()
    """The modules of `PARTS` that checkpoints and adapters have in the place of their parts."""
    predicts_more: bool = False
    """Whether checkpoints may have layers that predict further tokens (MTP); they are not read."""
    stores_mtp: bool = False
    """Whether these are in tensors `mtp.*` of the shapes that `model/load/mtp.py` checks."""
    grouped_delta: bool = False
    """Whether linear attention has queries, keys, values and gates of a key head one after the
    other in one module (`in_proj_qkvz`), and rates and decays in another (`in_proj_ba`), where
    others have all queries, then keys, then values in one, and each of the rest in its own."""
    partly_rotated: bool = False
    """Whether configs may leave some dimensions of each head unrotated."""
    interleaved: bool = False
    """Whether checkpoints have the dimensions that turn together as neighbours."""
    gguf: GGUFFacts | None = None
    """What is known of its GGUF files; None: they are not read."""

    def read(self, raw: Mapping[str, Any]) -> HFConfig:
        """Return a raw `config.json` with this family's defaults.

        Null says no where only yes and no can be, as in `transformers`.

        Raises:
            ValueError: a value has the wrong type.
        """
        switches = [each.name for each in msgspec.structs.fields(self.config) if each.type is bool]
        no = {name: False for name in switches if raw.get(name, ...) is None}
        defaults = self.variants.get(str(raw.get("model_type")), {})
        return converted({**defaults, **raw, **no}, self.config, lax=True)

    def spec(self, config: HFConfig) -> ModelSpec:
        """Return the spec of a config of this family.

        Raises:
            UnsupportedModel: one of its options is not built.
            ValueError: sizes do not fit each other.
        """
        config.check()
        dim = config.head_size()

        def read(stated: Mapping[str, Any]) -> RopeSpec:
            most, types = config.max_position_embeddings, config.rope_types
            rope = read_rope(stated, most, dim, types, partly=self.partly_rotated)
            return replace(rope, interleaved=self.interleaved)

        rope, sliding = read(config.stated_rope()), config.sliding_rope()
        kinds = config.kinds()
        if sliding is not None and (own := read(sliding)) != rope:
            kinds = tuple(replace(k, rope=k.rope or own) if k.window else k for k in kinds)
        fields: dict[str, Any] = {
            "layers": config.num_hidden_layers,
            "hidden_size": config.hidden_size,
            "heads": config.num_attention_heads,
            "kv_heads": config.num_key_value_heads or config.num_attention_heads,
            "head_dim": dim,
            "intermediate_size": config.intermediate_size,
            "vocab_size": config.vocab_size,
            "max_positions": config.positions(rope),
            "norm_eps": config.rms_norm_eps,
            "rope": rope,
            "tie_embeddings": config.tie_word_embeddings,
            "qkv_bias": config.attention_bias,
            "o_bias": config.attention_bias,
            "mlp_bias": config.mlp_bias,
            "activation": _ACTIVATIONS.get(config.hidden_act, config.hidden_act),
            "kinds": kinds,
        }
        return ModelSpec(self.name, **{**self.constants, **fields, **config.own_fields()})

    def usual_name(self, name: str) -> str:
        """Return the name that most families have for a tensor of a checkpoint of this one."""
        for part, usual in self.renamed.items():
            name = name.replace(part, usual)
        return name

    @property
    def constants(self) -> dict[str, Any]:
        """The fields of `ModelSpec` that are the same for all models of the family."""
        return {"qk_norm": self.qk_norm, "norms": tuple(self.norms)}


_BARE = ("embed_tokens.", "layers.", "norm.")
"""Names begin with one of these in checkpoints that were saved without a classifier."""
_TEXT = ("model.language_model.", "language_model.model.", "language_model.")
"""Names of the text part of a model of text and images begin with one of these."""


def text_name(name: str) -> str:
    """Return the name that a tensor or module of a checkpoint has in a whole model of text.

    Embeddings are stored without their place, and text parts under a name of their own.
    """
    for prefix in _TEXT:
        if name.startswith(prefix):
            name = name.removeprefix(prefix)
            break
    return f"model.{name}" if name.startswith(_BARE) else name
