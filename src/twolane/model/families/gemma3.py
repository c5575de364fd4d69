"""Gemma 3: norms before and after each block, GeGLU, and windows in five of six layers."""

import math
from collections.abc import Iterable
from typing import Any, ClassVar

from twolane.model.families.family import ALL_NORMS, Family, GGUFFacts, HFConfig, Key
from twolane.model.spec import UnsupportedModel


class Gemma3Config(HFConfig, kw_only=True):
    """Gemma 3's fields and defaults."""

    ropes_by_type: ClassVar[bool] = True

    vocab_size: int = 262_208
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4
    head_dim: int | None = 256
    hidden_activation: str = "gelu_pytorch_tanh"
    max_position_embeddings: int = 131_072
    tie_word_embeddings: bool = True
    eos_token_id: int | list[int] | None = 1
    rope_theta: float | None = 1_000_000.0
    rope_local_base_freq: float | None = None
    """The base of the rotation of layers with a window, in older configs."""
    query_pre_attn_scalar: float = 256.0
    sliding_window_pattern: int = 6
    """Each of this many layers has no window, where `layer_types` does not say it."""
    final_logit_softcapping: float | None = None
    attn_logit_softcapping: float | None = None
    use_bidirectional_attention: bool | None = False

    def check(self) -> None:
        """See `HFConfig.check`."""
        super().check()
        for name in (
            *("final_logit_softcapping", "attn_logit_softcapping"),
            "use_bidirectional_attention",
        ):
            if value := getattr(self, name):
                raise UnsupportedModel.because(name, value, ("none",))
        if self.sliding_window_pattern < 1 or not self.query_pre_attn_scalar > 0.0:
            names = "sliding_window_pattern and query_pre_attn_scalar"
            raise ValueError(f"config.json: {names} must be above 0")

    def sliding_layers(self) -> Iterable[int]:
        """See `HFConfig.sliding_layers`."""
        return self.typed_layers(otherwise=self.all_but_each(self.sliding_window_pattern))

    def sliding_rope(self) -> dict[str, Any] | None:
        """See `HFConfig.sliding_rope`."""
        plain = {"rope_theta": self.rope_local_base_freq or 10_000.0}
        return {**plain, **(super().sliding_rope() or {})}

    def own_fields(self) -> dict[str, Any]:
        """See `HFConfig.own_fields`."""
        return {
            "activation": self.hidden_activation,
            "attention_scale": self.query_pre_attn_scalar**-0.5,
            "embedding_scale": math.sqrt(self.hidden_size),
        }


def _gguf_factors(key: Key) -> dict[str, Any]:
    """Return what llama.cpp has in its code; the model of 62 layers is that of 27B."""
    hidden, heads = key("embedding_length", 0.0), key("attention.head_count", 1.0)
    divisor = hidden / heads if key("block_count", 0.0) == 62 else key("attention.key_length", 256)
    return {
        "activation": "gelu_pytorch_tanh",
        "attention_scale": divisor**-0.5,
        "embedding_scale": math.sqrt(hidden),
    }


FAMILY = Family(
    name="gemma3_text",
    architectures=("Gemma3ForCausalLM",),
    vision={"Gemma3ForConditionalGeneration": "gemma3"},
    config=Gemma3Config,
    norms=ALL_NORMS,
    norms_less_1="norm.weight",
    qk_norm="head",
    gguf=GGUFFacts(
        ("gemma3",), full_each=6, sliding_base=lambda rope: 10_000.0, factors=_gguf_factors
    ),
)
