"""Loads the weights of a decoder: safetensors, GGUF or random numbers."""

import logging
import math
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from twolane.common.errors import FieldError
from twolane.common.resources import free_memory
from twolane.common.vocabulary import OnProgress
from twolane.model.decoder import LayerWeights, Weights
from twolane.model.load.checkpoint import (
    EMBEDDING,
    HEAD,
    WeightsError,
    check_tensors,
    expected_shapes,
    expert_names,
    linears_of,
    norm_names,
    refuse_tensors,
    stored_form,
)
from twolane.model.load.configs import JOINED, quantization_from_directory
from twolane.model.load.dummy import STD, Dummy
from twolane.model.load.gguf import GGUFModel
from twolane.model.load.hub import ModelSource
from twolane.model.load.joined import Joined, Place
from twolane.model.load.quantization import BLOCK, FLOATS, Quantization
from twolane.model.load.quantized import for_gpu, read_module
from twolane.model.load.safetensors import Safetensors, indexed, model_files
from twolane.model.load.source import TensorSource
from twolane.model.load.stacked import Stacked, has_stacks
from twolane.model.load.stored_formats import with_stored_formats
from twolane.model.matrix import Matrix, Scheme, concatenated, quantised
from twolane.model.mlp import DenseMlp, Experts
from twolane.model.rope import pair_rows
from twolane.model.sharding import Shard
from twolane.model.spec import ModelSpec, skewed

log = logging.getLogger("twolane.model")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

QUANTIZATIONS: dict[str, Scheme] = {
    "fp8": "fp8_channel",
    "fp8_block128": "fp8_block128",
    "int4": "int4_g128",
}
"""Names of `quantization`, and the scheme that matrices get."""
MIN_ITEMSIZE = 0.5
"""Bytes that a weight takes at least in any of the quantised schemes."""


def load_weights(
    source: ModelSource,
    *,
    dtype: str = "auto",
    load_format: str = "auto",
    quantization: str | None = None,
    max_positions: int | None = None,
    seed: int = 0,
    router_skew: float = 0.0,
    device: torch.device | str = "cpu",
    progress: OnProgress | None = None,
    rank: int = 0,
    ranks: int = 1,
) -> tuple[ModelSpec, Weights]:
    """Load a model's weights onto a device.

    Args:
        source: what `hub.resolve` found.
        dtype: of the weights: "float32", "bfloat16", "float16", or "auto", which is float32 on a
            CPU and bfloat16 on a GPU.
        load_format: "dummy" takes random normal weights, the same for the same seed and device.
        quantization: one of `QUANTIZATIONS`, which the matrices of all layers are rounded to while
            they are loaded. "int4" is for dummy weights alone; of quantised checkpoints only those
            of four bits are rounded again, to "fp8".
        max_positions: overrides the positions of the config.
        seed: of dummy weights.
        router_skew: `MoeSpec.skew` of dummy weights.
        device: where the weights go, layer by layer.
        progress: called with ("weights", fraction) as layers are loaded.
        rank: whose part is read.
        ranks: number of ranks that share the model.

    Returns:
        The shape of the whole model, and the rank's part of its weights.

    Raises:
        UnsupportedModel: the model asks for something that is not built.
        WeightsError: tensors are missing, surplus or of the wrong shape.
        ValueError: files are missing or broken, or the arguments make no sense.
    """
    device = torch.device(device)
    floats = _floats(dtype, device)
    dummy = load_format == "dummy"
    stored = quantization_of(source)
    scheme = asked_scheme(quantization, stored, dummy)
    with ExitStack() as stack:
        spec, tensors, modules = _open(source, dummy, seed, router_skew, device, stack, stored)
        if max_positions is not None:
            spec = replace(spec, max_positions=max_positions)
        check_tensors(spec, tensors, modules, source.name)
        if device.type == "cpu":
            small = scheme is not None or (modules is not None and bool(modules.groups))
            _check_room(spec, floats, small, ranks, source.name)
        if ranks > 1:
            _check_shared(scheme)
        loader = _Loader(Shard(spec, rank, ranks), tensors, modules, scheme, floats, device)
        weights = loader.weights(progress or (lambda *_: None))
    for (before, after), count in loader.converted.items():
        log.info("%d matrices stored as %s are served as %s", count, before, after)
    return spec, weights


def _floats(dtype: str, device: torch.device) -> torch.dtype:
    """Return the type of weights that are not quantised.

    Raises:
        ValueError: it is not served.
    """
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of auto, {', '.join(DTYPES)}, not {dtype!r}")
    return DTYPES[dtype]


def quantization_of(source: ModelSource) -> Quantization | None:
    """Return the quantisation of a model's files, or None where they are not quantised so."""
    if source.kind != "dir" or source.path is None:
        return None
    return quantization_from_directory(source.path)


def asked_scheme(name: str | None, stored: Quantization | None, dummy: bool) -> Scheme | None:
    """Return the scheme that matrices are rounded to while they are loaded; None: they stay as they
    are.

    Dummy weights get the scheme of the config where nothing else is asked for.

    Raises:
        ValueError: there is no such quantization, or it does not go with the checkpoint.
    """
    if name is None:
        return stored.scheme if dummy and stored is not None else None
    if name not in QUANTIZATIONS:
        raise ValueError(f"quantization must be one of {', '.join(QUANTIZATIONS)}, not {name!r}")
    matrices = None if dummy or stored is None or not stored.groups else stored
    if matrices is not None and not (name == "fp8" and matrices.int4):
        raise ValueError(
            f"quantization {name} is for weights in 16 or 32 bits, and fp8 also for four; "
            f"the checkpoint is stored as {matrices.name} and is served so without it"
        )
    if name == "int4" and not dummy:
        raise ValueError("quantization int4 is for dummy weights; use an AWQ or GPTQ checkpoint")
    return QUANTIZATIONS[name]


def _open(
    source: ModelSource,
    dummy: bool,
    seed: int,
    router_skew: float,
    device: torch.device,
    stack: ExitStack,
    stored: Quantization | None,
) -> tuple[ModelSpec, TensorSource, Quantization | None]:
    """Open a model: its spec, its tensors, and the formats of linear modules (None: floats)."""
    if dummy:
        spec = skewed(source.spec(), router_skew)
        return spec, _dummy(spec, seed, device), None
    if router_skew:
        raise FieldError("router_skew", "is for dummy weights")
    if source.kind == "gguf" and source.path is not None:
        model = GGUFModel(source.path)
        joined = Joined(model, model.spec) if model.spec.family in JOINED else model
        return model.spec, joined, None
    if source.kind == "dir" and source.path is not None:
        spec, tensors = _open_directory(source, source.path, stack)
        if spec.moe is not None and has_stacks(tensors):
            tensors = Stacked(tensors, spec, source.name)
        if stored is not None:
            stored = with_stored_formats(stored, spec, tensors, source.name)
        if spec.family not in JOINED:
            return spec, tensors, stored
        whole = Joined(tensors, spec, lambda m: stored is not None and bool(stored.format(m)))
        return spec, whole, stored
    raise ValueError(f"{source.name} is a built-in shape without weights; load it as dummy")


def _open_directory(
    source: ModelSource, path: Path, stack: ExitStack
) -> tuple[ModelSpec, TensorSource]:
    """Open a directory; return its spec, with `tie_embeddings` as the tensors have it, and the
    tensors.

    Raises:
        WeightsError: the files lack a classifier that their index names.
    """
    index, spec = indexed(path), source.spec()
    tensors = Safetensors(model_files(path), stack, index)
    if not spec.tie_embeddings:  # without an index, the embeddings might be meant
        refuse_tensors(source.name, "missing", sorted({HEAD} & {*index} - {*tensors.names()}))
    spec = with_stored_head(spec, tensors, source.name)
    if spec.tie_embeddings and HEAD in tensors.names() and EMBEDDING not in tensors.names():
        tensors.rename(HEAD, EMBEDDING)  # of two names of one tensor, either may be stored
    return spec, tensors


def _dummy(spec: ModelSpec, seed: int, device: torch.device) -> Dummy:
    shapes, router = dict(expected_shapes(spec)), f".{expert_names(spec).router}.weight"
    routers = [name for name in shapes if name.endswith(router)] if spec.moe is not None else []
    shares = spec.moe.shares if spec.moe is not None and spec.moe.skew else ()
    return Dummy(shapes, seed, device, routers, shares, _deviations(spec, shapes))


def _deviations(spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, float]:
    """Return the standard deviations with which random tokens go to experts of their own.

    With equal ones, every token of a prompt soon has nearly the same hidden state, for attention
    adds the mean over all tokens to each of them, and few experts are chosen by all. So here what
    layers add is small beside the embeddings, as in models that are trained.
    """
    if spec.moe is None:
        return {}
    added = STD / math.sqrt(2 * spec.layers)
    ends = ("self_attn.o_proj.weight", f".{expert_names(spec).down}.weight")
    small = {name: added for name in shapes if name.endswith(ends)}
    return {EMBEDDING: 1.0, **small}


def with_stored_head(spec: ModelSpec, tensors: TensorSource, name: str) -> ModelSpec:
    """Return the spec with `tie_embeddings` as the tensors have it, which hold against the config.

    A head that differs from the embeddings is used, as `transformers` uses it; where there is none
    the embeddings serve as one, for nothing else can be meant.
    """
    stored = set(tensors.names())
    has_head = any(tensor.startswith("lm_head.") for tensor in stored)
    if not has_head and not spec.tie_embeddings:
        log.warning("%s: lm_head.weight is missing: the embeddings are used instead", name)
        return replace(spec, tie_embeddings=True)
    if not has_head or not spec.tie_embeddings or EMBEDDING not in stored:
        return spec
    if HEAD in stored and same(tensors, HEAD, EMBEDDING):
        return spec
    log.warning(
        "%s: lm_head.weight is used: it differs from the embeddings, despite tie_word_embeddings",
        name,
    )
    return replace(spec, tie_embeddings=False)


def same(tensors: TensorSource, one: str, other: str) -> bool:
    """Return whether two tensors of floats are equal."""
    if tensors.shape(one) != tensors.shape(other) or tensors.type(one) not in FLOATS:
        return False
    return bool((tensors.get(one) == tensors.get(other)).all())


def _check_shared(scheme: Scheme | None) -> None:
    """Refuse weights whose numbers would differ with the number of ranks."""
    if scheme not in (None, "fp8_channel"):
        raise FieldError(
            "tensor_parallel_size", "above 1 goes with weights as they are stored, or with fp8"
        )


def _check_room(
    spec: ModelSpec, floats: torch.dtype, quantised: bool, ranks: int, name: str
) -> None:
    """Refuse weights that this machine's free memory does not hold, before any is read.

    A rank asks for its own part alone: others may have read theirs.

    Raises:
        MemoryError: they take more.
    """
    itemsize = MIN_ITEMSIZE if quantised else floats.itemsize
    needed, free = spec.parameters * itemsize / ranks, free_memory()
    if needed > free:
        raise MemoryError(
            f"there is not enough memory: the weights of {name} take {needed / 2**30:.1f} GiB, and "
            f"{free / 2**30:.1f} GiB are free"
        )


@dataclass(frozen=True)
class _Loader:
    """Puts the tensors of a source together as weights."""

    shard: Shard
    tensors: TensorSource
    quantization: Quantization | None
    """Formats of the source's linear modules; None: floats."""
    scheme: Scheme | None
    """Scheme to which matrices of layers that are stored in floats are rounded; None: `dtype`."""
    dtype: torch.dtype
    device: torch.device
    converted: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Number of matrices that got another scheme, by both: because the device is a GPU, or since
    nothing multiplies with columns in act-order."""

    @cached_property
    def there(self) -> frozenset[str]:
        """The names of the source's tensors."""
        return frozenset(self.tensors.names())

    @property
    def spec(self) -> ModelSpec:
        """The shape of the rank's part."""
        return self.shard.local

    def weights(self, progress: OnProgress) -> Weights:
        """Load the rank's part of all weights, layer by layer."""
        embedding = self._get(EMBEDDING)
        layers = []
        for i in range(self.spec.layers):
            progress("weights", i / self.spec.layers)
            layers.append(self._layer(i))
        tied, on_cpu = self.spec.tie_embeddings, self.device.type == "cpu"
        head = Matrix.plain(embedding) if tied else self._alone("lm_head", plain=not on_cpu)
        norm = self._get("model.norm.weight") * self.spec.logit_scale
        weights = Weights(embedding, tuple(layers), norm, head)
        progress("weights", 1.0)
        return weights

    def _alone(self, name: str, *, plain: bool) -> Matrix:
        """Load the classifier or a router, without scales if that is how products take it."""
        matrix = self._module(name, None)
        if matrix.scales is None or not plain:
            return matrix
        floats = Matrix.plain(matrix.dequantised().to(self.dtype))
        self.converted[matrix.scheme, floats.scheme] += 1
        return floats

    def _get(self, name: str) -> Tensor:
        part = self.tensors.get(name, self.shard.cut(name))
        tensor = torch.as_tensor(part).to(self.device, self.dtype)
        return torch.zeros_like(tensor) if self.shard.left_out(name) else tensor

    def _bias(self, present: bool, *modules: str) -> Tensor | None:
        """Load the biases of modules that are one matrix."""
        return torch.cat([self._get(f"{name}.bias") for name in modules]) if present else None

    def _module(self, name: str, scheme: Scheme | None) -> Matrix:
        """Load a linear module, rounded to a scheme if it is stored in floats and there is one.

        Raises:
            WeightsError: its numbers cannot be.
        """
        form, place = stored_form(name, self.shard.spec, self.quantization)
        if form is None:
            weight = f"{name}.weight"
            return (
                Matrix.plain(self._get(weight)) if scheme is None else self._rounded(weight, scheme)
            )
        rows, columns = self._shape(name)
        at = place or Place(name, 0, rows)
        ends = form.tensors(at.rows, columns)
        parts = {
            end: self.tensors.get(f"{at.module}.{end}")
            for end, stored in ends.items()
            if not stored.optional or f"{at.module}.{end}" in self.there
        }
        try:
            matrix = read_module(form, parts).to(self.device)
        except ValueError as error:
            raise WeightsError(f"{at.module}.{error}") from error
        if matrix.scales is None and scheme is None:
            matrix = Matrix.plain(matrix.values.to(self.dtype))
            self.converted[f"{form.name} with act-order", matrix.scheme] += 1
        if place is not None:
            matrix = matrix.part(at.first, at.first + rows)
        whole = matrix if scheme is None else quantised(matrix.dequantised(), scheme)
        return self._part(name, whole)

    def _part(self, name: str, matrix: Matrix) -> Matrix:
        """Return the rank's part of a whole module.

        Where blocks of FP8 have more columns than fit a rank's part, all ranks round the module
        anew, with a scale for each row.

        Raises:
            WeightsError: it would cut columns that share a scale, in four bits.
        """
        cut = self.shard.cut(f"{name}.weight") if self.shard.size > 1 else None
        if cut is None:
            return matrix
        if cut.dim and matrix.scheme == "fp8_block128" and (cut.stop - cut.start) % BLOCK:
            rows = quantised(matrix.dequantised(), "fp8_channel")
            self.converted[matrix.scheme, rows.scheme] += 1
            matrix = rows
        if cut.dim and (finer := matrix.fitting(cut.stop - cut.start)) is not matrix:
            self.converted[matrix.scheme, finer.scheme] += 1
            matrix = finer
        try:
            part = matrix.columns if cut.dim else matrix.part
            return part(cut.start, cut.stop).contiguous()
        except ValueError as error:
            ranks = f"{self.shard.size} ranks cannot share it"
            raise WeightsError(f"{name}: {ranks}: {error}") from error

    def _rounded(self, name: str, scheme: Scheme) -> Matrix:
        """Load the rank's part of a tensor, rounded as the whole is: rows of which a rank has some
        columns have the scales of all of them."""
        cut = self.shard.cut(name)
        whole = cut is not None and cut.dim == 1
        wide = torch.as_tensor(self.tensors.get(name, None if whole else cut)).to(self.device)
        matrix = quantised(wide, scheme)
        if cut is None or not whole:
            return matrix
        return replace(matrix, values=matrix.values[:, cut.start : cut.stop].contiguous())

    def _shape(self, name: str) -> tuple[int, int]:
        spec = self.shard.spec
        if name == "lm_head":
            return spec.vocab_size, spec.hidden_size
        _, _, layer, rest = name.split(".", 3)
        linear = linears_of(spec, int(layer))[rest]
        return linear.rows, linear.columns

    def _fused(self, prefix: str, *names: str) -> Matrix:
        """Load modules that are one matrix.

        Raises:
            WeightsError: they are not stored alike.
        """
        matrices = [self._module(f"{prefix}.{name}", self.scheme) for name in names]
        if names[0] == "self_attn.q_proj":
            matrices[:2] = [each.reordered(self._pairs(each.shape[0])) for each in matrices[:2]]
        try:
            joined = concatenated(matrices)
        except ValueError as error:
            rounded = self.quantization is not None and self.quantization.int4
            other = "; --quantization fp8 makes them alike" if rounded else ""
            raise WeightsError(f"{prefix}: {', '.join(names)}: {error}{other}") from error
        if self.device.type == "cpu":
            return joined
        served = for_gpu(joined, self.dtype, four_bits=".experts." not in names[0])
        if served is not joined:
            self.converted[joined.scheme, served.scheme] += 1
        return served

    def _pairs(self, rows: int) -> Tensor:
        """Return the order of `pair_rows`."""
        return self._paired(torch.arange(rows, device=self.device))

    def _paired(self, rows: Tensor) -> Tensor:
        """Return the rows in the order of `pair_rows` of this model's heads."""
        return pair_rows(rows, self.spec.head_dim, self.spec.rope)

    def _layer(self, i: int) -> LayerWeights:
        spec, prefix = self.spec, f"model.layers.{i}"
        attention, names = f"{prefix}.self_attn", norm_names(spec)
        norms = {field: self._get(f"{prefix}.{name}.weight") for field, name in names.items()}
        return LayerWeights(
            input_norm=norms.get("input_norm"),
            qkv=self._fused(prefix, *(f"self_attn.{n}_proj" for n in "qkv")),
            qkv_bias=self._qkv_bias(attention) if spec.qkv_bias else None,
            qk_norm=self._qk_norm(attention) if spec.qk_norm else None,
            o=self._fused(prefix, "self_attn.o_proj"),
            o_bias=self._bias(spec.o_bias, f"{attention}.o_proj"),
            attention_out_norm=norms.get("attention_out_norm"),
            mlp_norm=norms.get("mlp_norm"),
            mlp_out_norm=norms.get("mlp_out_norm"),
            mlp=self._experts(prefix) if spec.has_experts(i) else self._dense(prefix),
        )

    def _dense(self, prefix: str) -> DenseMlp:
        biased, mlp = self.spec.mlp_bias, f"{prefix}.mlp"
        return DenseMlp(
            gate_up=self._fused(prefix, "mlp.gate_proj", "mlp.up_proj"),
            gate_up_bias=self._bias(biased, f"{mlp}.gate_proj", f"{mlp}.up_proj"),
            down=self._fused(prefix, "mlp.down_proj"),
            down_bias=self._bias(biased, f"{mlp}.down_proj"),
        )

    def _experts(self, prefix: str) -> Experts:
        moe, names = self.spec.moe, expert_names(self.spec)
        assert moe is not None
        each = [names.expert.format(number) for number in range(moe.experts)]
        gate_up = [f"{name}.{part}" for name in each for part in (names.gate, names.up)]
        return Experts(
            router=self._alone(f"{prefix}.{names.router}", plain=True),
            gate_up=self._fused(prefix, *gate_up),
            down=self._fused(prefix, *(f"{name}.{names.down}" for name in each)),
            per_token=moe.per_token,
            normalised=moe.normalised,
        )

    def _qkv_bias(self, attention: str) -> Tensor:
        q, k, v = (self._get(f"{attention}.{n}_proj.bias") for n in "qkv")
        return torch.cat([self._paired(q), self._paired(k), v])

    def _qk_norm(self, attention: str) -> Tensor:
        spec = self.spec
        q, k = (self._paired(self._get(f"{attention}.{n}_norm.weight")) for n in "qk")
        if spec.qk_norm_whole:
            return torch.cat([q, k]).view(-1, spec.head_dim)
        return torch.cat([q.expand(spec.heads, -1), k.expand(spec.kv_heads, -1)])
