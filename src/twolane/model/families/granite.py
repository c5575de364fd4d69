"""Granite 3 (dense): factors of embeddings, scores, blocks and logits."""

from collections.abc import Mapping
from typing import Any

from twolane.model.families.family import Family, GGUFFacts, HFConfig, Key


class GraniteConfig(HFConfig, kw_only=True):
    """Granite's factors and defaults."""

    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0

    def own_fields(self) -> dict[str, Any]:
        """See `HFConfig.own_fields`."""
        for name in ("residual_multiplier", "logits_scaling", "attention_multiplier"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"config.json: {name} must be above 0, not {getattr(self, name)}")
        return {
            "attention_scale": self.attention_multiplier,
            "embedding_scale": self.embedding_multiplier,
            "residual_scale": self.residual_multiplier,
            "logit_scale": 1.0 / self.logits_scaling,
        }


def _gguf_factors(key: Key) -> Mapping[str, Any]:
    """Return the factors of a GGUF file; llama.cpp takes its usual scale of scores where the key is
    0."""
    names = ("embedding_scale", "residual_scale", "logit_scale")
    embedding, residual, logit = (key(name, 1.0) for name in names)
    for name, factor in (("residual_scale", residual), ("logit_scale", logit)):
        if not factor > 0.0:
            raise ValueError(f"granite.{name} must be above 0, not {factor}")
    scores = key("attention.scale", 0.0)
    return {
        "attention_scale": scores if scores > 0.0 else None,
        "embedding_scale": embedding,
        "residual_scale": residual,
        "logit_scale": 1.0 / logit,
    }


FAMILY = Family(
    name="granite",
    architectures=("GraniteForCausalLM",),
    config=GraniteConfig,
    gguf=GGUFFacts(("granite",), permuted=True, factors=_gguf_factors),
)
