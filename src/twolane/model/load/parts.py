"""Modules that checkpoints store as parts of larger tensors.

Some families join modules whose rows follow each other (Phi-3, GLM). And `transformers` computes
with all experts of a layer in one tensor, and writes it so if it is not asked for the original
format: `mlp.experts.gate_up_proj` [experts, 2 * intermediate, hidden], the rows of the gate first,
and `mlp.experts.down_proj` [experts, hidden, intermediate], whatever the family's own names are.
Qwen3-VL is published with rows and columns exchanged: the shapes of both tensors say it. gpt-oss
has them exchanged, too, and rows of gate and up in turn, with biases, and with values of four bits
and their scales in tensors of their own (`ExpertNames.in_turn`).
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from twolane.model.families.family import PARTS
from twolane.model.load.checkpoint import WeightsError, part_rows, refuse_tensors
from twolane.model.load.facts import ModelFacts
from twolane.model.load.quantization import MX_GROUP
from twolane.model.load.source import TensorSource
from twolane.model.sharding import Cut
from twolane.model.spec import MoeSpec

_STACKS = ("gate_up_proj", "down_proj")
_GGUF_ENDS = ("weight", "bias", "blocks", "scales")
"""Ends of the names of tensors of experts, of which the last two are those of MXFP4."""
_IN_TURN = {"": "weight", "_bias": "bias", "_blocks": "blocks", "_scales": "scales"}
"""What follows the name of a stack whose rows take turns, and the tensor of a module that it is."""


class StoredPart(NamedTuple):
    """The place of a tensor in a stored one."""

    stored: str
    """The name of the stored tensor."""
    first: int = 0
    """The first of its rows there, or among those of its expert."""
    rows: int | None = None
    """The number of its rows; None: it is the whole tensor under another name."""
    expert: int | None = None
    """The expert whose rows these are; None: the tensor is not one of experts."""
    turned: bool = False
    """Whether an expert's matrix is stored as [columns, rows]."""
    step: int = 1
    """The distance of its rows there."""


class InParts:
    """A source in which parts of tensors are seen as tensors of their own.

    Args:
        source: The tensors as they are stored.
        parts: The parts by the names under which they are seen.
    """

    def __init__(self, source: TensorSource, parts: Mapping[str, StoredPart]) -> None:
        self._source, self._parts = source, parts
        hidden = {part.stored for part in parts.values()}
        self._names = [*(name for name in source.names() if name not in hidden), *parts]

    def names(self) -> list[str]:
        """See `TensorSource.names`."""
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """See `TensorSource.shape`."""
        part = self._parts.get(name, StoredPart(name))
        shape = self._source.shape(part.stored)
        columns = shape[1:] if part.expert is None else shape[1:2] if part.turned else shape[2:]
        return shape if part.rows is None else (part.rows, *columns)

    def type(self, name: str) -> str:
        """See `TensorSource.type`."""
        return self._source.type(self._parts.get(name, StoredPart(name)).stored)

    def get(self, name: str, cut: Cut | None = None) -> Tensor:
        """See `TensorSource.get`. All rows of an expert are read; joined modules are cut by rows
        alone."""
        part = self._parts.get(name, StoredPart(name))
        stored, first, rows, expert, turned, step = part
        if rows is None:
            return torch.as_tensor(self._source.get(stored, cut))
        if expert is None:
            start, stop = (0, rows) if cut is None else (cut.start, cut.stop)
            return torch.as_tensor(self._source.get(stored, Cut(0, first + start, first + stop)))
        whole = torch.as_tensor(self._source.get(stored, Cut(0, expert, expert + 1)))[0]
        own = (whole.t() if turned else whole)[first : first + rows * step : step]
        return own if cut is None else own.narrow(cut.dim, cut.start, cut.stop - cut.start)


def of_joined(source: TensorSource, facts: ModelFacts) -> TensorSource:
    """Return a source in which modules that a family joins are seen apart, unless they are
    quantised: of these, only the biases are.

    Raises:
        ValueError: a module has not the rows of its parts.
    """
    parts: dict[str, StoredPart] = {}
    for name in source.names():
        stem, _, end = name.rpartition(".")
        joined = next((whole for whole in PARTS if stem.endswith(f".{whole}")), "")
        quantised = facts.quantization is not None and facts.quantization.format(stem)
        if not joined or (quantised and end != "bias"):
            continue
        first = 0
        for part, rows in part_rows(joined, facts.spec).items():
            parts[f"{stem.removesuffix(joined)}{part}.{end}"] = StoredPart(name, first, rows)
            first += rows
        if source.shape(name)[0] != first:
            raise ValueError(f"{name} has {source.shape(name)[0]} rows instead of {first}")
    return InParts(source, parts) if parts else source


def of_stacked(source: TensorSource, facts: ModelFacts) -> TensorSource:
    """Return a source in which experts that are one tensor are seen apart.

    Raises:
        WeightsError: a stack has another shape than the config says, or is quantised.
    """
    names, moe, where = source.names(), facts.spec.moe, f".{facts.family.experts.stack}."
    stacked = [name for name in names if any(f"{where}{stack}" in name for stack in _STACKS)]
    if moe is None or not stacked:
        return source
    if facts.family.experts.in_turn:
        return _of_turns(source, facts, moe, stacked)
    if others := [name for name in stacked if not name.endswith(_STACKS)]:
        raise WeightsError(
            f"{facts.name}: quantised experts in one tensor are not read, such as {others[0]}; "
            "those that are stored one by one are"
        )
    experts, width, hidden = moe.experts, moe.intermediate_size, facts.spec.hidden_size
    shapes = (experts, 2 * width, hidden), (experts, hidden, width)
    columns_first = (experts, hidden, 2 * width), (experts, width, hidden)
    turned = all(source.shape(t) == columns_first[t.endswith(_STACKS[1])] for t in stacked)
    if turned:
        shapes = columns_first
    wanted = {name: shapes[name.endswith(_STACKS[1])] for name in stacked}
    _check_shapes(source, facts, wanted)
    parts = dict(_of_experts(facts, moe, set(stacked), turned=turned))
    own, prefixes = facts.family.experts.router, {name.split(where)[0] for name in stacked}
    if own != "mlp.gate" and where.startswith(".mlp."):
        parts |= {f"{p}.{own}.weight": StoredPart(f"{p}.mlp.gate.weight") for p in prefixes}
        bias, stored = facts.family.experts.bias, "mlp.e_score_correction_bias"
        if moe.biased:
            parts |= {f"{p}.{bias}": StoredPart(f"{p}.{stored}") for p in prefixes}
    return InParts(source, parts)


def of_gguf_experts(source: TensorSource, facts: ModelFacts) -> TensorSource:
    """Return a source in which the experts of a GGUF file are seen apart.

    A layer has one tensor of all experts for each part, or one for gates and parts up together.
    """
    moe, names, there = facts.spec.moe, facts.family.experts, {*source.names()}
    if moe is None:
        return source
    width, parts = moe.intermediate_size, dict[str, StoredPart]()
    for layer in filter(facts.spec.has_experts, range(facts.spec.layers)):
        both = any(f"blk.{layer}.ffn_gate_up_exps.{end}" in there for end in _GGUF_ENDS)
        places = [(names.down, "down", 0, facts.spec.hidden_size)]
        if both:
            places += [(names.gate, "gate_up", 0, width), (names.up, "gate_up", width, width)]
        else:
            places += [(names.gate, "gate", 0, width), (names.up, "up", 0, width)]
        for module, stack, first, rows in places:
            for end in _GGUF_ENDS:
                stored = f"blk.{layer}.ffn_{stack}_exps.{end}"
                for number in range(moe.experts if stored in there else 0):
                    part = f"model.layers.{layer}.{names.expert.format(number)}.{module}.{end}"
                    parts[part] = StoredPart(stored, first, rows, number)
    return InParts(source, parts)


def _check_shapes(
    source: TensorSource, facts: ModelFacts, wanted: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuse stacks that have not the wanted shapes.

    Raises:
        WeightsError: there is one.
    """
    wrong = [
        f"{name} {list(source.shape(name))} instead of {list(shape)}"
        for name, shape in wanted.items()
        if source.shape(name) != shape
    ]
    refuse_tensors(facts.name, "misshapen", sorted(wrong))


def _of_turns(
    source: TensorSource, facts: ModelFacts, moe: MoeSpec, stacked: list[str]
) -> TensorSource:
    """Return a source in which the experts of a family `in_turn` are seen apart.

    Raises:
        WeightsError: a stack has another shape than the config says.
    """
    names, width, hidden = facts.family.experts, moe.intermediate_size, facts.spec.hidden_size
    parts: dict[str, StoredPart] = {}
    wanted: dict[str, tuple[int, ...]] = {}
    places = (
        (names.gate, _STACKS[0], 0, width, 2, hidden),
        (names.up, _STACKS[0], 1, width, 2, hidden),
        (names.down, _STACKS[1], 0, hidden, 1, width),
    )
    for stored in stacked:
        prefix, _, end = stored.partition(f".{names.stack}.")
        for module, stack, first, rows, step, columns in places:
            kind = _IN_TURN.get(end.removeprefix(stack)) if end.startswith(stack) else None
            if kind is None:
                continue
            wanted[stored] = _shape_of(kind, moe.experts, rows * step, columns)
            for number in range(moe.experts):
                place = StoredPart(stored, first, rows, number, kind == "weight", step)
                parts[f"{prefix}.{names.expert.format(number)}.{module}.{kind}"] = place
    _check_shapes(source, facts, wanted)
    return InParts(source, parts)


def _shape_of(kind: str, experts: int, rows: int, columns: int) -> tuple[int, ...]:
    """Return the shape of a stack of experts whose rows take turns."""
    match kind:
        case "weight":
            return experts, columns, rows
        case "bias":
            return experts, rows
        case "blocks":
            return experts, rows, columns // MX_GROUP, MX_GROUP // 2
    return experts, rows, columns // MX_GROUP


def _of_experts(
    facts: ModelFacts, moe: MoeSpec, stacked: set[str], *, turned: bool
) -> Iterator[tuple[str, StoredPart]]:
    """Yield the weight of each module of an expert, and where it is."""
    names, width = facts.family.experts, moe.intermediate_size
    places = (
        (names.gate, _STACKS[0], 0, width),
        (names.up, _STACKS[0], width, width),
        (names.down, _STACKS[1], 0, facts.spec.hidden_size),
    )
    for layer in range(facts.spec.layers):
        prefix = f"model.layers.{layer}"
        for module, stack, first, rows in places:
            if (whole := f"{prefix}.{names.stack}.{stack}") in stacked:
                for number in range(moe.experts):
                    weight = f"{prefix}.{names.expert.format(number)}.{module}.weight"
                    yield weight, StoredPart(whole, first, rows, number, turned)
