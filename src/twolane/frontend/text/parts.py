"""Parts of a tokenizer, as its files state them."""

from typing import NamedTuple

import msgspec
from tokenizers import Tokenizer

from twolane.frontend.text.tokenizer import Declared


class Template(NamedTuple):
    """A chat template and where it was found."""

    text: str
    source: str


class Parts(msgspec.Struct):
    """Parts read from a model's files, before they are combined."""

    backend: Tokenizer
    origin: str
    special_tokens: dict[str, str]
    add_bos: bool | None = None
    """Whether a file states that texts begin with the BOS; None: the tokenizer itself determines
    it."""
    add_eos: bool | None = None
    templates: dict[str, Template] = {}
    """The chat templates, by name."""
    ends: list[Declared] = []
    extra_tokens: list[str] = []
    """Special tokens without a known name."""
    notes: list[str] = []
    config_name: str = "tokenizer_config.json"
