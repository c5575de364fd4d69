"""Every family by its names. A new family is a file of this package."""

import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any

from twolane.model import families
from twolane.model.families.family import Family
from twolane.model.families.refused import reason
from twolane.model.spec import UnsupportedModel


def _families() -> Iterator[Family]:
    """Yield the families of this package's files, of which those that families share have none."""
    for file in pkgutil.iter_modules(families.__path__, f"{families.__name__}."):
        family: Family | None = getattr(import_module(file.name), "FAMILY", None)
        if family is not None:
            yield family


FAMILIES: Mapping[str, Family] = {family.name: family for family in _families()}
"""Every family by its name."""
ARCHITECTURES = {name: each for each in FAMILIES.values() for name in each.architectures}
"""Families by the architectures that `config.json` may name."""
VISION = {name: each for each in FAMILIES.values() for name in each.vision}
"""Families of the text parts of checkpoints for text and images, by their architectures."""
GGUF_ARCHITECTURES = {
    (name, experts): each
    for each in FAMILIES.values()
    if each.gguf
    for name in each.gguf.architectures
    for experts in ((False, True) if each.gguf.config else (each.gguf.experts is not None,))
}
"""Families by the architectures that GGUF files may name, and whether they have experts."""


def _vision_family(raw: Mapping[str, Any]) -> Family | None:
    """Return the family of the text part of a model of text and images; None: it is none of these.

    Its architecture says so, with a classifier or without one; or its `model_type`, where the
    architecture is absent or that of the text part.
    """
    names, kind = raw.get("architectures") or [""], raw.get("model_type")
    if not isinstance(names, list) or not isinstance(name := names[0], str):
        return None
    base = f"{name.removesuffix('Model')}ForConditionalGeneration"
    if family := VISION.get(name) or VISION.get(base):
        return family
    family = next((each for each in VISION.values() if kind in each.vision.values()), None)
    return family if family is not None and name in ("", *family.architectures) else None


def is_vision(raw: Mapping[str, Any]) -> bool:
    """Return whether a raw `config.json` is that of a model of text and images whose text part is
    served."""
    return _vision_family(raw) is not None


def text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of a model's text part: all of it, unless the model reads images, too.

    Fields of `text_config` come before those beside it, except for `tie_word_embeddings`, which
    `transformers` reads from the whole config.

    Raises:
        ValueError: `text_config` is no object, or the architecture has another `model_type`.
    """
    if (family := _vision_family(raw)) is None:
        return raw
    own, kind = raw.get("text_config"), raw.get("model_type")
    if kind is not None and kind not in family.vision.values():
        works = family.vision.values()
        raise UnsupportedModel.because(f"model_type of {raw['architectures'][0]}", kind, works)
    if own is not None and not isinstance(own, dict):
        raise ValueError(f"config.json: text_config must be an object, not {own!r}")
    whole = {key: value for key, value in raw.items() if key != "architectures"}
    tied = {key: raw[key] for key in ("tie_word_embeddings",) if raw.get(key) is not None}
    text = {key: value for key, value in (own or {}).items() if value is not None or key not in raw}
    return {**whole, "model_type": family.name, **text, **tied}


def unsupported(what: str, name: str, works: Iterable[str]) -> UnsupportedModel:
    """Return the refusal of an architecture, with the reason or the list of those that work."""
    if (why := reason(name)) is not None:
        return UnsupportedModel(f"unsupported {what} {name!r}: {why}")
    return UnsupportedModel.because(what, name, works)


def family_of(architectures: list[str] | None, model_type: str | None) -> Family:
    """Return the family of a config that names these.

    A config without architectures is known by its type, and one that was saved without a classifier
    by its base.

    Raises:
        UnsupportedModel: the architecture is not built.
    """
    by_type = {name: each for each in FAMILIES.values() for name in (each.name, *each.variants)}
    if architectures:
        name = architectures[0]
        base = f"{name.removesuffix('Model').removesuffix('Text')}ForCausalLM"
        name = base if name.endswith("Model") and base in ARCHITECTURES else name
    else:
        typed = by_type.get(model_type or "")
        name = typed.architectures[0] if typed else f"model_type {model_type}"
    if name not in ARCHITECTURES:
        raise unsupported("architecture", name, ARCHITECTURES)
    family = ARCHITECTURES[name]
    if model_type is not None and by_type.get(model_type) is not family:
        raise UnsupportedModel.because(f"model_type of {name}", model_type, (family.name,))
    return family
