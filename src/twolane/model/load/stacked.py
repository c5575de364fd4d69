"""Checkpoints that store all experts of a layer as one tensor.

`transformers` computes with such tensors, and writes them if it is not asked for the original
format: `mlp.experts.gate_up_proj` [experts, 2 * intermediate, hidden], the rows of the gate first,
and `mlp.experts.down_proj` [experts, hidden, intermediate], whatever the family's own names are.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from twolane.model.load.checkpoint import WeightsError, refuse_tensors
from twolane.model.load.facts import ModelFacts
from twolane.model.load.source import TensorSource
from twolane.model.sharding import Cut

_STACKS = ("experts.gate_up_proj", "experts.down_proj")


class _Place(NamedTuple):
    """The place of an expert's module."""

    stack: str
    """The tensor that holds it."""
    expert: int
    first: int
    """The first of its rows among the expert's."""
    rows: int


class Stacked:
    """A source whose experts are seen as modules of their own.

    Args:
        source: The tensors as they are stored.
        facts: What the model's configs say.

    Raises:
        WeightsError: a stack has another shape than the config says, or is quantised.
    """

    def __init__(self, source: TensorSource, facts: ModelFacts) -> None:
        self._source = source
        self._places = dict(_places(facts, set(source.names())))
        stacks = {place.stack for place in self._places.values()}
        others = [t for t in source.names() if _in_stack(t) and not t.endswith(_STACKS)]
        if others:
            raise WeightsError(
                f"{facts.name}: quantised experts in one tensor are not read, such as {others[0]}; "
                "those that are stored one by one are"
            )
        refuse_tensors(facts.name, "misshapen", sorted(_misshapen(source, facts, stacks)))
        self._renamed = _routers(facts, stacks)
        held = stacks | {*self._renamed.values()}
        kept = (t for t in source.names() if t not in held)
        self._names = [*kept, *self._places, *self._renamed]

    def names(self) -> list[str]:
        """See `TensorSource.names`."""
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """See `TensorSource.shape`."""
        place = self._places.get(name)
        if place is None:
            return self._source.shape(self._renamed.get(name, name))
        return place.rows, self._source.shape(place.stack)[2]

    def type(self, name: str) -> str:
        """See `TensorSource.type`."""
        place = self._places.get(name)
        return self._source.type(self._renamed.get(name, name) if place is None else place.stack)

    def get(self, name: str, cut: Cut | None = None) -> torch.Tensor:
        """See `TensorSource.get`; of an expert, all rows of its stack are read."""
        place = self._places.get(name)
        if place is None:
            return torch.as_tensor(self._source.get(self._renamed.get(name, name), cut))
        whole = self._source.get(place.stack, Cut(0, place.expert, place.expert + 1))
        rows = torch.as_tensor(whole)[0, place.first : place.first + place.rows]
        return rows if cut is None else rows.narrow(cut.dim, cut.start, cut.stop - cut.start)


def has_stacks(source: TensorSource) -> bool:
    """Return whether a source has experts in one tensor."""
    return any(map(_in_stack, source.names()))


def _in_stack(name: str) -> bool:
    """Return whether a tensor holds all experts."""
    return any(f".mlp.{stack}" in name for stack in _STACKS)


def _places(facts: ModelFacts, there: set[str]) -> Iterator[tuple[str, _Place]]:
    """Yield the weight of each module of an expert, and where it is."""
    spec, names = facts.spec, facts.family.experts
    assert spec.moe is not None
    width = spec.moe.intermediate_size
    parts = (
        (names.gate, _STACKS[0], 0, width),
        (names.up, _STACKS[0], width, width),
        (names.down, _STACKS[1], 0, spec.hidden_size),
    )
    for layer in range(spec.layers):
        prefix = f"model.layers.{layer}"
        for part, stack, first, rows in parts:
            if (whole := f"{prefix}.mlp.{stack}") not in there:
                continue
            for number in range(spec.moe.experts):
                weight = f"{prefix}.{names.expert.format(number)}.{part}.weight"
                yield weight, _Place(whole, number, first, rows)


def _misshapen(source: TensorSource, facts: ModelFacts, stacks: set[str]) -> Iterator[str]:
    """Yield the stacks that have another shape than the config says, and which."""
    moe, hidden = facts.spec.moe, facts.spec.hidden_size
    assert moe is not None
    experts, width = moe.experts, moe.intermediate_size
    shapes = (experts, 2 * width, hidden), (experts, hidden, width)
    for stack in stacks:
        wanted = shapes[stack.endswith(_STACKS[1])]
        if source.shape(stack) != wanted:
            yield f"{stack} {list(source.shape(stack))} instead of {list(wanted)}"


def _routers(facts: ModelFacts, stacks: set[str]) -> dict[str, str]:
    """Return the routers beside stacks by name, with the names under which they are stored."""
    prefixes = {stack.split(".mlp.")[0] for stack in stacks}
    own, stored = facts.family.experts.router, "mlp.gate"
    return {f"{p}.{own}.weight": f"{p}.{stored}.weight" for p in prefixes if own != stored}
