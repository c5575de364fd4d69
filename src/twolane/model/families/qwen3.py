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

_QWEN3_VL = {"max_position_embeddings": 128_000, "rope_theta": 500_000.0}
TINY_IMAGES = {
    **{"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4},
    **{"out_hidden_size": 64, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
}
"""What reads images in tiny checkpoints; it is not loaded."""
_MROPE = {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True}

FAMILY = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    vision={"Qwen3VLForConditionalGeneration": "qwen3_vl"},
    config=Qwen3Config,
    variants={"qwen3_vl_text": _QWEN3_VL},
    qk_norm="head",
    gguf=GGUFFacts(("qwen3", "qwen3vl")),
    fixtures={
        "qwen3": {"head_dim": 32, "tie_word_embeddings": True},
        "qwen3-vl": {
            **{"model_type": "qwen3_vl", "vision_config": TINY_IMAGES},
            "text_config": {"head_dim": 32, "rope_parameters": _MROPE},
        },
        "qwen3-yarn": {"head_dim": 32, "rope_parameters": _YARN_ROPE},
    },
)
