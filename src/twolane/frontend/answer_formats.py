"""Formats of a model's answers: thinking, tool calls, and constraints of grammars."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Self

import msgspec

from twolane.common.errors import FieldError
from twolane.frontend.parsers import harmony, recipients
from twolane.frontend.parsers.answer import AnswerReader
from twolane.frontend.parsers.pieces import Parser
from twolane.frontend.parsers.reasoning import (
    ReasoningParser,
    ThinkingMarks,
    ends_in_thinking,
    thinking_of,
)
from twolane.frontend.parsers.tool_calls import FORMATS, CallsOrText, ToolCallParser, format_of
from twolane.frontend.parsers.unclosed import CallsInThinking
from twolane.frontend.structured.jobs import Calls, GrammarJob, OutputConstraint
from twolane.frontend.structured.tools import Tool, bare_heads, parameter_types, with_open_arguments


class AnswerFormat(NamedTuple):
    """The format of one request's answers."""

    grammar_job: GrammarJob | None = None
    """Job that compiles the grammar of the answers; None: free text."""
    grammar: str | None = None
    """Compiled grammar."""
    reader: Callable[[], AnswerReader] | None = None
    """Makes a parser of an answer's thinking and calls; None: all of it is text."""
    shows_special: bool = False
    """Whether the reader needs special tokens."""
    forced_call: bool = False
    """Whether the request names the tool to call."""
    thinking: ThinkingMarks | None = None
    """Marks of the thinking before the answer; None: there is none."""


FREE_TEXT = AnswerFormat()
CHANNELS = {
    harmony.NAME: (harmony.THINKING, harmony.BEFORE_CALL, ""),
    recipients.NAME: (recipients.THINKING, recipients.BEFORE_CALL, " "),
}
"""Formats of answers whose messages have headers: the marks of thinking, its end before a call, and
what the model writes before a header."""
AS_TEXT = "hermes"
"""Form of calls in which tools are told of as text."""


class FormatOptions(NamedTuple):
    """Options of a request that determine the format of its answers."""

    tools: Sequence[Tool] = ()
    """Tools that the model may call."""
    enforced: Sequence[Tool] = ()
    """Tools one of which must be called."""
    named: bool = False
    """Whether the request names the one tool to call."""
    several: bool = True
    """Whether more than one call may be made."""
    constraint: tuple[str, OutputConstraint] | None = None
    """Field that asks for a constraint, and the constraint."""
    reads: bool = True
    """Whether thinking and calls are read in the answer; if not, all of it is text."""

    @property
    def may_call_instead(self) -> bool:
        """Whether an answer that follows a constraint may be calls instead."""
        return self.constraint is not None and bool(self.tools) and not self.enforced

    @classmethod
    def of(
        cls,
        tools: Sequence[Tool],
        mode: str | None,
        constraint: tuple[str, OutputConstraint] | None,
        *,
        named: str | None = None,
        several: bool = True,
    ) -> Self:
        """Return the format of a conversation's answers.

        Args:
            tools: the tools that the request offers.
            mode: "none" hides them, "required" asks for a call; anything else leaves it open.
            constraint: see the field.
            named: name of the one tool to call; None: the model chooses.
            several: see the field.
        """
        if mode == "none" or not tools:
            return cls(constraint=constraint)
        if named is not None:
            enforced: Sequence[Tool] = [tool for tool in tools if tool.name == named]
        else:
            enforced = tools if mode == "required" else ()
        return cls(tools, enforced, named is not None, several, constraint)


class ModelFormats:
    """The formats that the served model can write.

    Args:
        template: the model's chat template; None: it has none.
        tool_parser: a name of `FORMATS`; None: the format is found from the template.
        shows_tools: Whether the template shows tools. If not, or if it shows them for calls of an
            unknown format, the model is told of them in a message, and calls have Hermes' form.
        reasons: true if thinking that the template has marks for is separated from the answer.
        hides: returns whether a text is a special token, which answers do not show.
        closes: true if objects of schemas have declared names only, where a request does not say.

    Raises:
        FieldError: the parser is for another form than that of which the model is told.
    """

    def __init__(
        self,
        template: str | None,
        tool_parser: str | None = None,
        *,
        shows_tools: bool,
        reasons: bool = True,
        hides: Callable[[str], bool] = lambda _: False,
        closes: bool = False,
    ) -> None:
        self._closes = closes
        own = (tool_parser or format_of(template)) if shows_tools else None
        self.tools_as_text = own is None
        """Whether tools, calls and results are put into messages as text; see `TextCodec.chat`."""
        self.calls = own or AS_TEXT
        """Format of the model's calls, a name of `FORMATS`."""
        if template is not None and tool_parser not in (None, self.calls):
            problem = f"must be {AS_TEXT}: the model's chat template shows no tools"
            raise FieldError("tool_call_parser", problem)
        self._channels = CHANNELS.get(self.calls)
        thinking = self._channels[0] if self._channels else thinking_of(template)
        self.thinking = thinking if reasons else None
        """Marks of the model's thinking; None: it does not think."""
        self.reads_all = self.thinking is not None or self._channels is not None
        """Whether answers to all conversations are read, whatever a request asks for."""
        self._hides_thinking = self.thinking is not None and hides(self.thinking.end)

    def of(self, options: FormatOptions, prompt: str, continued: str | None = None) -> AnswerFormat:
        """Return the format of the answers to a conversation.

        Args:
            options: the format that the request asks for.
            prompt: the end of the rendered prompt.
            continued: the text of the message that the answer continues; None: it is a new one.

        Raises:
            FieldError: a field asks for what the model cannot do.
        """
        if not options.reads:
            job = self._grammar_job(options, None)
            return FREE_TEXT if job is None else AnswerFormat(job)
        if self._channels is not None:
            return self._in_channels(options, prompt, continued, *self._channels)
        if not (self.thinking or options.tools or options.constraint):
            return FREE_TEXT
        thinking = self._thinking(prompt, continued)
        return AnswerFormat(
            grammar_job=self._grammar_job(options, thinking),
            reader=self._reader(options, thinking),
            shows_special=bool(options.tools) or (thinking is not None and self._hides_thinking),
            forced_call=options.named,
            thinking=thinking,
        )

    def _in_channels(
        self,
        options: FormatOptions,
        prompt: str,
        continued: str | None,
        thinking: ThinkingMarks,
        before_call: str,
        lead: str,
    ) -> AnswerFormat:
        """Return the format of answers whose messages have headers; see `CHANNELS`."""
        ended = continued is not None or prompt.endswith(harmony.MESSAGE)
        written = msgspec.structs.replace(thinking, begin=lead + thinking.begin)
        marks = None if ended else written
        if (options.enforced or options.may_call_instead) and marks is not None:
            marks = msgspec.structs.replace(marks, end=before_call)
        free = any(tool.strict for tool in options.tools)
        free = free and not (options.enforced or options.constraint)
        if free and ended:
            raise FieldError("tools", "strict is not enforced where an answer continues a message")
        parser = self._channel_parser(options, prompt)
        return AnswerFormat(
            grammar_job=self._grammar_job(options, None if free else marks),
            reader=lambda: AnswerReader(parser(), several=options.several),
            shows_special=True,
            forced_call=options.named,
            thinking=None if ended or self.thinking is None else thinking,
        )

    def _channel_parser(self, options: FormatOptions, prompt: str) -> Callable[[], Parser]:
        """Return what makes the parser of answers whose messages have headers."""
        reasons = self.thinking is not None
        if self.calls == harmony.NAME:
            calls = bool(options.tools)
            return partial(harmony.HarmonyParser, prompt, reasons=reasons, calls=calls)
        for name in (tool.name for tool in options.tools):
            if f" to={name}" in recipients.RECIPIENTS:
                raise FieldError("tools", f"cannot have the name {name!r} with this model")
        types = parameter_types(options.tools) if options.tools else None
        return partial(recipients.RecipientParser, prompt, reasons=reasons, types=types)

    def _thinking(self, prompt: str, continued: str | None) -> ThinkingMarks | None:
        marks = self.thinking
        if marks is None:
            return None
        opened = ends_in_thinking(marks, prompt, continued)
        closed = continued is not None or prompt.rstrip().endswith(marks.end)
        return msgspec.structs.replace(marks, opened=opened) if opened or not closed else None

    def _grammar_job(
        self, options: FormatOptions, thinking: ThinkingMarks | None
    ) -> GrammarJob | None:
        wanted: tuple[str, OutputConstraint | Calls]
        single = options.named or self._channels is not None
        several, instead = options.several and not single, None
        if options.enforced:
            wanted = "tools", Calls(self.calls, options.enforced, several, free=False)
        elif options.constraint is not None:
            wanted = options.constraint
            # A message that is an answer goes on.
            continues = self._channels is not None and thinking is None
            if options.may_call_instead and not continues:
                tools = with_open_arguments(options.tools)
                instead = Calls(self.calls, tools, several, free=False)
        elif any(tool.strict for tool in options.tools):
            wanted = "tools", Calls(self.calls, options.tools, options.several, free=True)
        else:
            return None
        field, answer = wanted
        return GrammarJob(field, answer, thinking, self._closes, instead)

    def _reader(
        self, options: FormatOptions, thinking: ThinkingMarks | None
    ) -> Callable[[], AnswerReader] | None:
        if not (thinking or options.tools):
            return None
        types = parameter_types(options.tools)
        calls = FORMATS[self.calls] if options.tools else None
        heads = bare_heads(self.calls, options.tools)

        def reader() -> AnswerReader:
            thoughts = None if thinking is None else ReasoningParser(thinking)
            if calls is None:
                return AnswerReader(thoughts, several=options.several)
            find = partial(ToolCallParser, calls, types)
            ends_in_calls = thinking is not None and not calls.bare
            unclosed = CallsInThinking(find, types) if ends_in_calls else None
            tools = CallsOrText(find(), types, heads) if options.may_call_instead else find()
            return AnswerReader(thoughts, tools, unclosed=unclosed, several=options.several)

        return reader
