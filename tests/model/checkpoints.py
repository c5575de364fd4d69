"""Tiny random checkpoints of every family, as `transformers` writes them."""

import copy
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from twolane.model.decoder import Decoder
from twolane.model.families import registry
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
    "pad_token_id": 0,
}
FINAL_NORMS = tuple(
    f"model.{name}.weight" for name in ("norm", "language_model.norm", "embedding_norm")
)


def load_decoder(source: ModelSource, **options: Any) -> Decoder:
    """The model for the CPU; for options see `load_weights`."""
    return Decoder(*load_weights(source, **options))


TINY_CONFIGS: dict[str, dict[str, dict[str, Any]]] = json.loads(
    Path(__file__).with_name("tiny_configs.json").read_text()
)
"""Fields of tiny configs of every family: its own, and options that change what is computed."""
_FIXTURES: dict[str, dict[str, Any]] = {
    name: {"model_type": family, **fields}
    for family in registry.FAMILIES
    for name, fields in TINY_CONFIGS[family].items()
}
FAMILIES = tuple(_FIXTURES)
EVERY_KIND = (
    *("qwen2-sliding", "gpt-oss", "gemma4-inputs", "gemma4-moe", "qwen3-moe", "qwen3.5-moe"),
    *("laguna", "lfm2", "glm4-moe", "qwen2-moe", "hunyuan", "muse-glimmer", "olmo2", "smollm3"),
)
"""Families that have every kind of layer (`tests/parity/test_tiny.py` says so)."""
BY_KIND = [
    pytest.param(family, marks=() if family in EVERY_KIND else pytest.mark.full)
    for family in FAMILIES
]
"""All families, of which the short form has each kind of layer."""
HYBRIDS = ("qwen3-next", "qwen3.5", "qwen3.5-moe", "lfm2", "lfm2-moe")
"""Those with layers that keep a state."""


def config_of(
    family: str, layers: int = LAYERS, sizes: Mapping[str, Any] | None = None
) -> PreTrainedConfig:
    """The config of one of `FAMILIES`, with values that are not the usual ones in `sizes`."""
    fields, tiny = copy.deepcopy(_FIXTURES[family]), {**TINY, "num_hidden_layers": layers}
    if (text := fields.get("text_config")) is None:
        return AutoConfig.for_model(**{**tiny, **fields, **(sizes or {})})
    text = {"model_type": f"{fields['model_type']}_text", **tiny, **text, **(sizes or {})}
    return AutoConfig.for_model(**{**fields, "text_config": text})


def make_checkpoint(
    family: str,
    path: Path,
    seed: int = 0,
    *,
    shards: int = 1,
    layers: int = LAYERS,
    sizes: Mapping[str, Any] | None = None,
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
    model = random_model(config_of(family, layers, sizes), seed)
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    model.save_pretrained(path, max_shard_size=size // shards + 1)
    return path


def random_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model with weights as in `make_checkpoint`, float32."""
    torch.manual_seed(seed)
    model = _auto_of(config).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            tied = getattr(model.config, "tie_word_embeddings", False)
            _initialise(name, parameter, tied)
            if "gemma" in config.model_type:
                _for_gemma(name, parameter, fourth="gemma4" in config.model_type)
            if config.model_type.startswith(("qwen3_5", "qwen3_next", "muse")):
                _for_hybrid(name, parameter, bare=config.model_type.startswith("muse"))
        for name, buffer in model.named_buffers():
            if name.endswith(("correction_bias", "expert_bias")):
                buffer.normal_(0.0, 0.3)
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.7, 1.2)
    return model


def _for_gemma(name: str, parameter: torch.Tensor, *, fourth: bool) -> None:
    """Undo that the model multiplies embeddings with the root of their size, and that Gemma 3 adds
    1 to norms, and that Gemma 4 divides no scores by the root of the heads' size."""
    scale = float(parameter.shape[-1]) ** 0.5
    if name.endswith("embed_tokens.weight"):
        parameter /= scale
    if name in FINAL_NORMS:
        parameter *= scale
    if fourth and name.endswith("q_norm.weight"):
        parameter /= scale
    if not fourth and name.endswith("norm.weight"):
        parameter -= 1.0


def _for_hybrid(name: str, parameter: torch.Tensor, *, bare: bool) -> None:
    """Undo that the model adds 1 to norms; and states outlast some tens of tokens."""
    if name.endswith("norm.weight") and ".linear_attn." not in name:
        parameter -= 1.0
    if name in FINAL_NORMS and bare:  # of Muse, the only norm with whole weights
        parameter += 1.0
    if name.endswith("A_log"):
        parameter.uniform_(-5.0, 0.0)


def _auto_of(config: PreTrainedConfig) -> type[AutoModelForCausalLM | AutoModelForImageTextToText]:
    reads_images = hasattr(config, "vision_config")
    return AutoModelForImageTextToText if reads_images else AutoModelForCausalLM


def _initialise(name: str, parameter: torch.Tensor, tied: bool) -> None:
    """Sharp attention that outweighs the token's own embedding, and far apart logits."""
    if name in FINAL_NORMS:
        parameter.uniform_(*((4.0, 12.0) if tied else (0.5, 1.5)))
    elif name.endswith(("q_norm.weight", "k_norm.weight", "query_layernorm.weight")):
        parameter.uniform_(0.7, 1.9)
    elif name.endswith(("norm.weight", "norm_1.weight", "norm_2.weight", "_scale")):
        parameter.uniform_(0.5, 1.5)
    elif name.endswith("router.scale"):  # the model divides it by the root of its size
        parameter.uniform_(4.0, 12.0)
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
    return (
        _auto_of(config)
        .from_pretrained(path, config=config, dtype=torch.float32, attn_implementation="eager")
        .eval()
    )


def gguf_reference(path: Path) -> PreTrainedModel:
    """A GGUF file of a Llama in `transformers`, float32. Of itself it reads the file twice, by
    views of a file that is mapped, and lists the tensors' names again for each module: three
    quarters of its time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "memmap", lambda path, **_: np.fromfile(path, np.uint8))
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        )
    return model.eval()
