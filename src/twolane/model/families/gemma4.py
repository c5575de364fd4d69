"""Gemma 4: larger heads in the layers without a window, experts beside dense MLPs, layers that read
the keys and values of earlier ones, and inputs of each token for each layer."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from twolane.model.families import family
from twolane.model.spec import Heads, LayerKind, MoeSpec, RopeType, UnsupportedModel

_ROPES: Mapping[str, Mapping[str, Any]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {
        **{"rope_type": "proportional", "rope_theta": 1_000_000.0},
        "partial_rotary_factor": 0.25,
    },
}


class Gemma4Config(family.HFConfig, kw_only=True):
    """Gemma 4's fields and defaults."""

    ropes_by_type: ClassVar[bool] = True
    rope_types: ClassVar[Mapping[str, RopeType]] = {
        **family.ROPE_TYPES,
        "proportional": "proportional",
    }

    vocab_size: int = 262_144
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 30
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4
    head_dim: int | None = 256
    global_head_dim: int | None = 512
    """Dimensions of a head in layers without a window."""
    num_global_key_value_heads: int | None = None
    """Heads of keys there, if `attention_k_eq_v` says that they differ."""
    per_layer_config: dict[str, dict[str, Any]] | None = None
    """The same by layer, in the place of both, as newer versions of `transformers` write it."""
    hidden_activation: str = "gelu_pytorch_tanh"
    max_position_embeddings: int = 131_072
    tie_word_embeddings: bool = True
    eos_token_id: int | list[int] | None = 1
    sliding_window: int | None = 512
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: str | bool | None = None
    vocab_size_per_layer_input: int = 262_144
    hidden_size_per_layer_input: int | None = 256
    attention_k_eq_v: bool = False
    num_kv_shared_layers: int = 0
    enable_moe_block: bool = False
    use_double_wide_mlp: bool = False
    num_experts: int | None = None
    top_k_experts: int | None = None
    moe_intermediate_size: int | None = None

    def check(self) -> None:
        """See `HFConfig.check`."""
        super().check()
        if self.use_bidirectional_attention not in (None, False, "vision"):
            direction, works = self.use_bidirectional_attention, ("none", "vision")
            raise UnsupportedModel.because("use_bidirectional_attention", direction, works)
        if self.hidden_size_per_layer_input and self.vocab_size_per_layer_input != self.vocab_size:
            name, value = "vocab_size_per_layer_input", self.vocab_size_per_layer_input
            raise UnsupportedModel.because(name, value, (f"vocab_size {self.vocab_size}",))
        if self.attention_bias and (self.attention_k_eq_v or self.num_kv_shared_layers):
            without = ("False where layers share keys or values",)
            raise UnsupportedModel.because("attention_bias", True, without)
        if (window := self.sliding_window) is None or window < 1:
            raise ValueError(f"config.json: sliding_window must be 1 or more, not {window}")
        if not 0 <= self.num_kv_shared_layers < self.num_hidden_layers:
            problem = f"must be 0 to {self.num_hidden_layers - 1}, not {self.num_kv_shared_layers}"
            raise ValueError(f"config.json: num_kv_shared_layers {problem}")

    def stated_rope(self) -> dict[str, Any]:
        """See `HFConfig.stated_rope`."""
        own = (self.rope_parameters or {}).get("full_attention") or {}
        return {**_ROPES["full_attention"], **own}

    def sliding_rope(self) -> dict[str, Any] | None:
        """See `HFConfig.sliding_rope`."""
        return {**_ROPES["sliding_attention"], **(super().sliding_rope() or {})}

    def kinds(self) -> tuple[LayerKind, ...]:
        """See `HFConfig.kinds`. The last layer never has a window."""
        count = self.num_hidden_layers
        sliding = {*self.typed_layers(otherwise=self.all_but_each(6))} - {count - 1}
        return tuple(self._kind(i, sliding=i in sliding) for i in range(count))

    def _kind(self, layer: int, *, sliding: bool) -> LayerKind:
        reads_earlier = layer >= self.num_hidden_layers - self.num_kv_shared_layers
        wide = self.use_double_wide_mlp and reads_earlier
        return LayerKind(
            window=self.sliding_window if sliding else None,
            heads=self._heads(layer, sliding=sliding),
            intermediate_size=2 * self.intermediate_size if wide else None,
            reads_earlier=reads_earlier,
            keys_are_values=self.attention_k_eq_v and not sliding,
        )

    def _heads(self, layer: int, *, sliding: bool) -> Heads | None:
        """Return the heads of a layer; None: they are those of the model."""
        usual = self.num_key_value_heads or self.num_attention_heads
        keys, dim = usual, self.head_size()
        if self.per_layer_config is not None:
            own = {int(key): each for key, each in self.per_layer_config.items()}.get(layer, {})
            keys, dim = own.get("num_key_value_heads") or keys, own.get("head_dim") or dim
        elif not sliding:
            keys = (self.num_global_key_value_heads if self.attention_k_eq_v else None) or keys
            dim = self.global_head_dim or dim
        if self.num_attention_heads % keys:
            problem = f"{self.num_attention_heads} heads cannot share {keys} key-value heads"
            raise ValueError(f"config.json: {problem} in layer {layer}")
        same = (keys, dim) == (usual, self.head_size())
        return None if same else Heads(self.num_attention_heads, keys, dim)

    def own_fields(self) -> dict[str, Any]:
        """See `HFConfig.own_fields`."""
        return {
            "activation": self.hidden_activation,
            "attention_scale": 1.0,
            "embedding_scale": math.sqrt(self.hidden_size),
            "v_norm": True,
            "layer_scales": True,
            "logit_cap": self.final_logit_softcapping,
            "layer_inputs": self.hidden_size_per_layer_input or 0,
            "moe": self._experts() if self.enable_moe_block else None,
        }

    def _experts(self) -> MoeSpec:
        sizes = self.num_experts, self.top_k_experts, self.moe_intermediate_size
        if None in sizes:
            names = "num_experts, top_k_experts and moe_intermediate_size"
            raise ValueError(f"config.json: enable_moe_block needs {names}")
        experts, each, width = (size or 0 for size in sizes)
        return MoeSpec(experts, each, width, beside_dense=True)


def _config_of(file: family.GGUFKeys) -> dict[str, Any]:
    """Return the fields of `config.json` that a GGUF file says."""
    layers = int(file.key("block_count"))

    def each(name: str) -> list[Any]:
        value = file.key(name)
        found = value if isinstance(value, list) else [value] * layers
        if len(found) < layers:
            raise ValueError(f"gemma4.{name} has {len(found)} values for {layers} layers")
        return found[:layers]

    slides, heads, widths = map(
        each, ("attention.sliding_window_pattern", "attention.head_count_kv", "feed_forward_length")
    )
    full = [i for i, slide in enumerate(slides) if not slide]
    usual = next((n for n, slide in zip(heads, slides, strict=True) if slide), heads[0])
    wide, shared = int(file.key("attention.key_length")), file.key("attention.shared_kv_layers", 0)
    own_values = [i for i in full if i < layers - shared and file.has(f"blk.{i}.attn_v.weight")]
    experts, inputs = file.key("expert_count", 0), file.key("embedding_length_per_layer_input", 0)
    return {
        "hidden_size": file.key("embedding_length"),
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] != widths[0],
        "num_hidden_layers": layers,
        "num_attention_heads": file.key("attention.head_count"),
        "num_key_value_heads": usual,
        "head_dim": file.key("attention.key_length_swa", wide),
        "per_layer_config": {
            str(i): {"num_key_value_heads": heads[i], "head_dim": wide} for i in full
        },
        "layer_types": ["sliding_attention" if s else "full_attention" for s in slides],
        "max_position_embeddings": file.key("context_length"),
        "rms_norm_eps": file.key("attention.layer_norm_rms_epsilon"),
        "sliding_window": file.key("attention.sliding_window"),
        "final_logit_softcapping": file.key("final_logit_softcapping", 0.0) or None,
        "hidden_size_per_layer_input": inputs,
        "attention_k_eq_v": bool(full) and not own_values,
        "num_kv_shared_layers": shared,
        "enable_moe_block": experts > 0,
        "num_experts": experts,
        "top_k_experts": file.key("expert_used_count", 0),
        "moe_intermediate_size": file.key("expert_feed_forward_length", 0),
        "rope_parameters": _ropes_of(file),
    }


def _ropes_of(file: family.GGUFKeys) -> dict[str, Any]:
    """Return the rotations of both types of layers: the divisors of a file are those of layers
    without a window."""
    turned = [divisor < _UNTURNED for divisor in file.numbers("rope_freqs.weight")]
    bases = {"full_attention": "rope.freq_base", "sliding_attention": "rope.freq_base_swa"}
    ropes = {
        kind: {**rope, "rope_theta": file.key(bases[kind], rope["rope_theta"])}
        for kind, rope in _ROPES.items()
    }
    ropes["full_attention"]["partial_rotary_factor"] = sum(turned) / len(turned)
    return ropes


_UNTURNED = 1e29
"""Divisors of frequencies from here on stand for pairs that do not turn, in GGUF files."""

_UNIFIED = {
    **{"max_position_embeddings": 262_144, "sliding_window": 1024},
    "hidden_size_per_layer_input": 0,
}

FAMILY = family.Family(
    name="gemma4_text",
    architectures=("Gemma4ForCausalLM", "Gemma4UnifiedForCausalLM"),
    vision={
        "Gemma4ForConditionalGeneration": "gemma4",
        "Gemma4UnifiedForConditionalGeneration": "gemma4_unified",
    },
    config=Gemma4Config,
    variants={"gemma4_unified_text": _UNIFIED},
    norms=family.ALL_NORMS,
    qk_norm="head",
    experts=family.ExpertNames(
        router="router.proj",
        expert="experts.{}",
        stack="experts",
        side={
            "norm": "pre_feedforward_layernorm_2.weight",
            "router_norm": "router.scale",
            "out_norm": "post_feedforward_layernorm_2.weight",
            "mlp_out_norm": "post_feedforward_layernorm_1.weight",
        },
    ),
    gguf=family.GGUFFacts(("gemma4",), config=_config_of),
)
