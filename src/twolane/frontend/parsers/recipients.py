"""Parser of Muse Glimmer's answers: messages that name their recipient.

An answer is ` to=self<|message|>…<|eom|><|start|>assistant to=user<|message|>…`; a call is a
message to a tool, with its arguments between marks.
"""

import re
from collections.abc import Sequence

from twolane.frontend.parsers.harmony import MESSAGE, START, HarmonyParser
from twolane.frontend.parsers.marked_call import atem_call
from twolane.frontend.parsers.pieces import CallArguments, CallStart, Content, Piece
from twolane.frontend.parsers.readers import Types
from twolane.frontend.parsers.reasoning import ThinkingMarks
from twolane.frontend.parsers.tool_calls import CallFormat, ToolCallParser

NAME = "muse_glimmer"
"""Name of the format among those of tool calls."""
END = "<|eom|>"
TO_SELF, TO_USER = f"to=self{MESSAGE}", f"to=user{MESSAGE}"
THINKING = ThinkingMarks(TO_SELF, f"{END}{START}assistant {TO_USER}", needed=True, bare=TO_USER)
"""Marks of the thinking and of the answer after it."""
BEFORE_CALL = f"{END}{START}assistant"
"""End of the thinking before a call."""
RECIPIENTS = (" to=self", " to=user")
"""Headers of messages that are no calls, as they are written."""
CALLS = CallFormat(atem_call, ("<atem:function_calls>",), ("</atem:function_calls>",), again="<")
"""Calls in a message to a tool."""
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class RecipientParser(HarmonyParser):
    """Splits an answer into thinking, text and calls by the recipients of its messages (`Parser`).

    Args:
        prompt: the end of the prompt, which may have begun a message.
        reasons: Whether thinking is told apart from text.
        types: Types of the parameters of each tool; None: there are no tools, and a message to one
            is thinking.
    """

    ends: Sequence[str] = (END, "<|eot|>")
    headers: Sequence[str] = (START,)

    def __init__(
        self, prompt: str = "", *, reasons: bool = True, types: Types | None = None
    ) -> None:
        self._types = types or {}
        self._parser: ToolCallParser | None = None
        """Parser of the calls of the current message."""
        super().__init__(prompt, reasons=reasons, calls=types is not None)

    def _kind_of(self, header: str, pieces: list[Piece]) -> str:
        recipient = _RECIPIENT.search(header)
        if recipient is None or recipient[1] == "user":
            return "answer"
        if recipient[1] == "self" or not self._calls:
            return "thinking"
        self._parser = ToolCallParser(CALLS, self._types)
        return "call"

    def _show_call(self, text: str, pieces: list[Piece]) -> None:
        assert self._parser is not None
        self._pass_on(self._parser.feed(text), pieces)

    def _end(self, pieces: list[Piece]) -> None:
        parser, self._parser = self._parser, None
        if parser is not None:
            self._pass_on(parser.finish(), pieces)
            self._count += parser.count

    def _pass_on(self, found: Sequence[Piece], pieces: list[Piece]) -> None:
        """Add pieces of a message to a tool, whose calls follow those of earlier messages."""
        for piece in found:
            match piece:
                case CallStart(index, name):
                    pieces.append(CallStart(self._count + index, name))
                case CallArguments(index, text):
                    pieces.append(CallArguments(self._count + index, text))
                case Content(text) if text.strip():
                    pieces.append(Content(text))
