"""Messages between the API process and the grammar worker."""

from collections.abc import Sequence
from typing import Any

import msgspec

from twolane.engine.messages import Vocabulary
from twolane.frontend.parsers.reasoning import ThinkingMarks
from twolane.frontend.structured.tools import Tool


class Schema(msgspec.Struct, frozen=True, tag=True):
    """JSON values that a JSON schema allows."""

    schema: Any
    closes: bool | None = None
    """Whether objects have declared names only; None: as the server's option says."""


class SchemaText(msgspec.Struct, frozen=True, tag=True):
    """JSON values that a JSON schema, given as text, allows."""

    text: str
    closes: bool | None = None
    """See `Schema`."""


class Regex(msgspec.Struct, frozen=True, tag=True):
    """Texts that match a regular expression as a whole."""

    regex: str


class Choices(msgspec.Struct, frozen=True, tag=True):
    """One of some texts."""

    choices: Sequence[str]


class ContextFree(msgspec.Struct, frozen=True, tag=True):
    """Texts of a grammar in Lark's format or GBNF."""

    text: str


class Calls(msgspec.Struct, frozen=True, tag=True):
    """Calls of tools."""

    format: str
    """Format of the calls, a name of `tool_calls.FORMATS`."""
    tools: Sequence[Tool]
    several: bool
    """Whether more than one call may be made."""
    free: bool
    """Whether a call is optional."""


OutputConstraint = Schema | SchemaText | Regex | Choices | ContextFree
"""Constraints that a request may set on its answers."""


class GrammarJob(msgspec.Struct, frozen=True):
    """A request for the grammar of one request's answers."""

    field: str
    """Field of the request that sets the constraint."""
    answer: OutputConstraint | Calls
    thinking: ThinkingMarks | None = None
    """Marks of the thinking before the answer; None: there is none."""
    closes: bool = False
    """Whether objects of schemas have declared names only, unless the answer says it itself."""
    calls: Calls | None = None
    """Calls that the model may make in place of the answer; None: it may not call."""


class GrammarSetup(msgspec.Struct, frozen=True):
    """The model that grammars are compiled for."""

    vocabulary: Vocabulary
    added_tokens: dict[str, int]
    """Tokens that were added to the tokenizer's own, by text; marks of calls may be among them."""
    eos_token_ids: Sequence[int]


class MadeGrammar(msgspec.Struct, frozen=True, tag=True):
    """A grammar in llguidance's format."""

    grammar: str


class InvalidGrammar(msgspec.Struct, frozen=True, tag=True):
    """An error of a grammar, as a clause about a field."""

    problem: str
    field: str | None = None
    """Field at fault; None: that of the job."""


Result = MadeGrammar | InvalidGrammar
