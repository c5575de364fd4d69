"""The `quantization_config` of each method by which checkpoints are quantised. No torch."""

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from twolane.common.checked_json import converted
from twolane.model.families.family import text_name
from twolane.model.load.quantization import BLOCK, Format, ModuleGroup, Quantization
from twolane.model.spec import UnsupportedModel

GROUPS = (32, 64, 128)
"""Columns of the groups of four-bit schemes that are read."""
CALIBRATED_KV = (
    *(".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".prob_scale"),
    *(".q_proj.output_scale", ".k_proj.output_scale", ".v_proj.output_scale"),
)
"""Ends of the names of scales that were calibrated for attention in eight bits."""
CALIBRATED_INPUTS = (".input_scale", ".activation_scale", ".act_scale")
"""Ends of the names of scales that were calibrated for activations."""


class _Method(msgspec.Struct):
    """The name of the method, which says what the rest means."""

    quant_method: str | None = None
    load_in_4bit: bool = False
    load_in_8bit: bool = False
    producer: dict[str, Any] = {}
    quant_algo: str | None = None
    config_groups: dict[str, Any] = {}
    sparsity_config: dict[str, Any] = {}

    @property
    def name(self) -> str:
        """The method; old configs do not name it, or name the program that wrote them."""
        if self.quant_method not in (None, "sparseml"):
            name = self.quant_method.lower().replace("_", "-").removeprefix("intel/")
            return name if name in _READERS else self.quant_method
        if self.load_in_4bit or self.load_in_8bit:
            return "bitsandbytes"
        if self.producer.get("name") == "modelopt" or self.quant_algo is not None:
            return "modelopt"
        compressed = self.config_groups or self.sparsity_config
        return "compressed-tensors" if compressed else "without a quant_method"


_OTHER_SUMS = (
    *("rotation", "rotation_config", "hadamard_config", "transform_config"),
    *("input_activations", "adapter"),
)
"""Fields of several methods that say that products are not those of the stored numbers alone."""


class _Fp8(msgspec.Struct):
    """Configuration of `quant_method` "fp8"."""

    activation_scheme: str = "dynamic"
    fmt: str = "e4m3"
    weight_block_size: list[int] | None = None
    ignored_layers: list[str] | None = None
    modules_to_not_convert: list[str] | None = None
    kv_cache_scheme: Any = None


class _Mxfp4(msgspec.Struct):
    """Configuration of `quant_method` "mxfp4", whose modules are those of experts."""

    modules_to_not_convert: list[str] | None = None


class _ModelOpt(msgspec.Struct):
    """Configuration of `quant_method` "modelopt"; a file of its own nests it in `quantization`."""

    quant_algo: str | None = None
    kv_cache_quant_algo: str | None = None
    kv_cache_scheme: Any = None
    ignore: list[str] | None = None
    exclude_modules: list[str] | None = None
    quantization: dict[str, Any] | None = None


class _AutoRound(msgspec.Struct):
    """Configuration of `quant_method` "auto-round"."""

    bits: int = 4
    group_size: int | list[int] = 128
    """Columns of a group; rows and columns of a block of FP8, which is not read."""
    sym: bool = False
    data_type: str = "int"
    act_bits: int | None = None
    packing_format: str = "auto_round"
    extra_config: dict[str, dict[str, Any]] | None = None


class _Awq(msgspec.Struct):
    """Configuration of `quant_method` "awq"; files of its own have the older of two names."""

    bits: int = 4
    w_bit: int | None = None
    group_size: int = 128
    q_group_size: int | None = None
    zero_point: bool = True
    version: str | None = None
    checkpoint_format: str | None = None
    format: str | None = None
    modules_to_not_convert: list[str] | None = None
    dynamic: dict[str, Any] | None = None


class _Gptq(msgspec.Struct):
    """Configuration of `quant_method` "gptq"."""

    bits: int = 4
    group_size: int = 128
    desc_act: bool = False
    sym: bool = False
    """Whether numbers are symmetric; without a value in the config, zero points are as stored."""
    lm_head: bool = False
    checkpoint_format: str | None = None
    format: str | None = None
    is_marlin_format: bool = False
    pack_dtype: str = "int32"
    modules_to_not_convert: list[str] | None = None
    modules_in_block_to_quantize: list[Any] | None = None
    dynamic: dict[str, Any] | None = None


class _Numbers(msgspec.Struct):
    """The number format of a group's weights or activations."""

    num_bits: int = 8
    type: str = "int"
    strategy: str | None = None
    symmetric: bool = True
    dynamic: bool | str = False
    group_size: int | None = None
    block_structure: list[int] | str | None = None
    """Rows and columns; older writers have them as "128x128"."""
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

    config_groups: dict[str, _ConfigGroup] = {}
    format: str = "float-quantized"
    ignore: list[str] | None = None
    kv_cache_scheme: Any = None
    sparsity_config: dict[str, Any] | None = None


def read_quantization(raw: Mapping[str, Any] | None) -> Quantization | None:
    """Read a `quantization_config`; return None where there is none.

    Raises:
        UnsupportedModel: the quantisation, or one of its options, is not built.
        ValueError: a value has the wrong type.
    """
    if not raw:
        return None
    fields = {name: value for name, value in _flat(raw).items() if value is not None}
    method = converted(fields, _Method, _WHERE).name
    for name in _OTHER_SUMS:
        _only(f"{name} of {method}", fields.get(name) or None, None)
    if method not in _READERS:
        raise UnsupportedModel.because("quantisation", method, (*_READERS, "GGUF files"))
    form, reader = _READERS[method]
    return reader(converted(fields, form, _WHERE, lax=True))


_WHERE = "config.json: quantization_config"


def _flat(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config that another holds, as compressed-tensors' first versions wrote."""
    inner = raw.get("quantization_config")
    return {**raw, **inner} if isinstance(inner, Mapping) else raw


def _only(what: str, value: object, *works: object) -> None:
    """Refuse a value that is not among those that work."""
    if value not in works:
        raise UnsupportedModel.because(what, value, [str(each) for each in works])


def _fp8(config: _Fp8) -> Quantization:
    _only("activation_scheme of fp8", config.activation_scheme, "dynamic", "static")
    _only("fmt of fp8", config.fmt, "e4m3", "float8_e4m3fn")
    _only("weight_block_size of fp8", config.weight_block_size, [BLOCK, BLOCK], None)
    left = (*(config.ignored_layers or ()), *(config.modules_to_not_convert or ()))
    unused = _unused(config.activation_scheme == "static", bool(config.kv_cache_scheme))
    if config.weight_block_size is not None:
        form = Format("fp8_block", "fp8", scales="weight_scale_inv")
        return _of_all([form], left, unused=unused)
    # AutoFP8 calls the scale of a module weight_scale, transformers weight_scale_inv.
    forms = [Format("fp8_scale", "fp8", scales=name) for name in _FP8_SCALES]
    return _of_all(forms, left, unused=unused)


_FP8_SCALES = ("weight_scale", "weight_scale_inv")


def _unused(static: bool, cache: bool) -> tuple[str, ...]:
    """Return the calibrated scales of a checkpoint whose activations, or KV cache, have such."""
    return (*(CALIBRATED_INPUTS if static else ()), *(CALIBRATED_KV if cache else ()))


def _modelopt(config: _ModelOpt) -> Quantization:
    if config.quantization is not None:
        config = converted(config.quantization, _ModelOpt, f"{_WHERE}: quantization")
    left = _globbed((*(config.ignore or ()), *(config.exclude_modules or ())))
    cache = config.kv_cache_quant_algo is not None or config.kv_cache_scheme is not None
    if config.quant_algo is None and cache:
        return _of_all([], left, unused=_unused(False, cache))
    _only("quant_algo of modelopt", (config.quant_algo or "").upper(), "FP8")
    return _of_all([Format("fp8_scale", "modelopt")], left, unused=_unused(True, cache))


def _globbed(names: Sequence[str]) -> list[str]:
    """Return names of modules, those with a star as patterns."""
    return [f"re:{fnmatch.translate(name)}" if "*" in name else name for name in names]


def _mxfp4(config: _Mxfp4) -> Quantization:
    left = _globbed(config.modules_to_not_convert or ())
    return _of_all([Format("mxfp4", "mxfp4", scales="scales")], left, (r"re:.*\.mlp\.experts\.",))


def _auto_round(config: _AutoRound) -> Quantization:
    """AutoRound writes the layouts of GPTQ and AWQ."""
    what = "of auto-round"
    _only(f"bits {what}", config.bits, 4)
    _only(f"data_type {what}", config.data_type, "int")
    _only(f"act_bits {what}", config.act_bits, None, 16)
    layouts: dict[str, Literal["awq", "gptq"]] = {
        "auto_round:auto_gptq": "gptq",
        "auto_round:auto_awq": "awq",
    }
    _only(f"packing_format {what}", config.packing_format, *layouts)
    kind, others = layouts[config.packing_format], config.extra_config or {}
    alike = {name for name, other in others.items() if _alike(name, other, config)}
    old, columns = kind == "gptq", _group(config.group_size, "auto-round")
    form = Format(kind, "auto-round", columns, symmetric=False, old_zeros=old, centred=config.sym)
    targets = ("Linear", "lm_head")
    left = [_searched(name) for name in others if name not in alike]
    return _of_all([form], left, targets, head="lm_head" in alike)


def _alike(name: str, other: Mapping[str, Any], config: _AutoRound) -> bool:
    """Return whether `extra_config` gives a module the format of the others; else it has 16 bits.

    Raises:
        UnsupportedModel: it has another one.
    """
    if other.get("bits", config.bits) in (16, 32):
        return False
    own = converted({**msgspec.structs.asdict(config), **other}, _AutoRound, _WHERE, lax=True)
    for field in ("bits", "group_size", "sym", "data_type"):
        what = f"extra_config of auto-round: {field} of {name}"
        usual = getattr(config, field)
        _only(what, getattr(own, field), usual, *((16, 32) if field == "bits" else ()))
    return True


def _searched(name: str) -> str:
    """Return a name of AutoRound, or one of its expressions, which are searched for."""
    return name if re.fullmatch(r"[\w.]*", name) else f"re:.*(?:{name})"


def _kind(blocks: bool) -> Literal["fp8_block", "fp8_scale"]:
    return "fp8_block" if blocks else "fp8_scale"


def _awq(config: _Awq) -> Quantization:
    _only("bits of awq", config.w_bit or config.bits, 4)
    version = config.version or config.checkpoint_format or config.format or "gemm"
    _only("version of awq", version.lower(), "gemm")
    columns = _group(config.q_group_size or config.group_size, "awq")
    left = (*(config.modules_to_not_convert or ()), *_left_out(config, "awq"))
    form = Format("awq", "awq", columns, symmetric=False, centred=not config.zero_point)
    return _of_all([form], left)


def _gptq(config: _Gptq) -> Quantization:
    _only("bits of gptq", config.bits, 4)
    _only("is_marlin_format of gptq", config.is_marlin_format, False)
    _only("pack_dtype of gptq", config.pack_dtype, "int32")
    layout = config.checkpoint_format or config.format or "gptq"
    _only("checkpoint_format of gptq", layout, "gptq", "gptq_v2")
    columns = _group(config.group_size, "gptq")
    form = Format(
        "gptq",
        "gptq",
        columns,
        symmetric=False,
        old_zeros=layout == "gptq",
        centred=config.sym,
        ordered=config.desc_act,
    )
    left = (*(config.modules_to_not_convert or ()), *_left_out(config, "gptq"))
    targets = _in_blocks(config.modules_in_block_to_quantize)
    if config.lm_head:
        targets.append("lm_head")
    return _of_all([form], left, targets, head=config.lm_head)


def _of_all(
    forms: Sequence[Format],
    left: Sequence[str],
    targets: Sequence[str] = ("Linear",),
    unused: tuple[str, ...] = (),
    *,
    head: bool = False,
) -> Quantization:
    """Return the quantisation of linear modules, all or some by name, in one format."""
    named, ignored = _checked(targets), _checked(left)
    groups = tuple(ModuleGroup(form, named) for form in forms)
    left = tuple(map(text_name, ignored))
    return Quantization(groups, left, head=head, by_pattern=False, unused=unused)


def _left_out(config: _Awq | _Gptq, method: str) -> list[str]:
    """Return the modules that GPTQModel's `dynamic` leaves in 16 bits, as patterns.

    Its other rules may repeat values of the config, or say nothing.

    Raises:
        UnsupportedModel: it gives modules another format.
    """
    usual, rules = msgspec.structs.asdict(config), config.dynamic or {}
    for name, rule in rules.items():
        if name.startswith("-:") or rule == {}:
            continue
        if not isinstance(rule, dict) or not rule.items() <= usual.items():
            works = 'rules with "-:", and those that change nothing'
            raise UnsupportedModel.because(f"dynamic of {method}", name, (works,))
    return [f"re:{name[2:]}" for name in rules if name.startswith("-:")]


def _in_blocks(blocks: list[Any] | None) -> list[str]:
    """Return the modules of a layer that are quantised: all, or those of
    `modules_in_block_to_quantize`, a list of names or of lists of names."""
    if not blocks:
        return ["Linear"]
    flat = [name for block in blocks for name in (block if isinstance(block, list) else [block])]
    return converted(flat, list[str], f"{_WHERE}: modules_in_block_to_quantize")


def _checked(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of modules.

    Raises:
        ValueError: what follows "re:" is no pattern.
    """
    for name in names:
        try:
            re.compile(name[3:] if name.startswith("re:") else "")
        except re.error as error:
            raise ValueError(f"{_WHERE}: {name!r} is not a pattern: {error}") from error
    return tuple(names)


def _group(size: int | list[int], method: str) -> int:
    _only(f"group_size of {method}", size, *GROUPS, -1)
    assert isinstance(size, int)
    return max(size, 0)


_ATTENTION = ("Attention", "self_attn", "self_attn$")
"""Ends of the names and patterns that mean attention as a whole."""


def _compressed(config: _CompressedTensors) -> Quantization:
    what = "of compressed-tensors"
    if config.sparsity_config:
        _only(f"sparsity_config {what}", config.sparsity_config.get("format"), "dense")
    # Groups of attention say how queries and keys are rounded, beside the KV cache.
    chosen = [
        group
        for group in config.config_groups.values()
        if not all(name.endswith(_ATTENTION) for name in group.targets)
    ]
    cache = config.kv_cache_scheme is not None or len(chosen) < len(config.config_groups)
    if not chosen and not cache and not config.sparsity_config:
        raise ValueError(f"{_WHERE}: config_groups has no group of linear modules")
    groups = tuple(
        ModuleGroup(
            _compressed_format(group, group.format or config.format), _checked(group.targets)
        )
        for group in chosen
    )
    ignored = _checked(config.ignore or ())
    static = any(each.input_activations and not each.input_activations.dynamic for each in chosen)
    unused = _unused(static, cache)
    left = tuple(map(text_name, ignored))
    return Quantization(groups, left, head=True, by_pattern=True, unused=unused)


_REORDERED = ("group", "dynamic", True)
"""Names of act-order whose groups are no neighbours."""


def _compressed_format(group: _ConfigGroup, form: str) -> Format:
    """Return the format of a group of modules."""
    what, weights = "of compressed-tensors", group.weights
    # Naive is the older name: each number as it is, of a type that is checked below.
    _only(f"format {what}", form, "float-quantized", "naive-quantized", "pack-quantized")
    if weights is None:
        raise UnsupportedModel.because(f"weights {what}", None, ("quantised ones",))
    _only(f"output_activations {what}", group.output_activations, None)
    if form == "pack-quantized":
        _only(f"type of weights {what}", weights.type, "int")
        _only(f"num_bits of weights {what}", weights.num_bits, 4)
        _only(f"strategy of weights {what}", weights.strategy, "group", "channel")
        orders = None, False, "weight", "static", *_REORDERED
        _only(f"actorder of weights {what}", weights.actorder, *orders)
        _only(f"input_activations of {form} {what}", group.input_activations, None)
        size = -1 if weights.strategy == "channel" else weights.group_size or -1
        columns, ordered = _group(size, "compressed-tensors"), weights.actorder in _REORDERED
        name = "compressed-tensors"
        return Format("packed", name, columns, weights.symmetric, ordered=ordered)
    _only(f"type of weights {what}", weights.type, "float")
    _only(f"num_bits of weights {what}", weights.num_bits, 8)
    _only(f"symmetric of weights {what}", weights.symmetric, True)
    _only(f"strategy of weights {what}", weights.strategy, "channel", "tensor", "block")
    blocks = weights.strategy == "block"
    if blocks:
        whole = [BLOCK, BLOCK], f"{BLOCK}x{BLOCK}"
        _only(f"block_structure of weights {what}", weights.block_structure, *whole)
    _rounded(group.input_activations, ("group",) if blocks else ("token", "tensor"))
    return Format(_kind(blocks), "compressed-tensors")


def _rounded(inputs: _Numbers | None, strategies: Sequence[str]) -> None:
    """Refuse activations that are not rounded to e4m3."""
    what = "input_activations of compressed-tensors"
    if inputs is None:
        raise UnsupportedModel.because(what, None, ("those of eight bits",))
    _only(f"dynamic of {what}", inputs.dynamic, True, False)
    _only(f"type of {what}", inputs.type, "float")
    _only(f"num_bits of {what}", inputs.num_bits, 8)
    _only(f"strategy of {what}", inputs.strategy, *strategies)
    if "group" in strategies:
        _only(f"group_size of {what}", inputs.group_size, BLOCK)


_READERS: Mapping[str, tuple[type[msgspec.Struct], Callable[[Any], Quantization]]] = {
    "fp8": (_Fp8, _fp8),
    "compressed-tensors": (_CompressedTensors, _compressed),
    "awq": (_Awq, _awq),
    "gptq": (_Gptq, _gptq),
    "auto-round": (_AutoRound, _auto_round),
    "modelopt": (_ModelOpt, _modelopt),
    "mxfp4": (_Mxfp4, _mxfp4),
}
"""The fields of the config of each method that is served, and what reads them."""
