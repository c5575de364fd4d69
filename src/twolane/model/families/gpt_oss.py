"""gpt-oss: experts in MXFP4, attention sinks, and windows in every other layer.

Experts and router have biases, and experts a SwiGLU of their own (`clamped_swiglu`). YaRN's ramp is
not rounded to whole dimensions.
"""

from collections.abc import Iterable
from typing import Any

from twolane.kernels.experts.rule import SWIGLU_ALPHA, SWIGLU_LIMIT
from twolane.model.families.family import ExpertNames, Family, GGUFFacts, HFConfig
from twolane.model.spec import MoeSpec, UnsupportedModel

_YARN = {
    **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0},
    **{"truncate": False, "original_max_position_embeddings": 4096},
}


class GptOssConfig(HFConfig, kw_only=True):
    """gpt-oss' fields and defaults."""

    vocab_size: int = 201_088
    hidden_size: int = 2880
    intermediate_size: int = 2880
    num_hidden_layers: int = 36
    num_attention_heads: int = 64
    num_key_value_heads: int | None = 8
    head_dim: int | None = 64
    max_position_embeddings: int = 131_072
    rms_norm_eps: float = 1e-5
    attention_bias: bool = True
    eos_token_id: int | list[int] | None = None
    sliding_window: int | None = 128
    rope_theta: float | None = 150_000.0
    num_local_experts: int = 128
    num_experts_per_tok: int = 4
    swiglu_alpha: float = SWIGLU_ALPHA
    swiglu_limit: float = SWIGLU_LIMIT

    def check(self) -> None:
        """See `HFConfig.check`."""
        super().check()
        for name, value, works in (
            ("hidden_act", self.hidden_act, "silu"),
            ("swiglu_alpha", self.swiglu_alpha, SWIGLU_ALPHA),
            ("swiglu_limit", self.swiglu_limit, SWIGLU_LIMIT),
        ):
            if value != works:
                raise UnsupportedModel.because(name, value, (str(works),))

    def sliding_layers(self) -> Iterable[int]:
        """See `HFConfig.sliding_layers`."""
        return self.typed_layers(otherwise=range(0, self.num_hidden_layers, 2))

    def stated_rope(self) -> dict[str, Any]:
        """See `HFConfig.stated_rope`."""
        stated = super().stated_rope()
        return stated if self.rope_parameters or self.rope_scaling else {**stated, **_YARN}

    def own_fields(self) -> dict[str, Any]:
        """See `HFConfig.own_fields`."""
        experts, each = self.num_local_experts, self.num_experts_per_tok
        moe = MoeSpec(experts, each, self.intermediate_size, biases=True)
        return {"moe": moe, "mlp_bias": False, **_ALIKE}


_ALIKE = {"sinks": True, "activation": "clamped_swiglu"}
"""Fields of `ModelSpec` that all models have alike."""


FAMILY = Family(
    name="gpt_oss",
    architectures=("GptOssForCausalLM",),
    config=GptOssConfig,
    experts=ExpertNames(router="mlp.router", in_turn=True),
    gguf=GGUFFacts(
        ("gpt-oss",), experts={}, full_each=2, truncates=False, factors=lambda _: _ALIKE
    ),
)
