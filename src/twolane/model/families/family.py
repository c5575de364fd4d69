"""What is known of a family of models: the record that each file of this package fills in."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from twolane.common.checked_json import converted
from twolane.model.families.config import HFConfig
from twolane.model.families.rope import read_rope
from twolane.model.spec import LayerKind, LayerNorm, ModelSpec, QkNorm, RopeSpec, UnsupportedModel

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


Key = Callable[[str, float], float]
"""Returns the number that a GGUF file has for a key of its architecture, or the default."""


def _alike(layers: int, window: int | None) -> tuple[LayerKind, ...]:
    return (LayerKind(window=window),) * layers if window else ()


def _no_factors(key: Key) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class GGUFFacts:
    """What is known of a family's GGUF files; `gguf` itself knows the names of their tensors."""

    architecture: str
    """The value of `general.architecture`."""
    permuted: bool = False
    """Whether files have the rotary rows in llama.cpp's own order."""
    kinds: Callable[[int, int | None], tuple[LayerKind, ...]] = _alike
    """Returns the kinds of a number of layers, given the sliding window of the file."""
    factors: Callable[[Key], Mapping[str, Any]] = _no_factors
    """Returns fields of `ModelSpec` that scale activations."""


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
    config: type[HFConfig] = HFConfig
    """The fields that are read of its `config.json`, with its defaults."""
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Other values of `model_type`, with the defaults that differ."""
    norms: Mapping[LayerNorm, str] = field(default_factory=lambda: PRE_NORMS)
    """Names of a layer's norms in checkpoints."""
    qk_norm: QkNorm | None = None
    """What queries and keys are normalised over."""
    experts: ExpertNames = ExpertNames()
    joined: tuple[str, ...] = ()
    """The modules of `PARTS` that checkpoints and adapters have in the place of their parts."""
    partly_rotated: bool = False
    """Whether configs may leave some dimensions of each head unrotated."""
    interleaved: bool = False
    """Whether checkpoints have the dimensions that turn together as neighbours."""
    gguf: GGUFFacts | None = None
    """What is known of its GGUF files; None: they are not read."""
    fixtures: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Fields of tiny configs whose logits tests compare with those of `transformers`, by name."""

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
        rope = self._rope(config)
        fields: dict[str, Any] = {
            "layers": config.num_hidden_layers,
            "hidden_size": config.hidden_size,
            "heads": config.num_attention_heads,
            "kv_heads": config.num_key_value_heads or config.num_attention_heads,
            "head_dim": config.head_size(),
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
            "kinds": config.kinds(),
        }
        return ModelSpec(self.name, **self.constants, **{**fields, **config.own_fields()})

    @property
    def constants(self) -> dict[str, Any]:
        """The fields of `ModelSpec` that are the same for all models of the family."""
        return {"qk_norm": self.qk_norm, "norms": tuple(self.norms)}

    def _rope(self, config: HFConfig) -> RopeSpec:
        stated = config.stated_rope()
        share = stated["partial_rotary_factor"]
        if not self.partly_rotated and share not in (None, 1.0):
            raise UnsupportedModel.because("partial_rotary_factor", share, ("1.0",))
        positions, types = config.max_position_embeddings, config.rope_types
        rope = read_rope(stated, positions, config.head_size(), types)
        return replace(rope, interleaved=self.interleaved)
