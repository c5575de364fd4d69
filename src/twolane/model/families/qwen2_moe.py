"""Qwen2 and Qwen1.5 with experts, of which all tokens share one under a gate."""

from dataclasses import replace
from typing import Any

from twolane.model.families.family import ExpertNames, Family, GGUFFacts
from twolane.model.families.qwen3_moe import Qwen3MoeConfig
from twolane.model.spec import UnsupportedModel


class Qwen2MoeConfig(Qwen3MoeConfig, kw_only=True):
    """Qwen2-MoE's fields and defaults."""

    intermediate_size: int = 5632
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 16
    num_local_experts: int = 60
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 1408
    shared_expert_intermediate_size: int = 5632
    qkv_bias: bool = True

    def own_fields(self) -> dict[str, Any]:
        """See `HFConfig.own_fields`."""
        wide, width = self.shared_expert_intermediate_size, self.moe_intermediate_size
        if wide % max(width, 1):
            fits = f"multiples of moe_intermediate_size {width}"
            raise UnsupportedModel.because("width of the shared expert", wide, (fits,))
        moe = replace(super().own_fields()["moe"], shared=wide // width, gated=True)
        return {"moe": moe, "qkv_bias": self.qkv_bias}


FAMILY = Family(
    name="qwen2_moe",
    architectures=("Qwen2MoeForCausalLM",),
    config=Qwen2MoeConfig,
    experts=ExpertNames(shared="mlp.shared_expert"),
    gguf=GGUFFacts(("qwen2moe",), experts={"normalised": False}),
)
