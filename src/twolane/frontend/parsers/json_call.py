"""A tool call in JSON, read as it comes: its name, then its arguments."""

import json
from typing import Any, NoReturn

WHITE = " \t\r\n"
NAMES = ("name", "function")
ARGUMENTS = ("arguments", "parameters")


def parsed(text: str) -> Any:
    """Return a value that a model wrote in JSON.

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
    raise ValueError(f"{name} is not JSON")


def in_string(char: str) -> str:
    """Return a character as JSON has it in strings; models leave line ends and tabs as they are."""
    return char if char >= " " else json.dumps(char)[1:-1]


class JsonCall:
    """Scans one object such as {"name": "f", "arguments": {…}} character by character.

    The arguments are passed on as they are written, as soon as the name is known; those of a call
    that has none are {}. What begins as no object is passed on when it has ended (`as_object`).

    Invariant: `name` and the characters of `arguments` depend on the text so far alone.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.done = False
        """Whether the object has been closed."""
        self.broken = False
        """Whether it is no such object, whatever comes."""
        self.spare = ""
        """What was fed and belongs no more to the call."""
        self._depth = 0
        self._in_string = self._escaped = False
        self._key: str | None = None
        """The key at the top whose value is being read."""
        self._scalar: list[str] = []
        """The characters of the string or value being read at the top."""
        self._arguments: list[str] = []
        self._taken = 0

    def feed(self, char: str) -> None:
        """Take the next character."""
        if self.done or self.broken:
            return
        if self._depth == 0:
            self._begin(char)
        elif self._in_string:
            self._string(char)
        else:
            self._structure(char)

    def end(self) -> None:
        """Nothing follows: what has come was passed on."""

    def take(self) -> str:
        """Return the arguments' characters since the last call, once the name is known."""
        if self.name is None or self._held:
            return ""
        if self.done and not self._arguments:
            self._arguments = ["{}"]
        new = "".join(self._arguments[self._taken :])
        self._taken = len(self._arguments)
        return new

    @property
    def _held(self) -> bool:
        """Whether arguments that are no object, so far, are still being written."""
        return self._key in ARGUMENTS and self._arguments[:1] != ["{"]

    @property
    def _arguments_ended(self) -> bool:
        ended = self._key in ARGUMENTS and self._depth == 1 and self._arguments[-1:] == ["}"]
        return ended and not self._held

    def _begin(self, char: str) -> None:
        if char == "{":
            self._depth = 1
        elif char not in WHITE:
            self.broken = True

    def _string(self, char: str) -> None:
        self._keep(char)
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False

    def _structure(self, char: str) -> None:
        if self._arguments_ended and char not in WHITE + ",}":  # the last brace is missing
            self.done, self.broken, self.spare = True, self.name is None, char
            return
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        if self._depth == 1 and char == ":" and self._key is None:
            key = self._read()
            self._key = "" if key in ARGUMENTS and self._arguments else key
        elif self._depth == 0 or (self._depth == 1 and char == ","):
            self._value()
            self.done = self._depth == 0
            self.broken = self.done and self.name is None
        else:
            self._keep(char)

    def _keep(self, char: str) -> None:
        if self._depth == 1 and not self._in_string and char in WHITE:
            return  # between two values
        if self._key in ARGUMENTS:
            self._arguments.append(in_string(char) if self._in_string else char)
        else:
            self._scalar.append(char)

    def _value(self) -> None:
        """A value at the top has ended."""
        if self._key in NAMES and self.name is None:
            self.name = self._read()
        elif self._held:
            self._arguments = [as_object("".join(self._arguments))]
        self._key, self._scalar = None, []

    def _read(self) -> str | None:
        """The string that was read, if it is one."""
        text, self._scalar = "".join(self._scalar).strip(), []
        try:
            value = parsed(text)
        except ValueError:
            value = None
        self.broken |= not isinstance(value, str)
        return value if isinstance(value, str) else None


def as_object(arguments: str) -> str:
    """Return arguments that were written as null or as a string of JSON as the object that they
    mean; others as they are."""
    try:
        value = parsed(arguments)
        if value is None or (isinstance(value, str) and not value.strip()):
            return "{}"
        within = parsed(value) if isinstance(value, str) else None
    except ValueError:
        return arguments
    return str(value) if isinstance(within, dict) else arguments
