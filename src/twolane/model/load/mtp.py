"""What predicts further tokens (MTP) in checkpoints that have it in tensors `mtp.*`.

It has the shapes of Qwen3-Next and Qwen3.5: norms of an embedding and of a hidden state, a
projection of both to one hidden state, and layers of softmax attention with the model's own MLPs.
No drafts are made yet, so a server checks its tensors, and leaves them in their files until
`load.weights.load_predictor` is called.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from twolane.model.load import checkpoint
from twolane.model.load.facts import ModelFacts
from twolane.model.load.parts import InParts, StoredPart, of_stacked
from twolane.model.load.quantization import Format, StoredTensor
from twolane.model.load.source import TensorSource

_BITS = {"F64": 64, "F32": 32, "BF16": 16, "F16": 16, "F8_E4M3": 8, "F8_E8M0": 8}


class Found(NamedTuple):
    """What a checkpoint has of it."""

    layers: int
    tensors: int
    bytes: int


def check_predictor(facts: ModelFacts, tensors: TensorSource) -> Found | None:
    """Check the tensors that predict further tokens; return what there is, None: nothing.

    Args:
        facts: What the model's configs say.
        tensors: The tensors of its files, experts of stacks as they are stored or seen apart.

    Raises:
        WeightsError: some are missing, or of another shape or type; the message names them.
    """
    names = {n: tensors.type(n) for n in tensors.names() if n.startswith("mtp.")}
    if not facts.family.stores_mtp or not names:
        return None
    numbers = {int(place[2]) for name in names if (place := name.split("."))[1] == "layers"}
    expected = dict(_expected(facts, max(numbers, default=0) + 1, names))
    checkpoint.refuse_tensors(facts.name, "missing", sorted(expected.keys() - names.keys()))
    wrong = [
        f"{name} {tensors.type(name)} {list(tensors.shape(name))} instead of "
        f"{' or '.join(stored.types)} {list(stored.shapes[0])}"
        for name, stored in expected.items()
        if tensors.shape(name) not in stored.shapes or tensors.type(name) not in stored.types
    ]
    checkpoint.refuse_tensors(facts.name, "wrong", wrong)
    bits = sum(
        math.prod(tensors.shape(name)) * _BITS.get(tensors.type(name), 8) for name in expected
    )
    return Found(max(numbers, default=0) + 1, len(expected), bits // 8)


def as_model(facts: ModelFacts, tensors: TensorSource) -> tuple[ModelFacts, TensorSource] | None:
    """Return its layers as those of a model of their own, and their tensors under the names that
    such a model has; None: there are none.

    Raises:
        WeightsError: see `check_predictor`.
    """
    if (found := check_predictor(facts, tensors)) is None:
        return None
    spec, names = facts.spec, {n: tensors.type(n) for n in tensors.names()}
    attends = next(i for i in range(spec.layers) if not spec.is_linear(i))
    moe = None if spec.moe is None else replace(spec.moe, dense_layers=())
    kinds = (spec.kind(attends),) * found.layers
    spec = replace(spec, layers=found.layers, kinds=kinds, moe=moe, delta=None, convolution=None)
    own = replace(facts, spec=spec)
    if facts.quantization is not None:
        formats = {
            f"model.layers.{i}.{name}": _format(facts, f"mtp.layers.{i}.{name}", module, names)
            for i in range(spec.layers)
            for name, module in checkpoint.linears_of(own, i).items()
        }
        own = replace(own, quantization=replace(facts.quantization, stored=formats))
    renamed = {
        name.replace("mtp.", "model.") if name.startswith(_MOVED) else name: StoredPart(name)
        for name in names
        if name.startswith("mtp.")
    }
    return own, of_stacked(_Renamed(tensors, renamed), own)


_MOVED = ("mtp.layers.", "mtp.norm.")
"""Beginnings of the names of tensors that a model of its own has, too."""


class _Renamed(InParts):
    """Some tensors of a source under other names, and no others."""

    def names(self) -> list[str]:
        """See `TensorSource.names`."""
        return [*self._parts]


def _expected(
    facts: ModelFacts, layers: int, names: Mapping[str, str]
) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors that there must be, given the names and types of those that there are."""
    spec = facts.spec
    hidden, norm = spec.hidden_size, StoredTensor(((spec.hidden_size,),))
    yield "mtp.fc.weight", StoredTensor(((hidden, 2 * hidden),))
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        yield f"mtp.{name}.weight", norm
    attends = next(i for i in range(spec.layers) if not spec.is_linear(i))
    modules = _modules(facts, attends)
    for prefix in (f"mtp.layers.{i}." for i in range(layers)):
        for name in facts.family.norms.values():
            yield f"{prefix}{name}.weight", norm
        for name, shape in checkpoint.vectors_of(spec, attends).items():
            yield f"{prefix}{name}", StoredTensor((shape,))
        stack = f"{prefix}{facts.family.experts.stack}."
        stacked = spec.moe is not None and f"{stack}down_proj" in names
        if stacked and spec.moe is not None:
            experts, width = spec.moe.experts, spec.moe.intermediate_size
            yield f"{stack}gate_up_proj", StoredTensor(((experts, 2 * width, hidden),))
            yield f"{stack}down_proj", StoredTensor(((experts, hidden, width),))
        for name, module in modules.items():
            if not (stacked and f"{prefix}{name}".startswith(stack)):
                yield from _stored(facts, f"{prefix}{name}", module, names)


def _modules(facts: ModelFacts, attends: int) -> dict[str, checkpoint.LinearModule]:
    """Return the linear modules of a layer that attends as this one does, and has experts if any
    has."""
    spec = facts.spec
    mixes = next((i for i in range(spec.layers) if spec.has_experts(i)), attends)
    own, other = checkpoint.linears_of(facts, attends), checkpoint.linears_of(facts, mixes)
    attention = {name: module for name, module in own.items() if name.startswith("self_attn.")}
    return attention | {name: module for name, module in other.items() if name.startswith("mlp.")}


def _stored(
    facts: ModelFacts, name: str, module: checkpoint.LinearModule, names: Mapping[str, str]
) -> Iterator[tuple[str, StoredTensor]]:
    """Yield a module's tensors in its format."""
    yield from checkpoint.module_tensors(name, module, _format(facts, name, module, names)).items()


def _format(
    facts: ModelFacts, name: str, module: checkpoint.LinearModule, names: Mapping[str, str]
) -> Format | None:
    """Return the first format of a module that has a weight of this type; None: floats."""
    formats = [] if facts.quantization is None else facts.quantization.formats(name)
    for form in formats:
        weight = checkpoint.module_tensors(name, module, form).get(f"{name}.weight")
        if weight is not None and names.get(f"{name}.weight") in weight.types:
            return form
    return None
