"""Tiny checkpoints in the public quantised formats, and what their numbers mean.

Written from the formats' descriptions, apart from the readers: numbers and scales are drawn first,
then packed as the format says, and multiplied to the matrix that they mean.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.model.checkpoints import LAYERS, make_checkpoint

E4M3 = torch.float8_e4m3fn
Module = dict[str, Tensor]
"""Tensors of one module by the end of their names."""
GROUP = 32
"""Columns of a group of the formats of four bits."""


def _e4m3(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(E4M3)


def fp8_blocks(weight: Tensor) -> tuple[Module, Tensor]:
    """Hugging Face `fp8`: a scale for each 128 x 128, the last ones smaller."""
    n, k = weight.shape
    scales = torch.empty(-(-n // 128), -(-k // 128))
    values, meant = torch.empty(n, k, dtype=E4M3), torch.empty(n, k)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            scales[i, j] = weight[place].abs().max() / 448
            values[place] = _e4m3(weight[place] / scales[i, j])
            meant[place] = values[place].float() * scales[i, j]
    return {"weight": values, "weight_scale_inv": scales}, meant


def fp8_compressed_blocks(weight: Tensor) -> tuple[Module, Tensor]:
    """compressed-tensors `float-quantized`, strategy "block": the same blocks."""
    module, meant = fp8_blocks(weight)
    return {"weight": module["weight"], "weight_scale": module["weight_scale_inv"]}, meant


def fp8_channels(weight: Tensor) -> tuple[Module, Tensor]:
    """compressed-tensors `float-quantized`, strategy "channel": bfloat16 scales [n, 1]."""
    scales = (weight.abs().amax(1, keepdim=True) / 440).bfloat16()
    values = _e4m3(weight / scales.float())
    return {"weight": values, "weight_scale": scales}, values.float() * scales.float()


def fp8_tensor(weight: Tensor) -> tuple[Module, Tensor]:
    """compressed-tensors `float-quantized`, strategy "tensor": one scale."""
    scale = (weight.abs().max() / 440).reshape(1)
    values = _e4m3(weight / scale)
    return {"weight": values, "weight_scale": scale}, values.float() * scale


def _four_bits(
    weight: Tensor, symmetric: bool, group: int = GROUP
) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers 0 to 15 [n, k], scales (of float16) and zeros [n, k / group]."""
    groups = weight.reshape(len(weight), -1, group)
    if symmetric:
        scales = (groups.abs().amax(2) / 7).half().float()
        zeros = torch.full(scales.shape, 8.0)
    else:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scales = ((high - low) / 15).half().float()
        zeros = (-low / scales).round().clamp(0, 15)
    numbers = ((groups / scales[..., None]).round() + zeros[..., None]).clamp(0, 15)
    return numbers.flatten(1).long(), scales, zeros.long()


def _meant(numbers: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    groups = numbers.reshape(*scales.shape, -1) - zeros[..., None]
    return (groups * scales[..., None]).flatten(1)


def words(numbers: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """int32 [rows, columns / 8] of numbers 0 to 15: bits 4 i of a word hold column order[i]."""
    eights = numbers.reshape(len(numbers), -1, 8)
    joined = sum(eights[:, :, order[i]] << (4 * i) for i in range(8))
    return torch.where(joined >= 2**31, joined - 2**32, joined).int().contiguous()


def awq(weight: Tensor, group: int = GROUP, symmetric: bool = False) -> tuple[Module, Tensor]:
    """AWQ `gemm`: [k, n / 8], in the order of its kernel."""
    numbers, scales, zeros = _four_bits(weight, symmetric, group or weight.shape[1])
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    module = {
        "qweight": words(numbers.t(), order),
        "qzeros": words(zeros.t(), order),
        "scales": scales.t().half().contiguous(),
    }
    return module, _meant(numbers, scales, zeros)


def gptq(
    weight: Tensor, old: bool = True, symmetric: bool = True, group: int = GROUP
) -> tuple[Module, Tensor]:
    """GPTQ without act-order, with the bias of zeros that its writers add."""
    size = group or weight.shape[1]
    numbers, scales, zeros = _four_bits(weight, symmetric, size)
    module = {
        "qweight": words(numbers).t().contiguous(),
        "qzeros": _old_zeros(zeros) if old else words(zeros.t()),
        "scales": scales.t().half().contiguous(),
        "g_idx": (torch.arange(weight.shape[1]) // size).int(),
        "bias": torch.zeros(len(weight)).half(),
    }
    return module, _meant(numbers, scales, zeros)


def _old_zeros(zeros: Tensor) -> Tensor:
    """The words of zero points in GPTQ's first format, which takes 1 from each number of a word,
    and what a zero lacks from the number behind it."""
    less = words(zeros.t()).long() - 0x11111111
    return ((less + 2**31) % 2**32 - 2**31).int()


def gptq_ordered(weight: Tensor) -> tuple[Module, Tensor]:
    """GPTQ with act-order: the columns of a group lie anywhere."""
    order, back = _shuffled(weight)
    numbers, scales, zeros = _four_bits(weight[:, order], symmetric=False)
    module = {
        "qweight": words(numbers[:, back]).t().contiguous(),
        "qzeros": _old_zeros(zeros),
        "scales": scales.t().half().contiguous(),
        "g_idx": (back // GROUP).int(),
    }
    return module, _meant(numbers, scales, zeros)[:, back]


def _shuffled(weight: Tensor) -> tuple[Tensor, Tensor]:
    """An order of the columns, and the one that undoes it."""
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(len(weight)))
    return order, order.argsort()


def gptq_v2(weight: Tensor) -> tuple[Module, Tensor]:
    """GPTQ's second format, with zero points."""
    return gptq(weight, old=False, symmetric=False)


def packed(
    weight: Tensor, symmetric: bool = True, group: int = GROUP, ordered: bool = False
) -> tuple[Module, Tensor]:
    """compressed-tensors `pack-quantized`; with act-order, if `ordered`."""
    order, back = _shuffled(weight) if ordered else (slice(None), slice(None))
    numbers, scales, zeros = _four_bits(weight[:, order], symmetric, group or weight.shape[1])
    module = {
        "weight_packed": words(numbers[:, back]),
        "weight_scale": scales.bfloat16(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        module["weight_zero_point"] = words(zeros.t()).t().contiguous()
    if isinstance(back, Tensor):
        module["weight_g_idx"] = (back // group).int()
    return module, _meant(numbers, scales.bfloat16().float(), zeros)[:, back]


def packed_zeros(weight: Tensor) -> tuple[Module, Tensor]:
    """compressed-tensors `pack-quantized` with zero points."""
    return packed(weight, symmetric=False)


def _compressed(form: str, weights: dict[str, Any], inputs: Any, ignore: list[str]) -> Any:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        },
        "ignore": ignore,
        "kv_cache_scheme": None,
    }


_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
_FLOAT = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
_INT = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
_GROUP = {**_TOKEN, "strategy": "group", "group_size": 128}
_BLOCK = {**_FLOAT, "strategy": "block", "block_structure": [128, 128]}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}

FORMATS: dict[str, tuple["Writer", dict[str, Any]]] = {
    "fp8": (fp8_blocks, {**_FP8, "fmt": "e4m3"}),
    "float-quantized-channel": (
        fp8_channels,
        _compressed("float-quantized", {**_FLOAT, "strategy": "channel"}, _TOKEN, ["lm_head"]),
    ),
    "float-quantized-tensor": (
        fp8_tensor,
        _compressed("float-quantized", {**_FLOAT, "strategy": "tensor"}, _TOKEN, ["lm_head"]),
    ),
    "float-quantized-block": (
        fp8_compressed_blocks,
        _compressed("float-quantized", _BLOCK, _GROUP, ["lm_head"]),
    ),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}),
    "gptq-act-order": (
        gptq_ordered,
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True},
    ),
    "gptq_v2": (
        gptq_v2,
        {
            **{"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False},
            "checkpoint_format": "gptq_v2",
        },
    ),
    "pack-quantized": (
        packed,
        _compressed("pack-quantized", {**_INT, "symmetric": True}, None, ["re:.*lm_head"]),
    ),
    "pack-quantized-zeros": (
        packed_zeros,
        _compressed("pack-quantized", {**_INT, "symmetric": False}, None, ["lm_head"]),
    ),
}
"""Each format's writer, and its `quantization_config`."""


def is_linear(name: str) -> bool:
    """Whether a tensor is the weight of a linear module of a layer."""
    return name.endswith(("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight"))


Writer = Callable[[Tensor], tuple[Module, Tensor]]
"""Stores the weight of a module; returns its tensors and what they mean."""


def write(
    path: Path,
    reference: Path,
    form: str,
    family: str = "qwen2",
    left: Callable[[str], bool] = lambda name: False,
    **sizes: int,
) -> None:
    """A random checkpoint in a format at `path`, and at `reference` the floats that it means.

    Args:
        path: folder of the quantised checkpoint.
        reference: folder of the same in float32.
        form: one of `FORMATS`.
        family: of the model, as in `make_checkpoint`.
        left: the modules that stay in floats.
        sizes: of the model, as in its config.
    """
    writer, config = FORMATS[form]

    def of(module: str) -> Writer | None:
        return writer if is_linear(f"{module}.weight") and not left(module) else None

    write_as(path, reference, of, config, family, **sizes)


def write_as(
    path: Path,
    reference: Path,
    writer: Callable[[str], Writer | None],
    config: dict[str, Any] | None,
    family: str = "qwen2",
    layers: int = LAYERS,
    **sizes: int,
) -> None:
    """As `write`, with the writer of each module by its name; None: it stays in floats."""
    make_checkpoint(family, path, seed=3, layers=layers, sizes=sizes)
    shutil.copytree(path, reference)
    tensors, meant = load_file(path / "model.safetensors"), {}
    for name in [t for t in tensors if t.endswith(".weight")]:
        of = writer(name.removesuffix(".weight"))
        if of is None:
            continue
        module, meant[name] = of(tensors.pop(name))
        prefix = name.removesuffix("weight")
        tensors |= {
            f"{prefix}{end}": t for end, t in module.items() if f"{prefix}{end}" not in tensors
        }
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    edit_config(path, quantization_config=config)
    floats = load_file(reference / "model.safetensors") | meant
    save_file(
        {name: t.contiguous() for name, t in floats.items()},
        reference / "model.safetensors",
        {"format": "pt"},
    )


def edit_config(path: Path, **values: Any) -> None:
    """Set values of a checkpoint's config."""
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
