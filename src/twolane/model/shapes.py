"""Shapes of well-known models, for dummy weights: no files, no network, no tokenizer."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

from twolane.common.checked_json import Json, read_tables
from twolane.model.spec import LayerKind, ModelSpec


def with_all_kinds(table: Json) -> Json:
    """Return a table in which `kinds`, if there are any, are repeated until each layer has one."""
    kinds = table.get("kinds", [])
    return {**table, "kinds": list(islice(cycle(kinds), table["layers"]))}


def _whole(kind: LayerKind) -> LayerKind:
    return replace(kind, rope=kind.rope and replace(kind.rope))


_READ = read_tables(Path(__file__).with_name("shapes.toml"), ModelSpec, with_all_kinds)
# msgspec leaves defaults to the class, where what encodes an instance does not find them.
SHAPES: Mapping[str, ModelSpec] = {
    name: replace(
        shape,
        rope=replace(shape.rope),
        moe=shape.moe and replace(shape.moe),
        kinds=tuple(map(_whole, shape.kinds)),
        delta=shape.delta and replace(shape.delta),
    )
    for name, shape in _READ.items()
}
"""Built-in shapes by name."""
