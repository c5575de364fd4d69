"""Seed-OSS: Llama with a switch of its own for the bias of attention's output."""

from typing import Any

from twolane.model.families.family import Family, GGUFFacts, HFConfig


class SeedOssConfig(HFConfig, kw_only=True):
    """Seed-OSS' fields and defaults."""

    vocab_size: int = 155_136
    intermediate_size: int = 27_648
    num_hidden_layers: int = 64
    num_attention_heads: int = 80
    num_key_value_heads: int | None = 8
    head_dim: int | None = 128
    max_position_embeddings: int = 524_288
    attention_bias: bool = True
    attention_out_bias: bool = False

    def own_fields(self) -> dict[str, Any]:
        """See `HFConfig.own_fields`."""
        return {"o_bias": self.attention_out_bias}


FAMILY = Family(
    name="seed_oss",
    architectures=("SeedOssForCausalLM",),
    config=SeedOssConfig,
    gguf=GGUFFacts(("seed_oss",)),
)
