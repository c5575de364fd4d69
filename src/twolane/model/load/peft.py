"""LoRA adapters as PEFT writes them: `adapter_config.json` and `adapter_model.safetensors`.

The tensors say which modules an adapter has; the config says how they are scaled. What a config
asks beyond that is refused by the name of its field, and so is a field that is not known here,
unless it is empty.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from twolane.common.checked_json import converted, json_object
from twolane.common.files import is_folder
from twolane.model.families.family import JOINED_GATE_UP, JOINED_QKV, text_name
from twolane.model.families.registry import FAMILIES
from twolane.model.load.adapter_files import CONFIG, TENSORS, digest_of_contents
from twolane.model.load.checkpoint import part_rows
from twolane.model.load.safetensors import loaded_tensors
from twolane.model.lora import MAX_RANK, Adapter, LoraProduct, Section
from twolane.model.rope import pair_rows
from twolane.model.sharding import Shard
from twolane.model.spec import ModelSpec

T = TypeVar("T")

_TYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Types of numbers that are read."""
_HEADER_BYTES = 16 << 20
"""Bytes that a file of tensors may have beside their numbers."""
_PREFIX = "base_model.model."
_WITHOUT_EFFECT = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout"),
        *("megatron_core", "peft_version", "qalora_group_size", "revision", "task_type"),
        # Which modules there are is read from the tensors, and how they began does not matter.
        *("layers_pattern", "layers_to_transform", "eva_config"),
    }
)
"""Fields of a config that change nothing of what an adapter computes."""
_PATTERN = re.compile(r"\^?[\w.\\|()\[\]-]+\$?")
"""Keys of `rank_pattern` and `alpha_pattern` that are read: expressions that repeat nothing, but
for `.*` at most `_MAX_GAPS` times."""
_MAX_GAPS = 3
_MAX_NAMES = 4096
"""Most names or patterns of modules in a field: each is compared with every module."""
_MAX_WAYS = 1 << 18
"""Most ways in which the patterns of a field may be tried on a name, as `_ways` counts them."""
_ENDS = ("lm_head", "model.embed_tokens")
"""The modules outside of layers that PEFT makes adapters of."""


class AdapterError(ValueError):
    """An adapter cannot be served; the message says why."""


class _AdapterConfig(msgspec.Struct, dict=True):
    """The fields of an `adapter_config.json` that are honoured."""

    peft_type: str
    r: int
    lora_alpha: float
    target_modules: list[str] | str
    use_rslora: bool = False
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    fan_in_fan_out: bool = False
    bias: str = "none"
    exclude_modules: list[str] | str | None = None
    init_lora_weights: Any = True

    @cached_property
    def _ranks(self) -> list[tuple[re.Pattern[str], int]]:
        return _compiled(self.rank_pattern)

    @cached_property
    def _alphas(self) -> list[tuple[re.Pattern[str], float]]:
        return _compiled(self.alpha_pattern)

    def rank(self, module: str) -> int:
        """Return the rank of a module."""
        return _of(self._ranks, module) or self.r

    def scale(self, module: str, rank: int) -> float:
        """Return the factor of B @ A of a module of this rank."""
        alpha = _of(self._alphas, module)
        alpha = self.lora_alpha if alpha is None else alpha
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


@dataclass(frozen=True)
class _LinearModule:
    """A linear module of a layer, as checkpoints of the family have it."""

    product: LoraProduct
    rows: int
    columns: int
    parts: tuple[str, ...]
    """The modules of `_Part` that its rows are, in their order."""


@dataclass(frozen=True)
class _Part:
    """Rows of a product that have one A and one B."""

    rows: int
    """Rows in the whole model."""
    first: int
    """Column of the rank's product where they begin."""
    paired: bool = False
    """Whether the decoder has the rows in the order of `pair_rows`."""


def read_adapter(
    path: str | Path,
    shard: Shard,
    dtype: torch.dtype,
    max_rank: int = MAX_RANK,
    digest: bytes | None = None,
) -> Adapter:
    """Read a rank's part of an adapter, on the CPU.

    Each file is read once, and not mapped: others may write it meanwhile, or cut it off.

    Args:
        path: directory of a PEFT checkpoint.
        shard: the rank's part of the base model.
        dtype: Type of the adapter's matrices.
        max_rank: the largest rank of a module that is taken.
        digest: Digest of the adapter's files, as `digest_of` returns it; None accepts any files.

    Raises:
        AdapterError: it is damaged, made for another model, or asks for what is not served; or its
            files are others.
    """
    try:
        return _read(Path(path), shard, dtype, max_rank, digest)
    except AdapterError:
        raise
    except (ValueError, OSError) as error:
        raise AdapterError(str(error)) from error


def _read(
    path: Path, shard: Shard, dtype: torch.dtype, max_rank: int, digest: bytes | None
) -> Adapter:
    if not is_folder(path):
        raise AdapterError(f"{path} is no directory")
    modules = dict(_modules(shard.spec))
    for name, why in ((CONFIG, ""), (TENSORS, "; other formats are not read")):
        if not (path / name).is_file():
            raise AdapterError(f"{path} has no {name}{why}")
    written = _content(path / CONFIG, _HEADER_BYTES)
    most = sum(each.rows + each.columns for each in modules.values())
    stored = _content(path / TENSORS, MAX_RANK * most * 4 + _HEADER_BYTES)
    if digest is not None and digest_of_contents(written, stored) != digest:
        raise AdapterError(f"the files in {path} have changed")
    config, loaded = _config(path, written), loaded_tensors(path / TENSORS, stored)
    tensors = {_usual_name(name): tensor for name, tensor in loaded.items()}
    found = _found(tensors, shard.spec, modules)
    _check_targets(config, found, [*_ENDS, *modules])
    _check_ranks(config, found, max_rank)
    read = _Reader(found, tensors, config, shard, modules, dtype)
    layers = [_layer(i, read) for i in range(shard.spec.layers)]
    return Adapter(layers, max(found.values()))


def _usual_name(tensor: str) -> str:
    """Return the name of a tensor in an adapter of a model of text; those of models that read
    images, too, have the names of their text part."""
    if not tensor.startswith(_PREFIX):
        return tensor
    return _PREFIX + text_name(tensor.removeprefix(_PREFIX))


def _content(file: Path, most: int) -> bytes:
    """Return the content of a file that has no more bytes than an adapter's can have."""
    with file.open("rb") as opened:
        content = opened.read(most + 1)
    if len(content) > most:
        raise AdapterError(
            f"{file} has more than {most:,} bytes, as no adapter of rank {MAX_RANK} has"
        )
    return content


def _config(path: Path, written: bytes) -> _AdapterConfig:
    """Read an adapter's config, refusing options that are not served."""
    raw = json_object(path / CONFIG, written)
    if raw.get("peft_type") != "LORA":
        raise AdapterError(f"{CONFIG}: peft_type must be 'LORA', not {raw.get('peft_type')!r}")
    if raw.get("bias", "none") != "none":
        raise AdapterError(f"{CONFIG}: bias must be 'none', not {raw['bias']!r}")
    known = {*_AdapterConfig.__struct_fields__, *_WITHOUT_EFFECT}
    for name, value in raw.items():
        if name not in known and value:
            raise AdapterError(f"{CONFIG}: {name} is not served (it is {_short(value)})")
    fields = {name: value for name, value in raw.items() if value is not None}
    config = converted(fields, _AdapterConfig, CONFIG, lax=True)
    if config.fan_in_fan_out:
        raise AdapterError(f"{CONFIG}: fan_in_fan_out is not served")
    # Values of `init_lora_weights` that leave the base model's weights as they are.
    if config.init_lora_weights not in (True, False, None, "gaussian", "orthogonal", "eva", "mica"):
        start = _short(config.init_lora_weights)
        raise AdapterError(f"{CONFIG}: init_lora_weights {start} changes the base model's weights")
    for field in ("target_modules", "rank_pattern", "alpha_pattern"):
        value = getattr(config, field)
        if not isinstance(value, str) and len(value) > _MAX_NAMES:
            raise AdapterError(f"{CONFIG}: {field} has more than {_MAX_NAMES} names")
        patterns = value if isinstance(value, dict) else ()
        for key in patterns:
            _check_pattern(field, key)
        if sum(map(_ways, patterns)) > _MAX_WAYS:
            raise AdapterError(f"{CONFIG}: {field} has too many alternatives in its patterns")
    alphas = [config.lora_alpha, *config.alpha_pattern.values()]
    if not all(map(math.isfinite, alphas)):
        raise AdapterError(f"{CONFIG}: lora_alpha must be finite")
    return config


def _check_pattern(field: str, key: str) -> None:
    problem = AdapterError(f"{CONFIG}: {field}: {_short(key)} is no name of modules")
    if not _PATTERN.fullmatch(key.replace(".*", "", _MAX_GAPS)):
        raise problem
    try:
        re.compile(key)
    except re.error:
        raise problem from None


def _ways(key: str) -> int:
    """Return about how many ways a pattern may be tried on a name: the choices of its groups
    multiply, and each `.*` may end at any character."""
    choices = math.prod(part.count("|") + 1 for part in re.split("[()]", key))
    return choices << 4 * key.count(".*")


def _compiled(values: Mapping[str, T]) -> list[tuple[re.Pattern[str], T]]:
    """Return the patterns of `rank_pattern` or `alpha_pattern` by the rules of PEFT."""
    return [(re.compile(rf"(.*\.)?({key})$"), value) for key, value in values.items()]


def _of(values: Sequence[tuple[re.Pattern[str], T]], module: str) -> T | None:
    """Return the value of the first pattern that a module matches."""
    return next((value for pattern, value in values if pattern.match(module)), None)


def _modules(spec: ModelSpec) -> Iterator[tuple[str, _LinearModule]]:
    """Yield the linear modules that adapters add to, with the names that checkpoints of the family
    have. A layer without a dense MLP has those of its attention alone."""
    for i in range(spec.layers):
        for name, module in _of_layer(spec, i).items():
            if "self_attn" in name or spec.has_dense(i):
                yield f"model.layers.{i}.{name}", module


def _of_layer(spec: ModelSpec, layer: int) -> dict[str, _LinearModule]:
    """Return the linear modules of a layer with a dense MLP."""
    at, kind, hidden = spec.at(layer), spec.kind(layer), spec.hidden_size
    down = _LinearModule("down", hidden, at.intermediate_size, ("mlp.down_proj",))
    modules = {
        "self_attn.o_proj": _LinearModule("o", hidden, at.q_size, ("self_attn.o_proj",)),
        "mlp.down_proj": down,
    }
    for joined, product in _PRODUCTS.items():
        rows = part_rows(joined, at)
        if joined in FAMILIES[spec.family].joined:
            modules[joined] = _LinearModule(product, sum(rows.values()), hidden, tuple(rows))
        else:
            modules |= {n: _LinearModule(product, rows[n], hidden, (n,)) for n in rows}
    if kind.reads_earlier:
        del modules[_KEYS], modules[_VALUES]
    elif kind.keys_are_values:
        del modules[_VALUES]
    return modules


_PRODUCTS: Mapping[str, LoraProduct] = {JOINED_QKV: "qkv", JOINED_GATE_UP: "gate_up"}
_KEYS, _VALUES = "self_attn.k_proj", "self_attn.v_proj"


def _parts(shard: Shard, layer: int) -> dict[str, _Part]:
    """Return the rows of each module in the rank's products of a layer."""
    spec, own = shard.spec.at(layer), shard.local.at(layer)
    return {
        "self_attn.q_proj": _Part(spec.q_size, 0, paired=True),
        _KEYS: _Part(spec.kv_size, own.q_size, paired=True),
        _VALUES: _Part(spec.kv_size, own.q_size + own.kv_size),
        "self_attn.o_proj": _Part(spec.hidden_size, 0),
        "mlp.gate_proj": _Part(spec.intermediate_size, 0),
        "mlp.up_proj": _Part(spec.intermediate_size, own.intermediate_size),
        "mlp.down_proj": _Part(spec.hidden_size, 0),
    }


def _found(
    tensors: Mapping[str, Tensor], spec: ModelSpec, modules: Mapping[str, _LinearModule]
) -> dict[str, int]:
    """Return the rank of each module that has tensors, by its name in the base model."""
    names, found = set(tensors), dict[str, int]()
    for name in sorted(names):
        module, _, end = name.removeprefix(_PREFIX).rpartition(".lora_")
        if not name.startswith(_PREFIX) or end not in ("A.weight", "B.weight"):
            raise AdapterError(f"{TENSORS}: {name} is no part of a LoRA adapter that is served")
        if module not in modules:
            why = f"the base model has no module {module} for adapters"
            if spec.moe is not None and ".self_attn." not in module:
                why += ", which experts, routers and what tokens share beside them do not take"
            raise AdapterError(f"{TENSORS}: {why}")
        other = "B" if end.startswith("A") else "A"
        if f"{_PREFIX}{module}.lora_{other}.weight" not in names:
            raise AdapterError(f"{TENSORS}: {module} lacks lora_{other}.weight")
        if (type_ := tensors[name].dtype) not in _TYPES:
            raise AdapterError(f"{TENSORS}: {name} is {type_}, not one of {_TYPES}")
        found[module] = _rank(tensors, module, modules[module])
    if not found:
        raise AdapterError(f"{TENSORS} has no tensors")
    return found


def _rank(tensors: Mapping[str, Tensor], module: str, kind: _LinearModule) -> int:
    """Return the rank of a module whose tensors have the shapes that the base model wants."""
    a, b = (tuple(tensors[f"{_PREFIX}{module}.lora_{end}.weight"].shape) for end in "AB")
    rank = a[0] if a else 0
    if a != (rank, kind.columns) or b != (kind.rows, rank):
        raise AdapterError(
            f"{module} has A {list(a)} and B {list(b)}; this base model wants "
            f"[rank, {kind.columns}] and [{kind.rows}, rank]"
        )
    return rank


def _check_targets(config: _AdapterConfig, found: Mapping[str, int], there: Sequence[str]) -> None:
    """Check that tensors and `target_modules` agree, if that is a list of names.

    As in PEFT, a name that no module of the base model has means none.
    """
    targets = config.target_modules
    if isinstance(targets, str):
        return  # an expression, of which the tensors are the result
    for target in targets:
        meant = [module for module in there if _ends_with(module, target)]
        if meant and not config.exclude_modules and not found.keys() & meant:
            raise AdapterError(f"{CONFIG}: target_modules has {target}, and {TENSORS} has not")
    for module in found:
        if not any(_ends_with(module, target) for target in targets):
            raise AdapterError(f"{TENSORS} has {module}, which is not in target_modules")


def _ends_with(module: str, target: str) -> bool:
    """Return whether a name of `target_modules` means a module."""
    return f".{module}".endswith(f".{target}")


def _check_ranks(config: _AdapterConfig, found: Mapping[str, int], most: int) -> None:
    for module, rank in found.items():
        expected = config.rank(module)
        if rank != expected or rank < 1:
            raise AdapterError(f"{module} has rank {rank}, and {CONFIG} says {expected}")
        if rank > most:
            raise AdapterError(
                f"{module} has rank {rank}: the most that is served here is {most} "
                "(--max-lora-rank)"
            )


@dataclass(frozen=True)
class _Reader:
    """What an adapter's layers are read from."""

    found: Mapping[str, int]
    tensors: Mapping[str, Tensor]
    config: _AdapterConfig
    shard: Shard
    modules: Mapping[str, _LinearModule]
    dtype: torch.dtype


def _layer(i: int, read: _Reader) -> dict[LoraProduct, list[Section]]:
    """Return the rank's part of an adapter in one layer."""
    layer: dict[LoraProduct, list[Section]] = {}
    values_too = read.shard.spec.kind(i).keys_are_values
    for name in (name for name in read.modules if name.startswith(f"model.layers.{i}.")):
        if name not in read.found:
            continue
        module = read.modules[name]
        a, b = (read.tensors[f"{_PREFIX}{name}.lora_{end}.weight"].float() for end in "AB")
        b = b * read.config.scale(name, read.found[name])
        sections = layer.setdefault(module.product, [])
        sections += _sections(i, module, a, b, read.shard, read.dtype)
        if values_too and name.endswith(_KEYS):
            same = replace(module, parts=(_VALUES,))
            sections += _sections(i, same, a, b, read.shard, read.dtype)
    return layer


def _sections(
    i: int, module: _LinearModule, a: Tensor, b: Tensor, shard: Shard, dtype: torch.dtype
) -> Iterator[Section]:
    """Yield the sections of a module's A and B in layer i; B is scaled.

    Raises:
        AdapterError: a number is not finite in this type.
    """
    parts, first, spec = _parts(shard, i), 0, shard.spec
    for name in module.parts:
        part = parts[name]
        own, ours = b[first : first + part.rows], a
        cut = shard.cut(f"model.layers.{i}.{name}.weight")
        if shard.size > 1 and cut is not None:
            pieces = slice(cut.start, cut.stop)
            own, ours = (own[pieces], a) if cut.dim == 0 else (own, a[:, pieces])
        own = pair_rows(own, spec.at(i).head_dim, spec.rope_of(i)) if part.paired else own
        # Copies: a view would keep the whole file's memory.
        kept = [each.to(dtype, copy=True).contiguous() for each in (ours, own)]
        if not all(bool(each.isfinite().all()) for each in kept):
            what = f"{TENSORS}: model.layers.{i}.{name}"
            raise AdapterError(f"{what} has numbers that are NaN or infinite")
        yield Section(slice(part.first, part.first + len(own)), *kept)
        first += part.rows


def _short(value: object) -> str:
    """Return a value of a config, shortened for a message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
