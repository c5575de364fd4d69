"""Muse Glimmer: gates of attention's output, norms without weights of embeddings, queries and keys,
norms before and after each block, and soft caps of logits."""

from collections.abc import Iterable
from typing import Any

from twolane.model.families.family import ALL_NORMS, Family, HFConfig
from twolane.model.spec import GateModule, UnsupportedModel


class MuseGlimmerConfig(HFConfig, kw_only=True):
    """Muse Glimmer's fields and defaults."""

    vocab_size: int = 202_048
    hidden_size: int = 6656
    intermediate_size: int = 19_968
    num_hidden_layers: int = 52
    num_key_value_heads: int | None = 2
    head_dim: int | None = 128
    hidden_activation: str = "silu"
    max_position_embeddings: int = 131_072
    rms_norm_eps: float = 1e-5
    eos_token_id: int | list[int] | None = 200_001
    sliding_window: int | None = 2048
    final_logit_softcapping: float | None = 20.0
    qk_scale_factor: float = 3.87
    output_multiplier: float = 0.19611613513818404
    post_norm_eps: float = 1e-8
    layer_rope_theta: list[float] | None = None
    """The base of the rotation of each layer; 0: it has none."""

    def check(self) -> None:
        """See `HFConfig.check`."""
        super().check()
        if self.tie_word_embeddings:
            raise UnsupportedModel.because("tie_word_embeddings", True, ("False",))
        bases = self.layer_rope_theta or ()
        if len(bases) not in (0, self.num_hidden_layers):
            problem = f"has {len(bases)} values for {self.num_hidden_layers} layers"
            raise ValueError(f"config.json: layer_rope_theta {problem}")
        if len({base for base in bases if base}) > 1:
            raise UnsupportedModel.because("layer_rope_theta", bases, ("one base, or 0",))

    def _full(self) -> list[int]:
        """Return each fourth layer, counted from the last."""
        last = self.num_hidden_layers - 1
        return [i for i in range(self.num_hidden_layers) if (last - i) % 4 == 0]

    def sliding_layers(self) -> Iterable[int]:
        """See `HFConfig.sliding_layers`."""
        return self.typed_layers(otherwise={*range(self.num_hidden_layers)} - {*self._full()})

    def unrotated_layers(self) -> Iterable[int]:
        """See `HFConfig.unrotated_layers`."""
        if self.layer_rope_theta is None:
            return self._full()
        return [i for i, base in enumerate(self.layer_rope_theta) if not base]

    def stated_rope(self) -> dict[str, Any]:
        """See `HFConfig.stated_rope`. A base of the layers holds against that of the model."""
        stated = super().stated_rope()
        base = next((base for base in self.layer_rope_theta or () if base), None)
        return stated if base is None else {**stated, "rope_theta": base}

    def own_fields(self) -> dict[str, Any]:
        """See `HFConfig.own_fields`."""
        return {
            "activation": self.hidden_activation,
            "attention_scale": self.qk_scale_factor * self.head_size() ** -0.5,
            "logit_scale": self.output_multiplier,
            "logit_cap": self.final_logit_softcapping,
            "out_norm_eps": self.post_norm_eps,
            "norms_embeddings": True,
            "bare_qk_norm": True,
            "gate": GateModule(),
        }


FAMILY = Family(
    name="muse_glimmer_text",
    architectures=("MuseGlimmerForCausalLM",),
    vision={"MuseGlimmerForConditionalGeneration": "muse_glimmer"},
    config=MuseGlimmerConfig,
    renamed={".self_attn.gate_proj.": ".self_attn.g_proj."},
    norms=ALL_NORMS,
    norms_less_1="layernorm.weight",
    qk_norm="head",
)
