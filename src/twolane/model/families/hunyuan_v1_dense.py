"""Hunyuan: norms of each head after its rotation, whose base may be stretched."""

from typing import Any

from twolane.model.families.family import Family, GGUFFacts, HFConfig, Key


class HunyuanConfig(HFConfig, kw_only=True):
    """Hunyuan's fields and defaults."""

    vocab_size: int = 290_943
    rms_norm_eps: float = 1e-5
    attention_head_dim: int | None = None
    """An older name of `head_dim`."""

    def head_size(self) -> int:
        """See `HFConfig.head_size`."""
        return self.head_dim or self.attention_head_dim or super().head_size()

    def stated_rope(self) -> dict[str, Any]:
        """See `HFConfig.stated_rope`. A fixed `alpha` stretches the base alone."""
        stated = super().stated_rope()
        if not (alpha := float(stated.get("alpha") or 0.0)):
            return stated
        if alpha < 0.0:
            raise ValueError(f"config.json: rope_parameters: alpha must be above 0, not {alpha}")
        dim, theta = self.head_size(), float(stated["rope_theta"] or 10_000.0)
        return {"rope_type": "default", "rope_theta": theta * alpha ** (dim / (dim - 2))}

    def own_fields(self) -> dict[str, Any]:
        """See `HFConfig.own_fields`."""
        return {"norms_rotated": True}


def gguf_factors(key: Key) -> dict[str, Any]:
    """Return what is in llama.cpp's code alone; the base of the rotation is stretched already."""
    return {"norms_rotated": True}


RENAMED = {
    ".self_attn.query_layernorm.": ".self_attn.q_norm.",
    ".self_attn.key_layernorm.": ".self_attn.k_norm.",
}

FAMILY = Family(
    name="hunyuan_v1_dense",
    architectures=("HunYuanDenseV1ForCausalLM",),
    config=HunyuanConfig,
    renamed=RENAMED,
    qk_norm="head",
    gguf=GGUFFacts(("hunyuan-dense",), factors=gguf_factors),
)
