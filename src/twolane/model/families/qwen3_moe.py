"""Qwen3 with experts."""

from collections.abc import Iterable
from typing import Any

from twolane.model.families.family import Family, GGUFFacts, HFConfig
from twolane.model.spec import MoeSpec


class Qwen3MoeConfig(HFConfig, kw_only=True):
    """Qwen3-MoE's fields and defaults. All layers have a window, if it is switched on."""

    vocab_size: int = 151_936
    hidden_size: int = 2048
    intermediate_size: int = 6144
    num_hidden_layers: int = 24
    num_key_value_heads: int | None = 4
    max_position_embeddings: int = 32_768
    eos_token_id: int | list[int] | None = None
    num_experts: int | None = None
    num_local_experts: int = 128
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] | None = None

    def sliding_layers(self) -> Iterable[int]:
        """See `HFConfig.sliding_layers`."""
        return range(self.num_hidden_layers) if self.use_sliding_window else ()

    def own_fields(self) -> dict[str, Any]:
        """See `HFConfig.own_fields`."""
        layers, step = range(self.num_hidden_layers), self.decoder_sparse_step
        self.check_above_0("decoder_sparse_step")
        dense = tuple(i for i in layers if i in (self.mlp_only_layers or ()) or (i + 1) % step)
        experts, each = self.num_experts or self.num_local_experts, self.num_experts_per_tok
        width, normalised = self.moe_intermediate_size, self.norm_topk_prob
        return {"moe": MoeSpec(experts, each, width, normalised, dense)}


_QWEN3_VL = {
    **{"intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16},
    "moe_intermediate_size": 1408,
    **{"max_position_embeddings": 128_000, "num_experts_per_tok": 4, "num_local_experts": 60},
    **{"norm_topk_prob": True, "rope_theta": 500_000.0, "tie_word_embeddings": True},
}

FAMILY = Family(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    vision={"Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe"},
    config=Qwen3MoeConfig,
    variants={"qwen3_vl_moe_text": _QWEN3_VL},
    qk_norm="head",
    gguf=GGUFFacts(("qwen3moe", "qwen3vlmoe"), experts={}),
)
