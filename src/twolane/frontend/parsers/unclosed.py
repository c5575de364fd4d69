"""Tool calls at the end of a model's thinking that was not closed before them."""

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import groupby

from twolane.frontend.parsers.json_call import is_object
from twolane.frontend.parsers.json_prefix import ObjectPrefix
from twolane.frontend.parsers.pieces import (
    CallArguments,
    CallStart,
    Piece,
    Reasoning,
    held_back,
    read_again_from,
)
from twolane.frontend.parsers.tool_calls import ToolCallParser

MAX_HELD = 1 << 16
"""Most characters of thinking that are held back: where a call is not closed, nothing else tells
its arguments from thinking after it."""


class CallsInThinking:
    """Holds back possible calls in thinking, and decides at the end whether they are calls.

    Qwen3.5 and others begin a call at times without the mark that closes the thinking. Models also
    draft calls while they think. Whole calls of known tools are such if nothing else follows in the
    answer; a draft has thinking or an answer after it. What is kept back is released as soon as it
    cannot be such calls any more: a call's arguments can become no object, say, or it is too long.

    Invariant: what the pieces say when put together depends on the whole text alone.

    Args:
        parser: makes what finds calls.
        tools: the names of the tools.
    """

    def __init__(self, parser: Callable[[], ToolCallParser], tools: Collection[str]) -> None:
        self._make = parser
        self._tools = tools
        self._marks = parser().marks
        self._text = ""
        """Held text that may become a mark."""
        self._held: list[str] = []
        """Held text from a mark on, piece by piece."""
        self._held_size = 0
        self._parser: ToolCallParser | None = None
        """Parser of the held text from a mark on, if there is one."""
        self._calls: list[Piece] = []
        self._arguments = ObjectPrefix()
        """Arguments of the last call."""

    @property
    def holds(self) -> bool:
        """Whether text is held back."""
        return bool(self._text or self._held)

    def feed(self, text: str) -> list[Piece]:
        """Process more thinking; return the part that is certain."""
        certain, rest = "", text
        while rest:
            if self._parser is None:
                thought, rest = self._begin(rest)
            else:
                thought, rest = self._go_on(self._parser, rest)
            certain += thought
        return [Reasoning(certain)] if certain else []

    def release(self) -> list[Piece]:
        """Return the held text as thinking, since an answer follows."""
        text = "".join((*self._held, self._text))
        self._held, self._text, self._parser = [], "", None
        return [Reasoning(text)] if text else []

    def finish(self) -> list[Piece]:
        """Finish; return the calls, or the held thinking."""
        if self._parser is not None:
            pieces = self._parser.finish()
            calls = [*joined(self._calls + pieces)]
            if self._may_be_calls(pieces) and are_whole(calls):
                return calls
        return self.release()

    def _begin(self, text: str) -> tuple[str, str]:
        """Search for a mark; return the thinking, and the text to parse again."""
        self._text += text
        places = [self._text.find(mark) for mark in self._marks if mark in self._text]
        if places:
            thought = self._text[: min(places)]
            rest, self._text = self._text[len(thought.rstrip()) :], ""
            self._parser, self._calls, self._held_size = self._make(), [], 0
            return thought.rstrip(), rest
        kept = held_back(self._text, self._marks)
        thought = self._text[: len(self._text) - kept].rstrip()
        self._text = self._text[len(thought) :]
        return thought, ""

    def _go_on(self, parser: ToolCallParser, text: str) -> tuple[str, str]:
        """Parse text after a mark; return the thinking, and the text to parse again."""
        most = MAX_HELD - self._held_size
        # Characters one by one: the result must not depend on how the text is chunked.
        for place, char in enumerate(text, 1):
            pieces = parser.feed(char)
            self._calls += pieces
            if place > most or not self._may_be_calls(pieces):
                held = "".join((*self._held, text[:place]))
                self._held, self._parser = [], None
                again = _read_no_more(held, self._marks)
                return held[:again], held[again:] + text[place:]
        self._held.append(text)
        self._held_size += len(text)
        return "", ""

    def _may_be_calls(self, pieces: list[Piece]) -> bool:
        return all(map(self._may_be_call, pieces))

    def _may_be_call(self, piece: Piece) -> bool:
        match piece:
            case CallStart(_, name):
                self._arguments = ObjectPrefix()
                return name in self._tools
            case CallArguments(_, text):
                return self._arguments.feed(text)
        return not piece.text.strip()


def _read_no_more(held: str, marks: tuple[str, ...]) -> int:
    """Return the number of characters of a text after a mark that are thinking and begin no
    call."""
    mark = len(held) - len(held.lstrip()) + 1  # it begins no other call
    return mark + read_again_from(held[mark:], marks)


def are_whole(pieces: Sequence[Piece]) -> bool:
    """Return whether there are calls, and each one's arguments, in one piece, are a JSON object."""
    starts = [piece for piece in pieces if isinstance(piece, CallStart)]
    arguments = [piece.text for piece in pieces if isinstance(piece, CallArguments)]
    return 0 < len(starts) == len(arguments) and all(map(is_object, arguments))


def joined(pieces: list[Piece]) -> Iterator[Piece]:
    """Yield the pieces with consecutive arguments of a call merged."""
    for is_arguments, group in groupby(pieces, lambda piece: isinstance(piece, CallArguments)):
        if not is_arguments:
            yield from group
            continue
        arguments = [piece for piece in group if isinstance(piece, CallArguments)]
        yield CallArguments(arguments[0].index, "".join(piece.text for piece in arguments))
