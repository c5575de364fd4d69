"""Tiny checkpoints in the layout in which hybrid models are published in FP8, with their MTP.

By the indexes and configs of Qwen3-Next-80B-A3B-FP8 and Qwen3.5-35B-A3B-FP8: blocks of 128 x 128
with scales in bfloat16, experts one by one, and a list of modules that stay in 16 bits, which has
names with the prefix of the text part, and names that are no linear modules.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.model.checkpoints import make_checkpoint
from tests.model.quantised_checkpoints import edit_config, fp8_blocks

FP8 = {
    **{"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"},
    "weight_block_size": [128, 128],
}
IN_16_BITS = (
    *("conv1d", "in_proj_a", "in_proj_b", "in_proj_ba", "gate", "shared_expert_gate"),
    *("embed_tokens", "lm_head", "fc", "pre_fc_norm_hidden", "pre_fc_norm_embedding", "norm"),
    *("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm"),
)
"""The last parts of the names of modules in `modules_to_not_convert`."""
SIZES = {
    **{"hidden_size": 192, "linear_key_head_dim": 32, "linear_value_head_dim": 32},
    "intermediate_size": 320,
}
"""Blocks of 128 end short in rows and in columns."""


def publish(family: str, path: Path, reference: Path) -> Path:
    """Write a random checkpoint as its publisher does, and at `reference` the floats that it means.

    Args:
        family: One of the fixtures with gated delta rules.
        path: Folder of the checkpoint in FP8, in two files.
        reference: Folder of the same in float32, as `transformers` writes it.
    """
    make_checkpoint(family, path, seed=3, sizes=SIZES)
    shutil.copytree(path, reference)
    stored = load_file(path / "model.safetensors")
    tensors: dict[str, Tensor] = {}
    for name, tensor in {**apart(stored), **mtp_of(apart(stored))}.items():
        module = name.removesuffix(".weight")
        keeps = module.rpartition(".")[2] in IN_16_BITS or ".visual." in name
        if tensor.ndim != 2 or keeps:
            tensors[name] = tensor
            continue
        blocks, _ = fp8_blocks(tensor)
        blocks["weight_scale_inv"] = blocks["weight_scale_inv"].bfloat16()
        tensors |= {f"{module}.{end}": one for end, one in blocks.items()}
    meant = {name: dequantised(tensors, name) for name in tensors if name.endswith(".weight")}
    floats = {name: together(meant, name, one) for name, one in stored.items()}
    save_file(floats, reference / "model.safetensors", {"format": "pt"})
    save_in_two(tensors, path)
    kept = {name.removesuffix(".weight") for name in tensors if name.endswith(".weight")}
    kept = {module for module in kept if f"{module}.weight_scale_inv" not in tensors}
    edit_config(path, quantization_config={**FP8, "modules_to_not_convert": sorted(kept)})
    return path


def apart(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with stacks of experts as one module an expert."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        prefix, _, stack = name.rpartition(".")
        if stack == "gate_up_proj":
            for i, (gate, up) in enumerate(each.chunk(2) for each in tensor):
                tensors[f"{prefix}.{i}.gate_proj.weight"] = gate.contiguous()
                tensors[f"{prefix}.{i}.up_proj.weight"] = up.contiguous()
        elif stack == "down_proj" and tensor.ndim == 3:
            tensors |= {f"{prefix}.{i}.down_proj.weight": each for i, each in enumerate(tensor)}
        else:
            tensors[name] = tensor
    return tensors


def mtp_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return random tensors that predict further tokens, of the shapes of the last layer's."""
    hidden = next(t for name, t in tensors.items() if name.endswith("embed_tokens.weight")).shape[1]
    last = {
        name.partition(".layers.3.")[2]: t for name, t in tensors.items() if ".layers.3." in name
    }
    shapes = {f"mtp.layers.0.{name}": tensor.shape for name, tensor in last.items()}
    shapes |= {f"mtp.{name}.weight": torch.Size([hidden]) for name in ("norm", *IN_16_BITS[9:11])}
    shapes["mtp.fc.weight"] = torch.Size([hidden, 2 * hidden])
    draw = torch.Generator().manual_seed(7)
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def dequantised(tensors: dict[str, Tensor], name: str) -> Tensor:
    """Return what a weight means, in float32."""
    scales = tensors.get(name.removesuffix(".weight") + ".weight_scale_inv")
    if scales is None:
        return tensors[name]
    rows, columns = tensors[name].shape
    each = scales.float().repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)
    return tensors[name].float() * each[:, :columns]


def together(meant: dict[str, Tensor], name: str, stored: Tensor) -> Tensor:
    """Return the floats of a tensor that `transformers` stores, experts stacked."""
    prefix, _, stack = name.rpartition(".")
    if stack == "gate_up_proj":
        names = ("gate_proj", "up_proj")
        pairs = [[meant[f"{prefix}.{i}.{one}.weight"] for one in names] for i in range(len(stored))]
        return torch.stack([torch.cat(pair) for pair in pairs])
    if stack == "down_proj" and stored.ndim == 3:
        return torch.stack([meant[f"{prefix}.{i}.down_proj.weight"] for i in range(len(stored))])
    return meant.get(name, stored).contiguous()


def save_in_two(tensors: dict[str, Tensor], path: Path) -> None:
    """Write tensors in two files with an index, those of MTP in the second."""
    (path / "model.safetensors").unlink(missing_ok=True)
    files = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    places = {name: files[name.startswith("mtp.") or len(name) % 2] for name in tensors}
    for file in files:
        own = {name: t.contiguous() for name, t in tensors.items() if places[name] == file}
        save_file(own, path / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": places}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
