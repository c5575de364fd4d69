"""Quantised checkpoints as they are published, each with the config and tensors that its writer
gives it, against the floats that they mean; and those that are refused, by the field that says why.

The configs are those of public checkpoints and of the reports in docs/notes/, cut to the fields
that say something.
"""

import json
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.model.checkpoints import load_decoder, reference
from tests.model.passes import close, expected
from tests.model.quantised_checkpoints import (
    Module,
    Writer,
    awq,
    edit_config,
    fp8_blocks,
    fp8_channels,
    fp8_compressed_blocks,
    fp8_tensor,
    gptq,
    gptq_ordered,
    gptq_v2,
    is_linear,
    packed,
    packed_zeros,
    words,
    write_as,
)
from tests.parallel.test_sharding import TOKENS, together
from tests.parallel.test_sharding import logits as ranks_logits
from twolane.model.decoder import Decoder
from twolane.model.load.checkpoint import WeightsError
from twolane.model.load.hub import resolve
from twolane.model.load.quantization import Format
from twolane.model.load.quantization_configs import read_quantization
from twolane.model.load.weights import load_weights
from twolane.model.matrix import Matrix
from twolane.model.spec import UnsupportedModel
from twolane.parallel.group import CpuGroup

SIZES = {"hidden_size": 128, "intermediate_size": 384}
"""Two ranks cut groups of 128 columns."""
LAYERS = 2


@dataclass(frozen=True)
class Published:
    """A checkpoint as somebody publishes it."""

    config: dict[str, Any] | None
    """Its `quantization_config`."""
    writer: Writer | dict[str, Writer | None]
    """Stores linear modules; or by a part of their names, the first that fits, else floats."""
    family: str = "qwen2"
    files: dict[str, Any] = field(default_factory=dict)
    """Other JSON files that it has."""
    extra: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Tensors that each layer has besides, by the end of their names."""
    tied: bool | None = None
    """What `tie_word_embeddings` says, if not what the family's maker writes."""

    def of(self, module: str) -> Writer | None:
        """What stores a module."""
        if "norm" in module:
            return None
        if isinstance(self.writer, dict):
            return next((w for part, w in self.writer.items() if part in f"{module}."), None)
        return self.writer if is_linear(f"{module}.weight") else None

    def save(self, path: Path, floats: Path) -> None:
        """Write it to `path`, and the floats that it means to `floats`."""
        write_as(path, floats, self.of, self.config, self.family, LAYERS, **SIZES)
        if self.tied is not None:
            edit_config(path, tie_word_embeddings=self.tied)
        for name, content in self.files.items():
            (path / name).write_text(json.dumps(content))
        if self.extra:
            file = path / "model.safetensors"
            more = {
                f"model.layers.{i}.{end}": torch.tensor(values)
                for i in range(LAYERS)
                for end, values in self.extra.items()
            }
            save_file(load_file(file) | more, file, {"format": "pt"})


def _scalar(weight: Tensor) -> tuple[Module, Tensor]:
    """`fp8` of transformers without blocks: a scale of no dimensions, and one of activations."""
    module, meant = fp8_tensor(weight)
    scale = module["weight_scale"].reshape(())
    parts = {"weight": module["weight"], "weight_scale_inv": scale}
    return {**parts, "activation_scale": torch.tensor(0.02)}, meant


def _with(writer: Writer, **more: Tensor) -> Writer:
    """A writer that adds tensors to each module."""

    def write(weight: Tensor) -> tuple[Module, Tensor]:
        module, meant = writer(weight)
        return module | {name: tensor.clone() for name, tensor in more.items()}, meant

    return write


def _without(end: str, writer: Writer) -> Writer:
    """A writer that leaves out a tensor of each module."""

    def write(weight: Tensor) -> tuple[Module, Tensor]:
        module, meant = writer(weight)
        return {name: tensor for name, tensor in module.items() if name != end}, meant

    return write


def _powers(weight: Tensor) -> tuple[Module, Tensor]:
    """`fp8` with blocks whose scales are powers of two, stored as exponents."""
    module, _ = fp8_blocks(weight)
    scales = torch.exp2(module["weight_scale_inv"].log2().ceil())
    wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    wide = wide[: weight.shape[0], : weight.shape[1]]
    values = (weight / wide).to(torch.float8_e4m3fn)
    stored = {"weight": values, "weight_scale_inv": scales.to(torch.float8_e8m0fnu)}
    return stored, values.float() * wide


def _uneven(writer: Writer) -> Writer:
    """Some rows have positive numbers alone, so that their zero points are 0."""

    def write(weight: Tensor) -> tuple[Module, Tensor]:
        weight = weight.clone()
        weight[::29] = weight[::29].abs()
        return writer(weight)

    return write


def _signed(weight: Tensor) -> tuple[Module, Tensor]:
    """GPTQ's layout as AutoRound fills it: the largest number of a group is -8, so that half of
    the scales are below 0."""
    groups = weight.reshape(len(weight), -1, 32)
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    scales = (largest / -8).half().float()
    module, _ = gptq(weight)
    numbers = ((groups / scales).round().clamp(-8, 7) + 8).flatten(1).long()
    module |= {"qweight": words(numbers).t().contiguous()}
    module |= {"scales": scales[..., 0].t().half().contiguous()}
    return module, ((numbers - 8).view_as(groups) * scales).flatten(1)


def _second_zeros(weight: Tensor) -> tuple[Module, Tensor]:
    """Symmetric GPTQ whose zero points are 8 as they are, not 7."""
    return gptq(weight, old=False)


def _no_order(weight: Tensor) -> tuple[Module, Tensor]:
    """GPTQ whose `g_idx` is there and says nothing."""
    module, meant = gptq(weight)
    return module | {"g_idx": torch.zeros_like(module["g_idx"])}, meant


def _usual_order(weight: Tensor) -> tuple[Module, Tensor]:
    """`pack-quantized` that tells the usual order of columns."""
    module, meant = packed(weight)
    return module | {"weight_g_idx": (torch.arange(weight.shape[1]) // 32).int()}, meant


def _numbers(**given: Any) -> dict[str, Any]:
    """Weights or activations of compressed-tensors as its writers have them, with every field."""
    base = {"actorder": None, "block_structure": None, "dynamic": False, "group_size": None}
    return {**base, "observer": "minmax", "observer_kwargs": {}, "symmetric": True, **given}


_FLOAT = {"num_bits": 8, "type": "float"}
_TOKEN = _numbers(**_FLOAT, strategy="token", dynamic=True, observer=None)
_STATIC = _numbers(**_FLOAT, strategy="tensor")
_INT = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}


def _group(weights: Any, inputs: Any = None, targets: Any = ("Linear",), **more: Any) -> Any:
    return {
        "input_activations": inputs,
        "output_activations": None,
        "targets": list(targets),
        "weights": weights,
        **more,
    }


def _compressed(form: str, *groups: Any, **more: Any) -> dict[str, Any]:
    """A config of compressed-tensors with every field that its writers give it."""
    return {
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        "format": form,
        "global_compression_ratio": 1.24,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        **more,
    }


_G128 = partial(packed, group=128)
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_AUTO_FP8 = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
_MODELOPT = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
_STATIC_FP8 = _with(fp8_tensor, input_scale=torch.tensor([0.03]))
_KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
_CHANNEL = _group(_numbers(**_FLOAT, strategy="channel"), _TOKEN)
_W4 = _group(_numbers(**_INT))

TAKEN = {
    # compressed-tensors
    "Llama-3.1-8B-FP8-dynamic": Published(_compressed("float-quantized", _CHANNEL), fp8_channels),
    "Llama-3.1-8B-FP8": Published(
        _compressed("float-quantized", _group(_numbers(**_FLOAT, strategy="tensor"), _STATIC)),
        _STATIC_FP8,
    ),
    "FP8-KV, k_scale of attention": Published(
        _compressed("float-quantized", _CHANNEL, kv_cache_scheme=_KV_SCHEME),
        fp8_channels,
        extra={"self_attn.k_scale": (0.1,), "self_attn.v_scale": (0.1,)},
    ),
    "FP8-KV, of the fused module": Published(
        _compressed("float-quantized", _CHANNEL, kv_cache_scheme=_KV_SCHEME),
        fp8_channels,
        extra={"self_attn.qkv_proj.k_scale": (0.1,), "self_attn.attn.v_scale": (0.1,)},
    ),
    "FP8 attention": Published(
        _compressed("float-quantized", _CHANNEL, _group(None, _STATIC, ["re:.*self_attn$"])),
        fp8_channels,
        extra={f"self_attn.{n}_scale": (0.1,) for n in "qkv"},
    ),
    "Qwen3-8B-FP8-BLOCK": Published(
        _compressed(
            "float-quantized",
            _group(
                _numbers(**_FLOAT, strategy="block", block_structure=[128, 128]),
                _numbers(**_FLOAT, strategy="group", group_size=128, dynamic=True),
            ),
            transform_config={},
            sparsity_config={},
            version="0.11.1.a20250924",
        ),
        fp8_compressed_blocks,
    ),
    "a classifier in FP8": Published(
        _compressed("float-quantized", _CHANNEL, ignore=[]),
        {"_proj.": fp8_channels, "lm_head.": fp8_channels},
    ),
    "a classifier in FP8 beside tied embeddings": Published(
        _compressed("float-quantized", _CHANNEL, ignore=[]),
        {"_proj.": fp8_channels, "lm_head.": fp8_channels},
        tied=True,
    ),
    "quantized.w4a16": Published(_compressed("pack-quantized", _W4), _G128),
    "w4a16, actorder weight": Published(
        _compressed("pack-quantized", _group(_numbers(**_INT, actorder="weight"))), _G128
    ),
    "w4a16, the usual order told all the same": Published(
        _compressed("pack-quantized", _group(_numbers(**{**_INT, "group_size": 32}))),
        _usual_order,
    ),
    "w4a16, actorder group": Published(
        _compressed(
            "pack-quantized", _group(_numbers(**{**_INT, "group_size": 32}, actorder="group"))
        ),
        partial(packed, ordered=True),
    ),
    "w4a16, actorder group, zero points": Published(
        _compressed(
            "pack-quantized",
            _group(_numbers(**{**_INT, "group_size": 32, "symmetric": False}, actorder="dynamic")),
        ),
        partial(packed, ordered=True, symmetric=False),
    ),
    "w4a16, actorder group that was not needed": Published(
        _compressed("pack-quantized", _group(_numbers(**_INT, actorder="group"))), _G128
    ),
    "w4a16, zero points of a symmetric format": Published(
        _compressed("pack-quantized", _W4),
        _with(_G128, weight_zero_point=torch.zeros(4, 2, dtype=torch.int8)),
    ),
    "w4a16, one scale a row": Published(
        _compressed(
            "pack-quantized",
            _group(_numbers(**{**_INT, "strategy": "channel", "group_size": None})),
        ),
        partial(packed, group=0),
    ),
    "awq by llm-compressor": Published(
        _compressed(
            "pack-quantized",
            _group(_numbers(**{**_INT, "group_size": 32, "symmetric": False})),
            ignore=["re:.*lm_head$", "re:visual.*"],
        ),
        packed_zeros,
    ),
    "a classifier in w4a16 beside tied embeddings": Published(
        _compressed("pack-quantized", _W4, ignore=[]),
        {"_proj.": _G128, "lm_head.": _G128},
        tied=True,
    ),
    "mixed-precision: attention in FP8, MLPs in w4a16": Published(
        _compressed(
            "mixed-precision",
            _group(
                _numbers(**_FLOAT, strategy="channel"),
                _TOKEN,
                [r"re:.*self_attn\.(q|k|v|o)_proj$"],
                format="float-quantized",
            ),
            _group(_numbers(**_INT), None, ["re:.*mlp.*"], format="pack-quantized"),
        ),
        {"self_attn.": fp8_channels, "mlp.": _G128},
    ),
    "mixed-precision: two groups name a module": Published(
        _compressed(
            "mixed-precision",
            _group(_numbers(**_INT), None, ["re:.*proj"], format="pack-quantized"),
            _group(
                _numbers(**_FLOAT, strategy="channel"),
                _TOKEN,
                [r"re:.*layers\.1\..*"],
                format="float-quantized",
            ),
        ),
        {"layers.1.": fp8_channels, "_proj.": _G128},
    ),
    "the first config of compressed-tensors": Published(
        {
            "quantization_config": {
                "quant_method": "sparseml",
                "config_groups": {"group_0": _W4},
                "format": "pack-quantized",
                "ignore": ["lm_head"],
            },
            "sparsity_config": {"format": "dense", "targets": [], "ignore": []},
        },
        _G128,
    ),
    "pruned, and saved as it is": Published(
        {
            "quant_method": "compressed-tensors",
            "sparsity_config": {"format": "dense", "sparsity_structure": "unstructured"},
        },
        {},
    ),
    "symmetric queries beside other keys": Published(
        _compressed(
            "pack-quantized",
            _group(_numbers(**{**_INT, "group_size": 32}), None, ["re:.*q_proj"]),
            _group(_numbers(**{**_INT, "group_size": 32, "symmetric": False})),
        ),
        {"q_proj.": packed, "_proj.": packed_zeros},
    ),
    "compressed-tensors that is not named": Published(
        {"config_groups": {"group_0": _CHANNEL}, "ignore": ["lm_head"]}, fp8_channels
    ),
    "Qwen3-30B-A3B-FP8-dynamic": Published(
        _compressed("float-quantized", _CHANNEL, ignore=["lm_head", r"re:.*mlp.gate$"]),
        fp8_channels,
        family="qwen3-moe",
    ),
    # AutoFP8, transformers, ModelOpt
    "Meta-Llama-3-8B-Instruct-FP8": Published(_AUTO_FP8, _STATIC_FP8),
    "Meta-Llama-3-8B-Instruct-FP8-KV": Published(
        {**_AUTO_FP8, "kv_cache_scheme": "static"},
        _STATIC_FP8,
        extra={"self_attn.kv_scale": (0.1,)},
    ),
    "FP8-K-V, output_scale": Published(
        {**_AUTO_FP8, "kv_cache_scheme": "static"},
        _STATIC_FP8,
        extra={"self_attn.k_proj.output_scale": (0.1,), "self_attn.v_proj.output_scale": (0.1,)},
    ),
    "FP8 before input_scale": Published(
        _AUTO_FP8, _with(fp8_tensor, act_scale=torch.tensor([0.03]))
    ),
    "Mixtral-8x7B-Instruct-v0.1-FP8": Published(
        {**_AUTO_FP8, "ignored_layers": ["re:.*lm_head", "re:.*gate"]},
        _STATIC_FP8,
        family="mixtral",
    ),
    "Phi-3-mini-128k-instruct-FP8": Published(
        {**_AUTO_FP8, "activation_scheme": "dynamic"}, fp8_tensor, family="phi3"
    ),
    "Ministral-3-8B-Instruct-2512": Published(
        {
            "activation_scheme": "static",
            "dequantize": False,
            "modules_to_not_convert": ["model.vision_tower", "lm_head", "model.lm_head"],
            "quant_method": "fp8",
            "weight_block_size": None,
        },
        _scalar,
        family="ministral3",
    ),
    "Qwen3-8B-FP8": Published(
        {
            **_FP8,
            "fmt": "e4m3",
            "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"],
        },
        fp8_blocks,
        family="qwen3",
    ),
    "MiniMax-M2": Published(
        {
            **{**_FP8, "fmt": "float8_e4m3fn"},
            "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        },
        {"gate.": None, "_proj.": fp8_blocks, "experts.": fp8_blocks},
        family="minimax-m2",
    ),
    "scale_fmt ue8m0": Published({**_FP8, "scale_fmt": "ue8m0"}, _powers),
    "a classifier that no list leaves out": Published(
        _FP8, {"_proj.": fp8_blocks, "lm_head.": fp8_blocks}
    ),
    "nvidia/Llama-3.1-8B-Instruct-FP8": Published(
        None,
        _STATIC_FP8,
        files={"hf_quant_config.json": {"quantization": _MODELOPT}},
        extra={"self_attn.k_proj.k_scale": (0.1,), "self_attn.v_proj.v_scale": (0.1,)},
    ),
    "ModelOpt, of the KV cache alone": Published(
        None,
        {},
        files={"hf_quant_config.json": {"quantization": {"kv_cache_quant_algo": "FP8"}}},
        extra={"self_attn.k_proj.k_scale": (0.1,), "self_attn.v_proj.v_scale": (0.1,)},
    ),
    "nvidia, in config.json": Published(
        {
            "quant_method": "modelopt",
            "quant_algo": "FP8",
            "ignore": ["lm_head", "model.layers.1.mlp*"],
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
            "config_groups": {"group_0": {"targets": ["Linear"]}},
            "producer": {"name": "modelopt", "version": "0.33.0"},
        },
        {"layers.1.mlp.": None, "_proj.": _STATIC_FP8},
        extra={"self_attn.k_proj.k_scale": (0.1,), "self_attn.q_proj.q_scale": (0.1,)},
    ),
    # GPTQ
    "Qwen2.5-7B-Instruct-GPTQ-Int4": Published(
        {**_GPTQ, "sym": True, "damp_percent": 0.01, "static_groups": False},
        partial(gptq, group=128),
    ),
    "Llama-2-7B-GPTQ, act-order": Published(
        None,
        gptq_ordered,
        files={"quantize_config.json": {"bits": 4, "group_size": 32, "desc_act": True}},
    ),
    "group_size -1 with desc_act": Published(
        {**_GPTQ, "group_size": -1, "desc_act": True, "sym": True}, partial(gptq, group=0)
    ),
    "sym false, by GPTQModel": Published(
        {**_GPTQ, "group_size": 32, "sym": False, "checkpoint_format": "gptq", "meta": {}},
        _uneven(partial(gptq, symmetric=False)),
    ),
    "gptq_v2, sym false": Published(
        {**_GPTQ, "group_size": 32, "sym": False, "checkpoint_format": "gptq_v2"},
        _uneven(gptq_v2),
    ),
    "Qwen3.5-GPTQ-Int4: first format, second zeros": Published(
        {
            **{**_GPTQ, "group_size": 32, "sym": True, "checkpoint_format": "gptq"},
            "dynamic": {
                **{"lm_head": {}, "model.language_model.embed_tokens": {}, "-:.*attn.*": {}},
                **{"-:.*shared_expert.*": {}, "-:.*mtp.*": {}, "-:.*visual.*": {}},
            },
        },
        {"mlp.": _second_zeros},
    ),
    "dynamic repeats the config's values": Published(
        {**_GPTQ, "group_size": 32, "sym": True, "dynamic": {r"+:.*down.*": {"bits": 4}}}, gptq
    ),
    "second format, first zeros": Published(
        {**_GPTQ, "group_size": 32, "sym": True, "checkpoint_format": "gptq_v2"}, gptq
    ),
    "g_idx of zeros": Published({**_GPTQ, "group_size": 32, "sym": True}, _no_order),
    "g_idx of zeros with desc_act": Published(
        {**_GPTQ, "group_size": 32, "desc_act": True}, _no_order
    ),
    "lm_head true": Published(
        {**_GPTQ, "group_size": 32, "sym": True, "lm_head": True},
        {"_proj.": gptq, "lm_head.": gptq},
    ),
    "dynamic leaves modules out": Published(
        {**_GPTQ, "group_size": 32, "dynamic": {r"-:.*\.1\.mlp\..*": {}, "-:lm_head": {}}},
        {"layers.1.mlp.": None, "_proj.": gptq},
    ),
    "a router in four bits": Published(
        {**_GPTQ, "group_size": 32, "sym": True},
        {"mlp.gate.": gptq, "_proj.": gptq},
        family="qwen3-moe",
    ),
    "AutoRound": Published(
        {
            "quant_method": "auto-round",
            "packing_format": "auto_round:auto_gptq",
            "bits": 4,
            "group_size": 128,
            "sym": True,
            "data_type": "int",
            "iters": 200,
            "autoround_version": "0.8.0",
            "block_name_to_quantize": "model.layers",
            "extra_config": {"model.layers.1.self_attn.o_proj": {"bits": 16}},
        },
        {"1.self_attn.o_proj.": None, "_proj.": partial(gptq, group=128)},
    ),
    "AutoRound: signed scales, the classifier, an expression": Published(
        {
            "quant_method": "auto-round",
            "packing_format": "auto_round:auto_gptq",
            "bits": 4,
            "group_size": 32,
            "sym": True,
            "extra_config": {
                "lm_head": {"bits": 4, "group_size": 32, "data_type": "int"},
                r"layers\.1\.mlp\.(gate|up)": {"bits": 16, "data_type": "float"},
            },
        },
        {"1.mlp.gate_": None, "1.mlp.up_": None, "_proj.": _signed, "lm_head.": _signed},
    ),
    "AutoRound for GPTQ": Published(
        {**_GPTQ, "group_size": 32, "sym": True, "provider": "auto-round"}, _signed
    ),
    # AWQ
    "Qwen2.5-7B-Instruct-AWQ": Published(
        {**_AWQ, "modules_to_not_convert": None, "version": "gemm"}, partial(awq, group=128)
    ),
    "llm-awq": Published(
        None,
        partial(awq, group=64),
        files={"quant_config.json": {"zero_point": True, "q_group_size": 64, "w_bit": 4}},
    ),
    "AutoRound for AWQ, symmetric": Published(
        {**_AWQ, "group_size": 32, "zero_point": False, "provider": "auto-round"},
        partial(awq, symmetric=True),
    ),
    "AWQ without qzeros": Published(
        {**_AWQ, "group_size": 32, "zero_point": False},
        _without("qzeros", partial(awq, symmetric=True)),
    ),
    "one scale a row": Published({**_AWQ, "group_size": -1}, partial(awq, group=0)),
    "Mixtral-8x7B-Instruct-v0.1-AWQ": Published(
        {**_AWQ, "group_size": 32, "modules_to_not_convert": ["gate"]}, awq, family="mixtral"
    ),
    "Qwen3-30B-A3B-AWQ with a layer left out": Published(
        {
            **{**_AWQ, "group_size": 32},
            "modules_to_not_convert": ["model.layers.0.", "self_attn", "mlp.gate"],
        },
        {"layers.0.": None, "self_attn.": None, "_proj.": awq},
        family="qwen3-moe",
    ),
    "Phi-3-mini-4k-instruct-AWQ": Published(
        {**_AWQ, "modules_to_not_convert": None}, partial(awq, group=128), family="phi3"
    ),
}
"""Checkpoints by a public one that is stored so, or by what is special."""


def _matrices(decoder: Decoder) -> list[Matrix]:
    """All matrices of a model."""
    inner = []
    for layer in decoder.weights.layers:
        inner += [layer.qkv, layer.o, *(matrix for _, matrix in layer.mlp.matrices())]
    return [*inner, decoder.weights.head]


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_taken_is_what_it_means(name: str, tmp_path: Path) -> None:
    TAKEN[name].save(tmp_path / "quantised", tmp_path / "floats")
    ours, meant = (load_decoder(resolve(str(tmp_path / n))) for n in ("quantised", "floats"))
    for stored, floats in zip(_matrices(ours), _matrices(meant), strict=True):
        close(stored.dequantised().float(), floats.values)


@pytest.mark.full
@pytest.mark.parametrize("name", TAKEN)
def test_logits_of_one_rank_and_of_two(name: str, tmp_path: Path) -> None:
    """Beside those of `transformers`, for the floats that are meant. With activations of eight
    bits, they differ by what is rounded."""
    TAKEN[name].save(tmp_path / "quantised", tmp_path / "floats")
    source, tokens = resolve(str(tmp_path / "quantised")), torch.tensor(TOKENS)
    with torch.inference_mode():
        decoder = Decoder(*load_weights(source))
        alone, meant = ranks_logits(decoder), expected(reference(tmp_path / "floats"), tokens)

    def ranked(group: CpuGroup) -> Tensor:
        spec, weights = load_weights(source, rank=group.rank, ranks=2)
        return ranks_logits(Decoder(spec, weights, group))

    both = together(2, ranked)[0]
    if any(matrix.scheme.startswith("fp8") for matrix in _matrices(decoder)):
        rounded = (alone - meant).norm()
        assert 0 < rounded < 0.3 * meant.norm()
        assert (both - alone).norm() < 1.5 * rounded
    else:
        close(alone, meant)
        torch.testing.assert_close(both, alone, rtol=1e-4, atol=1e-3)


_FLOAT4 = {"num_bits": 4, "type": "float"}
_INT8 = _numbers(num_bits=8, type="int", strategy="channel")
_ROUND = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:auto_gptq",
    "bits": 4,
    "group_size": 128,
}
REFUSED = {
    # compressed-tensors
    "quantized.w8a8": (_compressed("int-quantized", _group(_INT8, _TOKEN)), "format"),
    "quantized.w8a16": (_compressed("pack-quantized", _group(_INT8)), "num_bits of weights"),
    "w4a8": (_compressed("pack-quantized", _group(_numbers(**_INT), _TOKEN)), "input_activations"),
    "w2a16": (
        _compressed("pack-quantized", _group(_numbers(**{**_INT, "num_bits": 2}))),
        "num_bits",
    ),
    "W8A16-FP8": (
        _compressed("naive-quantized", _group(_numbers(**_FLOAT, strategy="channel"))),
        "input_activations",
    ),
    "int8 as naive-quantized": (_compressed("naive-quantized", _group(_INT8, _TOKEN)), "type"),
    "NVFP4": (
        _compressed(
            "nvfp4-pack-quantized",
            _group(_numbers(**_FLOAT4, strategy="tensor_group", group_size=16)),
        ),
        "format of compressed-tensors 'nvfp4-pack-quantized'",
    ),
    "MXFP4": (
        _compressed(
            "mxfp4-pack-quantized", _group(_numbers(**_FLOAT4, strategy="group", group_size=32))
        ),
        "format of compressed-tensors 'mxfp4-pack-quantized'",
    ),
    "FP8 and NVFP4": (
        _compressed(
            "mixed-precision",
            {**_CHANNEL, "format": "float-quantized"},
            _group(_numbers(**_FLOAT4), None, ["re:.*mlp.*"], format="nvfp4-pack-quantized"),
        ),
        "format of compressed-tensors 'nvfp4-pack-quantized'",
    ),
    "2of4-w4a16": (_compressed("marlin-24", _W4), "format of compressed-tensors 'marlin-24'"),
    "2of4-FP8": (
        _compressed(
            "float-quantized",
            _CHANNEL,
            sparsity_config={"format": "sparse-24-bitmask", "sparsity_structure": "2:4"},
        ),
        "sparsity_config",
    ),
    "sparse alone": (
        {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-bitmask"}},
        "sparsity_config of compressed-tensors 'sparse-bitmask'",
    ),
    "sparse alone, not named": (
        {"sparsity_config": {"format": "sparse-bitmask"}},
        "sparsity_config",
    ),
    "saved without compression": (_compressed("dense", _CHANNEL), "format"),
    "FP8 by groups": (
        _compressed("float-quantized", _group(_numbers(**_FLOAT, strategy="group"), _TOKEN)),
        "strategy of weights",
    ),
    "FP8 with zero points": (
        _compressed(
            "float-quantized",
            _group(_numbers(**_FLOAT, strategy="tensor", symmetric=False), _TOKEN),
        ),
        "symmetric of weights",
    ),
    "FP8 in blocks of 64": (
        _compressed(
            "float-quantized",
            _group(_numbers(**_FLOAT, strategy="block", block_structure=[64, 64]), _TOKEN),
        ),
        "block_structure",
    ),
    "FP8 blocks, one scale for activations": (
        _compressed(
            "float-quantized",
            _group(_numbers(**_FLOAT, strategy="block", block_structure=[128, 128]), _STATIC),
        ),
        "strategy of input_activations",
    ),
    "activations alone": (_compressed("float-quantized", _group(None, _TOKEN)), "weights"),
    "outputs of modules": (
        _compressed("float-quantized", {**_CHANNEL, "output_activations": _STATIC}),
        "output_activations",
    ),
    "rotated": (
        _compressed("pack-quantized", _W4, transform_config={"config_groups": {"R4": {}}}),
        "transform_config of compressed-tensors",
    ),
    "groups of 16": (
        _compressed("pack-quantized", _group(_numbers(**{**_INT, "group_size": 16}))),
        "group_size",
    ),
    # fp8 and ModelOpt
    "e5m2": ({**_AUTO_FP8, "fmt": "e5m2"}, "fmt"),
    "blocks of one row": ({**_FP8, "weight_block_size": [1, 128]}, "weight_block_size"),
    "activations in 16 bits": ({**_FP8, "activation_scheme": "none"}, "activation_scheme"),
    **{
        f"ModelOpt {algo}": (
            {"quant_method": "modelopt", "quantization": {"quant_algo": algo}},
            f"quant_algo of modelopt '{algo}'",
        )
        for algo in (
            *("NVFP4", "NVFP4_AWQ", "W4A16_AWQ", "W4A8_AWQ", "MXFP8", "MIXED_PRECISION"),
            *("FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "W8A8_SQ_PER_CHANNEL"),
        )
    },
    # GPTQ, AWQ, AutoRound
    **{f"GPTQ-Int{bits}": ({**_GPTQ, "bits": bits}, f"bits of gptq {bits}") for bits in (2, 3, 8)},
    "GPTQ in groups of 16": ({**_GPTQ, "group_size": 16}, "group_size of gptq 16"),
    **{
        f"GPTQ for {form}": ({**_GPTQ, "checkpoint_format": form}, "checkpoint_format of gptq")
        for form in ("marlin", "bitblas", "qqq", "ipex")
    },
    "Marlin by its switch": ({**_GPTQ, "is_marlin_format": True}, "is_marlin_format"),
    "words of eight bits": ({**_GPTQ, "pack_dtype": "int8"}, "pack_dtype"),
    "modules of other bits": (
        {**_GPTQ, "dynamic": {r"-:.*mlp\.gate$": {}, r".*down.*": {"bits": 8}}},
        "dynamic of gptq '\\.\\*down",
    ),
    "GPTQ with rotations": ({**_GPTQ, "rotation": "hadamard"}, "rotation of gptq 'hadamard'"),
    "GPTQ, activations of eight bits": (
        {**_GPTQ, "input_activations": {"format": "float8_e4m3fn", "dynamic": True}},
        "input_activations of gptq",
    ),
    "EoRA": ({**_GPTQ, "adapter": {"name": "lora", "rank": 64}}, "adapter of gptq"),
    **{
        f"AWQ {version}": ({**_AWQ, "version": version}, f"version of awq '{version}'")
        for version in ("gemv", "gemv_fast", "marlin", "exllama")
    },
    "AWQ in eight bits": ({**_AWQ, "bits": 8}, "bits of awq"),
    "AutoRound's own layout": ({**_ROUND, "packing_format": "auto_round"}, "packing_format"),
    "AutoRound in MXFP4": ({**_ROUND, "data_type": "mx_fp"}, "data_type"),
    "AutoRound in FP8": (
        {**_ROUND, "bits": 8, "group_size": [128, 128], "packing_format": "auto_round:fp8"},
        "bits of auto-round 8",
    ),
    "AutoRound in blocks": ({**_ROUND, "group_size": [128, 128]}, "group_size of auto-round"),
    "AutoRound in two bits": ({**_ROUND, "bits": 2}, "bits of auto-round 2"),
    "AutoRound, activations of eight bits": ({**_ROUND, "act_bits": 8}, "act_bits"),
    "AutoRound, a module in eight bits": (
        {**_ROUND, "extra_config": {"model.layers.0.mlp.down_proj": {"bits": 8}}},
        "extra_config of auto-round: bits of model.layers.0.mlp.down_proj 8",
    ),
    "AutoRound, a module in other groups": (
        {**_ROUND, "extra_config": {"lm_head": {"bits": 4, "group_size": 32}}},
        "extra_config of auto-round: group_size of lm_head 32",
    ),
    "AutoRound with rotations": ({**_ROUND, "rotation_config": {"block_size": 32}}, "rotation"),
    # others
    "bitsandbytes": ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "'bitsandbytes'"),
    **{
        f"the method {method}": ({"quant_method": method}, f"quantisation '{method}'")
        for method in (
            *("bitsandbytes", "fbgemm_fp8", "torchao", "hqq", "quark", "modelopt_fp4"),
            *("aqlm", "vptq", "eetq", "quanto", "higgs", "spqr", "bitnet", "exl2", "exl3"),
            *("fp_quant", "auto-round-fp", "experts_int8", "qqq", "paroquant"),
        )
    },
    "no method at all": ({"bits": 4}, "'without a quant_method'"),
}
"""Configs, and what of them the refusal names."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_its_field(name: str) -> None:
    config, message = REFUSED[name]
    with pytest.raises(UnsupportedModel, match=f"^unsupported .*{message}.*; these work: ."):
        read_quantization(config)


def test_groups_by_the_name_of_a_preset_are_no_groups() -> None:
    with pytest.raises(ValueError, match=r"quantization_config: Expected `object`.*config_groups"):
        read_quantization({**_compressed("pack-quantized"), "config_groups": {"W8A8": ["Linear"]}})


def test_quantised_embeddings_are_refused_by_name(tmp_path: Path) -> None:
    one = Published(_compressed("pack-quantized", _W4), {"_proj.": _G128, "embed_tokens.": _G128})
    one.save(tmp_path / "quantised", tmp_path / "floats")
    message = "quantised embeddings are not read, such as model.embed_tokens.weight_packed; those"
    with pytest.raises(WeightsError, match=message):
        load_decoder(resolve(str(tmp_path / "quantised")))


def test_only_words_of_rows_must_be_whole() -> None:
    """A vocabulary of 32,001 can be stored with groups that have no zero points."""
    form = Format("packed", "compressed-tensors", 32)
    assert form.tensors(250, 64)["weight_packed"].shapes == ((250, 8),)
    with pytest.raises(ValueError, match="no whole groups of 32 columns and words of eight"):
        replace(form, symmetric=False).tensors(250, 64)


def test_zero_points_that_a_config_denies_are_refused(tmp_path: Path) -> None:
    one = Published({**_AWQ, "group_size": 32, "zero_point": False}, awq)
    one.save(tmp_path / "quantised", tmp_path / "floats")
    with pytest.raises(WeightsError, match=r"q_proj\.qzeros has zero points, but zero_point is"):
        load_decoder(resolve(str(tmp_path / "quantised")))
