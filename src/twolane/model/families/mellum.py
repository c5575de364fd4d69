"""Mellum 2: Qwen3 with experts and, in some layers, windows with a rotation of their own."""

from collections.abc import Iterable
from typing import Any, ClassVar

from twolane.model.families.family import Family, HFConfig
from twolane.model.spec import MoeSpec


class MellumConfig(HFConfig, kw_only=True):
    """Mellum's fields and defaults."""

    ropes_by_type: ClassVar[bool] = True

    vocab_size: int = 98_304
    hidden_size: int = 2304
    intermediate_size: int = 7168
    num_hidden_layers: int = 28
    num_key_value_heads: int | None = 4
    head_dim: int | None = 128
    max_position_embeddings: int = 131_072
    sliding_window: int | None = 1024
    eos_token_id: int | list[int] | None = None
    rope_theta: float | None = 500_000.0
    moe_intermediate_size: int = 896
    num_experts_per_tok: int = 8
    num_experts: int | None = None
    num_local_experts: int = 64
    norm_topk_prob: bool = True
    mlp_layer_types: list[str] | None = None

    def sliding_layers(self) -> Iterable[int]:
        """See `HFConfig.sliding_layers`."""
        return self.typed_layers(otherwise=())

    def sliding_rope(self) -> dict[str, Any] | None:
        """See `HFConfig.sliding_rope`."""
        return super().sliding_rope() if self.rope_parameters else {"rope_theta": 10_000.0}

    def own_fields(self) -> dict[str, Any]:
        """See `HFConfig.own_fields`."""
        kinds = self.mlp_layer_types or ["sparse"] * self.num_hidden_layers
        dense = tuple(i for i, kind in enumerate(kinds) if kind != "sparse")
        each, width = self.num_experts_per_tok, self.moe_intermediate_size
        experts = self.num_experts or self.num_local_experts
        return {"moe": MoeSpec(experts, each, width, self.norm_topk_prob, dense)}


FAMILY = Family(
    name="mellum",
    architectures=("MellumForCausalLM",),
    config=MellumConfig,
    qk_norm="head",
    predicts_more=True,
)
