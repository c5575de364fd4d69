"""Loads the weights of a decoder: safetensors, GGUF or random numbers."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional

from twolane.common.errors import FieldError
from twolane.common.resources import free_memory
from twolane.devices import OnProgress
from twolane.kernels.cpu import tiles
from twolane.kernels.cpu.availability import available as compiles
from twolane.model import int8
from twolane.model.decoder import (
    LayerInputs,
    LayerWeights,
    Predictor,
    SideExperts,
    TokenInputs,
    Weights,
)
from twolane.model.families.family import JOINED_GATE_UP, JOINED_QKV, PARTS
from twolane.model.linear_attention import DeltaWeights, convolution_rows, delta_rows
from twolane.model.load import checkpoint
from twolane.model.load.facts import ModelFacts
from twolane.model.load.gguf import GGUFModel
from twolane.model.load.hub import ModelSource
from twolane.model.load.mtp import as_model
from twolane.model.load.opened import dummy_tensors, open_tensors
from twolane.model.load.quantization import BLOCK, Quantization
from twolane.model.load.quantized import for_gpu, read_module
from twolane.model.load.source import TensorSource
from twolane.model.matrix import Matrix, Scheme, concatenated, in_eight_bits, in_tiles, quantised
from twolane.model.mlp import DenseMlp, ExpertBiases, Experts
from twolane.model.rope import pair_rows
from twolane.model.sharding import Shard
from twolane.model.spec import ModelSpec, MoeSpec

log = logging.getLogger("twolane.model")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

QUANTIZATIONS: dict[str, Scheme] = {
    "fp8": "fp8_channel",
    "fp8_block128": "fp8_block128",
    "int4": "int4_g128",
    "mxfp4": "mxfp4",
}
"""Names of `quantization`, and the scheme that matrices get."""
_PUBLISHED = {"int4": "an AWQ or GPTQ", "mxfp4": "a published"}
"""Names of `quantization` for dummy weights alone, and the checkpoints that have such weights."""


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
    eight_bits: bool = False,
) -> tuple[ModelSpec, Weights]:
    """Load a model's weights onto a device.

    Args:
        source: What `hub.resolve` found.
        dtype: A type of `DTYPES`, or "auto", which is float32 on a CPU and bfloat16 on a GPU.
        load_format: "dummy" takes random normal weights, the same for the same seed and device.
        quantization: One of `QUANTIZATIONS`, which the matrices of all layers are rounded to while
            they are loaded; "mxfp4" rounds those of experts alone. "int4" and "mxfp4" are for dummy
            weights; of quantised checkpoints only those of four bits are rounded again, to "fp8".
        max_positions: Overrides the positions of the config.
        seed: The seed of dummy weights.
        router_skew: The `MoeSpec.skew` of dummy weights.
        device: The device that the weights go to, layer by layer.
        progress: Called with ("weights", fraction) as layers are loaded.
        rank: The rank whose part is read.
        ranks: The number of ranks that share the model.
        eight_bits: Whether matrices of few bits, but experts', get eight on a CPU fast at that.

    Returns:
        The shape of the whole model, and the rank's part of its weights.

    Raises:
        UnsupportedModel: the model asks for something that is not built.
        WeightsError: tensors are missing, surplus or of the wrong shape.
        ValueError: files are missing or broken, or the arguments make no sense.
    """
    device = torch.device(device)
    floats, dummy, facts = _floats(dtype, device), load_format == "dummy", source.facts
    scheme = asked_scheme(quantization, facts.quantization, dummy)
    _check_options(facts.spec, scheme, ranks, dummy, router_skew)
    eight = eight_bits and device.type == "cpu" and ranks == 1 and scheme is None and int8.is_fast()
    if max_positions is not None:
        facts = replace(facts, spec=replace(facts.spec, max_positions=max_positions))
    tensors: TensorSource
    with ExitStack() as stack:
        if dummy:
            facts, tensors = dummy_tensors(facts, seed, router_skew, device)
        else:
            facts, tensors = open_tensors(source, facts, stack)
        checkpoint.check_tensors(facts, tensors)
        if device.type == "cpu":
            _check_room(facts, floats, scheme, ranks, eight)
        shard = Shard(facts.spec, rank, ranks)
        loader = _Loader(facts, shard, tensors, scheme, floats, device, eight)
        return facts.spec, loader.weights(progress or (lambda *_: None))


def load_predictor(
    source: ModelSource,
    model: Weights,
    *,
    dtype: str = "auto",
    quantization: str | None = None,
    device: torch.device | str = "cpu",
) -> Predictor | None:
    """Load what predicts further tokens (MTP) onto a device; None: the checkpoint has none.

    Args:
        source: What `hub.resolve` found; a directory.
        model: The weights of the model itself, whose embeddings and classifier it shares.
        dtype: See `load_weights`, here and below.
        quantization: See there.
        device: See there.

    Raises:
        WeightsError: tensors are missing, or of another shape or type.
        ValueError: files are missing or broken, or the arguments make no sense.
    """
    device = torch.device(device)
    floats = _floats(dtype, device)
    scheme = asked_scheme(quantization, source.facts.quantization, False)
    with ExitStack() as stack:
        if (found := as_model(*open_tensors(source, source.facts, stack))) is None:
            return None
        facts, tensors = found
        loader = _Loader(facts, Shard(facts.spec, 0, 1), tensors, scheme, floats, device)
        layers = tuple(map(loader._layer, range(facts.spec.layers)))
        norm, less = loader._get("model.norm.weight"), bool(facts.family.norms_less_1)
        norms = [
            (torch.as_tensor(tensors.get(f"mtp.pre_fc_norm_{name}.weight")).float() + less)
            for name in ("embedding", "hidden")
        ]
        joins = loader._get("mtp.fc.weight")
    own = replace(model, layers=layers, norm=norm)
    return Predictor(facts.spec, own, joins, *(each.to(device, floats) for each in norms))


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
    if matrices is not None and not (name == "fp8" and matrices.four_bits):
        raise ValueError(
            f"quantization {name} is for weights in 16 or 32 bits, and fp8 also for four; "
            f"the checkpoint is stored as {matrices.name} and is served so without it"
        )
    if name in _PUBLISHED and not dummy:
        use = _PUBLISHED[name]
        raise ValueError(f"quantization {name} is for dummy weights; use {use} checkpoint")
    return QUANTIZATIONS[name]


def _check_options(
    spec: ModelSpec, scheme: Scheme | None, ranks: int, dummy: bool, router_skew: float
) -> None:
    """Refuse options that do not go together.

    Raises:
        FieldError: the numbers of weights would differ with the number of ranks, or a skew is not
            for dummy weights.
    """
    if ranks > 1 and scheme not in (None, "fp8_channel"):
        raise FieldError(
            "tensor_parallel_size", "above 1 goes with weights as they are stored, or with fp8"
        )
    if scheme == "mxfp4" and spec.moe is None:
        raise FieldError("quantization", "mxfp4 is for models with experts")
    if router_skew and not dummy:
        raise FieldError("router_skew", "is for dummy weights")


def _by_tap(taps: Tensor) -> Tensor:
    """Return taps [channels, taps] whose channels lie side by side, as kernels read them."""
    return taps.t().contiguous().t()


def _check_room(
    facts: ModelFacts, floats: torch.dtype, scheme: Scheme | None, ranks: int, eight_bits: bool
) -> None:
    """Refuse weights that this machine's free memory does not hold, before any is read.

    A rank asks for its own part alone: others may have read theirs.

    Raises:
        MemoryError: they take more.
    """
    stored = facts.quantization
    small = scheme is not None or (stored is not None and bool(stored.groups))
    # Bytes that a weight takes at least in any of the quantised schemes.
    itemsize = 0.5 if small else floats.itemsize
    if eight_bits and (small or facts.rounded):
        itemsize = 1.0
    needed, free = facts.spec.parameters * itemsize / ranks, free_memory()
    if needed > free:
        raise MemoryError(
            f"there is not enough memory: the weights of {facts.name} take "
            f"{needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"
        )


@dataclass(frozen=True)
class _Loader:
    """Puts the tensors of a source together as weights."""

    facts: ModelFacts
    """The whole model, and the names and formats of the source's tensors."""
    shard: Shard
    tensors: TensorSource
    scheme: Scheme | None
    """Scheme to which matrices of layers that are stored in floats are rounded; None: `dtype`."""
    dtype: torch.dtype
    device: torch.device
    eight_bits: bool = False
    """Whether matrices that are stored in few bits get eight bits, for the products of a CPU."""
    converted: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Number of matrices that got another scheme, by both: for the products of the device, or since
    nothing multiplies with columns in act-order."""

    @cached_property
    def there(self) -> frozenset[str]:
        """The names of the source's tensors."""
        return frozenset(self.tensors.names())

    @cached_property
    def spec(self) -> ModelSpec:
        """The shape of the rank's part."""
        return self.shard.local

    def weights(self, progress: OnProgress) -> Weights:
        """Load the rank's part of all weights, layer by layer."""
        embedding = self._get(checkpoint.EMBEDDING)
        if self.spec.norms_embeddings:
            shape, wide = embedding.shape[1:], embedding.float()
            wide = functional.rms_norm(wide, shape, None, self.spec.norm_eps)
            embedding = wide.to(embedding.dtype)
        layers = []
        for i in range(self.spec.layers):
            progress("weights", i / self.spec.layers)
            layers.append(self._layer(i))
        tied, on_cpu = self.spec.tie_embeddings, self.device.type == "cpu"
        embedding, even = self._filled(embedding), self.spec.vocab_size % self.shard.size == 0
        if tied:
            four = None if self.spec.norms_embeddings else self._four_bits(checkpoint.EMBEDDING)
            head = four or Matrix.plain(embedding)
            head = self._for_cpu(head, checkpoint.EMBEDDING.removesuffix(".weight"))
        else:
            head = self._alone("lm_head", plain=not (on_cpu and even))
        if not even:
            head = Matrix.plain(self._filled(head.values))
        norm, scales = self._get("model.norm.weight") * self.spec.logit_scale, None
        if tied and head.scheme == "tiles":
            embedding = head.values
        elif self.eight_bits and checkpoint.EMBEDDING in self.facts.rounded:
            embedding, scales = int8.quantise_rows(embedding)
        matrices = [head, *(matrix for layer in layers for matrix in layer.matrices)]
        tiles.move_together([each.values for each in matrices if each.scheme == "tiles"])
        inputs = self._token_inputs() if self.spec.layer_inputs else None
        weights = Weights(embedding, tuple(layers), norm, head, inputs, scales)
        progress("weights", 1.0)
        for (before, after), count in self.converted.items():
            kept = "four or eight bits (tiles)" if after == "tiles" else after
            log.info("%d matrices stored as %s are served as %s", count, before, kept)
        return weights

    def _alone(self, name: str, *, plain: bool) -> Matrix:
        """Load the classifier or a router, without scales if that is how products take it."""
        matrix = self._module(name, None)
        if matrix.scales is None or not plain:
            return matrix if plain else self._for_cpu(matrix, name)
        floats = Matrix.plain(matrix.dequantised().to(self.dtype))
        self.converted[matrix.scheme, floats.scheme] += 1
        return floats

    def _filled(self, rows: Tensor) -> Tensor:
        """Return the rank's rows of the vocabulary, with zeros to `Shard.vocab_rows`."""
        return functional.pad(rows, (0, 0, 0, self.shard.vocab_rows - len(rows)))

    def _get(self, name: str) -> Tensor:
        alone = self.shard.size == 1
        part = self.tensors.get(name, None if alone else self.shard.cut(name))
        # A copy: on a CPU, the file could be overwritten or cut while it is served.
        tensor = torch.as_tensor(part).to(self.device, self.dtype, copy=True)
        left_out = not alone and self.shard.left_out(name)
        return torch.zeros_like(tensor) if left_out else tensor

    def _bias(self, *modules: str) -> Tensor:
        """Load the biases of modules that are one matrix."""
        return torch.cat([self._get(f"{name}.bias") for name in modules])

    def _module(self, name: str, scheme: Scheme | None) -> Matrix:
        """Load a linear module, rounded to a scheme if it is stored in floats and there is one.

        Raises:
            WeightsError: its numbers cannot be.
        """
        form, place = checkpoint.stored_form(name, self.facts)
        if form is None and (four := self._four_bits(f"{name}.weight")) is not None:
            return four
        if form is None:
            weight = f"{name}.weight"
            return (
                Matrix.plain(self._get(weight)) if scheme is None else self._rounded(weight, scheme)
            )
        rows, columns = self._shape(name)
        at = place or checkpoint.Place(name, 0, rows)
        ends = form.tensors(at.rows, columns)
        parts = {
            end: self.tensors.get(f"{at.module}.{end}")
            for end, stored in ends.items()
            if not stored.optional or f"{at.module}.{end}" in self.there
        }
        try:
            matrix = read_module(form, parts).to(self.device)
        except ValueError as error:
            raise checkpoint.WeightsError(f"{at.module}.{error}") from error
        if matrix.scales is None and scheme is None:
            matrix = Matrix.plain(matrix.values.to(self.dtype))
            self.converted[f"{form.name} with act-order", matrix.scheme] += 1
        if place is not None:
            matrix = matrix.part(at.first, at.first + rows)
        whole = matrix if scheme is None else quantised(matrix.dequantised(), scheme)
        return self._part(name, whole)

    def _four_bits(self, name: str) -> Matrix | None:
        """Return a matrix with the four bits of a GGUF file, if the device multiplies with them."""
        stored = isinstance(self.tensors, GGUFModel) and self.eight_bits and compiles()
        if not stored or not tiles.fits(*self.tensors.shape(name)[:2]):
            return None
        assert isinstance(self.tensors, GGUFModel)
        if (parts := self.tensors.four_bits(name)) is None:
            return None
        numbers, scales, minima = (torch.tensor(part) for part in parts)
        return Matrix(numbers, "int4_min32", scales, minima)

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
            raise checkpoint.WeightsError(f"{name}: {ranks}: {error}") from error

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
        if name == "lm_head":
            return self.spec.vocab_size, self.spec.hidden_size
        if name == checkpoint.INPUTS_PROJECTION:
            return self.spec.layers * self.spec.layer_inputs, self.spec.hidden_size
        _, _, layer, rest = name.split(".", 3)
        linear = checkpoint.linears_of(self.facts, int(layer))[rest]
        return linear.rows, linear.columns

    def _fused(self, prefix: str, *names: str) -> Matrix:
        """Load modules of a layer that are one matrix.

        Raises:
            WeightsError: they are not stored alike.
        """
        joined = self._joined(prefix, names, self._modules(prefix, names))
        return self._for_cpu(joined, *(f"{prefix}.{name}" for name in names))

    def _qkv(self, prefix: str, i: int) -> Matrix:
        """Load the projections of queries and keys of layer i, in the order of `pair_rows`, of
        values, and of output gates, whose rows follow those of the queries of their head in
        checkpoints.

        Raises:
            WeightsError: they are not stored alike.
        """
        spec, kind, names = self.spec.at(i), self.spec.kind(i), PARTS[JOINED_QKV]
        if kind.reads_earlier or kind.keys_are_values:
            names = names[: 1 if kind.reads_earlier else 2]
        q, *kv = self._modules(prefix, names)
        gates = []
        if spec.output_gate:
            rows = torch.arange(spec.q_rows, device=self.device).view(spec.heads, 2, -1)
            parted = q.reordered(rows.transpose(0, 1).flatten())
            q, gates = parted.part(0, spec.q_size), [parted.part(spec.q_size, spec.q_rows)]
        values = kv if kind.keys_are_values else kv[1:]
        turned = [self._paired(each, i) for each in (q, *kv[:1])]
        joined = self._joined(prefix, names, [*turned, *values, *gates])
        return self._for_cpu(joined, *(f"{prefix}.{name}" for name in names))

    def _paired(self, matrix: Matrix, i: int) -> Matrix:
        """Return queries or keys of layer i with rows in the order of `pair_rows`."""
        rows = torch.arange(matrix.shape[0], device=self.device)
        dim, rope = self.spec.at(i).head_dim, self.spec.rope_of(i)
        return matrix.reordered(pair_rows(rows, dim, rope))

    def _for_cpu(self, matrix: Matrix, *modules: str) -> Matrix:
        """Return the matrix of modules in eight bits, if any of them is stored in few."""
        places = [(checkpoint.place_of(module, self.facts), module) for module in modules]
        stored = {f"{module if place is None else place.module}.weight" for place, module in places}
        rounded = not stored.isdisjoint(self.facts.rounded)
        if not self.eight_bits or not (rounded or matrix.scales is not None):
            return matrix
        tiled = compiles() and tiles.fits(*matrix.shape)
        served = in_tiles(matrix) if tiled else in_eight_bits(matrix)
        before = "GGUF's types of few bits" if rounded else matrix.scheme
        self.converted[before, served.scheme] += 1
        return served

    def _joined(
        self,
        prefix: str,
        names: Sequence[str],
        matrices: Sequence[Matrix],
        *,
        four_bits: bool = True,
    ) -> Matrix:
        """Return modules of a layer as one matrix, in the form that the device multiplies with;
        without `four_bits`, that is none of four bits on a GPU.

        Raises:
            WeightsError: they are not stored alike.
        """
        if len({each.scheme for each in matrices}) > 1:
            matrices = [
                Matrix.plain(each.dequantised()) if each.scheme == "int4_min32" else each
                for each in matrices
            ]
        try:
            joined = concatenated(matrices)
        except ValueError as error:
            stored = self.facts.quantization
            rounded = stored is not None and stored.four_bits
            other = "; --quantization fp8 makes them alike" if rounded else ""
            raise checkpoint.WeightsError(
                f"{prefix}: {', '.join(names)}: {error}{other}"
            ) from error
        if self.device.type == "cpu":
            return joined
        served = for_gpu(joined, self.dtype, four_bits=four_bits)
        if served is not joined:
            self.converted[joined.scheme, served.scheme] += 1
        return served

    def _layer(self, i: int) -> LayerWeights:
        spec, prefix = self.spec, f"model.layers.{i}"
        names = self.facts.family.norms
        norms = {field: self._get(f"{prefix}.{name}.weight") for field, name in names.items()}
        attention, linear = f"{prefix}.self_attn", spec.is_linear(i)
        convolved = linear and spec.convolution is not None
        back = "short_conv.out_proj" if convolved else "linear_attn.out_proj"
        return LayerWeights(
            input_norm=norms.get("input_norm"),
            qkv=self._state_projections(prefix) if linear else self._qkv(prefix, i),
            qkv_bias=self._qkv_bias(attention, i) if spec.qkv_bias and not linear else None,
            qk_norm=self._qk_norm(attention, i) if spec.qk_norm and not linear else None,
            sinks=self._get(f"{attention}.sinks").float() if spec.sinks and not linear else None,
            o=self._fused(prefix, back if linear else "self_attn.o_proj"),
            o_bias=self._bias(f"{attention}.o_proj") if spec.o_bias and not linear else None,
            attention_out_norm=norms.get("attention_out_norm"),
            mlp_norm=norms.get("mlp_norm"),
            mlp_out_norm=norms.get("mlp_out_norm"),
            mlp=self._dense(prefix) if spec.has_dense(i) else self._experts(prefix),
            delta=self._delta(prefix) if linear and not convolved else None,
            side=self._side(prefix) if spec.has_dense(i) and spec.has_experts(i) else None,
            inputs=self._layer_inputs(prefix) if spec.layer_inputs else None,
            scale=self._get(f"{prefix}.{checkpoint.LAYER_SCALE}").view(1)
            if spec.layer_scales
            else None,
            taps=self._taps(prefix) if convolved else None,
            gate=self._gate(prefix) if spec.gate and not linear else None,
        )

    def _gate(self, prefix: str) -> Matrix:
        """Load the rank's output gates.

        Raises:
            WeightsError: they are stored in another form than queries, which a GPU rounds what both
                read for.
        """
        names = ("self_attn.q_proj", "self_attn.g_proj")
        query, gate = (checkpoint.stored_form(f"{prefix}.{name}", self.facts)[0] for name in names)
        if self.device.type != "cpu" and query != gate:
            raise checkpoint.WeightsError(
                f"{prefix}: {', '.join(names)} must be stored alike for a GPU"
            )
        return self._fused(prefix, names[1])

    def _taps(self, prefix: str) -> Tensor:
        """Load the rank's taps of a short convolution."""
        taps = self._get(f"{prefix}.short_conv.conv.weight").squeeze(1)
        own = convolution_rows(self.shard).chunk(3)[0]
        return _by_tap(taps[own.to(self.device)])

    def _state_projections(self, prefix: str) -> Matrix:
        """Load the rank's projections of queries, keys, values and gates of linear attention, or of
        gates and inputs of a short convolution.

        Raises:
            WeightsError: they are not stored alike.
        """
        if self.spec.convolution is not None:
            name = "short_conv.in_proj"
            [whole] = self._modules(prefix, (name,))
            own = whole.reordered(convolution_rows(self.shard).to(self.device))
            return self._joined(prefix, (name,), [own])
        rows = delta_rows(self.shard)
        ends = ("qkvz",) if self.facts.family.grouped_delta else ("qkv", "z")
        names = [f"linear_attn.in_proj_{end}" for end in ends]
        orders = (rows.grouped,) if self.facts.family.grouped_delta else (rows.mixed, rows.gates)
        modules = zip(self._modules(prefix, names), orders, strict=True)
        return self._joined(prefix, names, [m.reordered(o.to(self.device)) for m, o in modules])

    def _delta(self, prefix: str) -> DeltaWeights:
        """Load the rank's part of what linear attention has beside its projections."""
        rows, attention = delta_rows(self.shard), f"{prefix}.linear_attn"

        def vector(name: str) -> Tensor:
            whole = torch.as_tensor(self.tensors.get(f"{attention}.{name}"))
            return whole.to(self.device, torch.float32)[rows.heads.to(self.device)]

        ends = ("ba",) if self.facts.family.grouped_delta else ("b", "a")
        rates = concatenated([self._alone(f"{attention}.in_proj_{e}", plain=True) for e in ends])
        order = rows.grouped_rates if self.facts.family.grouped_delta else rows.rates
        conv = self._get(f"{attention}.conv1d.weight").squeeze(1)
        return DeltaWeights(
            rates=rates.reordered(order.to(self.device)),
            conv=_by_tap(conv[rows.mixed.to(self.device)]),
            decay=-vector("A_log").exp(),
            shift=vector("dt_bias"),
            norm=self._get(f"{attention}.norm.weight"),
        )

    def _side(self, prefix: str) -> SideExperts:
        names, hidden = self.facts.family.experts.side, self.spec.hidden_size
        norms = {field: self._get(f"{prefix}.{name}") for field, name in names.items()}
        norms["router_norm"] = norms["router_norm"] * hidden**-0.5
        return SideExperts(self._experts(prefix), **norms)

    def _layer_inputs(self, prefix: str) -> LayerInputs:
        names = checkpoint.INPUT_GATE, checkpoint.INPUT_PROJECTION
        if self.device.type == "cpu":
            gate, projection = (self._fused(prefix, name) for name in names)
        else:  # they are small, and read what is not rounded
            gate, projection = (self._alone(f"{prefix}.{name}", plain=True) for name in names)
        return LayerInputs(gate, projection, self._get(f"{prefix}.{checkpoint.INPUT_NORM}"))

    def _token_inputs(self) -> TokenInputs:
        """Load what makes the layers' own inputs."""
        embedding = self._get(checkpoint.INPUTS_EMBEDDING) * self.spec.layer_inputs**0.5
        projection = self._alone(checkpoint.INPUTS_PROJECTION, plain=True)
        return TokenInputs(embedding, projection, self._get(checkpoint.INPUTS_NORM))

    def _dense(self, prefix: str) -> DenseMlp:
        biased, mlp = self.spec.mlp_bias, f"{prefix}.mlp"
        return DenseMlp(
            gate_up=self._fused(prefix, *PARTS[JOINED_GATE_UP]),
            gate_up_bias=self._bias(f"{mlp}.gate_proj", f"{mlp}.up_proj") if biased else None,
            down=self._fused(prefix, "mlp.down_proj"),
            down_bias=self._bias(f"{mlp}.down_proj") if biased else None,
            activation=self.spec.activation,
        )

    def _experts(self, prefix: str) -> Experts:
        spec, names = self.spec, self.facts.family.experts
        moe = spec.moe
        assert moe is not None
        each = [names.expert.format(number) for number in range(moe.experts)]
        stacks = (
            [f"{name}.{part}" for name in each for part in (names.gate, names.up)],
            [f"{name}.{names.down}" for name in each],
        )
        columns = spec.hidden_size, moe.intermediate_size
        both = all(each % 128 == 0 for each in columns)  # both products or neither have four bits
        scales = self._expert_scales(prefix) if moe.beside_dense else {}
        gate_up, down = (
            self._joined(
                prefix, stack, [*self._modules(prefix, stack, scales), *shared], four_bits=both
            )
            for stack, shared in zip(stacks, self._shared(prefix, moe), strict=True)
        )
        router = self._alone(f"{prefix}.{names.router}", plain=True)
        if moe.gated:
            gate = self._alone(f"{prefix}.{names.shared_gate}", plain=True)
            router = concatenated([router, gate])
        bias = self.tensors.get(f"{prefix}.{names.bias}") if moe.biased else None
        return Experts(
            router=router,
            gate_up=gate_up,
            down=down,
            rule=moe.rule,
            bias=None if bias is None else torch.as_tensor(bias).to(self.device).float().flatten(),
            activation=spec.activation,
            biases=self._expert_biases(prefix, stacks) if moe.biases else None,
        )

    def _expert_biases(self, prefix: str, stacks: Sequence[Sequence[str]]) -> ExpertBiases:
        """Load the biases of a layer's router and of the modules of its experts, in their order."""
        names = [self.facts.family.experts.router], *stacks
        return ExpertBiases(*(self._bias(*(f"{prefix}.{n}" for n in each)) for each in names))

    def _expert_scales(self, prefix: str) -> dict[str, float]:
        """Return the factors of experts' outputs, by the names of the modules that make these."""
        names = self.facts.family.experts
        scales = torch.as_tensor(self.tensors.get(f"{prefix}.{names.scales}")).float().tolist()
        modules = (f"{names.expert.format(i)}.{names.down}" for i in range(len(scales)))
        return dict(zip(modules, scales, strict=True))

    def _modules(
        self, prefix: str, names: Iterable[str], scales: Mapping[str, float] = MappingProxyType({})
    ) -> list[Matrix]:
        """Load modules of a layer, times the factors that some of them have."""
        experts_alone = self.scheme == "mxfp4"
        modules = {
            name: self._module(
                f"{prefix}.{name}",
                None if experts_alone and ".experts." not in name else self.scheme,
            )
            for name in names
        }
        return [m.times(scales[n]) if n in scales else m for n, m in modules.items()]

    def _shared(self, prefix: str, moe: MoeSpec) -> tuple[list[Matrix], list[Matrix]]:
        """Load the MLP that all tokens go to, cut into experts as wide as the others.

        Returns:
            Gate and up of each of them, one after the other, and the projections back.
        """
        if not moe.shared:
            return [], []
        parts, width = ("gate_proj", "up_proj", "down_proj"), moe.intermediate_size
        name = self.facts.family.experts.shared
        gate, up, down = self._modules(prefix, (f"{name}.{part}" for part in parts))
        firsts = range(0, width * moe.shared, width)
        gate_up = [each.part(i, i + width) for i in firsts for each in (gate, up)]
        return gate_up, [down.columns(i, i + width) for i in firsts]

    def _qkv_bias(self, attention: str, i: int) -> Tensor:
        """Load the biases of the rows of `_qkv`, in their order."""
        q, k, v = (self._get(f"{attention}.{n}_proj.bias") for n in "qkv")
        spec, rope = self.spec.at(i), self.spec.rope_of(i)
        q, *gates = (each.flatten() for each in q.view(spec.heads, -1, spec.head_dim).unbind(1))
        turned = [pair_rows(each, spec.head_dim, rope) for each in (q, k)]
        return torch.cat([*turned, v, *gates])

    def _qk_norm(self, attention: str, i: int) -> Tensor:
        spec, rope = self.spec.at(i), self.spec.rope_of(i)
        heads = {"q": spec.heads, "k": spec.kv_heads}
        if self.spec.kind(i).reads_earlier:
            del heads["k"]
        if spec.bare_qk_norm:
            return torch.ones(sum(heads.values()), spec.head_dim, device=self.device).to(self.dtype)
        norms = (self._get(f"{attention}.{n}_norm.weight") for n in heads)
        parts = [pair_rows(norm, spec.head_dim, rope) for norm in norms]
        if spec.qk_norm == "whole":
            return torch.cat(parts).view(-1, spec.head_dim)
        counts = zip(parts, heads.values(), strict=True)
        return torch.cat([part.expand(count, -1) for part, count in counts])
