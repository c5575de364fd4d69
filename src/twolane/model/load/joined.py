"""Checkpoints that join modules which others store apart (Phi-3, GLM)."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from twolane.model.load.source import TensorSource
from twolane.model.sharding import Cut
from twolane.model.spec import ModelSpec

_QKV = "self_attn.qkv_proj"


class Place(NamedTuple):
    """The place of a module that another one holds."""

    module: str
    """The name of the module that holds it."""
    first: int
    """The first of its rows there."""
    rows: int
    """The number of rows that the other one has."""


def place_of(name: str, spec: ModelSpec) -> Place | None:
    """Return a module's place in another one, for families that join modules; else None."""
    for joined, parts in _parts(spec).items():
        if joined == _QKV and spec.family != "phi3":
            continue  # GLM joins gate and up alone
        first = 0
        for part, rows in parts.items():
            if name.endswith(part):
                return Place(name.removesuffix(part) + joined, first, sum(parts.values()))
            first += rows
    return None


def _parts(spec: ModelSpec) -> Mapping[str, Mapping[str, int]]:
    """Return the modules that each module joins, and their numbers of rows."""
    return {
        _QKV: {
            "self_attn.q_proj": spec.q_size,
            "self_attn.k_proj": spec.kv_size,
            "self_attn.v_proj": spec.kv_size,
        },
        "mlp.gate_up_proj": {
            "mlp.gate_proj": spec.intermediate_size,
            "mlp.up_proj": spec.intermediate_size,
        },
    }


class Joined:
    """A source whose `qkv_proj` and `gate_up_proj` are seen as the modules that they join.

    Args:
        source: of the tensors.
        spec: of the model, which says where to cut.
        whole: returns whether a module is quantised, so that only its bias is seen so.
    """

    def __init__(
        self,
        source: TensorSource,
        spec: ModelSpec,
        whole: Callable[[str], bool] = lambda module: False,
    ) -> None:
        self._source = source
        parts = _parts(spec)
        self._rows: dict[str, tuple[str, int, int]] = {}
        """Place of each tensor: the stored tensor, its first row there and its number of rows."""
        for name in source.names():
            stem, _, end = name.rpartition(".")
            joined = next((j for j in parts if stem.endswith(f".{j}")), None)
            if joined is not None and end != "bias" and whole(stem):
                continue
            first = 0
            for part, rows in parts.get(joined or "", {}).items():
                own = f"{stem.removesuffix(joined or '')}{part}.{end}"
                self._rows[own] = name, first, rows
                first += rows
            if joined is not None and source.shape(name)[0] != first:
                raise ValueError(f"{name} has {source.shape(name)[0]} rows instead of {first}")

    def names(self) -> list[str]:
        """See `TensorSource.names`."""
        joined = {name for name, _, _ in self._rows.values()}
        return [*(name for name in self._source.names() if name not in joined), *self._rows]

    def shape(self, name: str) -> tuple[int, ...]:
        """See `TensorSource.shape`."""
        if name not in self._rows:
            return self._source.shape(name)
        whole, _, rows = self._rows[name]
        return rows, *self._source.shape(whole)[1:]

    def type(self, name: str) -> str:
        """See `TensorSource.type`."""
        return self._source.type(self._rows[name][0] if name in self._rows else name)

    def get(self, name: str, cut: Cut | None = None) -> torch.Tensor:
        """See `TensorSource.get`; the joined modules are cut by rows alone."""
        if name not in self._rows:
            return torch.as_tensor(self._source.get(name, cut))
        whole, first, rows = self._rows[name]
        start, stop = (0, rows) if cut is None else (cut.start, cut.stop)
        return torch.as_tensor(self._source.get(whole, Cut(0, first + start, first + stop)))
