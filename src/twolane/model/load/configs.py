"""Hugging Face configs as a `ModelSpec`, without `transformers`."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from twolane.common.checked_json import converted, read_json
from twolane.model.families.family import Family
from twolane.model.families.registry import family_of, is_vision, text_config
from twolane.model.load.facts import ModelFacts
from twolane.model.load.quantization_configs import read_quantization
from twolane.model.spec import ModelSpec, check_served, merge_eos
from twolane.sampling import SamplingParams

log = logging.getLogger("twolane.model")


class _Kind(msgspec.Struct):
    """The fields of a `config.json` that decide whether the rest can be read."""

    architectures: list[str] | None = None
    model_type: str | None = None
    quantization_config: dict[str, Any] | None = None
    compression_config: dict[str, Any] | None = None
    """The name that compressed-tensors wrote at first."""
    quantization: Any = None
    """What MLX writes, beside `quantization_config` or alone."""

    @property
    def stored(self) -> Mapping[str, Any] | None:
        """How weights are quantised; None: the config does not say it."""
        if isinstance(self.quantization, dict) and "bits" in self.quantization:
            return {"quant_method": "mlx"}
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


def facts_from_directory(path: Path, name: str | None = None) -> ModelFacts:
    """Read the configs of a model directory, each once.

    Args:
        path: The directory.
        name: The name by which the user asked for the model; None: the path.

    Raises:
        UnsupportedModel: the architecture, one of its options or the quantisation is not built.
        ValueError: there is no `config.json`, or one of the files has a value of the wrong type.
    """
    if not (path / "config.json").is_file():
        raise ValueError(f"{path} has no config.json")
    raw = read_json(path / "config.json")
    spec = spec_from_config(raw, _generation_eos(path))
    stored = converted(text_config(raw), _Kind).stored
    for file, method in _QUANTIZATION_FILES.items():
        if not stored and (path / file).is_file():
            stored = {"quant_method": method, **read_json(path / file)}
    return ModelFacts(name or str(path), spec, read_quantization(stored), is_vision(raw))


def declared_eos(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the end tokens that a model directory's configs declare, by the place that does.

    Raises:
        UnsupportedModel: the architecture is not built.
        ValueError: a file is missing or broken.
    """
    raw = text_config(read_json(path / "config.json"))
    family = check_architecture(raw)
    config = family.read(raw)
    place = "config.json" if "eos_token_id" in raw else f"the default of {family.name}"
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
    file = path / GENERATION_FILE
    raw = read_json(file) if file.is_file() else {}
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
            log.warning("%s: %s is not used: %s", file, name, problem)
        else:
            chosen[name] = value
    return chosen


def _generation_eos(path: Path) -> int | list[int] | None:
    file = path / GENERATION_FILE
    raw = read_json(file) if file.is_file() else {}
    return converted(raw, _Generation, GENERATION_FILE, lax=True).eos_token_id


def check_architecture(raw: Mapping[str, Any]) -> Family:
    """Return the family of a raw `config.json`.

    Raises:
        UnsupportedModel: the architecture or the quantisation is not built.
        ValueError: one of these has the wrong type.
    """
    kind = converted(text_config(raw), _Kind)
    family = family_of(kind.architectures, kind.model_type)
    read_quantization(kind.stored)  # is it built?
    return family


def spec_from_config(
    raw: Mapping[str, Any], generation_eos: int | list[int] | None = None
) -> ModelSpec:
    """Return the spec of a raw `config.json`.

    Args:
        raw: The file's content.
        generation_eos: The end tokens of `generation_config.json`, added to the config's own.

    Raises:
        UnsupportedModel: the architecture or one of its options is not built.
        ValueError: a value has the wrong type, or sizes do not fit each other.
    """
    raw = text_config(raw)
    family = check_architecture(raw)
    config = family.read(raw)
    spec = family.spec(config)
    check_served(spec)
    eos = merge_eos(config.vocab_size, config.eos_token_id, generation_eos)
    return replace(spec, eos_token_ids=eos)
