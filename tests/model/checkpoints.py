"""Tiny random checkpoints of every family, as `transformers` writes them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Glm4Config,
    GlmConfig,
    GraniteConfig,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from twolane.model.decoder import Decoder
from twolane.model.load.hub import ModelSource
from twolane.model.load.weights import load_weights

VOCAB = 256
POSITIONS = 1024
LAYERS = 4
"""Of a model that says nothing else."""

TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "eos_token_id": 2,
    "bos_token_id": 1,
}

_MOE: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}

_LLAMA31_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
}
_MINISTRAL_ROPE = {
    **{**YARN_ROPE, "factor": 64.0, "original_max_position_embeddings": 16},
    **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 1,
    "attention_factor": 1.1,
}
"""Phi-4-mini's; every sequence whose rotation can be seen exceeds the original positions."""
_GRANITE: dict[str, Any] = {
    "embedding_multiplier": 2.5,
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.7,
    "logits_scaling": 0.4,
}


def load_decoder(source: ModelSource, **options: Any) -> Decoder:
    """The model for the CPU; for options see `load_weights`."""
    return Decoder(*load_weights(source, **options))


def _configs(
    layers: int = LAYERS, sizes: Mapping[str, int] | None = None
) -> dict[str, PreTrainedConfig]:
    tiny = {**TINY, "num_hidden_layers": layers, **(sizes or {})}
    mha = {**tiny, "num_key_value_heads": 4}
    linear = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
    pairs = tiny["hidden_size"] // tiny["num_attention_heads"] * 3 // 8
    long = [1.0 + 0.5 * i for i in range(pairs)]
    longrope = {**_LONGROPE, "short_factor": [1.0] * pairs, "long_factor": long}
    return {
        "llama2": LlamaConfig(**mha),
        "llama31": LlamaConfig(**tiny, rope_parameters=_LLAMA31_ROPE, tie_word_embeddings=True),
        "llama-bias": LlamaConfig(
            **tiny, attention_bias=True, mlp_bias=True, rope_parameters=linear
        ),
        "mistral": MistralConfig(**tiny, sliding_window=24),
        "qwen2": Qwen2Config(**tiny),
        "qwen2-sliding": Qwen2Config(
            **tiny, use_sliding_window=True, sliding_window=20, max_window_layers=2
        ),
        "qwen3": Qwen3Config(**tiny, head_dim=32, tie_word_embeddings=True),
        "qwen3-yarn": Qwen3Config(**tiny, head_dim=32, rope_parameters=YARN_ROPE),
        "ministral3": Ministral3Config(
            **tiny, head_dim=16, pad_token_id=0, rope_parameters=_MINISTRAL_ROPE
        ),
        "qwen3-moe": Qwen3MoeConfig(**tiny, **_MOE, mlp_only_layers=[1]),
        "phi3": Phi3Config(**tiny, pad_token_id=0),
        "mixtral": MixtralConfig(**tiny, num_local_experts=4, num_experts_per_tok=2),
        "phi4-mini": Phi3Config(
            **tiny,
            pad_token_id=0,
            original_max_position_embeddings=1,
            rope_parameters=longrope,
        ),
        "granite": GraniteConfig(**tiny, **_GRANITE),
        "smollm3": SmolLM3Config(**tiny, pad_token_id=0, no_rope_layer_interval=2),
        "olmo2": Olmo2Config(**tiny),
        "glm": GlmConfig(**tiny, head_dim=16, pad_token_id=0),
        "glm4": Glm4Config(**tiny, head_dim=16, pad_token_id=0, tie_word_embeddings=True),
    }


FAMILIES = tuple(_configs())
"""Every family, and the options that change what is computed."""


def make_checkpoint(
    family: str,
    path: Path,
    seed: int = 0,
    *,
    shards: int = 1,
    layers: int = LAYERS,
    sizes: Mapping[str, int] | None = None,
) -> Path:
    """Write a random checkpoint of one of `FAMILIES` to `path` and return it.

    Weights are scaled so that every layer matters and the two best logits lie far apart: greedy
    tokens can be compared where the reference is sure of them.

    Args:
        family: one of `FAMILIES`.
        path: directory to create.
        seed: of the weights.
        shards: files to spread the weights over.
        layers: how many the model has.
        sizes: values of its config that are not the usual ones.
    """
    model = random_model(_configs(layers, sizes)[family], seed)
    size = sum(p.numel() * 4 for p in model.parameters())
    model.save_pretrained(path, max_shard_size=size // shards + 1)
    return path


def random_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model with weights as in `make_checkpoint`, float32."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _initialise(name, parameter, model.config.tie_word_embeddings)
    return model


def _initialise(name: str, parameter: torch.Tensor, tied: bool) -> None:
    """Sharp attention that outweighs the token's own embedding, and far apart logits."""
    if name == "model.norm.weight":
        parameter.uniform_(*((4.0, 12.0) if tied else (0.5, 1.5)))
    elif name.endswith(("q_norm.weight", "k_norm.weight")):
        parameter.uniform_(0.7, 1.9)
    elif name.endswith("norm.weight"):
        parameter.uniform_(0.5, 1.5)
    elif name.endswith("bias"):
        parameter.normal_(0.0, 0.3)
    elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
        # A tied embedding that outweighs the layers would predict the token it was given.
        parameter.normal_(0.0, 0.15 if tied else 1.0)
    else:
        gain = 1.5 if ".self_attn." in name else 1.0
        parameter.normal_(0.0, gain * parameter.shape[-1] ** -0.5)


def reference(path: Path) -> PreTrainedModel:
    """The checkpoint in `transformers`, float32, eager attention."""
    config = AutoConfig.from_pretrained(path)
    return AutoModelForCausalLM.from_pretrained(
        path, config=config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
