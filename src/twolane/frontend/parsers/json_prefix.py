"""Incremental check whether a text may still become a JSON object."""

import re

from twolane.frontend.parsers.json_call import WHITE

SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
SCALAR_BEGINS, SCALAR_GOES_ON = "-0123456789tfn", "+-.0123456789aeflnrstuE"


class ObjectPrefix:
    """A prefix of a JSON object. Its strings have no escapes but JSON's."""

    def __init__(self) -> None:
        self._open: list[str] = []
        """Open brackets."""
        self._next = "value"
        """Expected next token: a key, a colon, a value, or what follows a value; "first" is a key
        or item that may be missing."""
        self._scalar = ""
        """Number or word in progress."""
        self._string = self._escaped = False

    def feed(self, text: str) -> bool:
        """Process more text; return whether the whole may still become an object."""
        return all(map(self._take, text))

    def _take(self, char: str) -> bool:
        if self._string:
            self._within(char)
            return True
        if self._scalar and char in SCALAR_GOES_ON:
            self._scalar += char
            return True
        if self._scalar and SCALAR.fullmatch(self._scalar) is None:
            return False
        self._scalar = ""
        return char in WHITE or self._structure(char)

    def _within(self, char: str) -> None:
        """Process a character within a string."""
        self._string = self._escaped or char != '"'
        self._escaped = char == "\\" and not self._escaped

    def _structure(self, char: str) -> bool:
        """Process a character outside of strings and scalars."""
        if not self._open:
            return char == "{" and self._next == "value" and self._opens(char)
        last = self._open[-1]
        if self._next in ("after", "first") and char == {"{": "}", "[": "]"}[last]:
            self._open.pop()
            self._next = "after"
            return True
        if self._next == "after":
            self._next = "key" if last == "{" else "value"
            return char == ","
        if self._next == "colon":
            self._next = "value"
            return char == ":"
        if self._next == "key" or (self._next == "first" and last == "{"):
            self._next, self._string = "colon", True
            return char == '"'
        return self._value(char)

    def _value(self, char: str) -> bool:
        """Begin a value."""
        if char in "{[":
            return self._opens(char)
        self._next, self._string = "after", char == '"'
        self._scalar = char if char in SCALAR_BEGINS else ""
        return self._string or bool(self._scalar)

    def _opens(self, char: str) -> bool:
        self._open.append(char)
        self._next = "first"
        return True
