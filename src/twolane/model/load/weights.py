"""Weights into a `Decoder`: safetensors, GGUF or random numbers."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Protocol

import torch

from twolane.model.decoder import Decoder, LayerWeights, Weights, pair_rows
from twolane.model.load.dummy import Dummy
from twolane.model.load.gguf import GGUFModel
from twolane.model.load.hub import ModelSource, Progress
from twolane.model.load.safetensors import Safetensors
from twolane.model.matrix import Matrix
from twolane.model.mlp import DenseMlp
from twolane.model.spec import ModelSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

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
        return spec, Dummy(dict(_expected(spec)), seed, device)
    if source.kind == "gguf" and source.path is not None:
        model = GGUFModel(source.path)
        return model.spec, model
    if source.kind == "dir" and source.path is not None:
        return source.spec(), Safetensors(source.path, stack)
    raise ValueError(f"{source.name} is a built-in shape without weights; load it as dummy")


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
    weights = Weights(embedding, tuple(layers), get("model.norm.weight"), Matrix.plain(head))
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
        qkv=Matrix.plain(qkv("weight")),
        qkv_bias=qkv("bias") if spec.qkv_bias else None,
        qk_norm=qk_norm() if spec.qk_norm else None,
        o=Matrix.plain(get(f"{prefix}.self_attn.o_proj.weight")),
        o_bias=one("self_attn.o_proj.bias", spec.o_bias),
        post_norm=get(f"{prefix}.post_attention_layernorm.weight"),
        mlp=DenseMlp(
            gate_up=Matrix.plain(gate_up("weight")),
            gate_up_bias=gate_up("bias") if spec.mlp_bias else None,
            down=Matrix.plain(get(f"{prefix}.mlp.down_proj.weight")),
            down_bias=one("mlp.down_proj.bias", spec.mlp_bias),
        ),
    )
