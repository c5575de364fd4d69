"""Hunyuan with experts and one that all tokens share."""

from typing import Any

from twolane.model.families.family import Family, GGUFFacts
from twolane.model.families.hunyuan_v1_dense import RENAMED, HunyuanConfig, gguf_factors
from twolane.model.spec import MoeSpec, UnsupportedModel


class HunyuanMoeConfig(HunyuanConfig, kw_only=True):
    """Hunyuan's fields and defaults with experts; some may be a list with one value a layer."""

    num_experts: int | list[int] = 1
    moe_topk: int | list[int] = 1
    num_shared_expert: int | list[int] = 1
    moe_intermediate_size: int | list[int] | None = None
    use_cla: bool = False

    def check(self) -> None:
        """See `HFConfig.check`."""
        super().check()
        width = self.intermediate_size
        if self.use_cla:
            raise UnsupportedModel.because("use_cla", True, ("False",))
        for name, works in (("num_shared_expert", 1), ("moe_intermediate_size", width)):
            value = getattr(self, name)
            if value is not None and self.one_for_all(name) != works:
                raise UnsupportedModel.because(name, value, (str(works),))

    def one_for_all(self, name: str) -> int:
        """Return the value of a field that is the same for all layers.

        Raises:
            UnsupportedModel: it is not.
        """
        value = getattr(self, name)
        values = {*value} if isinstance(value, list) else {value}
        if len(values) != 1:
            raise UnsupportedModel.because(name, value, ("one value for all layers",))
        return int(values.pop())

    def own_fields(self) -> dict[str, Any]:
        """See `HFConfig.own_fields`."""
        experts, each = self.one_for_all("num_experts"), self.one_for_all("moe_topk")
        moe = MoeSpec(experts, each, self.intermediate_size, shared=1)
        return {**super().own_fields(), "moe": moe}


FAMILY = Family(
    name="hunyuan_v1_moe",
    architectures=("HunYuanMoEV1ForCausalLM",),
    config=HunyuanMoeConfig,
    renamed={**RENAMED, ".mlp.gate.wg.": ".mlp.gate.", ".mlp.shared_mlp.": ".mlp.shared_experts."},
    qk_norm="head",
    gguf=GGUFFacts(("hunyuan-moe",), experts={}, factors=gguf_factors),
)
