"""The forms of a model's answers: thinking, tool calls, and what a grammar enforces."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from twolane.common.errors import FieldError
from twolane.frontend.parsers.answer import AnswerReader
from twolane.frontend.parsers.reasoning import (
    END_THINK,
    ReasoningParser,
    ends_in_thinking,
    thinking_of,
)
from twolane.frontend.parsers.tool_calls import FORMATS, ToolCallParser, format_of
from twolane.frontend.structured.grammar import Maker, TokenOf, behind_thinking, made_grammar
from twolane.frontend.structured.tools import Tool, calls_grammar, strict_grammar


class AnswerForm(NamedTuple):
    """The form of one request's answers."""

    grammar: str | None = None
    """Answers follow this grammar; None: they are free."""
    reader: Callable[[], AnswerReader] | None = None
    """Makes what tells an answer's thinking and calls apart; None: all of it is text."""
    shows_special: bool = False
    """Whether special tokens are marks that the reader needs."""
    forced_call: bool = False
    """Whether the request names the tool that is called."""


FREE = AnswerForm()


class Asked(NamedTuple):
    """What a request asks of the form of its answers."""

    tools: Sequence[Tool] = ()
    """The tools that the model may call."""
    enforced: Sequence[Tool] = ()
    """The tools of which one must be called."""
    named: bool = False
    """Whether the request names the one tool to call."""
    several: bool = True
    """Whether more than one call may be made."""
    wanted: tuple[str, Maker] | None = None
    """The field that asks for a grammar, and what makes it."""


def grammar_alone(asked: Asked) -> AnswerForm:
    """Return the form of an answer to a plain prompt, which only a grammar can hold.

    Raises:
        FieldError: the grammar cannot be served.
    """
    assert asked.wanted is not None
    field, maker = asked.wanted
    return AnswerForm(grammar=made_grammar(maker, field))


class Forms:
    """The forms that the served model knows.

    Args:
        template: the model's chat template; None: it has none.
        tool_parser: a name of `FORMATS`; None: the format is found from the template.
        thinks: whether the model thinks between marks; None: that is found from the template.
        token_of: finds added tokens by their text.
    """

    def __init__(
        self,
        template: str | None,
        token_of: TokenOf,
        tool_parser: str | None = None,
        thinks: bool | None = None,
    ) -> None:
        self.calls = format_of(template) if tool_parser is None else tool_parser
        """How the model writes calls, a name of `FORMATS`; None: it is told of no tools."""
        self.thinks = thinking_of(template) if thinks is None else thinks
        self._token_of = token_of

    def of(self, asked: Asked, prompt: str) -> AnswerForm:
        """Return the form of the answers to a conversation.

        It compiles grammars, which takes up to a few tenths of a second.

        Args:
            asked: of the request.
            prompt: the end of the rendered prompt.

        Raises:
            FieldError: a field asks for what the model or the grammars cannot do.
        """
        if asked.enforced and asked.wanted is not None:
            raise FieldError("tool_choice", f"cannot be combined with {asked.wanted[0]}")
        if not (self.thinks or asked.tools or asked.wanted):
            return FREE
        opened = self.thinks and ends_in_thinking(prompt)
        closed = self.thinks and prompt.rstrip().endswith(END_THINK)
        thinks = self.thinks and not closed
        return AnswerForm(
            grammar=self._grammar(asked, thinks=thinks, opened=opened),
            reader=self._reader(asked, thinks=thinks, opened=opened),
            shows_special=bool(asked.tools),
            forced_call=asked.named,
        )

    def _grammar(self, asked: Asked, *, thinks: bool, opened: bool) -> str | None:
        field = "tools"
        if asked.enforced:
            form = self._known_calls()
            tools, several = asked.enforced, asked.several and not asked.named
            maker: Maker = partial(calls_grammar, form, tools, self._token_of, several=several)
        elif asked.wanted is not None:
            field, maker = asked.wanted
        elif any(tool.strict for tool in asked.tools):
            form, tools = self._known_calls(), asked.tools
            maker = partial(strict_grammar, form, tools, self._token_of, several=asked.several)
        else:
            return None
        if not thinks:
            return made_grammar(maker, field)
        tokens = self._token_of
        return made_grammar(lambda: behind_thinking(maker(), tokens, opened=opened), field)

    def _reader(
        self, asked: Asked, *, thinks: bool, opened: bool
    ) -> Callable[[], AnswerReader] | None:
        if not (thinks or asked.tools):
            return None
        types = {tool.name: tool.types for tool in asked.tools}
        form = FORMATS[self._known_calls()] if asked.tools else None

        def reader() -> AnswerReader:
            calls = None if form is None else ToolCallParser(form, types)
            return AnswerReader(ReasoningParser(thinking=opened) if thinks else None, calls)

        return reader

    def _known_calls(self) -> str:
        if self.calls is None:
            raise FieldError("tools", "is not supported: the model's chat template shows none")
        return self.calls
