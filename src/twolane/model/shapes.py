"""Shapes of well-known models, for dummy weights: no files, no network, no tokenizer."""

from collections.abc import Mapping
from pathlib import Path

from twolane.common.checked_json import read_tables
from twolane.model.spec import ModelSpec

SHAPES: Mapping[str, ModelSpec] = read_tables(Path(__file__).with_name("shapes.toml"), ModelSpec)
"""Built-in shapes by name."""
