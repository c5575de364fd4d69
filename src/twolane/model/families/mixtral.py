"""Mixtral: Mistral with experts in every layer, under names of its own."""

from collections.abc import Iterable
from typing import Any

from twolane.model.families.family import ExpertNames, Family, GGUFFacts, HFConfig
from twolane.model.spec import MoeSpec


class MixtralConfig(HFConfig, kw_only=True):
    """Mixtral's fields and defaults. All layers have a window, if there is one."""

    intermediate_size: int = 14_336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131_072
    rms_norm_eps: float = 1e-5
    rope_theta: float | None = 1_000_000.0
    sliding_window: int | None = None
    num_local_experts: int = 8
    num_experts_per_tok: int = 2

    def sliding_layers(self) -> Iterable[int]:
        """See `HFConfig.sliding_layers`."""
        return range(self.num_hidden_layers)

    def own_fields(self) -> dict[str, Any]:
        """See `HFConfig.own_fields`."""
        each = self.num_experts_per_tok
        moe = MoeSpec(self.num_local_experts, each, self.intermediate_size)
        return {"moe": moe, "qkv_bias": False, "o_bias": False}


FAMILY = Family(
    name="mixtral",
    architectures=("MixtralForCausalLM",),
    config=MixtralConfig,
    experts=ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts.{}", "w1", "w3", "w2"),
    gguf=GGUFFacts(("llama",), permuted=True, experts={}),
)
