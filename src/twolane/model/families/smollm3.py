"""SmolLM3: each fourth layer is not rotated."""

from collections.abc import Iterable

from twolane.model.families.family import Family, GGUFFacts, HFConfig


class SmolLM3Config(HFConfig, kw_only=True):
    """SmolLM3's fields and defaults. Layers that are not rotated have a window, if there is one."""

    vocab_size: int = 128_256
    hidden_size: int = 2048
    num_hidden_layers: int = 36
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 4
    max_position_embeddings: int = 32_768
    tie_word_embeddings: bool = True
    eos_token_id: int | list[int] | None = 128_001
    rope_theta: float | None = 2_000_000.0
    sliding_window: int | None = None
    no_rope_layers: list[int] | None = None
    """0 for each layer whose queries and keys are not rotated."""
    no_rope_layer_interval: int = 4

    def unrotated_layers(self) -> Iterable[int]:
        """See `HFConfig.unrotated_layers`."""
        layers, step = range(self.num_hidden_layers), self.no_rope_layer_interval
        stated = self.no_rope_layers
        if stated is None:
            self.check_above_0("no_rope_layer_interval")
            return layers[step - 1 :: step]
        if len(stated) < len(layers):
            problem = f"has {len(stated)} values for {len(layers)} layers"
            raise ValueError(f"config.json: no_rope_layers {problem}")
        return [i for i in layers if not stated[i]]

    def sliding_layers(self) -> Iterable[int]:
        """See `HFConfig.sliding_layers`."""
        switched = self.use_sliding_window or bool(self.layer_types)
        return self.typed_layers(otherwise=self.unrotated_layers()) if switched else ()


FAMILY = Family(
    name="smollm3",
    architectures=("SmolLM3ForCausalLM",),
    config=SmolLM3Config,
    gguf=GGUFFacts(("smollm3",), permuted=True, unrotated_each=4),
)
