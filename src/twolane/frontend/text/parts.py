"""A tokenizer as its files have it, on the way to one file."""

from typing import NamedTuple

import msgspec
from tokenizers import Tokenizer

from twolane.frontend.text.tokenizer import Declared


class Template(NamedTuple):
    """A chat template and where it was found."""

    text: str
    source: str


class Parts(msgspec.Struct):
    """What is read of a model's files, before it is put together."""

    backend: Tokenizer
    origin: str
    special_tokens: dict[str, str]
    add_bos: bool | None = None
    """Whether a file says that texts begin with the BOS; None: the tokenizer itself tells."""
    add_eos: bool | None = None
    templates: dict[str, Template] = {}
    """The chat templates, by name."""
    ends: list[Declared] = []
    extra_tokens: list[str] = []
    """Special tokens that no name is known of."""
    notes: list[str] = []
    config_name: str = "tokenizer_config.json"
