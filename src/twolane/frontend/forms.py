"""The forms of a model's answers: thinking, tool calls, and what a grammar enforces."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from twolane.common.errors import FieldError
from twolane.frontend.parsers.answer import AnswerReader
from twolane.frontend.parsers.reasoning import (
    ReasoningParser,
    ThinkingMarks,
    ends_in_thinking,
    thinking_of,
)
from twolane.frontend.parsers.tool_calls import FORMATS, ToolCallParser, format_of
from twolane.frontend.parsers.unclosed import CallsInThinking
from twolane.frontend.structured.jobs import Calls, GrammarJob, Wanted
from twolane.frontend.structured.tools import Tool, parameter_types


class AnswerForm(NamedTuple):
    """The form of one request's answers."""

    wanted: GrammarJob | None = None
    """What makes the grammar of the answers; None: they are free."""
    grammar: str | None = None
    """That grammar, when it is made."""
    reader: Callable[[], AnswerReader] | None = None
    """Makes what tells an answer's thinking and calls apart; None: all of it is text."""
    shows_special: bool = False
    """Whether special tokens are marks that the reader needs."""
    forced_call: bool = False
    """Whether the request names the tool that is called."""
    thinking: ThinkingMarks | None = None
    """How the model thinks before these answers; None: it does not."""


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
    wanted: tuple[str, Wanted] | None = None
    """The field that asks for a grammar, and what it is of."""


def grammar_alone(asked: Asked) -> AnswerForm:
    """Return the form of an answer to a plain prompt, which only a grammar can hold."""
    assert asked.wanted is not None
    return AnswerForm(GrammarJob(*asked.wanted))


class Forms:
    """The forms that the served model knows.

    Args:
        template: the model's chat template; None: it has none.
        tool_parser: a name of `FORMATS`; None: the format is found from the template.
        reasons: whether the thinking of a model that the template tells of comes apart.
        hides: whether a text is a special token, which answers do not show.
    """

    def __init__(
        self,
        template: str | None,
        tool_parser: str | None = None,
        *,
        reasons: bool = True,
        hides: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self.calls = format_of(template) if tool_parser is None else tool_parser
        """How the model writes calls, a name of `FORMATS`; None: it is told of no tools."""
        self.thinking = thinking_of(template) if reasons else None
        """How the model thinks before it answers; None: it does not."""
        self._hides_thinking = self.thinking is not None and hides(self.thinking.end)

    def of(self, asked: Asked, prompt: str, continued: str | None = None) -> AnswerForm:
        """Return the form of the answers to a conversation.

        Args:
            asked: of the request.
            prompt: the end of the rendered prompt.
            continued: the text of the message that the answer goes on with; None: it is a new one.

        Raises:
            FieldError: a field asks for what the model cannot do.
        """
        if asked.enforced and asked.wanted is not None:
            raise FieldError("tool_choice", f"cannot be combined with {asked.wanted[0]}")
        if not (self.thinking or asked.tools or asked.wanted):
            return FREE
        thinking = self._thinking(prompt, continued)
        return AnswerForm(
            wanted=self._wanted(asked, thinking),
            reader=self._reader(asked, thinking),
            shows_special=bool(asked.tools) or (thinking is not None and self._hides_thinking),
            forced_call=asked.named,
            thinking=thinking,
        )

    def _thinking(self, prompt: str, continued: str | None) -> ThinkingMarks | None:
        how = self.thinking
        if how is None:
            return None
        opened = ends_in_thinking(how, prompt, continued)
        closed = continued is not None or prompt.rstrip().endswith(how.end)
        return msgspec.structs.replace(how, opened=opened) if opened or not closed else None

    def _wanted(self, asked: Asked, thinking: ThinkingMarks | None) -> GrammarJob | None:
        if asked.enforced:
            several = asked.several and not asked.named
            calls = Calls(self._known_calls(), asked.enforced, several, free=False)
            return GrammarJob("tools", calls, thinking)
        if asked.wanted is not None:
            return GrammarJob(*asked.wanted, thinking)
        if any(tool.strict for tool in asked.tools):
            calls = Calls(self._known_calls(), asked.tools, asked.several, free=True)
            return GrammarJob("tools", calls, thinking)
        return None

    def _reader(
        self, asked: Asked, thinking: ThinkingMarks | None
    ) -> Callable[[], AnswerReader] | None:
        if not (thinking or asked.tools):
            return None
        types = parameter_types(asked.tools)
        form = FORMATS[self._known_calls()] if asked.tools else None

        def reader() -> AnswerReader:
            thoughts = None if thinking is None else ReasoningParser(thinking)
            if form is None:
                return AnswerReader(thoughts, several=asked.several)
            find = partial(ToolCallParser, form, types)
            ends_in_calls = thinking is not None and not form.bare
            unclosed = CallsInThinking(find, types) if ends_in_calls else None
            return AnswerReader(thoughts, find(), unclosed=unclosed, several=asked.several)

        return reader

    def _known_calls(self) -> str:
        if self.calls is None:
            raise FieldError("tools", "is not supported: the model's chat template shows none")
        return self.calls
