"""Whether a text may still become an object in JSON, judged character by character."""

import re

from twolane.frontend.parsers.json_call import WHITE

SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
SCALAR_BEGINS, SCALAR_GOES_ON = "-0123456789tfn", "+-.0123456789aeflnrstuE"


class ObjectPrefix:
    """A text that may become an object in JSON. Its strings have no escapes but JSON's."""

    def __init__(self) -> None:
        self._open: list[str] = []
        """The brackets that have not been closed."""
        self._next = "value"
        """What comes next: a key, a colon, a value, or something behind a value; "first" is a key
        or an item that may be missing."""
        self._scalar = ""
        """A number or a word that has begun and not ended."""
        self._string = self._escaped = False

    def feed(self, text: str) -> bool:
        """Take some more text; return whether all of it may still become an object."""
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
        """A string goes on or ends."""
        self._string = self._escaped or char != '"'
        self._escaped = char == "\\" and not self._escaped

    def _structure(self, char: str) -> bool:
        """Take a character that is in no string or scalar."""
        if not self._open:
            return char == "{" and self._next == "value" and self._opens(char)
        last = self._open[-1]
        if self._next in ("behind", "first") and char == {"{": "}", "[": "]"}[last]:
            self._open.pop()
            self._next = "behind"
            return True
        if self._next == "behind":
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
        """A value begins."""
        if char in "{[":
            return self._opens(char)
        self._next, self._string = "behind", char == '"'
        self._scalar = char if char in SCALAR_BEGINS else ""
        return self._string or bool(self._scalar)

    def _opens(self, char: str) -> bool:
        self._open.append(char)
        self._next = "first"
        return True
