"""Olmo 3: OLMo 2 with windows in most layers, whose rotation is not stretched."""

from collections.abc import Iterable
from typing import Any, ClassVar

from twolane.model.families.family import POST_NORMS, Family
from twolane.model.families.olmo2 import Olmo2Config


class Olmo3Config(Olmo2Config, kw_only=True):
    """Olmo 3's defaults."""

    ropes_by_type: ClassVar[bool] = True

    rope_theta: float | None = 500_000.0

    def sliding_layers(self) -> Iterable[int]:
        """See `HFConfig.sliding_layers`."""
        return self.typed_layers(otherwise=self.all_but_each(4))

    def sliding_rope(self) -> dict[str, Any] | None:
        """See `HFConfig.sliding_rope`."""
        plain = {"rope_theta": self.rope_theta} if self.rope_scaling else None
        return super().sliding_rope() or plain


FAMILY = Family(
    name="olmo3",
    architectures=("Olmo3ForCausalLM",),
    config=Olmo3Config,
    norms=POST_NORMS,
    qk_norm="whole",
)
