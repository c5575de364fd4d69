"""EXAONE 4: norms of outputs and of each head; the larger model mixes windows with full attention.

Where some layers have a window, the others are not rotated.
"""

from collections.abc import Iterable
from typing import Any

from twolane.model.families.family import POST_NORMS, Family, GGUFFacts, HFConfig


class Exaone4Config(HFConfig, kw_only=True):
    """EXAONE 4's fields and defaults."""

    vocab_size: int = 102_400
    intermediate_size: int = 16_384
    num_key_value_heads: int | None = 32
    rms_norm_eps: float = 1e-5
    sliding_window_pattern: int | str | None = 4
    """Each of this many layers has no window. A text repeats what `layer_types` says."""

    def sliding_layers(self) -> Iterable[int]:
        """See `HFConfig.sliding_layers`."""
        pattern = self.sliding_window_pattern
        if self.layer_types is not None:
            return self.typed_layers(otherwise=())
        if not isinstance(pattern, int) or pattern < 1:
            problem = f"must be a number above 0 without layer_types, not {pattern!r}"
            raise ValueError(f"config.json: sliding_window_pattern {problem}")
        return self.all_but_each(pattern)

    def unrotated_layers(self) -> Iterable[int]:
        """See `HFConfig.unrotated_layers`."""
        layers = range(self.num_hidden_layers)
        return {*layers} - {*self.sliding_layers()} if self.sliding_window else ()

    def own_fields(self) -> dict[str, Any]:
        """See `HFConfig.own_fields`."""
        return {"qkv_bias": False, "o_bias": False, "mlp_bias": False}


FAMILY = Family(
    name="exaone4",
    architectures=("Exaone4ForCausalLM",),
    config=Exaone4Config,
    norms=POST_NORMS,
    qk_norm="head",
    gguf=GGUFFacts(("exaone4",), full_each=4, rotates_full=False),
)
