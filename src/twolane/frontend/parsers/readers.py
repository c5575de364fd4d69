"""Readers of one tool call, for each way in which models write them."""

import json
import re
from collections.abc import Mapping
from typing import Protocol

from twolane.frontend.parsers.json_call import WHITE, JsonCall

Types = Mapping[str, Mapping[str, frozenset[str]]]
"""The JSON types of each parameter of each tool, by the tool's name, where its schema says some."""


class CallReader(Protocol):
    """Reads one call, character by character; what it holds depends on the text so far alone."""

    @property
    def name(self) -> str | None:
        """The tool's name, once it is known."""
        ...

    @property
    def done(self) -> bool:
        """Whether the call has ended."""
        ...

    @property
    def broken(self) -> bool:
        """Whether the text is no call, whatever comes."""
        ...

    def feed(self, char: str) -> None:
        """Take the next character."""
        ...

    def take(self) -> str:
        """Return the arguments' characters since the last call, once the name is known."""
        ...


class NamedCall:
    """A name, a mark, and the arguments as a JSON object: `name[ARGS]{…}`, or without the mark.

    Args:
        header: matches all that is before the object; its group `name` is the tool's.
    """

    def __init__(self, header: str) -> None:
        self.name: str | None = None
        self.done = self.broken = False
        self._header = re.compile(header)
        self._head: list[str] = []
        self._object: list[str] = []
        self._taken = self._depth = 0
        self._in_string = self._escaped = False

    def feed(self, char: str) -> None:
        """See `CallReader.feed`."""
        if self.name is None and char != "{":
            self._head.append(char)
            return
        if self.name is None:
            found = self._header.fullmatch("".join(self._head))
            self.broken = found is None
            self.name = found["name"] if found else None
        self._object.append(char)
        self._scan(char)

    def take(self) -> str:
        """See `CallReader.take`."""
        new, self._taken = "".join(self._object[self._taken :]), len(self._object)
        return new

    def _scan(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif self._in_string:
            self._escaped = char == "\\"
            self._in_string = char != '"'
        elif char == '"':
            self._in_string = True
        else:
            self._depth += (char in "{[") - (char in "}]")
            self.done = self._depth == 0


class ListedCall:
    """Mistral's call: an object of a list, as in `[{"name": …}]`, or `name[ARGS]{…}`."""

    def __init__(self) -> None:
        self._reader: CallReader | None = None

    @property
    def name(self) -> str | None:
        """See `CallReader.name`."""
        return None if self._reader is None else self._reader.name

    @property
    def done(self) -> bool:
        """See `CallReader.done`."""
        return self._reader is not None and self._reader.done

    @property
    def broken(self) -> bool:
        """See `CallReader.broken`."""
        return self._reader is not None and self._reader.broken

    def feed(self, char: str) -> None:
        """See `CallReader.feed`."""
        if self._reader is None:
            if char in WHITE or char == "[":
                return
            named = NamedCall(r"(?P<name>[\w.-]+?)(\[CALL_ID\][\w-]*)?(\[ARGS\])?\s*")
            self._reader = JsonCall() if char == "{" else named
        self._reader.feed(char)

    def take(self) -> str:
        """See `CallReader.take`."""
        return self._reader.take() if self._reader else ""


FUNCTION = re.compile(r"\s*<function=(?P<name>[^>\n]+)>")
PARAMETER = re.compile(r"\s*<parameter=(?P<name>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>", re.S)
END_FUNCTION = "</function>"


class XmlCall:
    """Qwen3-Coder's call: `<function=name>`, parameters between marks, `</function>`.

    Values are plain text. Those of parameters that are no strings are read as JSON where they can
    be. The arguments are passed on when the call has ended.
    """

    def __init__(self, types: Types) -> None:
        self.name: str | None = None
        self.done = self.broken = False
        self._types = types
        self._text = ""
        self._body = 0
        """Where in the text the parameters begin."""
        self._arguments = ""

    def feed(self, char: str) -> None:
        """See `CallReader.feed`."""
        self._text += char
        if self.name is None and char == ">":
            found = FUNCTION.fullmatch(self._text)
            self.broken = found is None
            if found:
                self.name, self._body = found["name"].strip(), len(self._text)
        elif self.name is None and char == "\n":
            self.broken = bool(self._text.strip())
        elif self.name is not None and char == ">" and self._text.endswith(END_FUNCTION):
            self.done = True
            self._arguments = self._read(self._text[self._body : -len(END_FUNCTION)])

    def take(self) -> str:
        """See `CallReader.take`."""
        new, self._arguments = self._arguments, ""
        return new

    def _read(self, body: str) -> str:
        types = self._types.get(self.name or "", {})
        found = {each["name"].strip(): each["value"] for each in PARAMETER.finditer(body)}
        values = {name: typed(value, types.get(name)) for name, value in found.items()}
        return json.dumps(values, ensure_ascii=False)


def typed(value: str, kinds: frozenset[str] | None) -> object:
    """Return a value that was written as plain text, as JSON of one of the types that are wanted;
    None: all are."""
    if kinds == frozenset(("boolean",)):
        value = value.lower()  # some write Python's True
    try:
        read = json.loads(value)
    except ValueError:
        return value
    fits = kinds is None or "string" not in kinds or kinds & KINDS[type(read)]
    return read if fits else value


KINDS: Mapping[type, frozenset[str]] = {
    bool: frozenset(("boolean",)),
    dict: frozenset(("object",)),
    float: frozenset(("number",)),
    int: frozenset(("integer", "number")),
    list: frozenset(("array",)),
    str: frozenset(),  # quoted text, where text is wanted, has its quotes
    type(None): frozenset(("null",)),
}
"""The JSON types of what is read as JSON."""
