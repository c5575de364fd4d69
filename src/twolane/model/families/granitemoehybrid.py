"""Granite 4 (dense): Granite 3 in the form of the hybrid models, without their Mamba and experts.

llama.cpp writes these models as `granite`, so that GGUF files of them are read as Granite 3.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

from twolane.model.families.family import JOINED_GATE_UP, Family
from twolane.model.families.granite import GraniteConfig
from twolane.model.spec import UnsupportedModel


class GraniteMoeHybridConfig(GraniteConfig, kw_only=True):
    """Granite 4's fields and defaults. Without `layer_types`, all layers are Mamba's."""

    known_layer_types: ClassVar[tuple[str, ...]] = ("attention", "full_attention")

    num_local_experts: int | None = 8
    shared_intermediate_size: int = 1024
    """Width of the MLP, which stands beside experts where there are any."""
    position_embedding_type: str | None = None
    """Queries and keys are rotated if it is "rope"."""

    def check(self) -> None:
        """See `HFConfig.check`."""
        super().check()
        if self.layer_types is None:
            raise UnsupportedModel.because("layer_types", "mamba", self.known_layer_types)
        self.typed_layers(otherwise=())
        if self.num_local_experts:
            raise UnsupportedModel.because("num_local_experts", self.num_local_experts, ("0",))
        if self.position_embedding_type not in ("rope", "nope", None):
            kind = self.position_embedding_type
            raise UnsupportedModel.because("position_embedding_type", kind, ("rope", "nope"))

    def unrotated_layers(self) -> Iterable[int]:
        """See `HFConfig.unrotated_layers`."""
        return () if self.position_embedding_type == "rope" else range(self.num_hidden_layers)

    def own_fields(self) -> dict[str, Any]:
        """See `HFConfig.own_fields`."""
        size = self.shared_intermediate_size
        return {**super().own_fields(), "intermediate_size": size, "mlp_bias": False}


FAMILY = Family(
    name="granitemoehybrid",
    architectures=("GraniteMoeHybridForCausalLM",),
    config=GraniteMoeHybridConfig,
    renamed={
        ".shared_mlp.input_linear.": ".mlp.gate_up_proj.",
        ".shared_mlp.output_linear.": ".mlp.down_proj.",
    },
    joined=(JOINED_GATE_UP,),
)
