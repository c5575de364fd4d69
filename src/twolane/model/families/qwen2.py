"""Qwen2 and Qwen2.5: biases of queries, keys and values, whatever the config says."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from twolane.model.families.family import ROPE_TYPES, Family, GGUFFacts, HFConfig
from twolane.model.spec import RopeType


class Qwen2Config(HFConfig, kw_only=True):
    """Qwen2's defaults. Layers from `max_window_layers` on have a window, if it is switched on."""

    rope_types: ClassVar[Mapping[str, RopeType]] = {**ROPE_TYPES, "mrope": "default"}
    """Rotation by time, height and width ("mrope") is the usual one for tokens of text."""

    vocab_size: int = 151_936
    intermediate_size: int = 22_016
    num_key_value_heads: int | None = 32
    max_position_embeddings: int = 32_768
    eos_token_id: int | list[int] | None = None

    def sliding_layers(self) -> Iterable[int]:
        """See `HFConfig.sliding_layers`."""
        upper = range(self.max_window_layers, self.num_hidden_layers)
        return self.typed_layers(otherwise=upper) if self.use_sliding_window else ()

    def own_fields(self) -> dict[str, Any]:
        """See `HFConfig.own_fields`."""
        return {"qkv_bias": True, "o_bias": False}


_QWEN2_VL = {
    **{"vocab_size": 152_064, "hidden_size": 8192, "intermediate_size": 29_568},
    **{"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8},
    **{"max_window_layers": 80, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0},
    "eos_token_id": 151_645,
}

FAMILY = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    vision={
        "Qwen2VLForConditionalGeneration": "qwen2_vl",
        "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    },
    config=Qwen2Config,
    variants={"qwen2_vl_text": _QWEN2_VL, "qwen2_5_vl_text": _QWEN2_VL},
    gguf=GGUFFacts(("qwen2", "qwen2vl")),
)
