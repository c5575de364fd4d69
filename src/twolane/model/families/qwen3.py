"""Qwen3: Qwen2 with norms of each head in the place of biases."""

from typing import Any

from twolane.model.families.family import Family, GGUFFacts
from twolane.model.families.qwen2 import Qwen2Config


class Qwen3Config(Qwen2Config, kw_only=True):
    """Qwen3's defaults."""

    head_dim: int | None = 128

    def own_fields(self) -> dict[str, Any]:
        """See `HFConfig.own_fields`."""
        return {}


_QWEN3_VL = {"max_position_embeddings": 128_000, "rope_theta": 500_000.0}

FAMILY = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    vision={"Qwen3VLForConditionalGeneration": "qwen3_vl"},
    config=Qwen3Config,
    variants={"qwen3_vl_text": _QWEN3_VL},
    qk_norm="head",
    gguf=GGUFFacts(("qwen3", "qwen3vl")),
)
