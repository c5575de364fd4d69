"""LFM2 and LFM2.5 with experts, chosen by sigmoid and bias, after some dense layers."""

from typing import Any

from twolane.model.families.family import ExpertNames, Family, GGUFFacts
from twolane.model.families.lfm2 import NORMS, RENAMED, Lfm2Config
from twolane.model.spec import MoeSpec


class Lfm2MoeConfig(Lfm2Config, kw_only=True):
    """LFM2's fields and defaults with experts."""

    hidden_size: int = 2048
    intermediate_size: int = 7168
    block_auto_adjust_ff_dim: bool = False
    moe_intermediate_size: int = 1792
    num_dense_layers: int = 2
    num_experts_per_tok: int = 4
    num_experts: int = 32
    use_expert_bias: bool = True
    routed_scaling_factor: float = 1.0
    norm_topk_prob: bool = True

    def own_fields(self) -> dict[str, Any]:
        """See `HFConfig.own_fields`."""
        moe = MoeSpec(
            self.num_experts,
            self.num_experts_per_tok,
            self.moe_intermediate_size,
            self.norm_topk_prob,
            dense_layers=tuple(range(self.num_dense_layers)),
            sigmoid=True,
            biased=self.use_expert_bias,
            scale=self.routed_scaling_factor,
        )
        return {**super().own_fields(), "moe": moe}


FAMILY = Family(
    name="lfm2_moe",
    architectures=("Lfm2MoeForCausalLM",),
    config=Lfm2MoeConfig,
    renamed=RENAMED,
    norms=NORMS,
    qk_norm="head",
    experts=ExpertNames(gate="w1", up="w3", down="w2", bias="mlp.expert_bias"),
    gguf=GGUFFacts(("lfm2moe",), experts={"sigmoid": True}),
)
