"""Checkpoints that join modules which others store apart (Phi-3, GLM)."""

from typing import NamedTuple

import torch

from twolane.model.families.family import PARTS
from twolane.model.load.facts import ModelFacts
from twolane.model.load.source import TensorSource
from twolane.model.sharding import Cut
from twolane.model.spec import ModelSpec


class Place(NamedTuple):
    """The place of a module that another one holds."""

    module: str
    """The name of the module that holds it."""
    first: int
    """The first of its rows there."""
    rows: int
    """The number of rows that the other one has."""


def place_of(name: str, facts: ModelFacts) -> Place | None:
    """Return a module's place in another one, for families that join modules; else None."""
    for joined in facts.family.joined:
        first = 0
        for part, rows in part_rows(joined, facts.spec).items():
            if name.endswith(part):
                total = sum(part_rows(joined, facts.spec).values())
                return Place(name.removesuffix(part) + joined, first, total)
            first += rows
    return None


def part_rows(joined: str, spec: ModelSpec) -> dict[str, int]:
    """Return the modules that a module joins, and their numbers of rows."""
    rows = {"self_attn.q_proj": spec.q_size, "self_attn.k_proj": spec.kv_size}
    rows["self_attn.v_proj"] = spec.kv_size
    return {part: rows.get(part, spec.intermediate_size) for part in PARTS.get(joined, ())}


class Joined:
    """A source whose `qkv_proj` and `gate_up_proj` are seen as the modules that they join.

    Args:
        source: The tensors as they are stored.
        facts: What the model's configs say: where to cut, and which modules are quantised, of
            which only the bias is seen so.
    """

    def __init__(self, source: TensorSource, facts: ModelFacts) -> None:
        self._source = source
        self._rows: dict[str, tuple[str, int, int]] = {}
        """Place of each tensor: the stored tensor, its first row there and its number of rows."""
        for name in source.names():
            stem, _, end = name.rpartition(".")
            joined = next((whole for whole in PARTS if stem.endswith(f".{whole}")), "")
            quantised = facts.quantization is not None and facts.quantization.format(stem)
            if joined and end != "bias" and quantised:
                continue
            first = 0
            for part, rows in part_rows(joined, facts.spec).items():
                self._rows[f"{stem.removesuffix(joined)}{part}.{end}"] = name, first, rows
                first += rows
            if joined and source.shape(name)[0] != first:
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
