"""Readers of one tool call, for each way in which models write them."""

import ast
import json
import re
from collections.abc import Mapping
from typing import Protocol

from twolane.frontend.parsers.json_call import WHITE, JsonCall, in_string, parsed

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

    @property
    def spare(self) -> str:
        """What was fed and belongs no more to the call."""
        ...

    def feed(self, char: str) -> None:
        """Take the next character."""
        ...

    def end(self) -> None:
        """Nothing follows: read what has come."""
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
        self.spare = ""
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
        self._object.append(in_string(char) if self._in_string else char)
        self._scan(char)

    def end(self) -> None:
        """See `CallReader.end`: what has come was passed on."""

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


class NamedLine(NamedCall):
    """GLM-4-0414's call: the name of a tool on a line, and the arguments as a JSON object below.

    No mark opens it: a line that is no tool's name, or is followed by no object, is text.

    Args:
        types: their keys are the names of the tools.
    """

    def __init__(self, types: Types) -> None:
        super().__init__(r"(?P<name>.*)")
        self._names = tuple(types)
        self._longest = SPACE_BEHIND + max(map(len, self._names), default=0)
        self._line = ""
        self._ended = False

    def feed(self, char: str) -> None:
        """See `CallReader.feed`."""
        if self.name is None and not (self._ended and char == "{"):
            self.broken = not self._goes_on(char)
            self.spare = char if self.broken else ""
            return
        if self.name is None:
            self._head = [self._line.rstrip()]
        super().feed(char)

    def _goes_on(self, char: str) -> bool:
        """Whether what is in front of the object may still become a call."""
        if (not self._line or self._ended) and char in WHITE:
            return True
        if char == "\n":
            self._ended = self._line.rstrip() in self._names
            return self._ended
        if self._ended or len(self._line) > self._longest:
            return False
        self._line += char
        name = self._line.rstrip()
        return any(each == name or each.startswith(self._line) for each in self._names)


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

    @property
    def spare(self) -> str:
        """See `CallReader.spare`."""
        return "" if self._reader is None else self._reader.spare

    def feed(self, char: str) -> None:
        """See `CallReader.feed`."""
        if self._reader is None:
            if char in WHITE or char == "[":
                return
            named = NamedCall(r"(?P<name>[\w.-]+?)(\[CALL_ID\][\w-]*)?(\[ARGS\])?\s*")
            self._reader = JsonCall() if char == "{" else named
        self._reader.feed(char)

    def end(self) -> None:
        """See `CallReader.end`: what has come was passed on."""

    def take(self) -> str:
        """See `CallReader.take`."""
        return self._reader.take() if self._reader else ""


FUNCTION = re.compile(r"\s*<function=(?P<name>[^>\n]+)>")
PARAMETER = re.compile(
    r"<parameter=(?P<name>[^>\n]+)>\n?(?P<value>.*?)"
    r"(?P<end>\n?</parameter>|(?=\n[ \t]*<parameter=[^>\n]+>)|\n?\Z)",
    re.S,
)
"""A parameter; models leave out the mark behind it at times."""
BEGIN_PARAMETER = re.compile(r"<parameter=[^>\n]+>\Z")
END_PARAMETER, END_FUNCTION, END_CALL = "</parameter>", "</function>", "</tool_call>"
ENDS = re.compile(rf"({END_FUNCTION}\s*)?({END_CALL})?\Z")
BOTH_ENDS = re.compile(rf"{END_FUNCTION}\s*{END_CALL}\Z")
SPACE_BEHIND = 8
"""Characters of white space that may be behind a name on its line."""
LONGEST_MARK = 512
"""Characters in which a mark is looked for."""
LONGEST_LITERAL = 1 << 16
"""Characters up to which a value is tried as Python's."""


class XmlCall:
    """Qwen3-Coder's call: `<function=name>`, parameters between marks, `</function>`.

    Values are plain text. Those of parameters that are no strings are read as JSON where they can
    be. The arguments are passed on when the call has ended. A value may have the end of a call
    within it, unless the end of the list follows.
    """

    def __init__(self, types: Types) -> None:
        self.name: str | None = None
        self.done = self.broken = False
        self.spare = ""
        self._types = types
        self._pieces: list[str] = []
        """The text since the name."""
        self._end = ""
        """The end of the text."""
        self._within = False
        """Whether a parameter has begun and not ended."""
        self._arguments = ""

    def feed(self, char: str) -> None:
        """See `CallReader.feed`."""
        self._pieces.append(char)
        self._end = (self._end + char)[-LONGEST_MARK:]
        if self.name is None and char == ">":
            found = FUNCTION.fullmatch("".join(self._pieces))
            self.broken = found is None
            if found:
                self.name, self._pieces, self._end = found["name"].strip(), [], ""
        elif self.name is None and char == "\n":
            self.broken = bool("".join(self._pieces).strip())
        elif self.name is not None and char == ">":
            self._mark()

    def end(self) -> None:
        """See `CallReader.end`. Arguments of which the last has not ended are cut, too."""
        arguments = self._read()
        self._arguments = arguments[:-1] if self._within else arguments

    def take(self) -> str:
        """See `CallReader.take`."""
        new, self._arguments = self._arguments, ""
        return new

    def _mark(self) -> None:
        """A mark may have ended."""
        if self._end.endswith(END_PARAMETER):
            self._within = False
        elif not self._within and BEGIN_PARAMETER.search(self._end):
            self._within = True
        ended = self._end.endswith((END_FUNCTION, END_CALL)) and not self._within
        if ended or BOTH_ENDS.search(self._end):
            self.done, self._within = True, False
            self._arguments = self._read()

    def _read(self) -> str:
        body = ENDS.sub("", "".join(self._pieces))
        types = self._types.get(self.name or "", {})
        found = [each for each in PARAMETER.finditer(body) if each["end"] or not self._within]
        if not found and (given := whole_object(body)) is not None:
            return given
        values = {each["name"].strip(): each["value"] for each in found}
        read = {name: typed(value, types.get(name)) for name, value in values.items()}
        return json.dumps(read, ensure_ascii=False)


def whole_object(text: str) -> str | None:
    """Return arguments that are written as one object in JSON; None: they are not."""
    try:
        return text.strip() if isinstance(parsed(text), dict) else None
    except ValueError:
        return None


def typed(value: str, kinds: frozenset[str] | None) -> object:
    """Return a value that was written as plain text, as JSON of one of the types that are wanted;
    None: all are."""
    if kinds == frozenset(("boolean",)):
        value = value.lower()  # some write Python's True
    try:
        read = parsed(value)
    except ValueError:
        return value if kinds is None or "string" in kinds else literal(value)
    fits = kinds is None or "string" not in kinds or kinds & KINDS[type(read)]
    return read if fits else value


def literal(value: str) -> object:
    """Return a list or an object that was written as Python writes it; other text as it is."""
    if not value.lstrip().startswith(("[", "{")) or len(value) > LONGEST_LITERAL:
        return value
    try:
        return parsed(json.dumps(ast.literal_eval(value.strip())))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return value


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
