"""Hugging Face configs as a `ModelSpec`, without `transformers`."""

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from twolane.common.checked_json import converted, read_json
from twolane.model.load.quantization import Quantization
from twolane.model.load.quantization_configs import read_quantization
from twolane.model.spec import (
    MOST_HEADS,
    MOST_LAYERS,
    Family,
    ModelSpec,
    MoeSpec,
    RopeSpec,
    UnsupportedModel,
    merge_eos,
)
from twolane.sampling import SamplingParams

log = logging.getLogger("twolane.model")

ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "MixtralForCausalLM": "mixtral",
    "Phi3ForCausalLM": "phi3",
    "GraniteForCausalLM": "granite",
    "SmolLM3ForCausalLM": "smollm3",
    "Olmo2ForCausalLM": "olmo2",
    "GlmForCausalLM": "glm",
    "Glm4ForCausalLM": "glm4",
    "MinistralForCausalLM": "mistral",
    "Ministral3ForCausalLM": "mistral",
}
"""The architectures that work, as `config.json` names them."""

_BASES = {
    f"{name.removesuffix('ForCausalLM')}Model": name
    for name in ARCHITECTURES
    if name.endswith("ForCausalLM")
}
"""The architectures of checkpoints that were saved without a classifier."""
_MODEL_TYPES = {"ministral": "mistral", "ministral3": "mistral"}
"""Other names of families, as `model_type`."""
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "ministral3": {"sliding_window": None, "head_dim": 128, "vocab_size": 131_072}
}
"""Defaults of these model types that differ from those of their families."""

_LACKING = {
    "GptOssForCausalLM": "attention sinks and MXFP4 experts are not built",
    **dict.fromkeys(
        (
            "GemmaForCausalLM",
            "Gemma2ForCausalLM",
            "Gemma3ForCausalLM",
            "Gemma3ForConditionalGeneration",
        ),
        "heads of 256 are not built",
    ),
    **dict.fromkeys(
        ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM"),
        "latent attention is not built",
    ),
    **dict.fromkeys(
        ("Qwen2MoeForCausalLM", "Glm4MoeForCausalLM"),
        "experts that all tokens share are not built",
    ),
    **dict.fromkeys(
        ("Qwen3NextForCausalLM", "GraniteMoeHybridForCausalLM"), "linear attention is not built"
    ),
    **dict.fromkeys(
        (
            "Qwen2VLForConditionalGeneration",
            "Qwen2_5_VLForConditionalGeneration",
            "Qwen3VLForConditionalGeneration",
            "Qwen3VLMoeForConditionalGeneration",
            "Mistral3ForConditionalGeneration",
            "Llama4ForConditionalGeneration",
        ),
        "models of images are not built",
    ),
}
"""Why much used architectures do not work."""
JOINED: tuple[Family, ...] = ("phi3", "glm", "glm4")
"""The families whose checkpoints join modules that others store apart."""
_PARTLY_ROTATED: tuple[Family, ...] = ("phi3", "glm", "glm4")
"""The families for which `partial_rotary_factor` counts."""
_GLOBAL: tuple[Family, ...] = ("llama", "granite", "olmo2", "glm", "glm4")
"""The families without sliding windows."""


class _Kind(msgspec.Struct):
    """What of a `config.json` tells whether the rest can be read."""

    architectures: list[str] | None = None
    model_type: str | None = None
    quantization_config: dict[str, Any] | None = None
    compression_config: dict[str, Any] | None = None
    """The name that compressed-tensors wrote at first."""

    @property
    def quantization(self) -> dict[str, Any] | None:
        """What says how matrices are stored, if anything does."""
        return self.quantization_config or self.compression_config


_QUANTIZATION_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
"""Files in which checkpoints of a `quant_method` have what others have in `config.json`."""


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
    attn_factor: float | None = None
    partial_rotary_factor: float | None = None
    llama_4_scaling_beta: float | None = None
    short_factor: list[float] | None = None
    long_factor: list[float] | None = None


_ABOVE_0 = (
    *("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    *("attention_factor", "partial_rotary_factor"),
)
"""The numbers of `rope_parameters` that are divided by or multiply everything."""
GENERATION_FILE = "generation_config.json"


class _Generation(msgspec.Struct):
    """What is read of a `generation_config.json` to serve at all."""

    eos_token_id: int | list[int] | None = None


class _Sampling(msgspec.Struct):
    """What is read of a `generation_config.json` where a request says nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class _DualChunk(msgspec.Struct):
    """Attention of Qwen2.5-1M, which is not built: positions are compared within chunks."""

    chunk_size: int = 8192
    local_size: int = 1024


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
    is_causal: bool | None = True
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
    original_max_position_embeddings: int | None = None
    dual_chunk_attention_config: _DualChunk | None = None


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


class _Qwen3Moe(HFConfig, kw_only=True):
    vocab_size: int = 151_936
    hidden_size: int = 2048
    intermediate_size: int = 6144
    num_hidden_layers: int = 24
    num_key_value_heads: int | None = 4
    max_position_embeddings: int = 32_768
    eos_token_id: int | list[int] | None = None
    num_experts: int | None = None
    num_local_experts: int = 128
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] = []


class _Mixtral(HFConfig, kw_only=True):
    intermediate_size: int = 14_336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131_072
    rms_norm_eps: float = 1e-5
    rope_theta: float | None = 1_000_000.0
    sliding_window: int | None = None
    num_local_experts: int = 8
    num_experts_per_tok: int = 2


class _Phi3(HFConfig, kw_only=True):
    vocab_size: int = 32_064
    hidden_size: int = 3072
    intermediate_size: int = 8192
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    sliding_window: int | None = None
    original_max_position_embeddings: int | None = 4096
    eos_token_id: int | list[int] | None = 32_000


class _Granite(HFConfig, kw_only=True):
    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0


class _SmolLM3(HFConfig, kw_only=True):
    vocab_size: int = 128_256
    hidden_size: int = 2048
    num_hidden_layers: int = 36
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 4
    max_position_embeddings: int = 32_768
    tie_word_embeddings: bool = True
    eos_token_id: int | list[int] | None = 128_001
    rope_theta: float | None = 2_000_000.0
    sliding_window: int | None = None
    no_rope_layers: list[int] | None = None
    """0 for each layer whose queries and keys are not rotated."""
    no_rope_layer_interval: int = 4


class _Olmo2(HFConfig, kw_only=True):
    vocab_size: int = 50_304
    rms_norm_eps: float = 1e-5
    eos_token_id: int | list[int] | None = 50_279


class _Glm(HFConfig, kw_only=True):
    vocab_size: int = 151_552
    intermediate_size: int = 13_696
    num_hidden_layers: int = 40
    num_key_value_heads: int | None = 2
    head_dim: int | None = 128
    max_position_embeddings: int = 131_072
    rms_norm_eps: float = 1.5625e-7
    attention_bias: bool = True
    eos_token_id: int | list[int] | None = msgspec.field(
        default_factory=lambda: [151_329, 151_336, 151_338]
    )
    partial_rotary_factor: float | None = 0.5


_CONFIGS: dict[Family, type[HFConfig]] = {
    "llama": HFConfig,
    "mistral": _Mistral,
    "qwen2": _Qwen2,
    "qwen3": _Qwen3,
    "qwen3_moe": _Qwen3Moe,
    "mixtral": _Mixtral,
    "phi3": _Phi3,
    "granite": _Granite,
    "smollm3": _SmolLM3,
    "olmo2": _Olmo2,
    "glm": _Glm,
    "glm4": _Glm,
}


def spec_from_directory(path: Path) -> ModelSpec:
    """Read `config.json` (and the end tokens of `generation_config.json`) of a model directory.

    Raises:
        UnsupportedModel: the architecture or one of its options is not built.
        ValueError: there is no `config.json`, or one of the files has a value of the wrong type.
    """
    config_file = path / "config.json"
    if not config_file.is_file():
        raise ValueError(f"{path} has no config.json")
    return spec_from_config(read_json(config_file), _generation_eos(path))


def declared_eos(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the end tokens that a model directory's configs declare, by the place that does.

    Raises:
        UnsupportedModel: the architecture is not built.
        ValueError: a file is missing or broken.
    """
    raw = read_json(path / "config.json")
    family = check_architecture(raw)
    config = _read_as(family, raw)
    place = "config.json" if "eos_token_id" in raw else f"the default of {family}"
    found = {GENERATION_FILE: _generation_eos(path), place: config.eos_token_id}
    merged = {name: merge_eos(config.vocab_size, ids, None) for name, ids in found.items()}
    return {name: ids for name, ids in merged.items() if ids}


def sampling_from_directory(path: Path) -> dict[str, Any]:
    """Read how a model's authors would have its tokens drawn from its `generation_config.json`.

    A value that cannot be used is left out with a warning, for requests may bring their own.

    Returns:
        Values by the names of `SamplingParams`.

    Raises:
        ValueError: the file is broken.
    """
    given = _raw_generation(path)
    chosen: dict[str, Any] = {}
    for name in (field.name for field in msgspec.structs.fields(_Sampling)):
        if given.get(name) is None:
            continue
        try:
            sampling = converted({name: given[name]}, _Sampling, GENERATION_FILE, lax=True)
            value = getattr(sampling, name)
            SamplingParams(**{name: value})
        except ValueError as error:
            said = str(error).removeprefix(f"{GENERATION_FILE}: ")
            log.warning("%s: %s is not used: %s", path / GENERATION_FILE, name, said)
        else:
            chosen[name] = value
    return chosen


def _generation_eos(path: Path) -> int | list[int] | None:
    return converted(_raw_generation(path), _Generation, GENERATION_FILE, lax=True).eos_token_id


def _raw_generation(path: Path) -> dict[str, Any]:
    file = path / GENERATION_FILE
    return read_json(file) if file.is_file() else {}


def check_architecture(config: Mapping[str, Any]) -> Family:
    """The family of a raw `config.json`.

    Raises:
        UnsupportedModel: the architecture or the quantisation is not built.
        ValueError: one of these has the wrong type.
    """
    kind = converted(config, _Kind)
    model_type = _MODEL_TYPES.get(kind.model_type or "", kind.model_type)
    name = kind.architectures[0] if kind.architectures else _named_by_type(model_type)
    name = _BASES.get(name, name)
    if name in _LACKING:
        raise UnsupportedModel(f"unsupported architecture {name!r}: {_LACKING[name]}")
    if name not in ARCHITECTURES:
        raise UnsupportedModel.because("architecture", name, ARCHITECTURES)
    family = ARCHITECTURES[name]
    if model_type not in (None, family):
        raise UnsupportedModel.because(f"model_type of {name}", kind.model_type, (family,))
    read_quantization(kind.quantization)  # it may be none that is built
    return family


def _named_by_type(model_type: str | None) -> str:
    """Return the architecture of a config that names none; what has no name stays a model type."""
    return next(
        (name for name, family in ARCHITECTURES.items() if family == model_type),
        f"model_type {model_type}",
    )


def quantization_from_directory(path: Path) -> Quantization | None:
    """How the matrices of a model directory are stored, or None where nothing is quantised.

    Raises:
        UnsupportedModel: the quantisation is not built.
        ValueError: a value of `quantization_config` has the wrong type.
    """
    raw = converted(read_json(path / "config.json"), _Kind).quantization
    for name, method in _QUANTIZATION_FILES.items():
        if not raw and (path / name).is_file():
            raw = {"quant_method": method, **read_json(path / name)}
    return read_quantization(raw)


def check_counts(layers: int, heads: int) -> None:
    """Compare numbers of parts before anything is made for each of them.

    Raises:
        ValueError: one is not that of a model.
    """
    if not 1 <= layers <= MOST_LAYERS:
        raise ValueError(f"num_hidden_layers must be 1 to {MOST_LAYERS}, not {layers}")
    if not 1 <= heads <= MOST_HEADS:
        raise ValueError(f"num_attention_heads must be 1 to {MOST_HEADS}, not {heads}")


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
    config = _read_as(family, raw)
    check_counts(config.num_hidden_layers, config.num_attention_heads)
    if config.max_position_embeddings < 1:
        said = f"must be 1 or more, not {config.max_position_embeddings}"
        raise ValueError(f"config.json: max_position_embeddings {said}")
    if config.hidden_act not in ("silu", "swish"):  # two names of one function
        raise UnsupportedModel.because("activation", config.hidden_act, ("silu",))
    if config.is_causal is False:  # each token would be attended to by those before it, too
        raise UnsupportedModel.because("is_causal", config.is_causal, ("True",))
    window, sliding_layers = _sliding(config, family)
    rope = _rope(config, family)
    if family == "phi3" and rope.type not in ("default", "longrope"):
        works = ("default", "longrope")
        raise UnsupportedModel.because("rope type of Phi3ForCausalLM", rope.type, works)
    biased = config.attention_bias and family not in ("mixtral", "phi3")  # these have none at all
    return ModelSpec(
        family=family,
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=_head_dim(config),
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        max_positions=_positions(config, rope),
        norm_eps=config.rms_norm_eps,
        rope=rope,
        tie_embeddings=config.tie_word_embeddings,
        qkv_bias=family == "qwen2" or biased,
        o_bias=family not in ("qwen2", "glm", "glm4") and biased,
        mlp_bias=config.mlp_bias,
        qk_norm=family in ("qwen3", "qwen3_moe", "olmo2"),
        qk_norm_whole=family == "olmo2",
        pre_norms=family != "olmo2",
        post_norms=family in ("olmo2", "glm4"),
        unrotated_layers=_unrotated(config),
        sliding_window=window,
        sliding_layers=sliding_layers,
        moe=_experts(config),
        eos_token_ids=merge_eos(config.vocab_size, config.eos_token_id, generation_eos),
        **_factors(config),
    )


def _read_as(family: Family, raw: Mapping[str, Any]) -> HFConfig:
    """A raw config as one of a family; null says no where only yes and no can be, as in
    `transformers`.

    Raises:
        ValueError: a value has the wrong type.
    """
    form = _CONFIGS[family]
    switches = [field.name for field in msgspec.structs.fields(form) if field.type is bool]
    raw = {**_DEFAULTS.get(str(raw.get("model_type")), {}), **raw}
    given = {**raw, **{name: False for name in switches if raw.get(name, ...) is None}}
    return converted(given, form, lax=True)


def _positions(config: HFConfig, rope: RopeSpec) -> int:
    """The most tokens of a sequence."""
    positions, chunks = config.max_position_embeddings, config.dual_chunk_attention_config
    if rope.type == "yarn":  # those of the config may be the ones before stretching
        positions = round(rope.original_positions * rope.factor)
    if chunks is not None:  # shorter ones are within one chunk
        positions = min(positions, chunks.chunk_size - chunks.local_size)
    return positions


def _factors(config: HFConfig) -> dict[str, float]:
    """The factors that Granite has, by their names in `ModelSpec`.

    Raises:
        ValueError: one of those that are divided by is 0.
    """
    if not isinstance(config, _Granite):
        return {}
    for name in ("residual_multiplier", "logits_scaling", "attention_multiplier"):
        if not getattr(config, name) > 0.0:
            raise ValueError(f"config.json: {name} must be above 0, not {getattr(config, name)}")
    return {
        "attention_scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": 1.0 / config.logits_scaling,
    }


def _unrotated(config: HFConfig) -> tuple[int, ...]:
    """The layers whose queries and keys are not rotated.

    Raises:
        ValueError: the config does not say it for each layer.
    """
    if not isinstance(config, _SmolLM3):
        return ()
    layers, step = range(config.num_hidden_layers), config.no_rope_layer_interval
    if config.no_rope_layers is None:
        if step < 1:
            raise ValueError(f"config.json: no_rope_layer_interval must be 1 or more, not {step}")
        return tuple(i for i in layers if (i + 1) % step == 0)
    if len(config.no_rope_layers) < len(layers):
        raise ValueError(
            f"config.json: no_rope_layers has {len(config.no_rope_layers)} values for "
            f"{len(layers)} layers"
        )
    return tuple(i for i in layers if not config.no_rope_layers[i])


def _experts(config: HFConfig) -> MoeSpec | None:
    """The experts, if the family has any.

    Raises:
        ValueError: the config does not say which layers have them.
    """
    if isinstance(config, _Mixtral):
        experts, each = config.num_local_experts, config.num_experts_per_tok
        return MoeSpec(experts, each, config.intermediate_size)
    if not isinstance(config, _Qwen3Moe):
        return None
    dense = {i for i in config.mlp_only_layers if 0 <= i < config.num_hidden_layers}
    if (step := config.decoder_sparse_step) < 1:
        raise ValueError(f"config.json: decoder_sparse_step must be 1 or more, not {step}")
    dense |= {i for i in range(config.num_hidden_layers) if (i + 1) % step}
    return MoeSpec(
        config.num_experts or config.num_local_experts,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        config.norm_topk_prob,
        tuple(sorted(dense)),
    )


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
    """The sliding window and its layers: those of `layer_types`, which some families do not read.

    Without it, all layers of Mistral, Mixtral, Phi-3 and Qwen3-MoE have one, of Qwen those from
    `max_window_layers` on, of SmolLM3 those that are not rotated. A window of 0 is none, as in vLLM
    and llama.cpp.

    Raises:
        ValueError: it is negative.
    """
    window, types = config.sliding_window, config.layer_types
    if family in _GLOBAL or not window:
        return None, ()
    if window < 0:
        raise ValueError(f"config.json: sliding_window must be 1 or more, not {window}")
    switched = family in ("qwen2", "qwen3", "qwen3_moe", "smollm3")
    if switched and not config.use_sliding_window and not (family == "smollm3" and types):
        return None, ()
    layers: Iterable[int] = range(config.num_hidden_layers)
    if types is not None and family not in ("mixtral", "phi3", "qwen3_moe"):
        layers = (i for i, t in enumerate(types) if t == "sliding_attention")
    elif family == "smollm3":
        layers = _unrotated(config)
    elif family in ("qwen2", "qwen3"):
        layers = range(config.max_window_layers, config.num_hidden_layers)
    chosen = tuple(layers)
    return (window, chosen) if chosen else (None, ())


def _rope(config: HFConfig, family: Family) -> RopeSpec:
    """The rotary embedding: how it is stretched, and which dimensions are rotated.

    Raises:
        UnsupportedModel: that is not built.
        ValueError: `rope_parameters` lacks a number, or has something else in its place.
    """
    share = _given_rope(config).get("partial_rotary_factor", config.partial_rotary_factor)
    rope = _stretched(config, family)
    if family not in _PARTLY_ROTATED and share not in (None, 1.0):
        raise UnsupportedModel.because("partial_rotary_factor", share, ("1.0",))
    if share is not None and not 0.0 < share <= 1.0:
        raise ValueError(f"config.json: partial_rotary_factor must be above 0, not {share}")
    rotated = int(_head_dim(config) * (1.0 if share is None else share))
    if len(rope.divisors) not in (0, rotated // 2):
        raise ValueError(f"config.json: long_factor must have {rotated // 2} numbers")
    given = _given_rope(config)
    beta = float(given.get("llama_4_scaling_beta") or 0.0)
    return replace(
        rope,
        rotated=None if rotated == _head_dim(config) else rotated,
        interleaved=family in ("glm", "glm4"),
        query_beta=beta,
        original_positions=_original_positions(given, config) if beta else rope.original_positions,
    )


def _given_rope(config: HFConfig) -> dict[str, Any]:
    """What a config says of the rotary embedding, under its older name first, as in
    `transformers`."""
    return config.rope_scaling or config.rope_parameters or {}


def _original_positions(rope: Mapping[str, Any], config: HFConfig) -> int:
    """The positions before stretching: those of the config itself come first, as in
    `transformers`."""
    name = "original_max_position_embeddings"
    return int(
        config.original_max_position_embeddings or rope.get(name) or config.max_position_embeddings
    )


def _stretched(config: HFConfig, family: Family) -> RopeSpec:
    """The rotary embedding: `rope_parameters`, or the older theta and scaling.

    Raises:
        UnsupportedModel: the type of scaling is not built.
        ValueError: it lacks a number, or has something else in its place.
    """
    rope = {name: value for name, value in _given_rope(config).items() if value is not None}
    for name, value in rope.items():
        if isinstance(value, dict):
            raise UnsupportedModel.because("rope_parameters of", name, ("one for all layers",))
    _check_rope(converted(rope, _RopeNumbers, "config.json: rope_parameters", lax=True))
    theta = float(rope.get("rope_theta") or config.rope_theta or 10_000.0)
    if not theta > 1.0:
        raise ValueError(f"config.json: rope_theta must be above 1, not {theta:g}")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if family == "phi3" and kind in ("su", "yarn"):  # older names of the same
        kind = "longrope"
    try:
        match kind:
            case "default":
                return RopeSpec(theta)
            case "linear":
                return RopeSpec(theta, "linear", float(rope["factor"]))
            case "dynamic":
                factor, positions = float(rope["factor"]), config.max_position_embeddings
                return RopeSpec(theta, "dynamic", factor, original_positions=positions)
            case "llama3":
                return _llama3(theta, rope, _original_positions(rope, config))
            case "yarn":
                return _yarn(theta, rope, config)
            case "longrope":
                return _longrope(theta, rope, config)
    except KeyError as error:
        raise ValueError(f"config.json: rope_parameters of type {kind} have no {error}") from error
    works = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
    raise UnsupportedModel.because("rope type", kind, works)


def _check_rope(numbers: _RopeNumbers) -> None:
    """Refuse numbers by which no position can be rotated.

    Raises:
        ValueError: there is one.
    """
    for name in _ABOVE_0:
        value = getattr(numbers, name)
        if value is not None and not 0.0 < value < math.inf:
            raise ValueError(f"config.json: rope_parameters: {name} must be above 0, not {value}")
    beta = numbers.llama_4_scaling_beta
    if beta is not None and not 0.0 <= beta < math.inf:
        raise ValueError(f"config.json: rope_parameters: llama_4_scaling_beta cannot be {beta}")
    low, high = numbers.low_freq_factor, numbers.high_freq_factor
    if low is not None and high is not None and not low < high:
        said = f"low_freq_factor {low} must be below high_freq_factor {high}"
        raise ValueError(f"config.json: rope_parameters: {said}")


def _llama3(theta: float, rope: Mapping[str, Any], original: int) -> RopeSpec:
    return RopeSpec(
        theta,
        "llama3",
        float(rope["factor"]),
        original_positions=original,
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
    )


def _longrope(theta: float, rope: Mapping[str, Any], config: HFConfig) -> RopeSpec:
    """LongRoPE; the scale of the attention follows from the factor where the config gives none."""
    positions, original = config.max_position_embeddings, _original_positions(rope, config)
    long, short = (tuple(map(float, rope[name])) for name in ("long_factor", "short_factor"))
    if len(long) != len(short) or min(*long, *short) <= 0.0:
        raise ValueError(
            "config.json: short_factor and long_factor must have equally many numbers above 0"
        )
    factor, scale = float(rope.get("factor") or positions / original), rope.get("attention_factor")
    if scale is None:
        grown = factor > 1.0
        scale = math.sqrt(1.0 + math.log(factor) / math.log(original)) if grown else 1.0
    return RopeSpec(
        theta,
        "longrope",
        factor,
        original_positions=original,
        attention_factor=float(scale),
        divisors=long,
        short_divisors=short,
    )


def _yarn(theta: float, rope: Mapping[str, Any], config: HFConfig) -> RopeSpec:
    """YaRN; the scale of the attention follows from the factor where the config gives none.

    `attn_factor` multiplies it, as in vLLM and llama.cpp; `transformers` does not know it.
    """
    original = _original_positions(rope, config)
    factor = float(rope.get("factor") or config.max_position_embeddings / original)
    scale = rope.get("attention_factor")
    if scale is None:
        growths = [float(rope.get(name) or 0.0) for name in ("mscale", "mscale_all_dim")]
        if not all(growths):
            growths = [1.0, 0.0]
        own, shared = (_yarn_scale(factor, growth) for growth in growths)
        scale = own / shared * float(rope.get("attn_factor") or 1.0)
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


def _yarn_scale(factor: float, growth: float) -> float:
    return 0.1 * growth * math.log(factor) + 1.0 if factor > 1.0 else 1.0
