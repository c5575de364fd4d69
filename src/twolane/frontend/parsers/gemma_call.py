"""Parser of Gemma 4's tool calls: `call:f{city:<|"|>Rome<|"|>,days:[1,2]}` after their mark."""

import json

from twolane.frontend.parsers.json_call import CallReader
from twolane.frontend.parsers.pieces import MAX_READ_AGAIN
from twolane.frontend.parsers.pythonic import value_of
from twolane.frontend.parsers.readers import Types

QUOTE = '<|"|>'
"""The mark around strings, within which every character stands for itself."""
_HEAD = "call:"
_CLOSING = {"{": "}", "[": "]"}


class GemmaCall(CallReader):
    """Parses one call, whose arguments are passed on as JSON; one that is cut off stays open.

    Keys are bare words. Strings are between `QUOTE`, or between quotes as in JSON, which models
    write at times; other values are literals, and what is no literal is text.

    Args:
        types: Types of the parameters of each tool, which are not asked: strings have marks.
    """

    def __init__(self, types: Types) -> None:
        super().__init__()
        self._head = ""
        """Text before the arguments."""
        self._open: list[str] = []
        """Brackets that are open."""
        self._counts: list[int] = []
        """Number of entries of each of them."""
        self._key = False
        """Whether a key comes next, or is being read."""
        self._filled = True
        """Whether the current entry has its value."""
        self._word: list[str] = []
        """Characters of the key, of the bare value, or of the string as in JSON being read."""
        self._quote = ""
        """Mark that ends the open string; empty: no string is open."""
        self._escaped = False
        """Whether the last character of a string as in JSON was an escape's backslash."""
        self._held = ""
        """Text that may become `QUOTE`."""

    def feed(self, char: str) -> None:
        """See `CallReader.feed`."""
        if self.done or self.broken:
            return
        if self.name is None:
            self._begin(char)
            return
        if self._quote == '"':
            self._in_json(char)
            return
        self._held += char
        while self._held and not QUOTE.startswith(self._held):
            first, self._held = self._held[0], self._held[1:]
            self._string(first) if self._quote else self._structure(first)
        if self._held == QUOTE:
            self._held = ""
            self._mark()

    def _begin(self, char: str) -> None:
        """Process a character before the arguments."""
        if char == "{":
            named = self._head.strip().removeprefix(_HEAD).strip()
            self.broken = not self._head.strip().startswith(_HEAD) or not named
            self.name = None if self.broken else named
            self._opened(char)
            return
        self._head += char
        begun = self._head.lstrip()[: len(_HEAD)]
        self.broken = not _HEAD.startswith(begun) or len(self._head) > MAX_READ_AGAIN

    def _mark(self) -> None:
        """Process `QUOTE`."""
        if self._quote:
            self._quote = ""
            self._arguments += [] if self._key else ['"']
            return
        self._quote, self._word = QUOTE, []
        if not self._key:
            self._entry()
            self._arguments.append('"')

    def _string(self, char: str) -> None:
        if self._key:
            self._word.append(char)
        else:
            self._arguments.append(json.dumps(char, ensure_ascii=False)[1:-1])

    def _in_json(self, char: str) -> None:
        """Process a character of a string as in JSON, which begins with the first of `_word`."""
        self._word.append(char)
        closes, self._escaped = (
            char == '"' and not self._escaped,
            char == "\\" and not self._escaped,
        )
        if closes:
            value, self._quote = value_of("".join(self._word)), ""
            self._word = [str(value)] if self._key else []
            self._arguments += [] if self._key else [json.dumps(value, ensure_ascii=False)]

    def _structure(self, char: str) -> None:
        """Process a character outside of strings."""
        if char == ":" and self._key:
            self._entry(self._bare)
        elif char in "{[" and not self._key:
            self._entry()
            self._opened(char)
        elif char in ",}]":
            self._ended(self._bare)
            self._key = char == "," and self._open[-1] == "{"
            self._filled = char != "," or self._key
            if char != ",":
                self._closed()
        elif char == '"' and not any(each.strip() for each in self._word):
            if not self._key:
                self._entry()
            self._quote, self._word = char, [char]
        else:
            self._word.append(char)

    @property
    def _bare(self) -> str:
        """The key or value outside of strings, so far."""
        return "".join(self._word).strip()

    def _opened(self, bracket: str) -> None:
        self._open.append(bracket)
        self._counts.append(0)
        self._key, self._word, self._filled = bracket == "{", [], bracket == "{"
        self._arguments.append(bracket)

    def _entry(self, key: str | None = None) -> None:
        """Begin an entry of an object by its key, or a value."""
        if key is not None or self._open[-1] == "[":
            self._arguments += [", "] if self._counts[-1] else []
            self._counts[-1] += 1
        if key is not None:
            self._arguments.append(f"{json.dumps(key, ensure_ascii=False)}: ")
        self._key, self._word, self._filled = False, [], key is None

    def _ended(self, bare: str) -> None:
        """Finish the current value, a bare one unless it was a string or is in brackets."""
        if self._key or self._filled:
            self._word = []
            return
        if bare or self._open[-1] == "{":
            self._entry() if self._open[-1] == "[" else None
            self._arguments.append(json.dumps(value_of(bare) if bare else None, ensure_ascii=False))
        self._word, self._filled = [], True

    def _closed(self) -> None:
        """Close the innermost bracket."""
        self._arguments.append(_CLOSING[self._open.pop()])
        self._counts.pop()
        self._key, self._filled, self.done = False, True, not self._open
