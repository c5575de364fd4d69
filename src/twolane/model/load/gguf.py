"""GGUF files: their metadata as a `ModelSpec`, their tensors under Hugging Face names. No torch."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, get_tensor_name_map
from gguf.quants import dequantize

from twolane.model.families.family import JOINED_QKV, PARTS, Family, GGUFKeys
from twolane.model.families.registry import GGUF_ARCHITECTURES, unsupported
from twolane.model.load.checkpoint import EMBEDDING, LAYER_INPUTS, LAYER_SCALE, TOKEN_INPUTS
from twolane.model.load.gguf_file import GGUFFile
from twolane.model.load.quantization import MX_GROUP, Format, ModuleGroup, Quantization
from twolane.model.sharding import Cut
from twolane.model.spec import (
    FULL,
    LINEAR,
    MAX_HEADS,
    MAX_LAYERS,
    UNROTATED,
    LayerKind,
    ModelSpec,
    MoeSpec,
    RopeSpec,
    ShortConvolution,
    UnsupportedModel,
    merge_eos,
)


def _stem(tensor: str) -> str:
    return tensor.removesuffix(".weight")


_SINKS = "self_attn.sinks"
_STEMS = ("model.norm", "lm_head", *map(_stem, (EMBEDDING, *TOKEN_INPUTS)))
"""The modules outside of layers."""
_LAYER_STEMS = (
    *("self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm", "mlp.down_proj"),
    *(f"short_conv.{name}" for name in ("in_proj", "conv", "out_proj")),
    *(*map(_stem, LAYER_INPUTS), _SINKS),
)
"""The modules of layers that have the same names in all families."""
_ROPE_FREQS = "rope_freqs.weight"
_ROPE_LONG, _ROPE_SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
_OF_ROPE = (_ROPE_FREQS, _ROPE_LONG, _ROPE_SHORT)
_TURNED = ("q_proj", "k_proj")
"""The modules whose rows files may have in llama.cpp's own order."""
_PART = re.compile(
    r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.IGNORECASE
)
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
"""Keys of options that are not built unless they are 0."""
_EXPERT_STACKS = ("gate", "up", "down", "gate_up")
"""What the tensors of all experts of a layer are called, between `ffn_` and `_exps`."""
_SIGMOID = {0: None, 1: False, 2: True}
"""Whether scores of experts are sigmoids, by `expert_gating_func`; None: the file does not say."""
_FLOATS = (
    GGMLQuantizationType.F64,
    GGMLQuantizationType.F32,
    GGMLQuantizationType.F16,
    GGMLQuantizationType.BF16,
)
"""Types of tensors that are not rounded to few bits."""


class GGUFModel:
    """An open GGUF file (memory-mapped)."""

    def __init__(self, path: Path) -> None:
        """Open the file, and the others if it is the first of several.

        Raises:
            UnsupportedModel: the architecture or one of its options is not built.
            ValueError: it is not a whole GGUF file, another one is missing, or it is not the first.
        """
        self._reader = GGUFFile(path)
        self._tensors = {t.name: t for t in self._reader.tensors}
        for part in self._other_parts(path):
            self._tensors |= {t.name: t for t in GGUFFile(part).tensors}
        self._architecture = str(self._field("general.architecture"))
        self._family = self._find_family()
        assert self._family.gguf is not None
        self._facts = self._family.gguf
        self.spec = self._read_spec()
        stems = hugging_face_stems(self._family, self.spec.layers)
        self._packed = {*self._packed_experts()}
        self._names = {
            _hugging_face_name(name, stems, self._family): name
            for name in self._tensors
            if name not in _OF_ROPE and not self._predicts_more(name) and name not in self._packed
        }
        for name in self._packed:
            stem = name.removesuffix(".weight")
            self._names |= {f"{stem}.blocks": name, f"{stem}.scales": name}

    def _find_family(self) -> Family:
        """Return the family of the file.

        Raises:
            UnsupportedModel: its architecture is not built, with experts or without.
        """
        experts = int(self._key("expert_count", 0))
        known = {name for name, _ in GGUF_ARCHITECTURES}
        if self._architecture not in known:
            raise unsupported("GGUF architecture", self._architecture, sorted(known))
        family = GGUF_ARCHITECTURES.get((self._architecture, experts > 0))
        if family is None:
            works = "0 (dense models)" if experts else "1 or more"
            raise UnsupportedModel.because("number of experts", experts, (works,))
        return family

    def _packed_experts(self) -> Iterator[str]:
        """Yield the experts' tensors that stay in MXFP4: those of layers all of whose experts are
        stored so."""
        moe = self.spec.moe
        for i in filter(self.spec.has_experts, range(self.spec.layers)):
            names = [f"blk.{i}.ffn_{stack}_exps.weight" for stack in _EXPERT_STACKS]
            there = [name for name in names if name in self._tensors]
            alike = {self._tensors[n].tensor_type for n in there} == {GGMLQuantizationType.MXFP4}
            if alike and moe is not None and not moe.shared and not moe.beside_dense:
                yield from there

    def quantization(self) -> Quantization | None:
        """Return the modules that stay in MXFP4, if there are any."""
        if not self._packed:
            return None
        layers = "|".join(sorted({name.split(".")[1] for name in self._packed}))
        prefix = re.escape(self._family.experts.expert.split("{")[0])
        form = Format("mxfp4", "mxfp4", scales="scales")
        group = ModuleGroup(form, (rf"re:model\.layers\.({layers})\.{prefix}",))
        return Quantization((group,), (), head=False, by_pattern=True)

    def _predicts_more(self, name: str) -> bool:
        """Return whether a tensor belongs to layers that predict further tokens."""
        place = name.split(".")
        return place[0] == "blk" and int(place[1]) >= self.spec.layers

    def _other_parts(self, path: Path) -> list[Path]:
        """Return the files that go with the first one of a model that is split.

        Raises:
            ValueError: one is missing, or `path` is not the first.
        """
        count = int(self._field("split.count") or 1)
        if count == 1:
            return []
        name = _PART.fullmatch(path.name)
        # A model is split into at most this many files.
        if name is None or int(name["count"]) != count or count > 9999:
            raise ValueError(
                f"{path} is one of {count} files of a model, which must be named "
                f"NAME-00001-of-{count:05}.gguf and so on"
            )
        if int(name["number"]) != 1 or self._field("split.no"):
            raise ValueError(f"{path} is not the first of the model's {count} files; name that one")
        parts = [
            path.with_name(f"{name['stem']}-{number:05}-of-{count:05}{name['suffix']}")
            for number in range(2, count + 1)
        ]
        for part in parts:
            if not part.is_file():
                raise ValueError(f"{path.parent} lacks {part.name}, a part of the model")
        return parts

    def names(self) -> list[str]:
        """Return the Hugging Face names of the tensors."""
        return list(self._names)

    def rounded(self) -> frozenset[str]:
        """Return the names of the tensors that are stored in few bits."""
        own_names = ((n, own) for n, own in self._names.items() if own not in self._packed)
        stored = ((name, self._tensors[own].tensor_type) for name, own in own_names)
        return frozenset(name for name, kind in stored if kind not in _FLOATS)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, [out, in]."""
        shape = tuple(int(n) for n in reversed(self._tensors[self._names[name]].shape))
        if self._names[name] not in self._packed:
            return self._whole(name, shape)
        groups = *shape[:-1], shape[-1] // MX_GROUP
        return groups if name.endswith(".scales") else (*groups, MX_GROUP // 2)

    def _whole(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that checkpoints have of a tensor from which files leave out a dimension
        of 1: a matrix of one row, or the taps of a convolution."""
        if len(shape) == 1 and name.endswith(f".{self._family.experts.shared_gate}.weight"):
            return 1, *shape
        if len(shape) == 2 and name.endswith(".short_conv.conv.weight"):
            return shape[0], 1, shape[1]
        return shape

    def type(self, name: str) -> str:
        """Return the type of `get`'s result, as safetensors names it."""
        return "U8" if self._names[name] in self._packed else "F32"

    def get(self, name: str, cut: Cut | None = None) -> npt.NDArray[Any]:
        """Return a tensor or a part of it, dequantised to float32, in the Hugging Face order of
        rows; of experts in MXFP4, what checkpoints store of them, uint8.

        Raises:
            UnsupportedModel: the `gguf` package cannot dequantise the tensor's type.
        """
        tensor = self._tensors[self._names[name]]
        if self._names[name] in self._packed:
            experts = slice(None) if cut is None else slice(cut.start, cut.stop)
            return _mxfp4(np.asarray(tensor.data)[experts], scales=name.endswith(".scales"))
        # The package takes rows apart, and a part of a memory map takes longer to make.
        data, permuted = np.asarray(tensor.data), self._facts.permuted
        rows = (
            cut is not None and cut.dim == 0 and not (permuted and name.split(".")[-2] in _TURNED)
        )
        if cut is not None and rows:
            data, cut = data[cut.start : cut.stop], None
        try:
            values: npt.NDArray[np.float32] = dequantize(data, tensor.tensor_type)
        except NotImplementedError:
            raise UnsupportedModel(
                f"unsupported GGUF tensor type {tensor.tensor_type.name!r} of {name}; "
                "these work: Q4_1, Q8_0, F16, F32 and all others that the gguf package dequantises"
            ) from None
        values = values.reshape(self._whole(name, values.shape))
        if permuted and ".q_proj." in name:
            values = _separate_halves(values, self.spec.heads)
        elif permuted and ".k_proj." in name:
            values = _separate_halves(values, self.spec.kv_heads)
        if cut is not None:
            part = slice(cut.start, cut.stop)
            values = values[part] if cut.dim == 0 else values[:, part]
        # Unquantised tensors are views of the file.
        return values if values.flags.writeable else values.copy()

    def four_bits(self, name: str) -> tuple[npt.NDArray[Any], ...] | None:
        """Return numbers, uint8 [out, in / 2], and float32 scales and minima [out, in / 32] of a
        matrix in Q4_0 or Q4_1, in the Hugging Face order of rows; None: it has another type.

        A number's element is scale * number + minimum; of each 32 columns 16 bytes have the first
        16 in their low halves.
        """
        tensor = self._tensors[self._names[name]]
        factors = {GGMLQuantizationType.Q4_0: 1, GGMLQuantizationType.Q4_1: 2}
        if tensor.tensor_type not in factors or len(tensor.shape) != 2:
            return None
        count, (columns, rows) = factors[tensor.tensor_type], map(int, tensor.shape)
        blocks = np.asarray(tensor.data).reshape(rows, columns // 32, 16 + 2 * count)
        floats = np.ascontiguousarray(blocks[:, :, : 2 * count]).view(np.float16)
        scales = floats[:, :, 0].astype(np.float32)
        minima = -8.0 * scales if count == 1 else floats[:, :, 1].astype(np.float32)
        numbers = blocks[:, :, 2 * count :].reshape(rows, -1)
        parts, part = (numbers, scales, minima), name.split(".")[-2]
        if not self._facts.permuted or part not in _TURNED:
            return parts
        heads = self.spec.heads if part == _TURNED[0] else self.spec.kv_heads
        return tuple(_separate_halves(each, heads) for each in parts)

    def _read_spec(self) -> ModelSpec:
        if self._facts.config is not None:
            return self._configured(self._facts.config)
        for name in _CAPS:
            if value := self._key(name, 0.0):
                raise UnsupportedModel.because(name, value, ("0",))
        if self._key("attention.causal", True) is False:  # as an embedding model's may be
            raise UnsupportedModel.because("attention.causal", "false", ("true",))
        heads = self._count("attention.head_count", MAX_HEADS)
        hidden = int(self._key("embedding_length"))
        head_dim = int(self._key("attention.key_length", hidden // heads))
        layers = self._count("block_count", MAX_LAYERS) - int(self._key("nextn_predict_layers", 0))
        vocab_size = int(self._tensor("token_embd.weight").shape[1])
        positions = int(self._key("context_length"))
        rope = self._rope(head_dim, positions)
        if rope.type == "yarn":  # the key may have the positions before stretching
            positions = round(rope.original_positions * rope.factor)
        return ModelSpec(
            family=self._family.name,
            layers=layers,
            hidden_size=hidden,
            heads=heads,
            kv_heads=self._kv_heads(heads),
            head_dim=head_dim,
            intermediate_size=int(self._key("feed_forward_length")),
            vocab_size=vocab_size,
            max_positions=positions,
            norm_eps=float(self._key("attention.layer_norm_rms_epsilon")),
            rope=rope,
            tie_embeddings=self._tied,
            qkv_bias="blk.0.attn_q.bias" in self._tensors,
            o_bias="blk.0.attn_output.bias" in self._tensors,
            mlp_bias="blk.0.ffn_gate.bias" in self._tensors,
            kinds=self._kinds(layers, rope),
            convolution=self._convolution(hidden),
            moe=self._moe(layers),
            eos_token_ids=self._eos(vocab_size),
            **self._constants(),
            **self._facts.factors(lambda name, default: float(self._key(name, default))),
        )

    def _configured(self, fields: Callable[[GGUFKeys], Mapping[str, Any]]) -> ModelSpec:
        """Return the spec of a family whose files are read as its configs are."""
        for name, most in (("block_count", MAX_LAYERS), ("attention.head_count", MAX_HEADS)):
            self._count(name, most)  # before a list has a value for each
        if cap := self._key(_CAPS[0], 0.0):
            raise UnsupportedModel.because(_CAPS[0], cap, ("0",))
        vocab = int(self._tensor("token_embd.weight").shape[1])
        sizes = {"vocab_size": vocab, "vocab_size_per_layer_input": vocab}
        config = self._family.read({**fields(self), **sizes, "tie_word_embeddings": self._tied})
        return replace(self._family.spec(config), eos_token_ids=self._eos(vocab))

    @property
    def _tied(self) -> bool:
        return "output.weight" not in self._tensors

    def _eos(self, vocab_size: int) -> tuple[int, ...]:
        ends = (self._field(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
        return merge_eos(vocab_size, *ends)

    def has(self, tensor: str) -> bool:
        """See `GGUFKeys.has`."""
        return tensor in self._tensors

    def numbers(self, tensor: str) -> Sequence[float]:
        """See `GGUFKeys.numbers`."""
        values: Sequence[float] = self._tensor(tensor).data.astype(np.float32).reshape(-1).tolist()
        return values

    def key(self, name: str, default: Any = None) -> Any:
        """See `GGUFKeys.key`."""
        value = self._field(f"{self._architecture}.{name}")
        return value if isinstance(value, list) else self._key(name, default)

    def _constants(self) -> dict[str, Any]:
        """Return `Family.constants`, with norms of heads where the tensors have some."""
        constants = self._family.constants
        normed = "blk.0.attn_q_norm.weight" in self._tensors
        return {**constants, "qk_norm": constants["qk_norm"] or ("head" if normed else None)}

    def _kv_heads(self, heads: int) -> int:
        """Return the heads of keys; a list has 0 for layers with a short convolution."""
        listed = self._field(f"{self._architecture}.attention.head_count_kv")
        counts = {*listed} - {0} if isinstance(listed, list) else set()
        own = next(iter(counts)) if len(counts) == 1 else None
        return int(self._key("attention.head_count_kv", heads) if own is None else own)

    def _convolution(self, hidden: int) -> ShortConvolution | None:
        """Return the short convolutions of layers that have one."""
        taps = int(self._key("shortconv.l_cache", 0))
        return ShortConvolution(hidden, taps) if taps else None

    def _kinds(self, layers: int, rope: RopeSpec) -> tuple[LayerKind, ...]:
        """Return the kind of each layer; none where all are alike and see all tokens."""
        convolved = [f"blk.{i}.shortconv.conv.weight" in self._tensors for i in range(layers)]
        if any(convolved):
            return tuple(LINEAR if each else FULL for each in convolved)
        facts, window = self._facts, int(self._key("attention.sliding_window", 0)) or None
        listed = self._field(f"{self._architecture}.attention.sliding_window_pattern")
        each = listed if isinstance(listed, int) and listed else facts.full_each
        if window is None:
            sliding = [False] * layers
        elif isinstance(listed, list) and len(listed) >= layers:
            sliding = listed[:layers]
        else:
            sliding = [not each or bool((i + 1) % each) for i in range(layers)]
        own, full = None, None if window is None or facts.rotates_full else UNROTATED
        if facts.sliding_base is not None:
            base = float(self._key("rope.freq_base_swa", facts.sliding_base(rope)))
            own = RopeSpec(base, rotated=rope.rotated, interleaved=rope.interleaved)
        own = None if own == rope else own
        unrotated = facts.unrotated_each
        kinds = tuple(
            LayerKind(window=window, rope=own)
            if slides
            else LayerKind(rope=UNROTATED if unrotated and (i + 1) % unrotated == 0 else full)
            for i, slides in enumerate(sliding)
        )
        return kinds if set(kinds) != {LayerKind()} else ()

    def _moe(self, layers: int) -> MoeSpec | None:
        """Return the experts; those that all tokens share, a bias and a gate as tensors have them.

        Raises:
            UnsupportedModel: experts are chosen in a way that is not built.
        """
        if not (experts := int(self._key("expert_count", 0))):
            return None
        routed = [i for i in range(layers) if f"blk.{i}.ffn_gate_inp.weight" in self._tensors]
        first = f"blk.{next(iter(routed), 0)}"
        width = int(self._tensor(f"{first}.ffn_down_exps.weight").shape[0])
        shared = self._tensors.get(f"{first}.ffn_down_shexp.weight")
        if (groups := int(self._key("expert_group_count", 0))) > 1:
            raise UnsupportedModel.because("expert_group_count", groups, ("0", "1"))
        chosen = int(self._key("expert_gating_func", 0))
        if chosen not in _SIGMOID:
            raise UnsupportedModel.because("expert_gating_func", chosen, map(str, _SIGMOID))
        assert self._facts.experts is not None
        usual = {"normalised": True, "sigmoid": False, **self._facts.experts}
        sigmoid = _SIGMOID[chosen]
        return MoeSpec(
            experts,
            int(self._key("expert_used_count")),
            width,
            bool(self._key("expert_weights_norm", usual["normalised"])),
            dense_layers=tuple(sorted({*range(layers)} - {*routed})),
            sigmoid=usual["sigmoid"] if sigmoid is None else sigmoid,
            biased=f"{first}.exp_probs_b.bias" in self._tensors,
            scale=float(self._key("expert_weights_scale", 0.0)) or 1.0,
            shared=0 if shared is None else int(shared.shape[0]) // width,
            gated=f"{first}.ffn_gate_inp_shexp.weight" in self._tensors,
            biases=f"{first}.ffn_gate_inp.bias" in self._tensors,
        )

    def _count(self, name: str, most: int) -> int:
        """Return a number of parts, which is compared before anything is made for each of them."""
        count = int(self._key(name))
        if not 1 <= count <= most:
            raise ValueError(f"{self._architecture}.{name} must be 1 to {most}, not {count}")
        return count

    def _rope(self, head_dim: int, positions: int) -> RopeSpec:
        theta = float(self._key("rope.freq_base", 10_000.0))
        rope = self._stretched(theta, positions)
        beta = float(self._key("attention.temperature_scale", 0.0))
        if beta:
            original = rope.original_positions or self._original_positions(positions)
            rope = replace(rope, query_beta=beta, original_positions=original)
        rotated = int(self._key("rope.dimension_count", head_dim))
        if rotated != head_dim and not self._family.partly_rotated:
            raise UnsupportedModel.because("rope.dimension_count", rotated, (f"{head_dim}",))
        own = None if rotated == head_dim else rotated
        return replace(rope, rotated=own, interleaved=self._family.interleaved)

    def _stretched(self, theta: float, positions: int) -> RopeSpec:
        if _ROPE_LONG in self._tensors:
            return self._longrope(theta, positions)
        # As in llama.cpp: a factor alone is linear, and one of 0 is none.
        kind = self._key("rope.scaling.type", "linear")
        factor = float(self._key("rope.scaling.factor", self._key("rope.scale_linear", 1.0))) or 1.0
        if _ROPE_FREQS in self._tensors:
            if kind not in ("none", "linear"):
                what = f"rope scaling beside {_ROPE_FREQS}"
                raise UnsupportedModel.because(what, kind, ("none", "linear"))
            each = factor if kind == "linear" else 1.0
            return RopeSpec(
                theta, "factors", divisors=tuple(each * n for n in self.numbers(_ROPE_FREQS))
            )
        if kind == "linear" and factor != 1.0:
            return RopeSpec(theta, "linear", factor)
        if kind == "yarn":
            return self._yarn(theta, factor, positions)
        if kind not in ("none", "linear"):
            raise UnsupportedModel.because("GGUF rope scaling", kind, ("none", "linear", "yarn"))
        return RopeSpec(theta)

    def _longrope(self, theta: float, positions: int) -> RopeSpec:
        """LongRoPE: two lists of divisors, and how much attention grows."""
        long, short = (tuple(self.numbers(name)) for name in (_ROPE_LONG, _ROPE_SHORT))
        original = self._original_positions(positions)
        return RopeSpec(
            theta,
            "longrope",
            positions / original,
            original_positions=original,
            attention_factor=float(self._key("rope.scaling.attn_factor", 1.0)),
            divisors=long,
            short_divisors=short,
        )

    def _original_positions(self, positions: int) -> int:
        key = "rope.scaling.original_context_length"
        original = int(self._key(key, positions))
        if original < 1:
            raise ValueError(f"{self._architecture}.{key} must be 1 or more, not {original}")
        return original

    def _yarn(self, theta: float, factor: float, positions: int) -> RopeSpec:
        """YaRN as llama.cpp computes it: attention grows with the factor, less what
        `yarn_log_multiplier` has of that growth."""
        if factor < 1.0:
            raise ValueError(f"{self._architecture}.rope.scaling.factor must be 1 or more")
        less = float(self._key("rope.scaling.yarn_log_multiplier", 0.0))
        if (value := self._key("rope.scaling.yarn_ext_factor", 1.0)) != 1.0:
            raise UnsupportedModel.because("rope.scaling.yarn_ext_factor", value, ("1",))
        grown = (0.1 * math.log(factor) + 1.0) / (0.1 * less * math.log(factor) + 1.0)
        said = float(self._key("rope.scaling.yarn_attn_factor", 1.0))
        if said != 1.0 and not math.isclose(said, grown, rel_tol=1e-3):
            raise UnsupportedModel.because("rope.scaling.yarn_attn_factor", said, ("1",))
        return RopeSpec(
            theta,
            "yarn",
            factor,
            original_positions=self._original_positions(positions),
            beta_fast=float(self._key("rope.scaling.yarn_beta_fast", 32.0)),
            beta_slow=float(self._key("rope.scaling.yarn_beta_slow", 1.0)),
            truncate=self._facts.truncates,
            attention_factor=grown * float(self._key("rope.scaling.attn_factor", 1.0)),
        )

    def _key(self, name: str, default: Any = None) -> Any:
        """Return a value of the model's architecture.

        Raises:
            ValueError: it is not there and has no default.
            UnsupportedModel: it differs from layer to layer.
        """
        key = f"{self._architecture}.{name}"
        value = self._field(key)
        if value is None and default is None:
            raise ValueError(f"the GGUF file has no {key}")
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            return value[0]
        if isinstance(value, list):
            raise UnsupportedModel.because(key, value, ("one value for all layers",))
        return default if value is None else value

    def _field(self, key: str) -> Any:
        return self._reader.value(key)

    def _tensor(self, name: str) -> Any:
        if name not in self._tensors:
            raise ValueError(f"the GGUF file has no tensor {name}")
        return self._tensors[name]


def hugging_face_stems(family: Family, layers: int) -> dict[str, str]:
    """Return the modules of a family by the names that its GGUF files have for them.

    Args:
        family: A family whose GGUF files are read.
        layers: The number of layers.
    """
    assert family.gguf is not None
    numbers = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    known = get_tensor_name_map(numbers[family.gguf.architectures[0]], layers)
    wholes = {*family.joined, JOINED_QKV}  # which files of GLM may have
    parts = (part for whole in PARTS if whole not in family.joined for part in PARTS[whole])
    in_layer = (*family.norms.values(), *_LAYER_STEMS, *wholes, *parts, *_of_experts(family))
    own = [f"model.layers.{i}.{stem}" for i in range(layers) for stem in in_layer]
    named = (
        (known.get_name(s) or known.get_name(_own_name(s, family)), s) for s in (*_STEMS, *own)
    )
    return {name: stem for name, stem in named if name is not None}


def _own_name(stem: str, family: Family) -> str:
    """Return what a family's checkpoints call a module with a usual name (`Family.renamed`)."""
    dotted = f".{stem}."
    found = ((part, usual) for part, usual in family.renamed.items() if usual in dotted)
    part, usual = next(found, ("", ".."))
    return dotted.replace(usual, part).strip(".")


def _of_experts(family: Family) -> tuple[str, ...]:
    """Return the modules of experts that are not stored as one tensor for all of them."""
    names = family.experts
    shared = (f"{names.shared}.{part}" for part in ("gate_proj", "up_proj", "down_proj"))
    biases = names.bias, names.bias.removesuffix("_bias")
    side = (name.removesuffix(".weight") for name in names.side.values())
    return names.router, names.shared_gate, *shared, *biases, *side


def _hugging_face_name(name: str, stems: Mapping[str, str], family: Family) -> str:
    """Return the name of a tensor in a checkpoint; its own, if a checkpoint has none such."""
    stem, _, end = name.rpartition(".")
    if end == "scale" and (side := family.experts.side):
        block, _, module = stem.rpartition(".")
        own = {"ffn_gate_inp": side["router_norm"], "ffn_down_exps": family.experts.scales}
        return f"{block.replace('blk', 'model.layers')}.{own.get(module, f'{module}.scale')}"
    if stem not in stems:
        return name
    if stems[stem].endswith((LAYER_SCALE, _SINKS)):  # they are no modules there
        return stems[stem]
    if stem.endswith("exp_probs_b"):  # it is no module there
        return f"{stems[stem].removesuffix('_bias')}_bias"
    return f"{stems[stem]}.{end}"


def _mxfp4(data: npt.NDArray[np.uint8], *, scales: bool) -> npt.NDArray[np.uint8]:
    """Return the scales or the numbers of blocks in MXFP4 as checkpoints store them.

    A block is its exponent and 16 bytes, which have the numbers of its first half in their lower
    four bits and those of its second half in the others; checkpoints have neighbours in one byte.

    Args:
        data: Rows of whole blocks, [..., 17 * groups].
        scales: Whether the exponents are returned, [..., groups]; otherwise the numbers
            [..., groups, 16].
    """
    blocks = data.reshape(*data.shape[:-1], -1, 1 + MX_GROUP // 2)
    if scales:
        return np.ascontiguousarray(blocks[..., 0])
    numbers = np.concatenate([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], axis=-1)
    pairs: npt.NDArray[np.uint8] = numbers[..., ::2] | (numbers[..., 1::2] << 4)
    return pairs


def _separate_halves(values: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undo llama.cpp's order of rotary rows: each head as 0, 2, 4, ..., 1, 3, 5, ..."""
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)
