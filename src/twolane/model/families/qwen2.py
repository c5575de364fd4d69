"""Qwen2 and Qwen2.5: biases of queries, keys and values, whatever the config says."""

from collections.abc import Iterable
from typing import Any

from twolane.model.families.family import Family, GGUFFacts, HFConfig


class Qwen2Config(HFConfig, kw_only=True):
    """Qwen2's defaults. Layers from `max_window_layers` on have a window, if it is switched on."""

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


FAMILY = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    config=Qwen2Config,
    gguf=GGUFFacts("qwen2"),
    fixtures={
        "qwen2": {},
        "qwen2-sliding": {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2},
    },
)
