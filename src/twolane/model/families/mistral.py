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
)
