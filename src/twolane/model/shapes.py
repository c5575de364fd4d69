"""Shapes of well-known models, for dummy weights: no files, no network, no tokenizer."""

from collections.abc import Mapping
from itertools import cycle, islice
from pathlib import Path

from twolane.common.checked_json import Json, read_tables
from twolane.model.spec import ModelSpec


def with_all_kinds(table: Json) -> Json:
    """Return a table in which `kinds`, if there are any, are repeated until each layer has one."""
    kinds = table.get("kinds", [])
    return {**table, "kinds": list(islice(cycle(kinds), table["layers"]))}


SHAPES: Mapping[str, ModelSpec] = read_tables(
    Path(__file__).with_name("shapes.toml"), ModelSpec, with_all_kinds
)
"""Built-in shapes by name."""
