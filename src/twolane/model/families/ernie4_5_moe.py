"""ERNIE 4.5 with experts: chosen by softmax and bias, beside some that all tokens share."""

from typing import Any

from twolane.model.families.ernie4_5 import Ernie45Config
from twolane.model.families.family import ExpertNames, Family, GGUFFacts
from twolane.model.spec import MoeSpec


class Ernie45MoeConfig(Ernie45Config, kw_only=True):
    """ERNIE 4.5's fields and defaults, with those of experts."""

    hidden_size: int = 2560
    intermediate_size: int = 12_288
    num_hidden_layers: int = 28
    num_attention_heads: int = 20
    num_key_value_heads: int | None = 4
    head_dim: int | None = None
    moe_intermediate_size: int = 1536
    moe_k: int = 6
    moe_num_experts: int = 64
    moe_num_shared_experts: int = 2
    moe_layer_start_index: int = 1
    moe_layer_end_index: int = -1
    moe_layer_interval: int = 1

    def own_fields(self) -> dict[str, Any]:
        """See `HFConfig.own_fields`."""
        layers, step = range(self.num_hidden_layers), self.moe_layer_interval
        self.check_above_0("moe_layer_interval")
        end = (
            self.num_hidden_layers - 1 if self.moe_layer_end_index < 0 else self.moe_layer_end_index
        )
        chosen = range(self.moe_layer_start_index, end + 1)
        moe = MoeSpec(
            self.moe_num_experts,
            self.moe_k,
            self.moe_intermediate_size,
            dense_layers=tuple(i for i in layers if i not in chosen or (i + 1) % step),
            biased=True,
            shared=self.moe_num_shared_experts,
        )
        return {**super().own_fields(), "moe": moe}


FAMILY = Family(
    name="ernie4_5_moe",
    architectures=("Ernie4_5_MoeForCausalLM",),
    config=Ernie45MoeConfig,
    experts=ExpertNames(bias="mlp.moe_statics.e_score_correction_bias"),
    interleaved=True,
    predicts_more=True,
    gguf=GGUFFacts(("ernie4_5-moe",), experts={}),
)
