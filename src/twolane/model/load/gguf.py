"""GGUF files: their metadata as a `ModelSpec`, their tensors under Hugging Face names. No torch."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
from gguf.quants import dequantize

from twolane.model.families.family import JOINED_QKV, PARTS, Family
from twolane.model.families.registry import GGUF_ARCHITECTURES, unsupported
from twolane.model.load.gguf_file import GGUFFile
from twolane.model.sharding import Cut
from twolane.model.spec import (
    MAX_HEADS,
    MAX_LAYERS,
    ModelSpec,
    RopeSpec,
    UnsupportedModel,
    merge_eos,
)

_STEMS = ("model.embed_tokens", "model.norm", "lm_head")
"""The modules outside of layers."""
_LAYER_STEMS = ("self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm", "mlp.down_proj")
"""The modules of layers that have the same names in all families."""
_ROPE_FREQS = "rope_freqs.weight"
_ROPE_LONG, _ROPE_SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
_OF_ROPE = (_ROPE_FREQS, _ROPE_LONG, _ROPE_SHORT)
_PART = re.compile(
    r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.IGNORECASE
)
_NEUTRAL = {"yarn_ext_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_log_multiplier": 0.0}
"""Keys of YaRN that are not built, with the values that change nothing."""


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
        if self._architecture not in GGUF_ARCHITECTURES:
            raise unsupported("GGUF architecture", self._architecture, GGUF_ARCHITECTURES)
        self._family = GGUF_ARCHITECTURES[self._architecture]
        assert self._family.gguf is not None
        self._facts = self._family.gguf
        self.spec = self._read_spec()
        stems = hugging_face_stems(self._family, self.spec.layers)
        split = ((name, *name.rpartition(".")) for name in self._tensors if name not in _OF_ROPE)
        self._names = {
            f"{stems[stem]}.{end}" if stem in stems else name: name for name, stem, _, end in split
        }

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

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, [out, in]."""
        return tuple(int(n) for n in reversed(self._tensors[self._names[name]].shape))

    def type(self, name: str) -> str:
        """Return the type of `get`'s result, as safetensors names it."""
        return "F32"

    def get(self, name: str, cut: Cut | None = None) -> npt.NDArray[np.float32]:
        """Return a tensor or a part of it, dequantised to float32, in the Hugging Face order of
        rows.

        Raises:
            UnsupportedModel: the `gguf` package cannot dequantise the tensor's type.
        """
        tensor = self._tensors[self._names[name]]
        try:
            values: npt.NDArray[np.float32] = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            raise UnsupportedModel(
                f"unsupported GGUF tensor type {tensor.tensor_type.name!r} of {name}; "
                "these work: Q4_1, Q8_0, F16, F32 and all others that the gguf package dequantises"
            ) from None
        permuted = self._facts.permuted
        if permuted and ".q_proj." in name:
            values = _separate_halves(values, self.spec.heads)
        elif permuted and ".k_proj." in name:
            values = _separate_halves(values, self.spec.kv_heads)
        if cut is not None:
            part = slice(cut.start, cut.stop)
            values = values[part] if cut.dim == 0 else values[:, part]
        # Unquantised tensors are views of the file.
        return values if values.flags.writeable else values.copy()

    def _read_spec(self) -> ModelSpec:
        if experts := self._key("expert_count", 0):
            raise UnsupportedModel.because("number of experts", experts, ("0 (dense models)",))
        if self._key("attention.causal", True) is False:  # as an embedding model's may be
            raise UnsupportedModel.because("attention.causal", "false", ("true",))
        heads = self._count("attention.head_count", MAX_HEADS)
        hidden = int(self._key("embedding_length"))
        head_dim = int(self._key("attention.key_length", hidden // heads))
        layers = self._count("block_count", MAX_LAYERS)
        window = self._key("attention.sliding_window", 0) or None
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
            kv_heads=int(self._key("attention.head_count_kv", heads)),
            head_dim=head_dim,
            intermediate_size=int(self._key("feed_forward_length")),
            vocab_size=vocab_size,
            max_positions=positions,
            norm_eps=float(self._key("attention.layer_norm_rms_epsilon")),
            rope=rope,
            tie_embeddings="output.weight" not in self._tensors,
            qkv_bias="blk.0.attn_q.bias" in self._tensors,
            o_bias="blk.0.attn_output.bias" in self._tensors,
            mlp_bias="blk.0.ffn_gate.bias" in self._tensors,
            kinds=self._facts.kinds(layers, window),
            eos_token_ids=merge_eos(
                vocab_size,
                self._field("tokenizer.ggml.eos_token_id"),
                self._field("tokenizer.ggml.eot_token_id"),
            ),
            **self._family.constants,
            **self._facts.factors(lambda name, default: float(self._key(name, default))),
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
        rotated = int(self._key("rope.dimension_count", head_dim))
        if self._family.partly_rotated:
            own = None if rotated == head_dim else rotated
            return replace(rope, rotated=own, interleaved=self._family.interleaved)
        if rotated != head_dim:
            raise UnsupportedModel.because("rope.dimension_count", rotated, (f"{head_dim}",))
        return rope

    def _stretched(self, theta: float, positions: int) -> RopeSpec:
        if _ROPE_LONG in self._tensors:
            return self._longrope(theta, positions)
        if _ROPE_FREQS in self._tensors:
            divisors = self._tensors[_ROPE_FREQS].data.astype(np.float32).reshape(-1).tolist()
            return RopeSpec(theta, "factors", divisors=tuple(divisors))
        # As in llama.cpp: a factor alone is linear, and one of 0 is none.
        kind = self._key("rope.scaling.type", "linear")
        factor = float(self._key("rope.scaling.factor", self._key("rope.scale_linear", 1.0))) or 1.0
        if kind == "linear" and factor != 1.0:
            return RopeSpec(theta, "linear", factor)
        if kind == "yarn":
            return self._yarn(theta, factor, positions)
        if kind not in ("none", "linear"):
            raise UnsupportedModel.because("GGUF rope scaling", kind, ("none", "linear", "yarn"))
        return RopeSpec(theta)

    def _longrope(self, theta: float, positions: int) -> RopeSpec:
        """LongRoPE: two lists of divisors, and how much attention grows."""
        long, short = (
            tuple(self._tensor(name).data.astype(np.float32).reshape(-1).tolist())
            for name in (_ROPE_LONG, _ROPE_SHORT)
        )
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
        """YaRN as llama.cpp computes it, whose attention grows with the factor in any case."""
        for key, neutral in _NEUTRAL.items():
            value = self._key(f"rope.scaling.{key}", neutral)
            if value != neutral:
                raise UnsupportedModel.because(f"rope.scaling.{key}", value, (f"{neutral:g}",))
        if factor < 1.0:
            raise ValueError(f"{self._architecture}.rope.scaling.factor must be 1 or more")
        grown = 0.1 * math.log(factor) + 1.0
        return RopeSpec(
            theta,
            "yarn",
            factor,
            original_positions=self._original_positions(positions),
            beta_fast=float(self._key("rope.scaling.yarn_beta_fast", 32.0)),
            beta_slow=float(self._key("rope.scaling.yarn_beta_slow", 1.0)),
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
    known = get_tensor_name_map(numbers[family.gguf.architecture], layers)
    wholes = {*family.joined, JOINED_QKV}  # which files of GLM may have
    parts = (part for whole in PARTS if whole not in family.joined for part in PARTS[whole])
    in_layer = (*family.norms.values(), *_LAYER_STEMS, *wholes, *parts)
    own = [f"model.layers.{i}.{stem}" for i in range(layers) for stem in in_layer]
    named = ((known.get_name(stem), stem) for stem in (*_STEMS, *own))
    return {name: stem for name, stem in named if name is not None}


def _separate_halves(values: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undo llama.cpp's order of rotary rows: each head as 0, 2, 4, ..., 1, 3, 5, ..."""
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)
