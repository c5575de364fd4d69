"""Pieces of an answer's text."""

from typing import Protocol

import msgspec


class Reasoning(msgspec.Struct, frozen=True):
    """Text of the model's thinking."""

    text: str


class Content(msgspec.Struct, frozen=True):
    """Text for the user."""

    text: str
    apart: bool = False
    """Whether calls separate it from the text before it."""

    @property
    def joined(self) -> str:
        """Text to append to the text before it, where calls are kept elsewhere."""
        return "\n" + self.text if self.apart else self.text


class CallStart(msgspec.Struct, frozen=True):
    """Start of a tool call; its arguments follow."""

    index: int
    """Index of the call among the answer's calls."""
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """More characters of a call's arguments, which together are JSON."""

    index: int
    text: str


Piece = Reasoning | Content | CallStart | CallArguments


class Parser(Protocol):
    """Parses an answer's text incrementally.

    What the pieces say when put together depends on the whole text alone, never on how it was cut.
    """

    def feed(self, text: str) -> list[Piece]:
        """Parse more text; return the pieces that are certain now."""

    def finish(self) -> list[Piece]:
        """Finish; return the pieces that were held back."""


MAX_READ_AGAIN = 256
"""Most characters after a mark that are parsed again if no call begins with it: otherwise nested
marks would be parsed as often as there are marks.

Invariant: a refused text is longer only if it is an object in JSON that names no tool, or white
space, or has taken a later call for a part of its arguments; of these the end is read again, where
what has told that they are no call stands.
"""


def read_again_from(text: str, marks: tuple[str, ...]) -> int:
    """Return the position from which a refused text after a mark is parsed again.

    A long one is so from the first mark in its last `MAX_READ_AGAIN` characters on or, where there
    is none, from what may be the begin of one at its end, and the white space before these.
    """
    near = len(text) - MAX_READ_AGAIN
    if near <= 0:
        return 0
    places = [place for mark in marks if (place := text.find(mark, near)) >= 0]
    place = min(places, default=len(text) - held_back(text, marks))
    return len(text[:place].rstrip())


def held_back(text: str, marks: tuple[str, ...]) -> int:
    """Return the number of characters at the end of a text that may begin one of the marks."""
    longest, most = max(map(len, marks), default=0) - 1, 0
    for mark in marks:
        end = text[-min(len(mark), longest) :] if longest > 0 else ""
        place = end.find(mark[:1])  # of most tokens, none begins a mark
        while place >= 0:
            if mark.startswith(end[place:]):
                most = max(most, len(end) - place)
                break
            place = end.find(mark[:1], place + 1)
    return most
