"""Weights into a `Decoder`: safetensors, GGUF or random numbers."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from safetensors import safe_open

from twolane.model.decoder import Decoder, LayerWeights, Weights, pair_rows
from twolane.model.load.gguf import GGUFModel
from twolane.model.load.hub import ModelSource, Progress
from twolane.model.spec import ModelSpec, converted, read_json

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_DUMMY_STD = 0.02
_NAMED_AT_MOST = 5
_IGNORED_SUFFIX = "rotary_emb.inv_freq"
"""Old Llama checkpoints store what follows from the config."""


class WeightsError(ValueError):
    """The checkpoint's tensors are not those of its config; the message names them."""


class TensorSource(Protocol):
    """Tensors by their Hugging Face names."""

    def names(self) -> list[str]:
        """All tensors."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape, without reading the tensor."""
        ...

    def get(self, name: str) -> Any:
        """The tensor: torch or numpy, of any dtype."""
        ...


def load_decoder(source: ModelSource, **options: Any) -> Decoder:
    """Load a model for the CPU: `load_weights` into a `Decoder`."""
    return Decoder(*load_weights(source, **options))


def load_weights(
    source: ModelSource,
    *,
    dtype: str = "auto",
    load_format: str = "auto",
    max_positions: int | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> tuple[ModelSpec, Weights]:
    """Load a model's weights onto a device.

    Args:
        source: what `hub.resolve` found.
        dtype: of the weights: "float32", "bfloat16", "float16", or "auto", which is float32 on a
            CPU and bfloat16 on a GPU.
        load_format: "dummy" takes random normal weights, the same for the same seed and device.
        max_positions: overrides the positions of the config.
        seed: of dummy weights.
        device: where the weights go, layer by layer.
        progress: told ("weights", fraction) as layers are loaded.

    Raises:
        UnsupportedModel: the model asks for something that is not built.
        WeightsError: tensors are missing, surplus or of the wrong shape.
        ValueError: files are missing or broken, or the arguments make no sense.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f"dtype must be one of auto, {', '.join(DTYPES)}, not {dtype!r}")
    device = torch.device(device)
    if dtype == "auto":
        dtype = "float32" if device.type == "cpu" else "bfloat16"
    with ExitStack() as stack:
        spec, tensors = _open(source, load_format, seed, device, stack)
        if max_positions is not None:
            spec = replace(spec, max_positions=max_positions)
        _check(spec, tensors, source.name)
        progress = progress or (lambda *_: None)
        weights = _assemble(spec, tensors, DTYPES[dtype], device, progress)
    return spec, weights


def _open(
    source: ModelSource, load_format: str, seed: int, device: torch.device, stack: ExitStack
) -> tuple[ModelSpec, TensorSource]:
    if load_format == "dummy":
        spec = source.spec()
        return spec, _Dummy(spec, seed, device)
    if source.kind == "gguf" and source.path is not None:
        model = GGUFModel(source.path)
        return model.spec, model
    if source.kind == "dir" and source.path is not None:
        return source.spec(), _Safetensors(source.path, stack)
    raise ValueError(f"{source.name} is a built-in shape without weights; load it as dummy")


class _Safetensors:
    """The safetensors files of a directory, memory-mapped."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._files: dict[str, Any] = {}
        for path in self._paths(directory):
            if not path.is_file():
                raise ValueError(f"{directory} lacks {path.name}, which its index names")
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except Exception as error:  # safetensors raises its own type, derived from Exception
                raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
            self._files.update(dict.fromkeys(file.keys(), file))

    @staticmethod
    def _paths(directory: Path) -> list[Path]:
        # In this order, as in `transformers`: an index may be left from a save in shards.
        single = directory / "model.safetensors"
        if single.is_file():
            return [single]
        index = directory / "model.safetensors.index.json"
        if index.is_file():
            return [directory / name for name in _shards(index)]
        raise ValueError(
            f"{directory} has neither model.safetensors nor model.safetensors.index.json; "
            "other weight formats than safetensors and GGUF are not read"
        )

    def names(self) -> list[str]:
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def get(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor


class _Index(msgspec.Struct):
    """What is read of a `model.safetensors.index.json`."""

    weight_map: dict[str, str]
    """File by tensor."""


def _shards(index: Path) -> list[str]:
    """The files that an index names, all of them in its folder or below.

    Raises:
        ValueError: it is broken, or leads elsewhere.
    """
    files = sorted(set(converted(read_json(index), _Index, str(index)).weight_map.values()))
    for name in files:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{index} names {name}, which is outside its folder")
    return files


class _Dummy:
    """Random normal matrices and norms of one, the same for the same seed."""

    def __init__(self, spec: ModelSpec, seed: int, device: torch.device) -> None:
        self._shapes = dict(_expected(spec))
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def get(self, name: str) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(self._shapes[name], device=self._device)
        tensor = torch.empty(self._shapes[name], device=self._device)
        return tensor.normal_(0.0, _DUMMY_STD, generator=self._generator)


def _expected(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor of a model, as Hugging Face checkpoints store them."""
    hidden, mlp = spec.hidden_size, spec.intermediate_size
    yield "model.embed_tokens.weight", (spec.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    if not spec.tie_embeddings:
        yield "lm_head.weight", (spec.vocab_size, hidden)
    matrices = {
        "self_attn.q_proj": (spec.q_size, hidden, spec.qkv_bias),
        "self_attn.k_proj": (spec.kv_size, hidden, spec.qkv_bias),
        "self_attn.v_proj": (spec.kv_size, hidden, spec.qkv_bias),
        "self_attn.o_proj": (hidden, spec.q_size, spec.o_bias),
        "mlp.gate_proj": (mlp, hidden, spec.mlp_bias),
        "mlp.up_proj": (mlp, hidden, spec.mlp_bias),
        "mlp.down_proj": (hidden, mlp, spec.mlp_bias),
    }
    for i in range(spec.layers):
        prefix = f"model.layers.{i}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        if spec.qk_norm:
            yield f"{prefix}.self_attn.q_norm.weight", (spec.head_dim,)
            yield f"{prefix}.self_attn.k_norm.weight", (spec.head_dim,)
        for name, (rows, columns, bias) in matrices.items():
            yield f"{prefix}.{name}.weight", (rows, columns)
            if bias:
                yield f"{prefix}.{name}.bias", (rows,)


def _check(spec: ModelSpec, tensors: TensorSource, name: str) -> None:
    """Refuse a checkpoint whose tensors are not exactly those of its config."""
    expected = dict(_expected(spec))
    found = {t for t in tensors.names() if not t.endswith(_IGNORED_SUFFIX)}
    if spec.tie_embeddings and "lm_head.weight" in found:
        found.remove("lm_head.weight")
        head, embedding = (tensors.get(t) for t in ("lm_head.weight", "model.embed_tokens.weight"))
        if head.shape != embedding.shape or not bool((head == embedding).all()):
            raise WeightsError(f"{name}: embeddings are tied, but lm_head.weight differs from them")
    misshapen = [
        f"{t} {list(tensors.shape(t))} instead of {list(shape)}"
        for t, shape in expected.items()
        if t in found and tensors.shape(t) != shape
    ]
    missing = [t for t in expected if t not in found]
    surplus = sorted(found - expected.keys())
    faults = (("missing", missing), ("surplus", surplus), ("misshapen", misshapen))
    for what, which in faults:
        if which:
            more = len(which) - _NAMED_AT_MOST
            listed = ", ".join(which[:_NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")
            raise WeightsError(f"{name}: {what} tensors: {listed}")


def _assemble(
    spec: ModelSpec,
    tensors: TensorSource,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
) -> Weights:
    def get(name: str) -> torch.Tensor:
        return torch.as_tensor(tensors.get(name)).to(device, dtype)

    embedding = get("model.embed_tokens.weight")
    layers = []
    for i in range(spec.layers):
        progress("weights", i / spec.layers)
        layers.append(_layer(spec, get, f"model.layers.{i}"))
    head = embedding if spec.tie_embeddings else get("lm_head.weight")
    weights = Weights(embedding, tuple(layers), get("model.norm.weight"), head)
    progress("weights", 1.0)
    return weights


def _layer(spec: ModelSpec, get: Callable[[str], torch.Tensor], prefix: str) -> LayerWeights:
    def one(name: str, present: bool = True) -> torch.Tensor | None:
        return get(f"{prefix}.{name}") if present else None

    def rotary(name: str) -> torch.Tensor:
        return pair_rows(get(f"{prefix}.{name}"), spec.head_dim)

    def qkv(suffix: str) -> torch.Tensor:
        q, k = (rotary(f"self_attn.{n}_proj.{suffix}") for n in "qk")
        return torch.cat([q, k, get(f"{prefix}.self_attn.v_proj.{suffix}")])

    def gate_up(suffix: str) -> torch.Tensor:
        return torch.cat([get(f"{prefix}.mlp.{n}_proj.{suffix}") for n in ("gate", "up")])

    def qk_norm() -> torch.Tensor:
        q, k = (rotary(f"self_attn.{n}_norm.weight") for n in "qk")
        return torch.cat([q.expand(spec.heads, -1), k.expand(spec.kv_heads, -1)])

    return LayerWeights(
        input_norm=get(f"{prefix}.input_layernorm.weight"),
        qkv=qkv("weight"),
        qkv_bias=qkv("bias") if spec.qkv_bias else None,
        qk_norm=qk_norm() if spec.qk_norm else None,
        o=get(f"{prefix}.self_attn.o_proj.weight"),
        o_bias=one("self_attn.o_proj.bias", spec.o_bias),
        post_norm=get(f"{prefix}.post_attention_layernorm.weight"),
        gate_up=gate_up("weight"),
        gate_up_bias=gate_up("bias") if spec.mlp_bias else None,
        down=get(f"{prefix}.mlp.down_proj.weight"),
        down_bias=one("mlp.down_proj.bias", spec.mlp_bias),
    )
