"""LFM2 and LFM2.5: short convolutions in the place of attention in most layers."""

from typing import Any, ClassVar

from twolane.model.families.family import Family, GGUFFacts, HFConfig
from twolane.model.spec import FULL, LINEAR, LayerKind, ShortConvolution, UnsupportedModel


class Lfm2Config(HFConfig, kw_only=True):
    """LFM2's fields and defaults."""

    known_layer_types: ClassVar[tuple[str, ...]] = ("full_attention", "conv")

    vocab_size: int = 65_536
    hidden_size: int = 2560
    intermediate_size: int = 12_288
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 128_000
    norm_eps: float = 1e-5
    rope_theta: float | None = 1_000_000.0
    tie_word_embeddings: bool = True
    tie_embedding: bool | None = None
    """An older name of `tie_word_embeddings`."""
    conv_bias: bool = False
    conv_L_cache: int = 3
    block_ff_dim: int | None = None
    """An older name of `intermediate_size`."""
    block_multiple_of: int = 256
    block_ffn_dim_multiplier: float | None = 1.0
    block_auto_adjust_ff_dim: bool = True
    full_attn_idxs: list[int] | None = None
    """The layers with attention, where `layer_types` does not say it."""

    def check(self) -> None:
        """See `HFConfig.check`."""
        super().check()
        if self.conv_bias:
            raise UnsupportedModel.because("conv_bias", True, ("False",))
        self.check_above_0("block_multiple_of")

    def kinds(self) -> tuple[LayerKind, ...]:
        """See `HFConfig.kinds`."""
        layers = range(self.num_hidden_layers)
        attending = layers if self.full_attn_idxs is None else self.full_attn_idxs
        convolved = {*self.typed_layers({*layers} - {*attending}, "conv")}
        return tuple(LINEAR if i in convolved else FULL for i in layers) if convolved else ()

    def mlp_size(self) -> int:
        """Return the width of dense MLPs."""
        width = self.block_ff_dim or self.intermediate_size
        if not self.block_auto_adjust_ff_dim:
            return width
        width = int(2 * width / 3)
        if self.block_ffn_dim_multiplier is None:
            return width
        multiple = self.block_multiple_of
        return -(-int(self.block_ffn_dim_multiplier * width) // multiple) * multiple

    def own_fields(self) -> dict[str, Any]:
        """See `HFConfig.own_fields`."""
        convolution = ShortConvolution(self.hidden_size, self.conv_L_cache)
        tied = self.tie_word_embeddings if self.tie_embedding is None else self.tie_embedding
        return {
            "convolution": convolution if LINEAR in self.kinds() else None,
            "intermediate_size": self.mlp_size(),
            "norm_eps": self.norm_eps,
            "tie_embeddings": tied,
            "qkv_bias": False,
            "o_bias": False,
        }


NORMS: dict[Any, str] = {"input_norm": "operator_norm", "mlp_norm": "ffn_norm"}
RENAMED = {
    ".feed_forward.w1.": ".mlp.gate_proj.",
    ".feed_forward.w3.": ".mlp.up_proj.",
    ".feed_forward.w2.": ".mlp.down_proj.",
    ".feed_forward.": ".mlp.",
    ".self_attn.out_proj.": ".self_attn.o_proj.",
    ".self_attn.q_layernorm.": ".self_attn.q_norm.",
    ".self_attn.k_layernorm.": ".self_attn.k_norm.",
    ".conv.in_proj.": ".short_conv.in_proj.",
    ".conv.out_proj.": ".short_conv.out_proj.",
    ".conv.conv.": ".short_conv.conv.",
    "model.embedding_norm.": "model.norm.",
}
"""What checkpoints call the modules that most families have, and the convolution."""

FAMILY = Family(
    name="lfm2",
    architectures=("Lfm2ForCausalLM",),
    config=Lfm2Config,
    renamed=RENAMED,
    norms=NORMS,
    qk_norm="head",
    gguf=GGUFFacts(("lfm2",)),
)
