"""ERNIE 4.5 (dense): Llama with rotated dimensions as neighbours."""

from typing import Any

from twolane.model.families.family import Family, GGUFFacts, HFConfig


class Ernie45Config(HFConfig, kw_only=True):
    """ERNIE 4.5's fields and defaults."""

    vocab_size: int = 103_424
    hidden_size: int = 1024
    intermediate_size: int = 3072
    num_hidden_layers: int = 18
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 2
    head_dim: int | None = 128
    max_position_embeddings: int = 131_072
    rms_norm_eps: float = 1e-5
    rope_theta: float | None = 500_000.0
    tie_word_embeddings: bool = True
    use_bias: bool = False

    def own_fields(self) -> dict[str, Any]:
        """See `HFConfig.own_fields`."""
        return dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), self.use_bias)


FAMILY = Family(
    name="ernie4_5",
    architectures=("Ernie4_5ForCausalLM",),
    config=Ernie45Config,
    interleaved=True,
    gguf=GGUFFacts(("ernie4_5",)),
)
