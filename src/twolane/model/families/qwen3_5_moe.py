"""Qwen3.5 and 3.6 with experts, of which all tokens share one under a gate."""

from twolane.model.families.family import ExpertNames, Family
from twolane.model.families.qwen3_next import Qwen3NextConfig


class Qwen35MoeConfig(Qwen3NextConfig, kw_only=True):
    """Qwen3.5-MoE's fields and defaults."""

    vocab_size: int = 248_320
    intermediate_size: int = 512
    num_hidden_layers: int = 40
    num_local_experts: int = 256
    num_experts_per_tok: int = 8


FAMILY = Family(
    name="qwen3_5_moe_text",
    architectures=("Qwen3_5MoeForCausalLM",),
    vision={"Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe"},
    config=Qwen35MoeConfig,
    norms_less_1="norm.weight",
    qk_norm="head",
    experts=ExpertNames(shared="mlp.shared_expert"),
    predicts_more=True,
    stores_mtp=True,
    partly_rotated=True,
)
