"""What a model is made of, read from a Hugging Face config, without weights and `transformers`."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from twolane.sampling import SamplingParams

T = TypeVar("T")
Family = Literal["llama", "mistral", "qwen2", "qwen3"]
RopeType = Literal["default", "linear", "llama3", "yarn", "factors"]

ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""The architectures that work, as `config.json` names them."""


class UnsupportedModel(ValueError):
    """The model asks for something that is not built; the message names it and what works."""

    @classmethod
    def because(cls, what: str, given: object, works: Iterable[str]) -> "UnsupportedModel":
        """The refusal of one value of `what`, with the list of those that work."""
        return cls(f"unsupported {what} {given!r}; these work: {', '.join(works)}")


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding: base frequency and how it is stretched.

    "linear" divides all frequencies by `factor`; "llama3" and "yarn" stretch the low ones
    (Llama 3.1; arXiv:2309.00071); "factors" divides each by its own number, as GGUF files store it.
    """

    theta: float = 10_000.0
    type: RopeType = "default"
    factor: float = 1.0
    original_positions: int = 0
    """Positions the model was trained for before stretching (llama3, yarn)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Whether yarn rounds the borders of its ramp to whole dimensions."""
    attention_factor: float = 1.0
    """Multiplies cosine and sine (yarn)."""
    divisors: tuple[float, ...] = ()
    """One number for each of the head_dim / 2 frequencies (factors)."""


@dataclass(frozen=True)
class ModelSpec:
    """The shape of a decoder-only transformer of one of the supported families."""

    family: Family
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    norm_eps: float = 1e-6
    rope: RopeSpec = RopeSpec()
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm over each query and key head before rotation (Qwen3)."""
    sliding_window: int | None = None
    """A token of a sliding layer sees itself and this many - 1 tokens before it."""
    sliding_layers: tuple[int, ...] = ()
    """The layers that `sliding_window` holds for."""
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads cannot share {self.kv_heads} key-value heads")
        if self.head_dim % 2:
            raise ValueError(f"rotary embedding needs an even head_dim, not {self.head_dim}")

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer in tokens, or None where all tokens are seen."""
        return self.sliding_window if layer in self.sliding_layers else None

    @property
    def q_size(self) -> int:
        """Elements of one token's queries."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of one token's keys (or values) in one layer."""
        return self.kv_heads * self.head_dim

    @property
    def layer_parameters(self) -> int:
        """Weights in one layer."""
        qkv = self.q_size + 2 * self.kv_size
        attention = (qkv + self.q_size) * self.hidden_size
        mlp = 3 * self.hidden_size * self.intermediate_size
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        biases = (
            (qkv if self.qkv_bias else 0)
            + (self.hidden_size if self.o_bias else 0)
            + (2 * self.intermediate_size + self.hidden_size if self.mlp_bias else 0)
        )
        return attention + mlp + norms + biases

    @property
    def parameters(self) -> int:
        """Weights in the whole model; tied embeddings count once."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return embeddings + self.layers * self.layer_parameters + self.hidden_size

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of keys and values of one token in all layers, at `itemsize` bytes an element."""
        return 2 * self.layers * self.kv_size * itemsize


class _Kind(msgspec.Struct):
    """What of a `config.json` tells whether the rest can be read."""

    architectures: list[str] | None = None
    model_type: str | None = None
    quantization_config: dict[str, Any] | None = None


class _RopeNumbers(msgspec.Struct):
    """The numbers among `rope_parameters`."""

    rope_theta: float | None = None
    factor: float | None = None
    original_max_position_embeddings: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None


GENERATION_FILE = "generation_config.json"


class _Generation(msgspec.Struct):
    """What is read of a `generation_config.json`."""

    eos_token_id: int | list[int] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class HFConfig(msgspec.Struct, kw_only=True):
    """What is read of a `config.json`.

    Fields that are not there have the defaults of the family's class in `transformers`. That is not
    asked: its import takes longer than all else that starts an engine, PyTorch's included.
    """

    vocab_size: int = 32_000
    hidden_size: int = 4096
    intermediate_size: int = 11_008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_token_id: int | list[int] | None = 2
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    """The older name of `rope_parameters`, without theta."""
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None


class _Mistral(HFConfig, kw_only=True):
    intermediate_size: int = 14_336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131_072


class _Qwen2(HFConfig, kw_only=True):
    vocab_size: int = 151_936
    intermediate_size: int = 22_016
    num_key_value_heads: int | None = 32
    max_position_embeddings: int = 32_768
    eos_token_id: int | list[int] | None = None


class _Qwen3(_Qwen2, kw_only=True):
    head_dim: int | None = 128


_CONFIGS: dict[Family, type[HFConfig]] = {
    "llama": HFConfig,
    "mistral": _Mistral,
    "qwen2": _Qwen2,
    "qwen3": _Qwen3,
}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        ValueError: it does not; the message names the file.
    """
    try:
        return msgspec.convert(json.loads(path.read_text(encoding="utf-8")), dict[str, Any])
    except ValueError as error:  # of JSON, of UTF-8, or msgspec's
        raise ValueError(f"{path} is not a JSON object: {error}") from error


def converted(raw: object, form: type[T], file: str = "config.json") -> T:
    """What was read from a file, in a form.

    Raises:
        ValueError: something has the wrong type; the message begins with the file.
    """
    try:
        return msgspec.convert(raw, form)
    except msgspec.ValidationError as error:
        raise ValueError(f"{file}: {error}") from error


def spec_from_directory(path: Path) -> ModelSpec:
    """Read `config.json` (and the end tokens of `generation_config.json`) of a model directory.

    Raises:
        UnsupportedModel: the architecture or one of its options is not built.
        ValueError: there is no `config.json`, or one of the files has a value of the wrong type.
    """
    config_file = path / "config.json"
    if not config_file.is_file():
        raise ValueError(f"{path} has no config.json")
    return spec_from_config(read_json(config_file), _generation(path).eos_token_id)


def sampling_from_directory(path: Path) -> dict[str, Any]:
    """How a model's authors would have its tokens drawn, by the names of `SamplingParams`: what its
    `generation_config.json` has of it.

    Raises:
        ValueError: a value there has the wrong type or is out of range.
    """
    given = msgspec.structs.asdict(_generation(path))
    del given["eos_token_id"]
    chosen = {name: value for name, value in given.items() if value is not None}
    try:
        SamplingParams(**chosen)
    except ValueError as error:
        raise ValueError(f"{GENERATION_FILE}: {error}") from error
    return chosen


def _generation(path: Path) -> _Generation:
    file = path / GENERATION_FILE
    return converted(read_json(file) if file.is_file() else {}, _Generation, file.name)


def check_architecture(config: Mapping[str, Any]) -> Family:
    """The family of a raw `config.json`.

    Raises:
        UnsupportedModel: the architecture or the quantisation is not built.
        ValueError: one of these has the wrong type.
    """
    kind = converted(config, _Kind)
    name = kind.architectures[0] if kind.architectures else f"model_type {kind.model_type}"
    if name not in ARCHITECTURES:
        raise UnsupportedModel.because("architecture", name, ARCHITECTURES)
    family = ARCHITECTURES[name]
    if kind.model_type not in (None, family):
        raise UnsupportedModel.because(f"model_type of {name}", kind.model_type, (family,))
    if kind.quantization_config:
        method = kind.quantization_config.get("quant_method", "unknown")
        raise UnsupportedModel.because(
            "quantisation", method, ("unquantised safetensors", "GGUF files")
        )
    return family


def spec_from_config(
    raw: Mapping[str, Any], generation_eos: int | list[int] | None = None
) -> ModelSpec:
    """The spec of a raw `config.json`.

    Args:
        raw: the file's content.
        generation_eos: the end tokens of `generation_config.json`, added to the config's own.

    Raises:
        UnsupportedModel: the architecture or one of its options is not built.
        ValueError: a value has the wrong type, or sizes do not fit each other.
    """
    family = check_architecture(raw)
    config = converted(raw, _CONFIGS[family])
    if config.hidden_act != "silu":
        raise UnsupportedModel.because("activation", config.hidden_act, ("silu",))
    window, sliding_layers = _sliding(config, family)
    rope, positions = _rope(config), config.max_position_embeddings
    if rope.type == "yarn":  # those of the config may be the ones before stretching
        positions = round(rope.original_positions * rope.factor)
    return ModelSpec(
        family=family,
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=_head_dim(config),
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        max_positions=positions,
        norm_eps=config.rms_norm_eps,
        rope=rope,
        tie_embeddings=config.tie_word_embeddings,
        qkv_bias=family == "qwen2" or config.attention_bias,
        o_bias=family != "qwen2" and config.attention_bias,
        mlp_bias=config.mlp_bias,
        qk_norm=family == "qwen3",
        sliding_window=window,
        sliding_layers=sliding_layers,
        eos_token_ids=merge_eos(config.vocab_size, config.eos_token_id, generation_eos),
    )


def merge_eos(vocab_size: int, *ids: int | Iterable[int] | None) -> tuple[int, ...]:
    """All end tokens named by any of the sources, each once, in order.

    Those outside the vocabulary (-1 for none, tokens that were never added) are left out: they
    cannot be chosen, and there is no logit to ban before `min_tokens`.
    """
    flat = [i for group in ids for i in ([group] if isinstance(group, int) else group or ())]
    return tuple(i for i in dict.fromkeys(flat) if 0 <= i < vocab_size)


def _head_dim(config: HFConfig) -> int:
    if config.head_dim:
        return config.head_dim
    if config.hidden_size % config.num_attention_heads:
        raise ValueError(
            f"config.json: hidden_size {config.hidden_size} is no multiple of "
            f"num_attention_heads {config.num_attention_heads}, and there is no head_dim"
        )
    return config.hidden_size // config.num_attention_heads


def _sliding(config: HFConfig, family: Family) -> tuple[int | None, tuple[int, ...]]:
    """The sliding window and its layers: all of Mistral's, for Qwen those of `layer_types`, or
    those from `max_window_layers` on."""
    window = config.sliding_window
    if family == "llama" or window is None:
        return None, ()
    if family == "mistral":
        return window, tuple(range(config.num_hidden_layers))
    if not config.use_sliding_window:
        return None, ()
    if config.layer_types is None:
        layers = tuple(range(config.max_window_layers, config.num_hidden_layers))
    else:
        layers = tuple(i for i, t in enumerate(config.layer_types) if t == "sliding_attention")
    return (window, layers) if layers else (None, ())


def _rope(config: HFConfig) -> RopeSpec:
    """The rotary embedding: `rope_parameters`, or the older theta and scaling.

    Raises:
        UnsupportedModel: the type of scaling is not built.
        ValueError: it lacks a number, or has something else in its place.
    """
    given = config.rope_scaling or config.rope_parameters or {}
    rope = {name: value for name, value in given.items() if value is not None}
    for name, value in rope.items():
        if isinstance(value, dict):
            raise UnsupportedModel.because("rope_parameters of", name, ("one for all layers",))
    converted(rope, _RopeNumbers, "config.json: rope_parameters")
    theta = float(rope.get("rope_theta") or config.rope_theta or 10_000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    rotated = rope.get("partial_rotary_factor", config.partial_rotary_factor)
    if rotated not in (None, 1.0):
        raise UnsupportedModel.because("partial_rotary_factor", rotated, ("1.0",))
    try:
        match kind:
            case "default":
                return RopeSpec(theta)
            case "linear":
                return RopeSpec(theta, "linear", float(rope["factor"]))
            case "llama3":
                return _llama3(theta, rope, config.max_position_embeddings)
            case "yarn":
                return _yarn(theta, rope, config.max_position_embeddings)
    except KeyError as error:
        raise ValueError(f"config.json: rope_parameters of type {kind} have no {error}") from error
    raise UnsupportedModel.because("rope type", kind, ("default", "linear", "llama3", "yarn"))


def _llama3(theta: float, rope: Mapping[str, Any], max_positions: int) -> RopeSpec:
    return RopeSpec(
        theta,
        "llama3",
        float(rope["factor"]),
        original_positions=int(rope.get("original_max_position_embeddings") or max_positions),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
    )


def _yarn(theta: float, rope: Mapping[str, Any], max_positions: int) -> RopeSpec:
    """YaRN; the scale of the attention follows from the factor where the config gives none."""
    for key in ("mscale", "mscale_all_dim"):
        if rope.get(key):
            raise UnsupportedModel.because(f"yarn {key}", rope[key], ("none",))
    original = int(rope.get("original_max_position_embeddings") or max_positions)
    factor = float(rope.get("factor") or max_positions / original)
    scale = rope.get("attention_factor")
    if scale is None:
        scale = 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0
    return RopeSpec(
        theta,
        "yarn",
        factor,
        original_positions=original,
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        truncate=bool(rope.get("truncate", True)),
        attention_factor=float(scale),
    )
