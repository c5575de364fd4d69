"""What a config says of quantised matrices: which module is stored how. No torch."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from twolane.common.checked_json import converted
from twolane.model.spec import UnsupportedModel

BLOCK = 128
"""Rows and columns of the only blocks of FP8 that are read."""
GROUPS = (32, 64, 128)
"""Columns of the groups of four-bit schemes that are read."""
FLOATS = ("F32", "BF16", "F16")
"""Types of tensors that are no quantised values, as safetensors names them."""


@dataclass(frozen=True)
class Stored:
    """One tensor of a checkpoint."""

    shapes: tuple[tuple[int, ...], ...]
    """The shapes that it may have."""
    types: tuple[str, ...] = FLOATS
    """The types that it may have, as safetensors names them."""


@dataclass(frozen=True)
class Format:
    """How one linear module is stored."""

    kind: Literal["fp8_block", "fp8_scale", "awq", "gptq", "packed"]
    """The layout of its tensors."""
    name: str
    """How the checkpoint's config calls it."""
    group: int = BLOCK
    """Columns that share a scale, in schemes of four bits; 0: all columns."""
    symmetric: bool = True
    """Whether a scheme of four bits has no zero points."""
    old_zeros: bool = False
    """Whether stored zero points are one less than those that are meant (GPTQ's first format)."""

    def tensors(self, rows: int, columns: int) -> Mapping[str, Stored]:
        """The tensors of a module [rows, columns], by the end of their names.

        Raises:
            ValueError: a module of this shape cannot be stored so.
        """
        if self.kind == "fp8_block":
            blocks = -(-rows // BLOCK), -(-columns // BLOCK)
            return {
                "weight": Stored(((rows, columns),), ("F8_E4M3",)),
                "weight_scale_inv": Stored((blocks,)),
            }
        if self.kind == "fp8_scale":
            return {
                "weight": Stored(((rows, columns),), ("F8_E4M3",)),
                "weight_scale": Stored(((rows, 1), (rows,), (1,), (), (1, 1))),
            }
        groups = self._groups(rows, columns)
        words, wholes = rows // 8, ("I32",)
        if self.kind == "awq":
            return {
                "qweight": Stored(((columns, words),), wholes),
                "qzeros": Stored(((groups, words),), wholes),
                "scales": Stored(((groups, rows),)),
            }
        if self.kind == "gptq":
            return {
                "qweight": Stored(((columns // 8, rows),), wholes),
                "qzeros": Stored(((groups, words),), wholes),
                "scales": Stored(((groups, rows),)),
                "g_idx": Stored(((columns,),), wholes),
            }
        zeros = {} if self.symmetric else {"weight_zero_point": Stored(((words, groups),), wholes)}
        return {
            "weight_packed": Stored(((rows, columns // 8),), wholes),
            "weight_scale": Stored(((rows, groups),)),
            "weight_shape": Stored(((2,),), ("I64", "I32")),
            **zeros,
        }

    def _groups(self, rows: int, columns: int) -> int:
        """Groups of a row.

        Raises:
            ValueError: groups, or words of eight numbers, do not divide the shape.
        """
        group = self.group or columns
        if rows % 8 or columns % 32 or columns % group:
            raise ValueError(
                f"a matrix of {rows} x {columns} has no whole groups of {group} columns "
                "and words of eight numbers"
            )
        return columns // group


@dataclass(frozen=True)
class _Group:
    """A group of modules of one format."""

    format: Format
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Quantization:
    """Which linear modules are quantised, and how."""

    groups: tuple[_Group, ...]
    ignored: tuple[str, ...]
    """Modules that are left in 16 bits, by name or pattern."""
    head: bool
    """Whether the classifier counts as a linear module."""
    by_pattern: bool
    """Whether names are whole, or patterns behind "re:"; otherwise a name means all below it."""

    @property
    def name(self) -> str:
        """How the config calls it."""
        return self.groups[0].format.name

    @property
    def scheme(self) -> Literal["fp8_block128", "fp8_channel", "int4_g128"]:
        """The scheme of matrices that dummy weights get in place of the checkpoint's."""
        kind = self.groups[0].format.kind
        if kind == "fp8_block":
            return "fp8_block128"
        return "fp8_channel" if kind == "fp8_scale" else "int4_g128"

    @property
    def int4(self) -> bool:
        """Whether the quantised modules have four bits."""
        return self.scheme == "int4_g128"

    def format(self, module: str) -> Format | None:
        """How a linear module is stored; None: in 16 bits."""
        if (module == "lm_head" and not self.head) or self._matches(module, self.ignored):
            return None
        fitting = (group for group in self.groups if self._matches(module, group.targets))
        return next((group.format for group in fitting), None)

    def _matches(self, module: str, names: Sequence[str]) -> bool:
        if not self.by_pattern:
            return any(name == "Linear" or f".{name}." in f".{module}." for name in names)
        return any(
            name in ("Linear", module)
            or (name.startswith("re:") and re.match(name[3:], module) is not None)
            for name in names
        )


class _Method(msgspec.Struct):
    """The name of the method, which says what the rest means."""

    quant_method: str = "unknown"


class _Fp8(msgspec.Struct):
    """Configuration of `quant_method` "fp8"."""

    activation_scheme: str = "dynamic"
    fmt: str = "e4m3"
    weight_block_size: list[int] | None = None
    ignored_layers: list[str] | None = None
    modules_to_not_convert: list[str] | None = None


class _Awq(msgspec.Struct):
    """Configuration of `quant_method` "awq"."""

    bits: int = 4
    group_size: int = 128
    zero_point: bool = True
    version: str = "gemm"
    modules_to_not_convert: list[str] | None = None


class _Gptq(msgspec.Struct):
    """Configuration of `quant_method` "gptq"."""

    bits: int = 4
    group_size: int = 128
    desc_act: bool = False
    sym: bool = True
    lm_head: bool = False
    checkpoint_format: str = "gptq"
    dynamic: dict[str, Any] | None = None


class _Numbers(msgspec.Struct):
    """How weights or activations of a group are stored."""

    num_bits: int = 8
    type: str = "int"
    strategy: str | None = None
    symmetric: bool = True
    dynamic: bool | str = False
    group_size: int | None = None
    block_structure: list[int] | None = None
    actorder: str | bool | None = None


class _ConfigGroup(msgspec.Struct):
    """Modules of a compressed-tensors checkpoint that are stored alike."""

    targets: list[str]
    weights: _Numbers | None = None
    input_activations: _Numbers | None = None
    output_activations: _Numbers | None = None
    format: str | None = None


class _CompressedTensors(msgspec.Struct):
    """Configuration of `quant_method` "compressed-tensors"."""

    config_groups: dict[str, _ConfigGroup]
    format: str = "float-quantized"
    ignore: list[str] | None = None
    kv_cache_scheme: dict[str, Any] | None = None
    sparsity_config: dict[str, Any] | None = None


def read_quantization(raw: Mapping[str, Any] | None) -> Quantization | None:
    """What a `quantization_config` says; None where there is none.

    Raises:
        UnsupportedModel: the quantisation, or one of its options, is not built.
        ValueError: a value has the wrong type.
    """
    if not raw:
        return None
    method = converted(raw, _Method, _WHERE).quant_method
    match method:
        case "fp8":
            return _fp8(converted(raw, _Fp8, _WHERE))
        case "awq":
            return _awq(converted(raw, _Awq, _WHERE))
        case "gptq":
            return _gptq(converted(raw, _Gptq, _WHERE))
        case "compressed-tensors":
            return _compressed(converted(raw, _CompressedTensors, _WHERE))
    served = ("fp8", "compressed-tensors", "awq", "gptq", "GGUF files")
    raise UnsupportedModel.because("quantisation", method, served)


_WHERE = "config.json: quantization_config"


def _only(what: str, given: object, *works: object) -> None:
    """Refuse a value that is not among those that work."""
    if given not in works:
        raise UnsupportedModel.because(what, given, [str(each) for each in works])


def _fp8(config: _Fp8) -> Quantization:
    _only("activation_scheme of fp8", config.activation_scheme, "dynamic")
    _only("fmt of fp8", config.fmt, "e4m3")
    _only("weight_block_size of fp8", config.weight_block_size, [BLOCK, BLOCK], None)
    form = Format("fp8_block" if config.weight_block_size else "fp8_scale", "fp8")
    ignored = (*(config.ignored_layers or ()), *(config.modules_to_not_convert or ()))
    return Quantization((_Group(form, ("Linear",)),), ignored, head=False, by_pattern=False)


def _awq(config: _Awq) -> Quantization:
    _only("bits of awq", config.bits, 4)
    _only("version of awq", config.version.lower(), "gemm")
    _only("zero_point of awq", config.zero_point, True)
    form = Format("awq", "awq", _group(config.group_size, "awq"), symmetric=False)
    ignored = tuple(config.modules_to_not_convert or ())
    return Quantization((_Group(form, ("Linear",)),), ignored, head=False, by_pattern=False)


def _gptq(config: _Gptq) -> Quantization:
    _only("bits of gptq", config.bits, 4)
    _only("desc_act of gptq", config.desc_act, False)
    _only("lm_head of gptq", config.lm_head, False)
    _only("checkpoint_format of gptq", config.checkpoint_format, "gptq", "gptq_v2")
    _only("dynamic of gptq", config.dynamic or None, None)
    old = config.checkpoint_format == "gptq"
    form = Format("gptq", "gptq", _group(config.group_size, "gptq"), symmetric=False, old_zeros=old)
    return Quantization((_Group(form, ("Linear",)),), (), head=False, by_pattern=False)


def _group(size: int, method: str) -> int:
    _only(f"group_size of {method}", size, *GROUPS, -1)
    return max(size, 0)


def _compressed(config: _CompressedTensors) -> Quantization:
    what = "of compressed-tensors"
    _only(f"kv_cache_scheme {what}", config.kv_cache_scheme, None)
    if config.sparsity_config:
        _only(f"sparsity {what}", config.sparsity_config.get("format"), "dense")
    if not config.config_groups:
        raise ValueError(f"{_WHERE}: config_groups is empty")
    groups = tuple(
        _Group(_compressed_format(group, group.format or config.format), tuple(group.targets))
        for group in config.config_groups.values()
    )
    return Quantization(groups, tuple(config.ignore or ()), head=True, by_pattern=True)


def _compressed_format(group: _ConfigGroup, form: str) -> Format:
    """The format of a group of modules."""
    what, weights = "of compressed-tensors", group.weights
    _only(f"format {what}", form, "float-quantized", "pack-quantized")
    if weights is None:
        raise UnsupportedModel.because(f"weights {what}", None, ("quantised ones",))
    _only(f"output_activations {what}", group.output_activations, None)
    if form == "pack-quantized":
        _only(f"type of weights {what}", weights.type, "int")
        _only(f"num_bits of weights {what}", weights.num_bits, 4)
        _only(f"strategy of weights {what}", weights.strategy, "group", "channel")
        _only(f"actorder of weights {what}", weights.actorder, None, False, "weight", "static")
        _only(f"input_activations of {form} {what}", group.input_activations, None)
        size = -1 if weights.strategy == "channel" else weights.group_size or -1
        columns = _group(size, "compressed-tensors")
        return Format("packed", "compressed-tensors", columns, weights.symmetric)
    _only(f"type of weights {what}", weights.type, "float")
    _only(f"num_bits of weights {what}", weights.num_bits, 8)
    _only(f"symmetric of weights {what}", weights.symmetric, True)
    _only(f"strategy of weights {what}", weights.strategy, "channel", "tensor")
    inputs = group.input_activations
    if inputs is None:
        raise UnsupportedModel.because(f"input_activations {what}", None, ("dynamic ones",))
    _only(f"dynamic of input_activations {what}", inputs.dynamic, True)
    _only(f"type of input_activations {what}", inputs.type, "float")
    _only(f"num_bits of input_activations {what}", inputs.num_bits, 8)
    _only(f"strategy of input_activations {what}", inputs.strategy, "token", "tensor")
    return Format("fp8_scale", "compressed-tensors")
