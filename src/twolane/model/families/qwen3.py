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


_YARN_ROPE = {
    **{"rope_type": "yarn", "rope_theta": 10_000.0, "original_max_position_embeddings": 256},
    "factor": 4.0,
}

FAMILY = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    config=Qwen3Config,
    qk_norm="head",
    gguf=GGUFFacts("qwen3"),
    fixtures={
        "qwen3": {"head_dim": 32, "tie_word_embeddings": True},
        "qwen3-yarn": {"head_dim": 32, "rope_parameters": _YARN_ROPE},
    },
)
