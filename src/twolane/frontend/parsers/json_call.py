"""Incremental parser of a tool call in JSON: its name, then its arguments."""

import json
from collections.abc import Collection
from typing import Any, NoReturn

WHITE = " \t\r\n"
NAMES = ("name", "function")
ARGUMENTS = ("arguments", "parameters")
FUNCTION_ENDED = "}"
"""Stands for the key of a whole function within another object."""
BEHIND_STRINGS = ",:}]\"'"
"""Characters that may follow a string, with or without white space between them."""
LITERALS = {"True": "true", "False": "false", "None": "null"}
"""JSON's literals by Python's."""


def parsed(text: str) -> Any:
    """Parse a model's JSON.

    Raises:
        ValueError: it is no JSON, or cannot be written as such: NaN, half of a character.
    """
    try:
        value = json.loads(text, parse_constant=_no_json)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return value


def _no_json(name: str) -> NoReturn:
    """Refuse NaN and Infinity, which Python parses and JSON does not have."""
    raise ValueError(f"{name} is not JSON")


def is_object(text: str) -> bool:
    """Return whether a text is a JSON object."""
    try:
        return isinstance(json.loads(text, parse_constant=_no_json), dict)
    except (ValueError, RecursionError):
        return False


def in_string(char: str) -> str:
    """Return a character escaped for a JSON string; models leave line ends and tabs unescaped."""
    return char if char >= " " else json.dumps(char)[1:-1]


class JsonText:
    """Normalises a model's JSON incrementally so that its strings are valid.

    Models leave line ends and tabs in strings as they are, and the backslashes of paths and regular
    expressions: one that begins no escape of JSON is text. Strings may be quoted as in Python, and
    have apostrophes then.
    """

    def __init__(self) -> None:
        self.in_string = False
        """Whether a string is open."""
        self._quote = ""
        """Quote that ends the string."""
        self._escape = ""
        """Escape in progress."""
        self._closing = ""
        """Single quote that may end the string, and the white space after it."""

    def settle(self, char: str) -> str:
        """Return the output of a single quote, if one came, now that the next character is known.

        It ends the string only if what follows is outside of strings.
        """
        if not self._closing or char in WHITE:
            return ""
        closing, self._closing = self._closing, ""
        if char in BEHIND_STRINGS:
            self.in_string = False
            return '"' + closing[1:]
        return "".join(map(in_string, closing))

    def feed(self, char: str) -> str:
        """Process the next character, which is settled; return the output that is certain now."""
        if self._closing:
            self._closing += char
            return ""
        if self._escape:
            return self._escaped(char)
        if not self.in_string:
            self.in_string, self._quote = char in ('"', "'"), char
            return '"' if self.in_string else char
        if char == "\\":
            self._escape = char
            return ""
        if char == "'" == self._quote:
            self._closing = char
            return ""
        self.in_string = char != self._quote
        if char == '"':
            return '\\"' if self.in_string else char
        return in_string(char)

    def _escaped(self, char: str) -> str:
        begun, self._escape = self._escape, ""
        if begun + char == "\\'" and self._quote == char:
            return char
        # Characters that may follow a backslash in a string.
        known = '"\\/bfnrtu' if begun == "\\" else "0123456789abcdefABCDEF"
        if char not in known:
            return "\\" + begun + self.feed(char)
        whole = begun + char
        if whole[1] == "u" and len(whole) < len("\\u0000"):
            self._escape = whole
            return ""
        return whole


class PlainJson:
    """Normalises JSON outside of strings where models write it as in Python: trailing commas, and
    True, False and None."""

    def __init__(self) -> None:
        self._held: list[str] = []
        """A comma and the white space after it, or the beginning of a word."""

    def feed(self, written: str, *, quoted: bool) -> str:
        """Process more text; return the output that is certain now.

        Args:
            written: the result of `JsonText`.
            quoted: true if the value is a string.
        """
        if quoted or not written:
            return self.rest() + written
        before = ""
        if self._held[:1] == [","]:
            if written in WHITE:
                self._held.append(written)
                return ""
            before = self.rest().removeprefix("," if written in "]}" else "")
        self._held.append(written)
        word = "".join(self._held)
        if word in LITERALS:
            self._held = [LITERALS[word]]
        elif word == "," or any(each.startswith(word) for each in LITERALS):
            return before
        return before + self.rest()

    def rest(self) -> str:
        """Return the text that is held back."""
        held, self._held = self._held, []
        return "".join(held)


class CallReader:
    """Parses one call, character by character; its state depends on the text so far alone.

    A reader that is done without a name has read a list that has no calls.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        """Tool's name, once it is known."""
        self.done = False
        """Whether the call is complete."""
        self.broken = False
        """Whether the text cannot become a call any more."""
        self.spare = ""
        """Text that was fed and does not belong to the call."""
        self._arguments: list[str] = []
        """Characters of the arguments, as JSON."""

    def feed(self, char: str) -> None:
        """Process the next character."""
        raise NotImplementedError

    def end(self) -> None:
        """Finish: the text has ended; what was held back is released."""

    def take(self) -> str:
        """Return the arguments' characters since the last call, once the name is known."""
        new, self._arguments = "".join(self._arguments), []
        return new


class JsonCall(CallReader):
    """Parses one object such as {"name": "f", "arguments": {…}} character by character.

    It may be the value of "function" in another object, as in OpenAI's API.

    The arguments are passed on as they are written, as soon as the name is known; those of a call
    that has none are {}. What begins as no object is passed on when it has ended (`as_object`).

    Invariant: `name` and the characters of `arguments` depend on the text so far alone.

    Args:
        tools: the names of the tools; an object with another name and without arguments is no call.
            None: any name may be one.
    """

    def __init__(self, tools: Collection[str] | None = None) -> None:
        super().__init__()
        self._tools = tools
        self._text = JsonText()
        self._plain = PlainJson()
        self._depth = 0
        self._around = False
        """Whether the object is in another one."""
        self._unknown: str | None = None
        """A name that is no tool's, seen before any arguments."""
        self._key: str | None = None
        """Top-level key whose value is being read."""
        self._scalar: list[str] = []
        """Characters of the top-level string or value being read."""
        self._taken = 0

    def feed(self, char: str) -> None:
        """See `CallReader.feed`."""
        if self.done or self.broken:
            return
        if settled := self._text.settle(char):
            self._keep(settled, quoted=True)
        within = self._text.in_string
        written = self._text.feed(char)
        if within:
            self._keep(written, quoted=True)
        elif self._depth == 0:
            self._begin(char)
        else:
            self._structure(written)

    def end(self) -> None:
        """See `CallReader.end`."""
        self._arguments += self._plain.rest()

    def take(self) -> str:
        """See `CallReader.take`."""
        if self.name is None or self._held:
            return ""
        if self.done and not self._arguments:
            self._arguments = ["{}"]
        new = "".join(self._arguments[self._taken :])
        self._taken = len(self._arguments)
        return new

    @property
    def _held(self) -> bool:
        """Whether arguments are in progress that are no object so far."""
        return self._key in ARGUMENTS and self._arguments[:1] != ["{"]

    @property
    def _arguments_ended(self) -> bool:
        ended = self._key in ARGUMENTS and self._depth == 1 and self._arguments[-1:] == ["}"]
        return (ended and not self._held) or self._key == FUNCTION_ENDED

    def _begin(self, char: str) -> None:
        if char == "{":
            self._depth = 1
        elif char not in WHITE:
            self.broken = True

    def _structure(self, char: str) -> None:
        if self._arguments_ended and char not in WHITE + ",}":  # the last brace is missing
            self.done, self.broken, self.spare = True, self.name is None, char
            return
        if self._wants_key and char not in WHITE + '",}':
            self.broken = char != "{"  # one may be doubled: Qwen2.5's template shows calls so
            return
        if char == "{" and self._is_around:
            self._around, self._key = True, None
            return
        if char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        if self._depth == 1 and char == ":" and self._key is None:
            key = self._read_key()
            self._key = "" if key in ARGUMENTS and self._arguments else key
        elif self._depth == 0 or (self._depth == 1 and char == ","):
            self._value()
            self.done = self._depth == 0 and not self._around
            if self._depth == 0 and self._around:
                self._depth, self._around, self._key = 1, False, FUNCTION_ENDED
            self.broken = self.done and self.name is None
        else:
            self._keep(char)

    @property
    def _is_around(self) -> bool:
        """Whether an object that begins now is the function of the one around it."""
        begins = self._depth == 1 and self._key == "function" and not self._scalar
        return begins and self.name is None and not self._arguments

    @property
    def _wants_key(self) -> bool:
        """Whether a top-level key may begin, before the object is known to be a call."""
        return self._depth == 1 and self._key is None and not self._scalar and self.name is None

    def _keep(self, written: str, *, quoted: bool = False) -> None:
        if self._depth == 1 and not self._text.in_string and written in WHITE:
            return  # between two values
        if self._key in ARGUMENTS:
            self._arguments += self._plain.feed(written, quoted=quoted)
            self.name = self.name or self._unknown
        else:
            self._scalar.append(written)

    def _value(self) -> None:
        """Finish a top-level value."""
        if self._key in NAMES and self.name is None:
            self._call(self._read())
        elif self._held:
            self._arguments = [as_object("".join(self._arguments))]
        self._key, self._scalar = None, []

    def _call(self, name: str | None) -> None:
        """Set the object's name, which is a call's if it is a tool's, or if arguments follow."""
        if self._tools is None or name in self._tools or self._arguments:
            self.name = name
        else:
            self._unknown = name

    def _read_key(self) -> str:
        """Return the key that was read.

        Once the name of the call is known, text before a key, such as a comment, has no effect.
        """
        text = "".join(self._scalar).strip()
        if self.name is not None:
            self._scalar = [text[max(0, text.rfind('"', 0, -1)) :]]
        return self._read() or ""

    def _read(self) -> str | None:
        """Return the string that was read; None: it is no string."""
        text, self._scalar = "".join(self._scalar).strip(), []
        try:
            value = parsed(text)
        except ValueError:
            value = None
        self.broken |= not isinstance(value, str) and self.name is None
        return value if isinstance(value, str) else None


def as_object(arguments: str) -> str:
    """Return arguments written as null or as a string of JSON as an object; others unchanged."""
    try:
        value = parsed(arguments)
        if value is None or (isinstance(value, str) and not value.strip()):
            return "{}"
        within = parsed(value) if isinstance(value, str) else None
    except ValueError:
        return arguments
    return str(value) if isinstance(within, dict) else arguments


def arguments_object(arguments: str) -> dict[str, Any]:
    """Return a call's arguments, in a history or an answer, as an object.

    Blank text and null are {}. What is no JSON object, or cannot be written as one (`parsed`), has
    the key `raw`: a call that a model got wrong must end neither the answer nor the conversation.
    """
    try:
        value = parsed(as_object(arguments)) if arguments.strip() else {}
    except ValueError:
        return {"raw": arguments}
    return value if isinstance(value, dict) else {"raw": arguments}
