"""GLM: half of each head is rotated, in neighbouring dimensions; gate and up are joined."""

from typing import Any

import msgspec

from twolane.model.families.family import JOINED_GATE_UP, Family, HFConfig


class GlmConfig(HFConfig, kw_only=True):
    """GLM's defaults."""

    vocab_size: int = 151_552
    intermediate_size: int = 13_696
    num_hidden_layers: int = 40
    num_key_value_heads: int | None = 2
    head_dim: int | None = 128
    max_position_embeddings: int = 131_072
    rms_norm_eps: float = 1.5625e-7
    attention_bias: bool = True
    eos_token_id: int | list[int] | None = msgspec.field(
        default_factory=lambda: [151_329, 151_336, 151_338]
    )
    partial_rotary_factor: float | None = 0.5

    def own_fields(self) -> dict[str, Any]:
        """See `HFConfig.own_fields`."""
        return {"o_bias": False}


FAMILY = Family(
    name="glm",
    architectures=("GlmForCausalLM",),
    config=GlmConfig,
    joined=(JOINED_GATE_UP,),
    partly_rotated=True,
    interleaved=True,
)
