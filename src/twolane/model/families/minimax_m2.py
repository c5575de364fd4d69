"""MiniMax M2: experts chosen by sigmoid and bias, and norms of all queries and all keys."""

from typing import Any

from twolane.model.families.family import ExpertNames, Family, GGUFFacts, HFConfig
from twolane.model.spec import MoeSpec, UnsupportedModel


class MiniMaxM2Config(HFConfig, kw_only=True):
    """MiniMax M2's fields and defaults."""

    vocab_size: int = 200_064
    hidden_size: int = 3072
    intermediate_size: int = 1536
    num_hidden_layers: int = 62
    num_attention_heads: int = 48
    num_key_value_heads: int | None = 8
    head_dim: int | None = 128
    max_position_embeddings: int = 196_608
    rope_theta: float | None = 5_000_000.0
    eos_token_id: int | list[int] | None = 200_020
    rotary_dim: int | None = None
    """The older name of `partial_rotary_factor`, in dimensions of a head."""
    attn_type_list: list[int] | None = None
    """1 for each layer with softmax attention; MiniMax-Text-01, of the same type, has others."""
    num_experts_per_tok: int = 8
    num_local_experts: int = 256

    def check(self) -> None:
        """See `HFConfig.check`."""
        super().check()
        if other := {*(self.attn_type_list or ())} - {1}:
            raise UnsupportedModel.because("attn_type_list", min(other), ("1",))

    def stated_rope(self) -> dict[str, Any]:
        """See `HFConfig.stated_rope`."""
        stated = super().stated_rope()
        if self.rotary_dim and stated["partial_rotary_factor"] is None:
            stated["partial_rotary_factor"] = self.rotary_dim / self.head_size()
        return stated

    def own_fields(self) -> dict[str, Any]:
        """See `HFConfig.own_fields`."""
        each, width = self.num_experts_per_tok, self.intermediate_size
        moe = MoeSpec(self.num_local_experts, each, width, sigmoid=True, biased=True)
        return {"moe": moe, "qkv_bias": False, "o_bias": False}


FAMILY = Family(
    name="minimax_m2",
    architectures=("MiniMaxM2ForCausalLM",),
    config=MiniMaxM2Config,
    variants={"minimax": {}},  # of the first configs
    qk_norm="whole",
    experts=ExpertNames(
        *("block_sparse_moe.gate", "block_sparse_moe.experts.{}", "w1", "w3", "w2"),
        bias="block_sparse_moe.e_score_correction_bias",
    ),
    partly_rotated=True,
    predicts_more=True,
    gguf=GGUFFacts(("minimax-m2",), experts={"sigmoid": True}),
)
