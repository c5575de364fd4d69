"""Mistral, Ministral and the text model of Ministral 3; GGUF files call the first two Llama."""

from collections.abc import Iterable

from twolane.model.families.family import Family, GGUFFacts, HFConfig


class MistralConfig(HFConfig, kw_only=True):
    """Mistral's defaults. All layers have a window, unless `layer_types` says which."""

    intermediate_size: int = 14_336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131_072

    def sliding_layers(self) -> Iterable[int]:
        """See `HFConfig.sliding_layers`."""
        return self.typed_layers(otherwise=range(self.num_hidden_layers))


_YARN_ROPE = {
    **{"rope_type": "yarn", "rope_theta": 10_000.0, "original_max_position_embeddings": 16},
    **{"factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
}
_MINISTRAL_3 = {"model_type": "ministral3", "head_dim": 16, "rope_parameters": _YARN_ROPE}

_TINY_IMAGES = {
    **{"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "head_dim": 8},
    **{"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 4},
}
_SMALL_3 = {"model_type": "mistral", "sliding_window": None, "head_dim": 16}

FAMILY = Family(
    name="mistral",
    architectures=("MistralForCausalLM", "MinistralForCausalLM", "Ministral3ForCausalLM"),
    vision={"Mistral3ForConditionalGeneration": "mistral3"},
    config=MistralConfig,
    variants={
        "ministral": {},
        "ministral3": {"sliding_window": None, "head_dim": 128, "vocab_size": 131_072},
    },
    gguf=GGUFFacts(("mistral3",), permuted=True),
    fixtures={
        "mistral": {"sliding_window": 24},
        "ministral3": _MINISTRAL_3,
        "mistral-small-3": {
            **{"model_type": "mistral3", "vision_config": _TINY_IMAGES},
            **{"text_config": _SMALL_3, "tie_word_embeddings": False},
        },
        "ministral3-published": {
            **{"model_type": "mistral3", "vision_config": _TINY_IMAGES},
            **{"text_config": _MINISTRAL_3, "tie_word_embeddings": True},
        },
    },
)
