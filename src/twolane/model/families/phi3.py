"""Phi-3 and Phi-4: joined modules, and heads of which a part may be rotated."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from twolane.model.families.family import JOINED_GATE_UP, JOINED_QKV, Family, GGUFFacts, HFConfig
from twolane.model.spec import RopeType


class Phi3Config(HFConfig, kw_only=True):
    """Phi-3's defaults. All layers have a window, if there is one."""

    rope_types: ClassVar[Mapping[str, RopeType]] = {
        **{"default": "default", "longrope": "longrope"},
        **{"su": "longrope", "yarn": "longrope"},
    }

    vocab_size: int = 32_064
    hidden_size: int = 3072
    intermediate_size: int = 8192
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    sliding_window: int | None = None
    original_max_position_embeddings: int | None = 4096
    eos_token_id: int | list[int] | None = 32_000

    def sliding_layers(self) -> Iterable[int]:
        """See `HFConfig.sliding_layers`."""
        return range(self.num_hidden_layers)

    def own_fields(self) -> dict[str, Any]:
        """See `HFConfig.own_fields`."""
        return {"qkv_bias": False, "o_bias": False}


FAMILY = Family(
    name="phi3",
    architectures=("Phi3ForCausalLM",),
    config=Phi3Config,
    joined=(JOINED_QKV, JOINED_GATE_UP),
    partly_rotated=True,
    gguf=GGUFFacts(("phi3",)),
)
