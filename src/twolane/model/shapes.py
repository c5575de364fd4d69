"""Shapes of well-known models, for dummy weights: no files, no network, no tokenizer."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from twolane.common.checked_json import read_tables
from twolane.model.spec import ModelSpec

_READ = read_tables(Path(__file__).with_name("shapes.toml"), ModelSpec)
# msgspec leaves defaults to the class, where what encodes an instance does not find them.
SHAPES: Mapping[str, ModelSpec] = {
    name: replace(shape, rope=replace(shape.rope), moe=shape.moe and replace(shape.moe))
    for name, shape in _READ.items()
}
"""Built-in shapes by name."""
