"""A decoder in float64, where a request's tokens cannot depend on what runs beside it."""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from twolane.model.decoder import Decoder
from twolane.model.matrix import Matrix


def doubled(decoder: Decoder) -> Decoder:
    """The same model in float64."""
    return Decoder(decoder.spec, _double(decoder.weights))


def _double(part: Any) -> Any:
    if isinstance(part, torch.Tensor):
        return part.double()
    if isinstance(part, Matrix):
        return Matrix.plain(part.values.double())
    if isinstance(part, Sequence) and not isinstance(part, str):
        return [_double(each) for each in part]
    if is_dataclass(part):
        return type(part)(**{f.name: _double(getattr(part, f.name)) for f in fields(part)})
    return part
