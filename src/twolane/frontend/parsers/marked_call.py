"""Parser of tool calls whose arguments are plain text between marks."""

import json
import re
from typing import NamedTuple

from twolane.frontend.parsers.json_call import CallReader
from twolane.frontend.parsers.pieces import MAX_READ_AGAIN
from twolane.frontend.parsers.readers import ChosenCall, Types, typed

LONGEST_MARK = len("</atem:parameter>")
"""Characters of the longest mark."""


class CallMarks(NamedTuple):
    """What a call is written between. Expressions match whole texts from the end of the part before
    them; each ends with ">"."""

    head: re.Pattern[str]
    """Matches the text up to where the name is certain; its group `name` is the tool's, and what
    its group `rest` matches belongs to the arguments."""
    argument: re.Pattern[str]
    """Matches an argument with the groups `key` and `value`."""
    end_of_argument: str
    """The mark after a value."""
    end: str
    """The mark after the last argument."""


GLM45 = CallMarks(
    re.compile(r"\s*(?P<name>[^\s<>{}]+)\s*(?P<rest><arg_key>|</tool_call>)"),
    re.compile(
        r"\s*<arg_key>(?P<key>[^<>]+)</arg_key>\s*<arg_value>(?P<value>.*)</arg_value>", re.DOTALL
    ),
    "</arg_value>",
    "</tool_call>",
)
"""The call of GLM-4.5 and later, after `<tool_call>`."""
MINIMAX_M2 = CallMarks(
    re.compile(r"\s*<invoke name=\"?(?P<name>[^<>\"]+)\"?>(?P<rest>)"),
    re.compile(r"\s*<parameter name=\"?(?P<key>[^<>\"]+)\"?>(?P<value>.*)</parameter>", re.DOTALL),
    "</parameter>",
    "</invoke>",
)
"""The call of MiniMax M2, in a list between `<minimax:tool_call>` and its end."""
MINICPM5 = CallMarks(
    re.compile(r"\s*(?P<name>[^\s<>\"]+)\"?>(?P<rest>)"),
    re.compile(
        r"\s*<param name=\"?(?P<key>[^<>\"]+)\"?>"
        r"(?:(?P<quoted><!\[CDATA\[)|(?!<!\[CDATA\[))(?P<value>.*)(?(quoted)\]\]>)</param>",
        re.DOTALL,
    ),
    "</param>",
    "</function>",
)
"""The call of MiniCPM5, after `<function name="`; text with marks in it is in a CDATA section."""
ATEM = CallMarks(
    re.compile(r"\s*<atem:invoke name=\"?(?P<name>[^<>\"]+)\"?>(?P<rest>)"),
    re.compile(
        r"\s*<atem:parameter name=\"?(?P<key>[^<>\"]+)\"?>(?P<value>.*)</atem:parameter>",
        re.DOTALL,
    ),
    "</atem:parameter>",
    "</atem:invoke>",
)
"""The call of Muse Glimmer, in a list between `<atem:function_calls>` and its end."""


class MarkedCall(CallReader):
    """Parses one call whose arguments are plain text, each passed on when it has ended.

    Values of parameters that are no strings are read as JSON where they can be. Of two arguments by
    one name the first counts.

    Args:
        marks: What the call is written between.
        types: Types of the parameters of each tool.
    """

    def __init__(self, marks: CallMarks, types: Types) -> None:
        super().__init__()
        self._marks, self._types = marks, types
        self._text: list[str] = []
        """Characters that are not parsed yet."""
        self._last = ""
        """The last of them, as many as the longest mark has."""
        self._known: set[str] = set()

    def feed(self, char: str) -> None:
        """See `CallReader.feed`."""
        if self.done or self.broken:
            return
        self._text.append(char)
        self._last = (self._last + char)[-LONGEST_MARK:]
        if char == ">":
            self._mark()
        elif self.name is None and len(self._text) > MAX_READ_AGAIN:
            self.broken = True

    def end(self) -> None:
        """See `CallReader.end`. A call that is cut off after its name has no arguments."""
        name = "".join(self._text).strip()
        if self.name is None and name in self._types:
            self.name, self._arguments = name, ["{}"]

    def _mark(self) -> None:
        """Process the end of a possible mark."""
        if self.name is None:
            found = self._marks.head.fullmatch("".join(self._text))
            if found is None:
                self.broken = True  # every mark before the name ends the head
                return
            self.name, self._text = found["name"].strip(), list(found["rest"])
            self._last = found["rest"]
        if self._last.endswith(self._marks.end_of_argument):
            found = self._marks.argument.fullmatch("".join(self._text))
            if found is not None:
                self._argument(found["key"].strip(), found["value"])
        elif self._ends_here:
            self._arguments.append("}" if self._known else "{}")
            self.done = True

    @property
    def _ends_here(self) -> bool:
        """Whether the text is the mark after the last argument."""
        end = self._marks.end
        return self._last.endswith(end) and "".join(self._text).strip() == end

    def _argument(self, key: str, value: str) -> None:
        """Pass an argument on."""
        self._text, self._last = [], ""
        if key in self._known:
            return
        kinds = self._types.get(str(self.name), {}).get(key)
        begin = ", " if self._known else "{"
        read = json.dumps(typed(value, kinds), ensure_ascii=False)
        self._arguments.append(f"{begin}{json.dumps(key, ensure_ascii=False)}: {read}")
        self._known.add(key)


def glm45_call(types: Types) -> CallReader:
    """Return what reads the call of GLM-4.5 after its mark, or an object in JSON."""
    return ChosenCall(lambda: MarkedCall(GLM45, types))


def minimax_call(types: Types) -> CallReader:
    """Return what reads the call of MiniMax M2."""
    return MarkedCall(MINIMAX_M2, types)


def minicpm5_call(types: Types) -> CallReader:
    """Return what reads the call of MiniCPM5."""
    return MarkedCall(MINICPM5, types)


def atem_call(types: Types) -> CallReader:
    """Return what reads the call of Muse Glimmer."""
    return MarkedCall(ATEM, types)
