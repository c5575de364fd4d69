"""Incremental search for stop strings."""

from collections.abc import Sequence

import msgspec

MAX_STRINGS = 32
"""Most stop strings of a request."""
MAX_STRING_LENGTH = 1024
"""Most characters of a stop string."""


class StopResult(msgspec.Struct, frozen=True):
    """The result of a piece of text."""

    text: str
    """Text that may be shown now."""
    stop: str | None = None
    """Stop string that was found; None: none yet."""


class StopStrings:
    """Searches for stop strings, and holds back text that may begin one.

    The string that is complete first ends the text; of two that are complete with the same
    character, the longer. So the outcome does not depend on how the text is cut into pieces.

    Args:
        strings: the stop strings, none of them empty.
        include: true if the stop string is part of the text.
    """

    def __init__(self, strings: Sequence[str], *, include: bool = False) -> None:
        # Longest first: the first to match a character is the one that began first.
        self._matchers = [Matcher(string) for string in sorted(strings, key=len, reverse=True)]
        self._include = include
        self._held: list[str] = []
        """Shown text of each character that is held back, empty for hidden ones."""

    def feed(self, piece: str, *, hidden: bool = False) -> StopResult:
        """Process the next piece of text.

        Args:
            piece: the text.
            hidden: true if the text is not shown, though it may be part of a stop string.
        """
        if not self._matchers:
            return StopResult("" if hidden else piece)
        for character in piece:
            self._held.append("" if hidden else character)
            hits = [m for m in self._matchers if m.feed(character)]
            if hits:
                stop = hits[0].string
                before = "".join(self._held[: -len(stop)])
                self._held = []
                return StopResult(before + stop if self._include else before, stop)
        certain = len(self._held) - max(matcher.matched for matcher in self._matchers)
        text, self._held = "".join(self._held[:certain]), self._held[certain:]
        return StopResult(text)

    def flush(self) -> str:
        """Return the text that is held back; called once, at the end."""
        return "".join(self._held)


class Matcher:
    """Matches one string incrementally (Knuth, Morris and Pratt)."""

    def __init__(self, string: str) -> None:
        self.string = string
        self.matched = 0
        self._fallback = [0] * len(string)
        for place in range(1, len(string)):
            self._fallback[place] = self._longest(string[place], self._fallback[place - 1])

    def feed(self, character: str) -> bool:
        """Process the next character; return whether the string is complete."""
        self.matched = self._longest(character, self.matched)
        return self.matched == len(self.string)

    def _longest(self, character: str, matched: int) -> int:
        while matched and self.string[matched] != character:
            matched = self._fallback[matched - 1]
        return matched + (self.string[matched] == character)
