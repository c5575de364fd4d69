"""Parser of gpt-oss' answers (Harmony): messages in channels, some of which are calls of tools.

An answer is `<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…`;
a call is a message to `functions.NAME`. The package `openai-harmony` reads tokens of one vocabulary
alone, which it downloads, so that it serves neither without a network nor with other tokenizers.
"""

import re
from collections.abc import Sequence

from twolane.frontend.parsers.pieces import (
    CallArguments,
    CallStart,
    Content,
    Piece,
    Reasoning,
    held_back,
)
from twolane.frontend.parsers.reasoning import ThinkingMarks

NAME = "harmony"
"""Name of the format among those of tool calls."""
START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
THINKING = ThinkingMarks(
    f"{CHANNEL}analysis{MESSAGE}",
    f"{END}{START}assistant{CHANNEL}final{MESSAGE}",
    needed=True,
    bare=f"{CHANNEL}final{MESSAGE}",
)
"""Marks of the analysis and of the answer after it."""
BEFORE_CALL = f"{END}{START}assistant"
"""End of the analysis before a call."""
_ROLE = re.compile(r"\s*(<\|start\|>)?\s*(assistant)?\s*")
_HEADS = (START, CHANNEL, MESSAGE, "<|constrain|>", "assistant", "to=")
"""Beginnings of what follows the role in a header."""
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_IN_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")
CHANNELS = ("analysis", "commentary", "final")
_MAX_HEADER = 256
"""Characters after which what has no end is no header."""


class HarmonyParser:
    """Splits an answer into thinking, text and calls by the headers of its messages (`Parser`).

    Analysis is thinking. Text of other channels is for the user; messages of one kind are put on
    lines of their own. Text without a header is for the user, too.

    Args:
        prompt: the end of the prompt, which may have begun a message.
        reasons: Whether thinking is told apart from text.
        calls: Whether there are tools; without, a message to one is thinking.
    """

    ends: Sequence[str] = (END, "<|call|>", "<|return|>")
    """Marks at the end of a message."""
    headers: Sequence[str] = (START, CHANNEL)
    """Marks at the beginning of a header, which may follow a message without an end."""

    def __init__(self, prompt: str = "", *, reasons: bool = True, calls: bool = True) -> None:
        self._reasons, self._calls = reasons, calls
        self._text = ""
        """Text that is not parsed yet."""
        self._kind = "header"
        """What is read: a header, or the text of thinking, an answer or a call."""
        self._count = 0
        """Number of calls."""
        self._shown: set[str] = set()
        """Kinds of the messages that had text."""
        self._blank = False
        """Whether nothing of the message has come yet."""
        self.feed(prompt[max(0, prompt.rfind(START)) :] if START in prompt else "")
        self._shown.clear()
        self._blank = False

    def feed(self, text: str) -> list[Piece]:
        """See `Parser.feed`."""
        self._text += text
        pieces: list[Piece] = []
        while self._text and (self._head if self._kind == "header" else self._body)(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        """See `Parser.finish`."""
        pieces: list[Piece] = []
        begun = _ROLE.sub("", self._text, count=1)
        if self._kind == "header" and not _is_cut(begun):
            self._begin_without_header(begun)
        rest, self._text = self._text, ""
        if self._kind != "header":
            self._show(rest, pieces)
            self._end(pieces)
        return pieces

    def _head(self, pieces: list[Piece]) -> bool:
        """Parse the header of a message."""
        header, mark, rest = self._text.partition(MESSAGE)
        begun = _ROLE.sub("", self._text, count=1)
        may_be = any(h.startswith(begun) or begun.startswith(h) for h in _HEADS)
        within = begun.removesuffix(mark + rest)
        if (
            not may_be
            or len(header) > _MAX_HEADER
            or any(end in within for end in (*self.ends, START))
        ):
            self._begin_without_header(begun)
            return True
        if mark:
            self._text = rest
            self._begin(self._kind_of(header, pieces))
        return bool(mark)

    def _begin_without_header(self, begun: str) -> None:
        """Begin a message whose header is missing or, as models write at times, has no end."""
        channel = _IN_CHANNEL.match(begun)
        thinks = channel is not None and channel[1] != "final"
        named = channel is not None and channel[1] in CHANNELS
        self._text = begun[channel.end() :] if channel and named else begun.removeprefix(CHANNEL)
        self._begin("thinking" if thinks else "answer")

    def _kind_of(self, header: str, pieces: list[Piece]) -> str:
        channel, recipient = _IN_CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is not None and recipient[0] != "to=assistant":
            if not self._calls:
                return "thinking"
            pieces.append(CallStart(self._count, recipient[1]))
            self._count += 1
            return "call"
        return "thinking" if channel is not None and channel[1] == "analysis" else "answer"

    def _begin(self, kind: str) -> None:
        self._kind, self._blank = kind, True

    def _body(self, pieces: list[Piece]) -> bool:
        """Parse the text of a message up to the mark of its end, or of the next one's header."""
        marks = (*self.ends, *self.headers)
        places = [(place, mark) for mark in marks if (place := self._text.find(mark)) >= 0]
        if not places:
            certain = len(self._text) - held_back(self._text, marks)
            shown, self._text = self._text[:certain], self._text[certain:]
            self._show(shown, pieces)
            return False
        place, mark = min(places)
        self._show(self._text[:place], pieces)
        self._end(pieces)
        self._text, self._kind = self._text[place:], "header"
        if mark in self.ends:
            self._text = self._text[len(mark) :]
        return True

    def _show(self, text: str, pieces: list[Piece]) -> None:
        if self._kind == "call":
            text = text.lstrip() if self._blank else text
        elif text and self._blank and self._kind in self._shown:
            text = "\n" + text
        if not text:
            return
        self._blank = False
        self._shown.add(self._kind)
        if self._kind == "call":
            self._show_call(text, pieces)
        elif self._kind == "thinking" and self._reasons:
            pieces.append(Reasoning(text))
        else:
            pieces.append(Content(text))

    def _show_call(self, text: str, pieces: list[Piece]) -> None:
        """Add text of a call."""
        pieces.append(CallArguments(self._count - 1, text))

    def _end(self, pieces: list[Piece]) -> None:
        """Finish a message."""


def _is_cut(begun: str) -> bool:
    """Return whether an answer ends within a header, of which this is the part after the role."""
    if not begun.startswith(CHANNEL):
        return not begun or begun.startswith(("<|", "to=")) or CHANNEL.startswith(begun)
    channel = begun.removeprefix(CHANNEL).lstrip()
    return any(name.startswith(channel) or channel.startswith(name) for name in CHANNELS)
