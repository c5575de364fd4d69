"""GLM-4.5, 4.6 and 4.5-Air: experts chosen by sigmoid and bias, and one that all tokens share."""

from typing import Any

from twolane.model.families.family import Family, GGUFFacts, HFConfig
from twolane.model.spec import MoeSpec, UnsupportedModel


class Glm4MoeConfig(HFConfig, kw_only=True):
    """GLM-4.5's fields and defaults."""

    vocab_size: int = 151_552
    intermediate_size: int = 10_944
    num_hidden_layers: int = 46
    num_attention_heads: int = 96
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131_072
    rms_norm_eps: float = 1e-5
    eos_token_id: int | list[int] | None = None
    partial_rotary_factor: float | None = 0.5
    moe_intermediate_size: int = 1408
    num_experts_per_tok: int = 8
    n_shared_experts: int = 1
    n_routed_experts: int = 128
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    first_k_dense_replace: int = 1
    norm_topk_prob: bool = True
    use_qk_norm: bool = False

    def own_fields(self) -> dict[str, Any]:
        """See `HFConfig.own_fields`."""
        if self.n_group != self.topk_group:
            raise UnsupportedModel.because(
                "topk_group", self.topk_group, (f"n_group {self.n_group}",)
            )
        moe = MoeSpec(
            self.n_routed_experts,
            self.num_experts_per_tok,
            self.moe_intermediate_size,
            self.norm_topk_prob,
            dense_layers=tuple(range(self.first_k_dense_replace)),
            sigmoid=True,
            biased=True,
            scale=self.routed_scaling_factor,
            shared=self.n_shared_experts,
        )
        return {"moe": moe, "o_bias": False, "qk_norm": "head" if self.use_qk_norm else None}


FAMILY = Family(
    name="glm4_moe",
    architectures=("Glm4MoeForCausalLM",),
    config=Glm4MoeConfig,
    partly_rotated=True,
    predicts_more=True,
    gguf=GGUFFacts(("glm4moe",), experts={"normalised": False, "sigmoid": True}),
)
