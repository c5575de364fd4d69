"""Laguna: experts beside a shared one, gates of attention's output, more heads in some layers."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from twolane.model.families.family import Family, HFConfig
from twolane.model.spec import FULL, GateModule, Heads, LayerKind, MoeSpec, UnsupportedModel

_ROPES: Mapping[str, Mapping[str, Any]] = {
    "full_attention": {"rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
}
_GATINGS: Mapping[bool | str, bool] = {True: True, "per-head": True, "per-element": False}
"""Whether a head has one gate, by the values of `gating`."""


class LagunaConfig(HFConfig, kw_only=True):
    """Laguna's fields and defaults."""

    ropes_by_type: ClassVar[bool] = True

    vocab_size: int = 100_352
    hidden_size: int = 2048
    intermediate_size: int = 8192
    num_hidden_layers: int = 40
    num_attention_heads: int = 48
    num_key_value_heads: int | None = 8
    head_dim: int | None = 128
    max_position_embeddings: int = 131_072
    sliding_window: int | None = 512
    eos_token_id: int | list[int] | None = None
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    num_experts_per_tok: int = 8
    num_experts: int = 256
    gating: bool | str = True
    num_attention_heads_per_layer: list[int] | None = None
    mlp_layer_types: list[str] | None = None
    moe_routed_scaling_factor: float = 1.0
    moe_apply_router_weight_on_input: bool = False
    moe_router_logit_softcapping: float = 0.0

    def check(self) -> None:
        """See `HFConfig.check`."""
        super().check()
        added = "moe_apply_router_weight_on_input", "moe_router_logit_softcapping"
        for name in ("rope_scaling", *added):  # rotations are those of `rope_parameters` alone
            if value := getattr(self, name):
                raise UnsupportedModel.because(name, value, ("none",))
        if self.gating not in _GATINGS:
            raise UnsupportedModel.because("gating", self.gating, map(str, _GATINGS))
        for name in ("num_attention_heads_per_layer", "mlp_layer_types"):
            listed = getattr(self, name)
            if listed is not None and len(listed) != self.num_hidden_layers:
                problem = f"has {len(listed)} values for {self.num_hidden_layers} layers"
                raise ValueError(f"config.json: {name} {problem}")

    def sliding_layers(self) -> Iterable[int]:
        """See `HFConfig.sliding_layers`."""
        return self.typed_layers(otherwise=())

    def stated_rope(self) -> dict[str, Any]:
        """See `HFConfig.stated_rope`."""
        return super().stated_rope() if self.rope_parameters else dict(_ROPES["full_attention"])

    def sliding_rope(self) -> dict[str, Any] | None:
        """See `HFConfig.sliding_rope`."""
        stated = super().sliding_rope() if self.rope_parameters else None
        return dict(_ROPES["sliding_attention"]) if stated is None else stated

    def kinds(self) -> tuple[LayerKind, ...]:
        """See `HFConfig.kinds`."""
        kinds = super().kinds() or (FULL,) * self.num_hidden_layers
        counts = self.num_attention_heads_per_layer or [self.num_attention_heads] * len(kinds)
        keys, dim = self.num_key_value_heads or self.num_attention_heads, self.head_size()
        own = [
            None if count == self.num_attention_heads else Heads(count, keys, dim)
            for count in counts
        ]
        kinds = tuple(replace(kind, heads=heads) for kind, heads in zip(kinds, own, strict=True))
        return kinds if set(kinds) != {FULL} else ()

    def own_fields(self) -> dict[str, Any]:
        """See `HFConfig.own_fields`."""
        types = self.mlp_layer_types or ["dense", *["sparse"] * (self.num_hidden_layers - 1)]
        wide, width = self.shared_expert_intermediate_size, self.moe_intermediate_size
        if wide % max(width, 1):
            fits = f"multiples of moe_intermediate_size {width}"
            raise UnsupportedModel.because("width of the shared expert", wide, (fits,))
        moe = MoeSpec(
            self.num_experts,
            self.num_experts_per_tok,
            width,
            dense_layers=tuple(i for i, kind in enumerate(types) if kind == "dense"),
            sigmoid=True,
            biased=True,
            scale=self.moe_routed_scaling_factor,
            shared=wide // width,
        )
        return {"moe": moe, "gate": GateModule(softplus=True, each_head=_GATINGS[self.gating])}


FAMILY = Family(
    name="laguna",
    architectures=("LagunaForCausalLM",),
    config=LagunaConfig,
    renamed={
        ".mlp.experts.e_score_correction_bias": ".mlp.gate.e_score_correction_bias",
        ".mlp.shared_expert.": ".mlp.shared_experts.",
    },
    qk_norm="head",
    partly_rotated=True,
)
