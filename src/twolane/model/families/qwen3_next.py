"""Qwen3-Next: gated delta rules in three of four layers, gated attention in the fourth, experts."""

from typing import Any, ClassVar

from twolane.kernels.delta_rule.rule import DeltaRule
from twolane.model.families.family import ExpertNames, Family
from twolane.model.families.qwen2_moe import Qwen2MoeConfig
from twolane.model.spec import FULL, LINEAR, LayerKind, UnsupportedModel


class Qwen3NextConfig(Qwen2MoeConfig, kw_only=True):
    """Qwen3-Next's fields and defaults."""

    known_layer_types: ClassVar[tuple[str, ...]] = ("full_attention", "linear_attention")

    vocab_size: int = 151_936
    num_hidden_layers: int = 48
    num_key_value_heads: int | None = 2
    head_dim: int | None = 256
    eos_token_id: int | list[int] | None = None
    partial_rotary_factor: float | None = 0.25
    num_local_experts: int = 512
    num_experts_per_tok: int = 10
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    norm_topk_prob: bool = True
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    attn_output_gate: bool = True
    output_gate_type: str = "swish"
    """The function of the gates of linear attention, in newer configs."""
    full_attention_interval: int = 4
    """Each of this many layers has softmax attention, where `layer_types` does not say it."""

    def check(self) -> None:
        """See `HFConfig.check`."""
        super().check()
        self.check_above_0("full_attention_interval")
        if self.output_gate_type not in (works := ("swish", "silu")):
            raise UnsupportedModel.because("output_gate_type", self.output_gate_type, works)
        if self.hidden_act not in works:  # linear attention has the function of the MLPs
            raise UnsupportedModel.because("hidden_act", self.hidden_act, works)

    def kinds(self) -> tuple[LayerKind, ...]:
        """See `HFConfig.kinds`."""
        usual = self.all_but_each(self.full_attention_interval)
        linear = {*self.typed_layers(usual, "linear_attention")}
        return tuple(LINEAR if i in linear else FULL for i in range(self.num_hidden_layers))

    def attention_fields(self) -> dict[str, Any]:
        """Return the fields of `ModelSpec` that say what both kinds of attention compute."""
        delta = DeltaRule(
            self.linear_num_key_heads,
            self.linear_num_value_heads,
            self.linear_key_head_dim,
            self.linear_value_head_dim,
            self.linear_conv_kernel_dim,
        )
        linear = LINEAR in self.kinds()
        fields = {"delta": delta if linear else None, "output_gate": self.attn_output_gate}
        return {**fields, "qkv_bias": self.attention_bias, "o_bias": self.attention_bias}

    def own_fields(self) -> dict[str, Any]:
        """See `HFConfig.own_fields`."""
        return {**super().own_fields(), **self.attention_fields()}


FAMILY = Family(
    name="qwen3_next",
    architectures=("Qwen3NextForCausalLM",),
    config=Qwen3NextConfig,
    norms_less_1="norm.weight",
    qk_norm="head",
    experts=ExpertNames(shared="mlp.shared_expert"),
    predicts_more=True,
    stores_mtp=True,
    grouped_delta=True,
    partly_rotated=True,
)
