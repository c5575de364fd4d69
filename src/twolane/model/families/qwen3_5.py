"""Qwen3.5 and 3.6 with dense MLPs, the text part of their checkpoints for text and images."""

from typing import Any

from twolane.model.families.family import Family
from twolane.model.families.qwen3_next import Qwen3NextConfig


class Qwen35Config(Qwen3NextConfig, kw_only=True):
    """Qwen3.5's fields and defaults; it has no experts."""

    vocab_size: int = 248_320
    hidden_size: int = 4096
    intermediate_size: int = 12_288
    num_hidden_layers: int = 32
    num_key_value_heads: int | None = 4

    def own_fields(self) -> dict[str, Any]:
        """See `HFConfig.own_fields`."""
        return self.attention_fields()


FAMILY = Family(
    name="qwen3_5_text",
    architectures=("Qwen3_5ForCausalLM",),
    vision={"Qwen3_5ForConditionalGeneration": "qwen3_5"},
    config=Qwen35Config,
    norms_less_1="norm.weight",
    qk_norm="head",
    predicts_more=True,
    stores_mtp=True,
    partly_rotated=True,
)
