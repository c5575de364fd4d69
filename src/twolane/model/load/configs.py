"""Hugging Face configs as a `ModelSpec`, without `transformers`."""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from twolane.common.checked_json import converted, read_json
from twolane.model.load.hf_config import (
    CONFIGS,
    GraniteConfig,
    HFConfig,
    MixtralConfig,
    Qwen3MoeConfig,
    SmolLM3Config,
)
from twolane.model.load.quantization import Quantization
from twolane.model.load.quantization_configs import read_quantization
from twolane.model.load.rope_config import rope_from_config
from twolane.model.spec import (
    MAX_HEADS,
    MAX_LAYERS,
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
_GLOBAL: tuple[Family, ...] = ("llama", "granite", "olmo2", "glm", "glm4")
"""The families without sliding windows."""


_LAYER_TYPES = {"full_attention", "sliding_attention"}


class _Kind(msgspec.Struct):
    """The fields of a `config.json` that decide whether the rest can be read."""

    architectures: list[str] | None = None
    model_type: str | None = None
    quantization_config: dict[str, Any] | None = None
    compression_config: dict[str, Any] | None = None
    """The name that compressed-tensors wrote at first."""

    @property
    def quantization(self) -> dict[str, Any] | None:
        """The quantisation config, if there is one."""
        return self.quantization_config or self.compression_config


_QUANTIZATION_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
"""Files in which checkpoints of a `quant_method` have what others have in `config.json`."""


GENERATION_FILE = "generation_config.json"


class _Generation(msgspec.Struct):
    """The field of a `generation_config.json` that serving needs."""

    eos_token_id: int | list[int] | None = None


class _Sampling(msgspec.Struct):
    """The fields of a `generation_config.json` that are defaults of requests."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


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
    ids_of = {GENERATION_FILE: _generation_eos(path), place: config.eos_token_id}
    merged = {name: merge_eos(config.vocab_size, ids, None) for name, ids in ids_of.items()}
    return {name: ids for name, ids in merged.items() if ids}


def sampling_from_directory(path: Path) -> dict[str, Any]:
    """Read how a model's authors would have its tokens drawn from its `generation_config.json`.

    A value that cannot be used is left out with a warning, for requests may bring their own.

    Returns:
        Values by the names of `SamplingParams`.

    Raises:
        ValueError: the file is broken.
    """
    raw = _raw_generation(path)
    chosen: dict[str, Any] = {}
    for name in (field.name for field in msgspec.structs.fields(_Sampling)):
        if raw.get(name) is None:
            continue
        try:
            sampling = converted({name: raw[name]}, _Sampling, GENERATION_FILE, lax=True)
            value = getattr(sampling, name)
            SamplingParams(**{name: value})
        except ValueError as error:
            problem = str(error).removeprefix(f"{GENERATION_FILE}: ")
            log.warning("%s: %s is not used: %s", path / GENERATION_FILE, name, problem)
        else:
            chosen[name] = value
    return chosen


def _generation_eos(path: Path) -> int | list[int] | None:
    return converted(_raw_generation(path), _Generation, GENERATION_FILE, lax=True).eos_token_id


def _raw_generation(path: Path) -> dict[str, Any]:
    file = path / GENERATION_FILE
    return read_json(file) if file.is_file() else {}


def check_architecture(config: Mapping[str, Any]) -> Family:
    """Return the family of a raw `config.json`.

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
    """Return the quantisation of a model directory; None where nothing is quantised.

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
    if not 1 <= layers <= MAX_LAYERS:
        raise ValueError(f"num_hidden_layers must be 1 to {MAX_LAYERS}, not {layers}")
    if not 1 <= heads <= MAX_HEADS:
        raise ValueError(f"num_attention_heads must be 1 to {MAX_HEADS}, not {heads}")


def spec_from_config(
    raw: Mapping[str, Any], generation_eos: int | list[int] | None = None
) -> ModelSpec:
    """Return the spec of a raw `config.json`.

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
        problem = f"must be 1 or more, not {config.max_position_embeddings}"
        raise ValueError(f"config.json: max_position_embeddings {problem}")
    if config.hidden_act not in ("silu", "swish"):  # two names of one function
        raise UnsupportedModel.because("activation", config.hidden_act, ("silu",))
    if other := {*(config.layer_types or ())} - _LAYER_TYPES:
        raise UnsupportedModel.because("layer_types", min(other), sorted(_LAYER_TYPES))
    if config.is_causal is False:  # each token would be attended to by those before it, too
        raise UnsupportedModel.because("is_causal", config.is_causal, ("True",))
    window, sliding_layers = _sliding(config, family)
    rope = rope_from_config(config, family)
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
        head_dim=config.head_size(),
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
    """Return a raw config as one of a family; null says no where only yes and no can be, as in
    `transformers`.

    Raises:
        ValueError: a value has the wrong type.
    """
    form = CONFIGS[family]
    switches = [field.name for field in msgspec.structs.fields(form) if field.type is bool]
    raw = {**_DEFAULTS.get(str(raw.get("model_type")), {}), **raw}
    fields = {**raw, **{name: False for name in switches if raw.get(name, ...) is None}}
    return converted(fields, form, lax=True)


def _positions(config: HFConfig, rope: RopeSpec) -> int:
    """Return the most tokens of a sequence."""
    positions, chunks = config.max_position_embeddings, config.dual_chunk_attention_config
    if rope.type == "yarn":  # those of the config may be the ones before stretching
        positions = round(rope.original_positions * rope.factor)
    if chunks is not None:  # shorter ones are within one chunk
        positions = min(positions, chunks.chunk_size - chunks.local_size)
    return positions


def _factors(config: HFConfig) -> dict[str, float]:
    """Return the factors that Granite has, by their names in `ModelSpec`.

    Raises:
        ValueError: one of those that are divided by is 0.
    """
    if not isinstance(config, GraniteConfig):
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
    """Return the layers whose queries and keys are not rotated.

    Raises:
        ValueError: the config does not say it for each layer.
    """
    if not isinstance(config, SmolLM3Config):
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
    """Return the experts, if the family has any.

    Raises:
        ValueError: the config does not say which layers have them.
    """
    if isinstance(config, MixtralConfig):
        experts, each = config.num_local_experts, config.num_experts_per_tok
        return MoeSpec(experts, each, config.intermediate_size)
    if not isinstance(config, Qwen3MoeConfig):
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


def _sliding(config: HFConfig, family: Family) -> tuple[int | None, tuple[int, ...]]:
    """Return the sliding window and its layers: those of `layer_types`, which some families do not
    read.

    Without it, all layers of Mistral, Mixtral, Phi-3 and Qwen3-MoE have one, of Qwen those from
    `max_window_layers` on, of SmolLM3 those that are not rotated. A window of 0 is none, as in vLLM
    and llama.cpp.

    Raises:
        ValueError: it is negative, or `layer_types` has not one value for each layer.
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
        if len(types) != config.num_hidden_layers:
            problem = f"has {len(types)} values for {config.num_hidden_layers} layers"
            raise ValueError(f"config.json: layer_types {problem}")
        layers = (i for i, t in enumerate(types) if t == "sliding_attention")
    elif family == "smollm3":
        layers = _unrotated(config)
    elif family in ("qwen2", "qwen3"):
        layers = range(config.max_window_layers, config.num_hidden_layers)
    chosen = tuple(layers)
    return (window, chosen) if chosen else (None, ())
