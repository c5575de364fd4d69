"""GGUF files of Gemma 4 and gpt-oss, as llama.cpp's converter writes them, against the reference.

Keys and names are those of llama.cpp's converters of these families.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.quants import quantize
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.model.checkpoints import load_decoder, make_checkpoint, reference
from tests.model.passes import close, expected, in_chunks, prompt
from tests.model.test_gpt_oss import mxfp4
from twolane.model.families.family import text_name
from twolane.model.load.configs import facts_from_directory
from twolane.model.load.gguf import GGUFModel
from twolane.model.load.hub import resolve
from twolane.model.load.weights import load_weights
from twolane.model.spec import UnsupportedModel

F32, MXFP4 = GGMLQuantizationType.F32, GGMLQuantizationType.MXFP4
CHUNKS = [100, 1, 1, 30, *[1] * 18]


def write(
    file: Path,
    architecture: str,
    keys: Mapping[str, Any],
    tensors: Mapping[str, tuple[Tensor, GGMLQuantizationType]],
) -> None:
    """Write a file of these keys of its architecture and these tensors."""
    writer = GGUFWriter(file, architecture)
    for name, value in keys.items():
        match value:
            case list():
                writer.add_array(f"{architecture}.{name}", value)
            case int():
                writer.add_uint32(f"{architecture}.{name}", value)
            case float():
                writer.add_float32(f"{architecture}.{name}", value)
            case _:
                writer.add_string(f"{architecture}.{name}", value)
    writer.add_eos_token_id(2)
    for name, (values, kind) in tensors.items():
        writer.add_tensor(name, quantize(values.float().numpy(), kind), raw_dtype=kind)
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()


def keys_of(path: Path) -> dict[str, Any]:
    """The keys that files of all architectures have."""
    spec = facts_from_directory(path).spec
    return {
        "block_count": spec.layers,
        "context_length": 1024,
        "embedding_length": spec.hidden_size,
        "feed_forward_length": spec.intermediate_size,
        "attention.head_count": spec.heads,
        "attention.head_count_kv": spec.kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.layer_norm_rms_epsilon": spec.norm_eps,
    }


def named(architecture: str, layers: int) -> Any:
    """llama.cpp's names of tensors by those of checkpoints."""
    numbers = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    return get_tensor_name_map(numbers[architecture], layers)


def gemma4(path: Path, file: Path) -> None:
    """Convert a checkpoint of Gemma 4."""
    text = reference(path).config.get_text_config()
    layers, slides = text.num_hidden_layers, [t[0] == "s" for t in text.layer_types]
    each, ropes = facts_from_directory(path).spec.each, text.rope_parameters
    widths, dims = [at.intermediate_size for at in each], {at.head_dim for at in each}
    keys = keys_of(path) | {
        "attention.key_length": max(dims),
        "attention.key_length_swa": min(dims),
        "attention.sliding_window": text.sliding_window,
        "attention.sliding_window_pattern": slides,
        "attention.shared_kv_layers": text.num_kv_shared_layers,
        "attention.head_count_kv": [at.kv_heads for at in each],
        "feed_forward_length": widths if len({*widths}) > 1 else widths[0],
        "embedding_length_per_layer_input": text.hidden_size_per_layer_input or 0,
        "final_logit_softcapping": text.final_logit_softcapping,
        "rope.freq_base": float(ropes["full_attention"]["rope_theta"]),
        "rope.freq_base_swa": float(ropes["sliding_attention"]["rope_theta"]),
        "rope.dimension_count": max(dims),
        "rope.dimension_count_swa": min(dims),
    }
    if text.enable_moe_block:
        keys |= {"expert_count": text.num_experts, "expert_used_count": text.top_k_experts}
        keys |= {"expert_feed_forward_length": text.moe_intermediate_size}
    half = max(dims) // 2
    turned = int(half * ropes["full_attention"]["partial_rotary_factor"])
    tensors = {"rope_freqs.weight": torch.tensor([1.0] * turned + [1e30] * (half - turned))}
    known = named("gemma4", layers)
    for own, values in load_file(path / "model.safetensors").items():
        name = text_name(own)
        if name.endswith("layer_scalar") or ".experts." in name:
            name += ".weight"
        layer = name.split(".")[2]
        if name.endswith("router.scale"):
            tensors[f"blk.{layer}.ffn_gate_inp.scale"] = values
        elif name.endswith("per_expert_scale"):
            tensors[f"blk.{layer}.ffn_down_exps.scale"] = values
        elif (found := known.get_name(name.removesuffix(".weight"))) is not None:
            tensors[f"{found}.weight"] = values
    write(file, "gemma4", keys, {name: (values, F32) for name, values in tensors.items()})


def gpt_oss(path: Path, file: Path, kind: GGMLQuantizationType) -> None:
    """Convert a checkpoint of gpt-oss, its experts in a type."""
    config = reference(path).config
    rope = config.rope_parameters
    keys = keys_of(path) | {
        "attention.sliding_window": config.sliding_window,
        "expert_count": config.num_local_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.intermediate_size,
        "rope.freq_base": rope["rope_theta"],
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
    }
    known, tensors = named("gpt-oss", config.num_hidden_layers), {}
    for name, values in load_file(path / "model.safetensors").items():
        place, _, end = name.rpartition(".")
        if ".experts." in name:
            stem, what = place.replace(".experts", "").removeprefix("model.layers."), "weight"
            if end.endswith("_bias"):
                what = "bias"
            else:
                values = values.transpose(1, 2).contiguous()
            block = f"blk.{stem.split('.')[0]}.ffn"
            of = kind if what == "weight" else F32
            if end.startswith("down"):
                tensors[f"{block}_down_exps.{what}"] = values, of
            else:
                tensors[f"{block}_gate_exps.{what}"] = values[:, ::2].contiguous(), of
                tensors[f"{block}_up_exps.{what}"] = values[:, 1::2].contiguous(), of
        elif end == "sinks":
            tensors[f"{known.get_name(name)}.weight"] = values, F32
        else:
            tensors[f"{known.get_name(place)}.{end}"] = values, F32
    write(file, "gpt-oss", keys, tensors)


def in_four_bits(path: Path) -> PreTrainedModel:
    """Round the experts of a checkpoint to MXFP4, in place; return what it means."""
    model, rounded = reference(path), {}
    for name, values in model.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            rounded[name] = mxfp4(values.transpose(1, 2))[2].transpose(1, 2)
    model.load_state_dict(rounded, strict=False)
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize("fixture", ["gemma4", "gemma4-moe", "gemma4-inputs"])
def test_gemma4(tmp_path: Path, fixture: str) -> None:
    """Heads by layer, experts beside dense MLPs, shared keys and values, inputs of each layer."""
    path, file = make_checkpoint(fixture, tmp_path / "model", seed=3), tmp_path / "m.gguf"
    gemma4(path, file)
    spec, found = facts_from_directory(path).spec, GGUFModel(file).spec
    assert found.kinds == spec.kinds
    assert found.moe == spec.moe
    tokens = prompt(150)
    decoder = load_decoder(resolve(str(file)))
    close(in_chunks(decoder, tokens, CHUNKS), expected(reference(path), tokens))


def test_gpt_oss_in_floats(tmp_path: Path) -> None:
    path, file = make_checkpoint("gpt-oss", tmp_path / "model", seed=3), tmp_path / "m.gguf"
    gpt_oss(path, file, F32)
    tokens = prompt(150)
    decoder = load_decoder(resolve(str(file)))
    close(in_chunks(decoder, tokens, CHUNKS), expected(reference(path), tokens))


def test_gpt_oss_keeps_four_bits(tmp_path: Path) -> None:
    """The blocks of a file are rearranged, not rounded again."""
    path, file = make_checkpoint("gpt-oss", tmp_path / "model", seed=3), tmp_path / "m.gguf"
    model = in_four_bits(path)
    gpt_oss(path, file, MXFP4)
    source, tokens = resolve(str(file)), prompt(150)
    decoder = load_decoder(source)
    schemes = {m.scheme for _, m in decoder.weights.layers[0].mlp.matrices()}
    assert schemes == {"float32", "mxfp4"}
    close(in_chunks(decoder, tokens, CHUNKS), expected(model, tokens))
    _, part = load_weights(source, rank=1, ranks=2)
    assert part.layers[0].mlp.down.shape == (8 * 64, 32)
    eight = load_decoder(source, quantization="fp8")
    assert eight.weights.layers[0].mlp.down.scheme == "fp8_channel"


def test_lists_of_another_length_are_refused(tmp_path: Path) -> None:
    path, file = make_checkpoint("gemma4", tmp_path / "model", seed=3), tmp_path / "m.gguf"
    keys = keys_of(path) | {"attention.sliding_window_pattern": [True, False]}
    vocab = torch.zeros(256, 64)
    write(file, "gemma4", keys, {"token_embd.weight": (vocab, F32)})
    with pytest.raises(ValueError, match="sliding_window_pattern has 2 values for 4 layers"):
        GGUFModel(file)
    write(file, "gemma4", keys | {"attn_logit_softcapping": 50.0}, {})
    with pytest.raises(UnsupportedModel, match="attn_logit_softcapping"):
        GGUFModel(file)
