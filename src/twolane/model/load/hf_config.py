"""The fields of a `config.json` that are read, with the defaults of each model family."""

from typing import Any

import msgspec

from twolane.model.spec import Family


class DualChunkConfig(msgspec.Struct):
    """Attention of Qwen2.5-1M, which is not built: positions are compared within chunks."""

    chunk_size: int = 8192
    local_size: int = 1024


class HFConfig(msgspec.Struct, kw_only=True):
    """The fields that are read of a `config.json`.

    Fields that are not there have the defaults of the family's class in `transformers`. That is not
    asked: its import takes longer than all else that starts an engine, PyTorch's included.
    """

    vocab_size: int = 32_000
    hidden_size: int = 4096
    intermediate_size: int = 11_008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    is_causal: bool | None = True
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_token_id: int | list[int] | None = 2
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    """The older name of `rope_parameters`, without theta."""
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    original_max_position_embeddings: int | None = None
    dual_chunk_attention_config: DualChunkConfig | None = None

    def head_size(self) -> int:
        """Return the numbers of one attention head.

        Raises:
            ValueError: the config does not say it, and the hidden state has no equal parts.
        """
        if self.head_dim:
            return self.head_dim
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"config.json: hidden_size {self.hidden_size} is no multiple of "
                f"num_attention_heads {self.num_attention_heads}, and there is no head_dim"
            )
        return self.hidden_size // self.num_attention_heads


class MistralConfig(HFConfig, kw_only=True):
    """Mistral's defaults."""

    intermediate_size: int = 14_336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131_072


class Qwen2Config(HFConfig, kw_only=True):
    """Qwen2's defaults."""

    vocab_size: int = 151_936
    intermediate_size: int = 22_016
    num_key_value_heads: int | None = 32
    max_position_embeddings: int = 32_768
    eos_token_id: int | list[int] | None = None


class Qwen3Config(Qwen2Config, kw_only=True):
    """Qwen3's defaults."""

    head_dim: int | None = 128


class Qwen3MoeConfig(HFConfig, kw_only=True):
    """Qwen3 with experts: its fields and defaults."""

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
    mlp_only_layers: list[int] = []


class MixtralConfig(HFConfig, kw_only=True):
    """Mixtral: its fields and defaults."""

    intermediate_size: int = 14_336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131_072
    rms_norm_eps: float = 1e-5
    rope_theta: float | None = 1_000_000.0
    sliding_window: int | None = None
    num_local_experts: int = 8
    num_experts_per_tok: int = 2


class Phi3Config(HFConfig, kw_only=True):
    """Phi-3's defaults."""

    vocab_size: int = 32_064
    hidden_size: int = 3072
    intermediate_size: int = 8192
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    sliding_window: int | None = None
    original_max_position_embeddings: int | None = 4096
    eos_token_id: int | list[int] | None = 32_000


class GraniteConfig(HFConfig, kw_only=True):
    """Granite: its factors and defaults."""

    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0


class SmolLM3Config(HFConfig, kw_only=True):
    """SmolLM3: its fields and defaults."""

    vocab_size: int = 128_256
    hidden_size: int = 2048
    num_hidden_layers: int = 36
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 4
    max_position_embeddings: int = 32_768
    tie_word_embeddings: bool = True
    eos_token_id: int | list[int] | None = 128_001
    rope_theta: float | None = 2_000_000.0
    sliding_window: int | None = None
    no_rope_layers: list[int] | None = None
    """0 for each layer whose queries and keys are not rotated."""
    no_rope_layer_interval: int = 4


class Olmo2Config(HFConfig, kw_only=True):
    """OLMo 2's defaults."""

    vocab_size: int = 50_304
    rms_norm_eps: float = 1e-5
    eos_token_id: int | list[int] | None = 50_279


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


CONFIGS: dict[Family, type[HFConfig]] = {
    "llama": HFConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
    "mixtral": MixtralConfig,
    "phi3": Phi3Config,
    "granite": GraniteConfig,
    "smollm3": SmolLM3Config,
    "olmo2": Olmo2Config,
    "glm": GlmConfig,
    "glm4": GlmConfig,
}
"""Classes of the fields that are read of each family's `config.json`."""
