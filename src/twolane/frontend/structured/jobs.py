"""What is asked of the program that makes grammars, and what it answers."""

from collections.abc import Sequence
from typing import Any

import msgspec

from twolane.frontend.parsers.reasoning import ThinkingMarks
from twolane.frontend.structured.tools import Tool


class Schema(msgspec.Struct, frozen=True, tag=True):
    """JSON values that a JSON schema allows."""

    schema: Any


class SchemaText(msgspec.Struct, frozen=True, tag=True):
    """The same, of a schema that is given as text."""

    text: str


class Regex(msgspec.Struct, frozen=True, tag=True):
    """Texts that match a regular expression as a whole."""

    regex: str


class Choices(msgspec.Struct, frozen=True, tag=True):
    """Some texts."""

    choices: Sequence[str]


class ContextFree(msgspec.Struct, frozen=True, tag=True):
    """Texts of a grammar in Lark's or GBNF's form."""

    text: str


class Calls(msgspec.Struct, frozen=True, tag=True):
    """Calls of tools."""

    format: str
    """How the model writes calls, a name of `tool_calls.FORMATS`."""
    tools: Sequence[Tool]
    several: bool
    """Whether more than one call may be made."""
    free: bool
    """Whether the model may also answer without a call."""


OutputConstraint = Schema | SchemaText | Regex | Choices | ContextFree
"""The answers that a request may ask for."""


class GrammarJob(msgspec.Struct, frozen=True):
    """The grammar of one request's answers."""

    field: str
    """The field of the request that asks for it."""
    answer: OutputConstraint | Calls
    thinking: ThinkingMarks | None = None
    """How the model thinks before it answers; None: it does not."""


class GrammarSetup(msgspec.Struct, frozen=True):
    """The model whose answers grammars are for."""

    tokenizer: str
    """Its `tokenizer.json`."""
    eos_token_ids: Sequence[int]


class MadeGrammar(msgspec.Struct, frozen=True, tag=True):
    """A grammar in the form that the engine matches."""

    grammar: str


class InvalidGrammar(msgspec.Struct, frozen=True, tag=True):
    """Why there is no grammar, as a clause about the field."""

    problem: str


Result = MadeGrammar | InvalidGrammar
