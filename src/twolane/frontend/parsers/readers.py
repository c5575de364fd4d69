"""Parsers of one tool call, one for each format."""

import ast
import json
import re
from collections.abc import Callable, Collection, Mapping

from twolane.frontend.parsers.json_call import (
    WHITE,
    CallReader,
    JsonCall,
    JsonText,
    PlainJson,
    parsed,
)
from twolane.frontend.parsers.pieces import MAX_READ_AGAIN

Types = Mapping[str, Mapping[str, frozenset[str]]]
"""JSON types by tool and parameter, where a schema states them."""


class NamedCall(CallReader):
    """A name, a mark, and the arguments as a JSON object: `name[ARGS]{…}`, or without the mark.

    Args:
        header: matches all that is before the object; its group `name` is the tool's.
        end: mark after the header of a call without arguments; None: it has none.
    """

    def __init__(self, header: str, end: str | None = None) -> None:
        super().__init__()
        self._header, self._end_mark = re.compile(header), end
        self._head: list[str] = []
        self._depth = 0
        self._text, self._plain = JsonText(), PlainJson()

    def feed(self, char: str) -> None:
        """See `CallReader.feed`."""
        if self.name is None and char != "{":
            self._head.append(char)
            self._end_without_arguments()
            self.broken = self.name is None and len(self._head) > MAX_READ_AGAIN
            return
        if self.name is None:
            self.name = self._named_by("".join(self._head))
            self.broken = self.name is None
        if settled := self._text.settle(char):
            self._arguments += self._plain.feed(settled, quoted=True)
        within = self._text.in_string
        self._arguments += self._plain.feed(self._text.feed(char), quoted=within)
        if not within:
            self._depth += (char in "{[") - (char in "}]")
            self.done = self._depth == 0

    def _named_by(self, head: str) -> str | None:
        """Return the tool's name in the text before the object; None: no call begins so."""
        found = self._header.fullmatch(head)
        return found["name"] if found else None

    def _end_without_arguments(self) -> None:
        """Finish the call if the end mark has come before any object."""
        if self._end_mark is None or self._head[-1] != self._end_mark[-1]:
            return
        head = "".join(self._head)
        if head.endswith(self._end_mark):
            self.name = self._named_by(head.removesuffix(self._end_mark))
            self.done, self._arguments = self.name is not None, ["{}"]

    def end(self) -> None:
        """See `CallReader.end`."""
        self._arguments += self._plain.rest()


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
        """Return whether the text before the object may still become a call."""
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


class ChosenCall(CallReader):
    """A call that is read as one of two kinds by its first character: JSON's object, or another.

    Args:
        other: makes what reads the other kind.
        before: characters in front of the call that are no part of it.
        tools: see `JsonCall`; with them, a list without calls is none.
    """

    def __init__(
        self,
        other: Callable[[], CallReader],
        before: str = WHITE,
        tools: Collection[str] | None = None,
    ) -> None:
        super().__init__()
        self._other, self._before, self._tools = other, before, tools
        self._reader: CallReader | None = None
        self._listed = False
        """Whether a list has begun."""

    def feed(self, char: str) -> None:
        """See `CallReader.feed`."""
        if self._reader is None:
            if char in self._before:
                self._listed |= char == "["
                return
            if char == "]" and self._listed and self._tools is None:
                self.done = True
                return
            self._reader = JsonCall(self._tools) if char == "{" else self._other()
        self._reader.feed(char)
        self._follow(self._reader)

    def end(self) -> None:
        """See `CallReader.end`."""
        if self._reader is not None:
            self._reader.end()
            self._follow(self._reader)

    def take(self) -> str:
        """See `CallReader.take`."""
        return self._reader.take() if self._reader else ""

    def _follow(self, reader: CallReader) -> None:
        self.name, self.done = reader.name, reader.done
        self.broken, self.spare = reader.broken, reader.spare


def listed_call(_: Types) -> CallReader:
    """Return what reads Mistral's call: an object of a list, as in `[{"name": …}]`, or
    `name[ARGS]{…}`."""
    header = r"(?P<name>[\w.:-]+)\s*+(\[CALL_ID\][\w-]*)?(\[ARGS\])?\s*"
    return ChosenCall(lambda: NamedCall(header), WHITE + "[")


def listed_object(types: Types) -> CallReader:
    """Return what reads Llama's call: an object, alone or of a list, or after `<function=` the
    name of a tool, `>` and its arguments."""
    names = "|".join(map(re.escape, types))
    header = rf"(?P<name>{names})>\s*" if names else r"(?P<name>[\w.:-]+)>\s*"
    return ChosenCall(lambda: NamedCall(header), WHITE + "[", types)


def tagged_call(types: Types) -> CallReader:
    """Return what reads the call after `<tool_call>`, in JSON or as Qwen3-Coder writes it: models
    were trained with both and mix them up. Objects may be in a list."""
    return ChosenCall(lambda: XmlCall(types), WHITE + "[")


SEP = "<｜tool▁sep｜>"
"""DeepSeek's mark between the kind of a call and its name."""
DEEPSEEK_HEADER = (
    rf"(?=[\s\S]*{SEP})\s*(function{SEP}\s*)?(?P<name>[^\s<]([^\n<]*[^\s<])?)\s*({SEP})?"
    r"\s*(```(json)?\s*)?"
)
"""DeepSeek's text before the arguments: of V3, `function<｜tool▁sep｜>name` and a line's end, or of
V3.1, `name<｜tool▁sep｜>`."""


def deepseek_call(_: Types) -> CallReader:
    """Return what reads DeepSeek's call."""
    return NamedCall(DEEPSEEK_HEADER, "<｜tool▁call▁end｜>")


BEGIN_FUNCTION = "<function="
FUNCTION = re.compile(rf"\s*{BEGIN_FUNCTION}(?P<name>[^>\n]+)>")
INSIDE = ("<parameter=", "</function>", "</tool_call>", "{")
"""Beginnings of what follows a function's name; anything else makes the mark part of a text."""
BEGIN_PARAMETER = re.compile(r"<parameter=(?P<name>[^<>\n]+)>\Z")
END_PARAMETER, END_FUNCTION, END_CALL = "</parameter>", "</function>", "</tool_call>"
END_VALUE = re.compile(
    rf"\n?{END_PARAMETER}\s*({END_FUNCTION}|{END_CALL}|<parameter=[^<>\n]+>)\Z"
    rf"|\n?{END_FUNCTION}\s*{END_CALL}\Z|\n[ \t]*<parameter=(?P<unclosed>[^<>\n]+)>\Z"
)
"""End of a value: its mark, if another mark follows, which models leave out at times."""
ENDED = re.compile(rf"\n?{END_PARAMETER}\s*\Z")
"""End of the last value."""
MAY_END = re.compile(rf"\n?[ \t]*(({END_PARAMETER}|{END_FUNCTION})\s*)?(<[^<>\n]*)?\Z")
"""Text that may become the end of a value."""
SPACE_BEHIND = 8
"""Most characters of white space after a name on its line."""
MAX_MARK_LENGTH = 512
"""Most characters that are searched for a mark."""
MAX_LITERAL_LENGTH = 1 << 16
"""Most characters of a value that is parsed as Python."""


class XmlCall(CallReader):
    """Qwen3-Coder's call: `<function=name>`, parameters between marks, `</function>`.

    Values are plain text. Those of parameters that are no strings are read as JSON where they can
    be, when they have ended; strings are passed on as they come. A value may have its own end
    within it, unless a mark follows, and the end of a call, unless the end of the list does. Of two
    parameters by one name the first counts.
    """

    def __init__(self, types: Types) -> None:
        super().__init__()
        self._begun_name: str | None = None
        """Name of the function, which is a call's if the text continues as one."""
        self._types = types
        self._pieces: list[str] = []
        """Text that is not parsed yet."""
        self._end = ""
        """Last characters of the text."""
        self._parameter: str | None = None
        """Parameter whose value is in progress."""
        self._begun = False
        """Whether part of its value has been emitted."""
        self._known: list[str] = []
        """Parameters so far."""

    def feed(self, char: str) -> None:
        """See `CallReader.feed`."""
        self._pieces.append(char)
        self._end = (self._end + char)[-MAX_MARK_LENGTH:]
        if self._begun_name is None:
            self._head(char)
        elif self.name is None:
            self._inside()
        elif char == ">":
            self._mark()

    def end(self) -> None:
        """See `CallReader.end`. Arguments are cut off if the last one has not ended."""
        if self.name is None and not "".join(self._pieces).strip():
            self.name = self._begun_name
        if self._parameter is not None and (ended := ENDED.search(self._end)):
            self._finish(len(ended[0]))
        if self._parameter is None and not self.done:
            self._close()
        elif self._parameter is not None and not self._is_text and not self._known:
            self._arguments.append(self._key)

    def take(self) -> str:
        """See `CallReader.take`."""
        if self._parameter is not None and self._is_text:
            self._pass_on()
        return super().take()

    @property
    def _kinds(self) -> frozenset[str] | None:
        return self._types.get(self.name or "", {}).get(self._parameter or "")

    @property
    def _is_text(self) -> bool:
        """Whether the parameter's type is string and its value counts."""
        return self._kinds == frozenset(("string",)) and self._parameter not in self._known

    def _head(self, char: str) -> None:
        """Process a character of the mark before the parameters."""
        if char == ">":
            match = FUNCTION.fullmatch("".join(self._pieces))
            self.broken = match is None
            if match:
                self._begun_name, self._pieces, self._end = unquoted(match["name"]), [], ""
            return
        begun = "".join(self._pieces).lstrip()
        if not begun:
            self._pieces = []  # or else all of it is read again after each character
        known = BEGIN_FUNCTION.startswith(begun[: len(BEGIN_FUNCTION)])
        self.broken = not known or "\n" in begun or len(begun) > MAX_READ_AGAIN

    def _inside(self) -> None:
        """Decide by the text after the name whether a call has begun."""
        begun = "".join(self._pieces).lstrip()
        if not begun:
            self._pieces = []  # or else all of it is read again after each character
        elif begun.startswith(INSIDE):
            self.name = self._begun_name
            if begun.endswith(">"):
                self._mark()
        else:
            self.broken = not any(mark.startswith(begun) for mark in INSIDE)

    def _mark(self) -> None:
        """Process the end of a possible mark."""
        last = self._end[self._end.rfind("<") :]
        if last not in (END_PARAMETER, END_FUNCTION, END_CALL) and "<parameter=" not in last:
            return
        if self._parameter is not None:
            ended = END_VALUE.search(self._end)
            if ended is None or not self._is_parameter(ended["unclosed"]):
                return
            self._finish(len(ended[0]))
            self.done = ended[0].endswith((END_FUNCTION, END_CALL))
        else:
            self.done = self._end.endswith((END_FUNCTION, END_CALL))
        if self.done:
            self._close()
        elif begun := BEGIN_PARAMETER.search(self._end):
            self._parameter, self._begun = unquoted(begun["name"]), False
            self._pieces = []

    def _is_parameter(self, name: str | None) -> bool:
        """Return whether a line within a value may begin a parameter of this name; None: no
        name."""
        known = self._types.get(self.name or "")
        return name is None or not known or unquoted(name) in known

    def _finish(self, mark: int) -> None:
        """Finish a value that ended with a mark of `mark` characters."""
        value = "".join(self._pieces)
        value = value[: len(value) - mark]
        name = str(self._parameter)
        if self._is_text:
            self._write(value)
            self._arguments.append('"')
        elif name not in self._known:
            read = typed(value.removeprefix("\n"), self._kinds)
            self._arguments.append(f"{self._key}{json.dumps(read, ensure_ascii=False)}")
        self._known.append(name)
        self._parameter, self._pieces = None, []

    def _pass_on(self) -> None:
        """Emit the part of a text value that cannot become its end."""
        text = "".join(self._pieces)
        near = max(0, len(text) - MAX_MARK_LENGTH)
        match = MAY_END.search(text, near)
        held = len(text) if match is None else match.start()
        if held:
            self._write(text[:held])
            self._pieces = [text[held:]]

    def _write(self, text: str) -> None:
        """Emit part of a text value."""
        if not self._begun:
            self._arguments.append(f'{self._key}"')
            self._begun, text = True, text.removeprefix("\n")
        self._arguments.append(json.dumps(text, ensure_ascii=False)[1:-1])

    @property
    def _key(self) -> str:
        """Separator and name before the value."""
        separator = ", " if self._known else "{"
        return f"{separator}{json.dumps(self._parameter, ensure_ascii=False)}: "

    def _close(self) -> None:
        """Finish the parameters."""
        body = "".join(self._pieces)
        for mark in (END_CALL, END_FUNCTION):
            body = body.removesuffix(mark).rstrip()
        given = None if self._known else whole_object(body)
        self._arguments.append(given or ("}" if self._known else "{}"))


def unquoted(name: str) -> str:
    """Return a name without quotes and white space around it."""
    return name.strip().strip("\"'")


def whole_object(text: str) -> str | None:
    """Return arguments that are a JSON object as a whole; None: they are not."""
    try:
        return text.strip() if isinstance(parsed(text), dict) else None
    except ValueError:
        return None


def typed(value: str, kinds: frozenset[str] | None) -> object:
    """Return a value written as plain text as JSON of one of the types; None: of any type."""
    word = value.strip().lower()
    if kinds is not None and "string" not in kinds and word in PYTHON_WORDS:
        read = PYTHON_WORDS[word]
        if kinds & KINDS[type(read)]:
            return read
    try:
        read = parsed(value)
    except ValueError:
        return value if kinds is None or "string" in kinds else literal(value)
    fits = kinds is None or "string" not in kinds or kinds & KINDS[type(read)]
    return read if fits else value


def literal(value: str) -> object:
    """Return a list or object in Python's syntax; other text unchanged."""
    if not value.lstrip().startswith(("[", "{")) or len(value) > MAX_LITERAL_LENGTH:
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
"""JSON types by Python type."""
PYTHON_WORDS: Mapping[str, bool | None] = {"true": True, "false": False, "none": None}
"""Python's constants, which models write for values that are no strings, by lower-case names."""
