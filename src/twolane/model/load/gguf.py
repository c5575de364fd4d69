"""GGUF files: their metadata as a `ModelSpec`, their tensors under Hugging Face names. No torch."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.quants import dequantize

from twolane.model.load.gguf_file import GGUFFile
from twolane.model.sharding import Cut
from twolane.model.spec import (
    MOST_HEADS,
    MOST_LAYERS,
    Family,
    ModelSpec,
    RopeSpec,
    UnsupportedModel,
    merge_eos,
)

ARCHITECTURES: dict[str, Family] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""GGUF architectures that work; "llama" covers Mistral too."""

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FREQS = "rope_freqs.weight"
_PART = re.compile(
    r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.IGNORECASE
)
_MOST_PARTS = 9999
"""A model is split into at most this many files."""
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
        self.spec = self._read_spec()
        self._names = {
            _hugging_face_name(name): name for name in self._tensors if name != _ROPE_FREQS
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
        if name is None or int(name["count"]) != count or count > _MOST_PARTS:
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
        """The tensors, by their Hugging Face names."""
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, [out, in]."""
        return tuple(int(n) for n in reversed(self._tensors[self._names[name]].shape))

    def type(self, name: str) -> str:
        """The type of what `get` gives, as safetensors names it."""
        return "F32"

    def get(self, name: str, cut: Cut | None = None) -> npt.NDArray[np.float32]:
        """A tensor or a part of it, dequantised to float32, in the Hugging Face order of rows.

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
        if self._architecture == "llama" and ".q_proj." in name:
            values = _separate_halves(values, self.spec.heads)
        elif self._architecture == "llama" and ".k_proj." in name:
            values = _separate_halves(values, self.spec.kv_heads)
        if cut is not None:
            part = slice(cut.start, cut.stop)
            values = values[part] if cut.dim == 0 else values[:, part]
        # Unquantised tensors are views of the file.
        return values if values.flags.writeable else values.copy()

    def _read_spec(self) -> ModelSpec:
        family = ARCHITECTURES.get(self._architecture)
        if family is None:
            raise UnsupportedModel.because("GGUF architecture", self._architecture, ARCHITECTURES)
        if experts := self._key("expert_count", 0):
            raise UnsupportedModel.because("number of experts", experts, ("0 (dense models)",))
        heads = self._count("attention.head_count", MOST_HEADS)
        hidden = int(self._key("embedding_length"))
        head_dim = int(self._key("attention.key_length", hidden // heads))
        layers = self._count("block_count", MOST_LAYERS)
        window = self._key("attention.sliding_window", 0) or None
        vocab_size = int(self._tensor("token_embd.weight").shape[1])
        positions = int(self._key("context_length"))
        rope = self._rope(head_dim, positions)
        if rope.type == "yarn":  # the key may have the positions before stretching
            positions = round(rope.original_positions * rope.factor)
        return ModelSpec(
            family=family,
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
            qk_norm="blk.0.attn_q_norm.weight" in self._tensors,
            sliding_window=window,
            sliding_layers=tuple(range(layers)) if window else (),
            eos_token_ids=merge_eos(
                vocab_size,
                self._field("tokenizer.ggml.eos_token_id"),
                self._field("tokenizer.ggml.eot_token_id"),
            ),
        )

    def _count(self, name: str, most: int) -> int:
        """Return a number of parts, which is compared before anything is made for each of them."""
        count = int(self._key(name))
        if not 1 <= count <= most:
            raise ValueError(f"{self._architecture}.{name} must be 1 to {most}, not {count}")
        return count

    def _rope(self, head_dim: int, positions: int) -> RopeSpec:
        theta = float(self._key("rope.freq_base", 10_000.0))
        rotated = self._key("rope.dimension_count", head_dim)
        if rotated != head_dim:
            raise UnsupportedModel.because("rope.dimension_count", rotated, (f"{head_dim}",))
        if _ROPE_FREQS in self._tensors:
            divisors = self._tensors[_ROPE_FREQS].data.astype(np.float32).reshape(-1).tolist()
            return RopeSpec(theta, "factors", divisors=tuple(divisors))
        kind = self._key("rope.scaling.type", "none")
        factor = float(self._key("rope.scaling.factor", self._key("rope.scale_linear", 1.0)))
        if kind == "linear" or (kind == "none" and factor != 1.0):
            return RopeSpec(theta, "linear", factor)
        if kind == "yarn":
            return self._yarn(theta, factor, positions)
        if kind != "none":
            raise UnsupportedModel.because("GGUF rope scaling", kind, ("none", "linear", "yarn"))
        return RopeSpec(theta)

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
            original_positions=int(self._key("rope.scaling.original_context_length", positions)),
            beta_fast=float(self._key("rope.scaling.yarn_beta_fast", 32.0)),
            beta_slow=float(self._key("rope.scaling.yarn_beta_slow", 1.0)),
            attention_factor=grown * float(self._key("rope.scaling.attn_factor", 1.0)),
        )

    def _key(self, name: str, default: Any = None) -> Any:
        """A value of the model's architecture.

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


def _hugging_face_name(name: str) -> str:
    """blk.3.attn_q.weight → model.layers.3.self_attn.q_proj.weight; unknown names stay."""
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{suffix}"
    block, _, part = stem.partition(".")
    number, _, part = part.partition(".")
    if block == "blk" and part in _LAYER:
        return f"model.layers.{number}.{_LAYER[part]}.{suffix}"
    return name


def _separate_halves(values: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undo llama.cpp's order of rotary rows: each head as 0, 2, 4, ..., 1, 3, 5, ..."""
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)
