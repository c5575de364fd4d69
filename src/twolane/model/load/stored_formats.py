"""Formats of modules by a checkpoint's tensors, where they differ from the lists of its config.

Writers and readers match names and patterns in different ways: `modules_to_not_convert` as parts of
names, as their begins or as expressions, with the prefix of another model or with a point at the
end, and overlapping patterns by their order or by the alphabet. The tensors are what was written.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from twolane.model.load.checkpoint import (
    HEAD,
    LinearModule,
    WeightsError,
    linears_of,
    module_tensors,
    place_of,
)
from twolane.model.load.facts import ModelFacts
from twolane.model.load.quantization import Format
from twolane.model.load.source import TensorSource

log = logging.getLogger("twolane.model")


def with_stored_formats(facts: ModelFacts, tensors: TensorSource) -> ModelFacts:
    """Return the facts with the formats of modules that are stored in another one.

    Where no module is stored in any of its formats, nothing changes: the tensors are not those of
    the config.

    Args:
        facts: What the configs say.
        tensors: The tensors of the files, before joined modules are seen apart.
    """
    quantization = facts.quantization
    if quantization is None:
        return facts
    ends = defaultdict[str, set[str]](set)
    for tensor in tensors.names():
        if not tensor.endswith((*quantization.unused, ".bias")):
            module, _, end = tensor.rpartition(".")
            ends[module].add(end)
    formats: dict[str, Format | None] = {}
    for module, linear in _linear_modules(facts):
        fitting = (
            form
            for form in quantization.formats(module)
            if _fits(form, module, linear, tensors, ends[module])
        )
        formats[module] = next(fitting, quantization.format(module))
    if not any(formats.values()):
        return facts
    stored = {m: form for m, form in formats.items() if form != quantization.format(m)}
    # Of several formats that are named, any will do; and no list need name a router in floats.
    router = f".{facts.family.experts.router}"
    routers = {m for m, form in formats.items() if form is None and m.endswith(router)}
    others = [m for m in stored if formats[m] not in (quantization.named(m) or (None,))]
    if differing := [module for module in others if module not in routers]:
        text = "%s: %d modules have another format than quantization_config says, such as %s"
        log.warning(text, facts.name, len(differing), differing[0])
    return replace(facts, quantization=replace(quantization, stored=stored))


def _linear_modules(facts: ModelFacts) -> Iterator[tuple[str, LinearModule]]:
    """Yield the linear modules as the checkpoint has them: some families join several in one."""
    spec = facts.spec
    if not spec.tie_embeddings:
        yield HEAD.removesuffix(".weight"), LinearModule(spec.vocab_size, spec.hidden_size, False)
    for i in range(spec.layers):
        joined = set()
        for name, linear in linears_of(facts, i).items():
            whole = f"model.layers.{i}.{name}"
            place = place_of(whole, facts)
            if place is None:
                yield whole, linear
            elif place.module not in joined:
                joined.add(place.module)
                yield place.module, LinearModule(place.rows, linear.columns, False)


def _fits(
    form: Format | None, module: str, linear: LinearModule, tensors: TensorSource, ends: set[str]
) -> bool:
    """Return whether a module has the tensors of a format, and no others."""
    try:
        wanted = module_tensors(module, replace(linear, bias=False), form)
    except WeightsError:  # its shape has no whole groups
        return False
    for tensor, stored in wanted.items():
        end = tensor.rpartition(".")[2]
        if end not in ends and not stored.optional:
            return False
        if end in ends and not (
            tensors.shape(tensor) in stored.shapes and tensors.type(tensor) in stored.types
        ):
            return False
    return {f"{module}.{end}" for end in ends} <= wanted.keys()
