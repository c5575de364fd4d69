"""Random LoRA adapters for the tiny checkpoints, as PEFT writes them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from twolane.model.load.hub import resolve
from twolane.model.spec import ModelSpec

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
MODULES = (*ATTENTION, *MLP)
"""The linear modules of a layer in most families."""
JOINED = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
"""The linear modules of a layer of Phi-3."""


def shapes(spec: ModelSpec, layer: int) -> dict[str, tuple[int, int]]:
    """Rows and columns of each linear module of a layer, by its name in checkpoints."""
    kind, dense, spec = spec.kind(layer), spec.has_dense(layer), spec.at(layer)
    hidden, inner, q, kv = spec.hidden_size, spec.intermediate_size, spec.q_size, spec.kv_size
    ends = {"self_attn.o_proj": (hidden, q), "mlp.down_proj": (hidden, inner)}
    sizes = {"q": q, "k": kv, "v": kv}
    lacking = "kv" if kind.reads_earlier else "v" if kind.keys_are_values else ""
    own = {n: rows for n, rows in sizes.items() if n not in lacking}
    attention = {f"self_attn.{n}_proj": (rows, hidden) for n, rows in own.items()}
    mlp = {f"mlp.{n}_proj": (inner, hidden) for n in ("gate", "up")}
    if spec.family == "phi3":
        attention = {"self_attn.qkv_proj": (q + 2 * kv, hidden)}
    if spec.family in ("phi3", "glm", "glm4"):
        mlp = {"mlp.gate_up_proj": (2 * inner, hidden)}
    sizes = attention | mlp | ends
    return {name: sizes[name] for name in sizes if "self_attn" in name or dense}


def make_adapter(
    base: Path,
    path: Path,
    *,
    rank: int = 8,
    modules: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    seed: int = 0,
    strength: float = 1.0,
    dtype: torch.dtype = torch.float32,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write an adapter that changes what a checkpoint says, and return its directory.

    Args:
        base: the checkpoint.
        path: directory to create.
        rank: of every module that `rank_pattern` in `config` does not name in full.
        modules: of each layer; by default all.
        layers: by default all.
        seed: of its numbers.
        strength: of what it adds, beside the base's products.
        dtype: of its tensors.
        config: fields of `adapter_config.json` that are not the usual ones.
    """
    spec, random = resolve(str(base)).spec(), torch.Generator().manual_seed(seed)
    each = [shapes(spec, i) for i in range(spec.layers)]
    given = dict(config or {})
    alpha = 2 * rank
    tensors: dict[str, torch.Tensor] = {}
    for i in layers if layers is not None else range(spec.layers):
        for module in modules or each[i]:
            rows, columns = each[i][module]
            r = (given.get("rank_pattern") or {}).get(module.split(".")[-1], rank)
            a = torch.randn(r, columns, generator=random) * columns**-0.5
            b = torch.randn(rows, r, generator=random) * strength * r**-0.5
            name = f"base_model.model.model.layers.{i}.{module}"
            tensors[f"{name}.lora_A.weight"] = a.to(dtype)
            tensors[f"{name}.lora_B.weight"] = b.to(dtype)
    path.mkdir(parents=True)
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    all_modules: set[str] = set().union(*each)
    targets = sorted(module.split(".")[-1] for module in modules or all_modules)
    usual = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": targets}
    (path / "adapter_config.json").write_text(json.dumps(usual | given))
    return path


def merge(base: Path, adapter: Path, path: Path) -> Path:
    """Write the checkpoint with scale * B @ A added to its weights, and return its directory."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    weights, tensors = (
        load_file(base / "model.safetensors"),
        load_file(adapter / "adapter_model.safetensors"),
    )
    for name in [n for n in tensors if "lora_A" in n]:
        a, b = tensors[name].double(), tensors[name.replace("lora_A", "lora_B")].double()
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        end = module.split(".")[-1]
        alpha = config.get("alpha_pattern", {}).get(end, config["lora_alpha"])
        scale = alpha / (len(a) ** 0.5 if config.get("use_rslora") else len(a))
        weight = weights[f"{module}.weight"]
        weights[f"{module}.weight"] = (weight.double() + scale * b @ a).float()
    path.mkdir()
    (path / "config.json").write_text((base / "config.json").read_text())
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path
