"""Tool calls with which a model's thinking ends, where it has not closed that before them."""

from collections.abc import Callable, Collection, Iterator
from itertools import groupby

from twolane.frontend.parsers.json_call import is_object
from twolane.frontend.parsers.pieces import (
    MOST_READ_AGAIN,
    CallArguments,
    CallStart,
    Content,
    Piece,
    Reasoning,
    held_back,
)
from twolane.frontend.parsers.tool_calls import ToolCallParser


class CallsInThinking:
    """Keeps back what may be calls in thinking, and tells at the end whether they are.

    Qwen3.5 and others begin a call at times without the mark that closes the thinking. Models also
    draft calls while they think. Whole calls of known tools are such if nothing else follows in the
    answer; a draft has thinking or an answer behind it.

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
        """The text that is kept back: what may become a mark."""
        self._held: list[str] = []
        """The text that is kept back from a mark on, piece by piece."""
        self._parser: ToolCallParser | None = None
        """Reads the text kept back from a mark on, if there is one."""
        self._calls: list[Piece] = []

    @property
    def holds(self) -> bool:
        """Whether something is kept back."""
        return bool(self._text or self._held)

    def feed(self, text: str) -> list[Piece]:
        """Take some more thinking; return what is certain to be such."""
        certain, rest = "", text
        while rest:
            if self._parser is None:
                thought, rest = self._begin(rest)
            else:
                thought, rest = self._go_on(self._parser, rest)
            certain += thought
        return [Reasoning(certain)] if certain else []

    def release(self) -> list[Piece]:
        """An answer follows the thinking: return what was kept back, which is of it."""
        text = "".join((*self._held, self._text))
        self._held, self._text, self._parser = [], "", None
        return [Reasoning(text)] if text else []

    def finish(self) -> list[Piece]:
        """Nothing follows: return the calls, or the thinking that was kept back."""
        if self._parser is not None:
            self._calls += self._parser.finish()
            if self._may_be_calls(self._calls) and is_object(self._last_arguments()):
                return [*joined(self._calls)]
        return self.release()

    def _begin(self, text: str) -> tuple[str, str]:
        """Look for a mark; return what is thinking, and what is to be read again."""
        self._text += text
        found = [self._text.find(mark) for mark in self._marks if mark in self._text]
        if found:
            thought = self._text[: min(found)]
            rest, self._text = self._text[len(thought.rstrip()) :], ""
            self._parser, self._calls = self._make(), []
            return thought.rstrip(), rest
        kept = held_back(self._text, self._marks)
        thought = self._text[: len(self._text) - kept].rstrip()
        self._text = self._text[len(thought) :]
        return thought, ""

    def _go_on(self, parser: ToolCallParser, text: str) -> tuple[str, str]:
        """Read on behind a mark; return what is thinking, and what is to be read again."""
        for place, char in enumerate(text, 1):  # which one tells must not depend on the cuts
            found = parser.feed(char)
            self._calls += found
            if not self._may_be_calls(found):
                held = "".join((*self._held, text[:place]))
                self._held, self._parser = [], None
                behind = _read_no_more(held, self._marks)
                return held[:behind], held[behind:] + text[place:]
        self._held.append(text)
        return "", ""

    def _may_be_calls(self, pieces: list[Piece]) -> bool:
        return all(
            isinstance(piece, CallArguments)
            or (isinstance(piece, CallStart) and piece.name in self._tools)
            or (isinstance(piece, Content) and not piece.text.strip())
            for piece in pieces
        )

    def _last_arguments(self) -> str:
        starts = [i for i, piece in enumerate(self._calls) if isinstance(piece, CallStart)]
        behind = self._calls[starts[-1] :] if starts else ()
        return "".join(piece.text for piece in behind if isinstance(piece, CallArguments))


def _read_no_more(held: str, marks: tuple[str, ...]) -> int:
    """Return how many characters of a text that begins with a mark, and no call, are thinking."""
    if len(held) > MOST_READ_AGAIN:
        return len(held) - held_back(held, marks)
    return len(held) - len(held.lstrip()) + 1  # the mark itself begins no other call


def joined(pieces: list[Piece]) -> Iterator[Piece]:
    """Yield the pieces with all arguments of a call that follow each other as one."""
    for is_arguments, group in groupby(pieces, lambda piece: isinstance(piece, CallArguments)):
        if not is_arguments:
            yield from group
            continue
        arguments = [piece for piece in group if isinstance(piece, CallArguments)]
        yield CallArguments(arguments[0].index, "".join(piece.text for piece in arguments))
