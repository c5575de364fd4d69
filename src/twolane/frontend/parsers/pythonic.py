"""Parser of tool calls in Python's syntax: a list such as `[f(a=1), g(b="x")]`."""

import ast
import json
import re
import warnings
from collections.abc import Mapping
from typing import Any

from twolane.frontend.parsers.json_call import WHITE, CallReader, parsed
from twolane.frontend.parsers.readers import MAX_LITERAL_LENGTH, Types

ARGUMENT_NAME = re.compile(r"[^\s=(),'\"\[\]{}]+")
ARGUMENT = re.compile(rf"(?P<name>{ARGUMENT_NAME.pattern})\s*=(?!=)(?P<value>.+)", re.DOTALL)
LINE_ENDS = {"\n": "\\n", "\r": "\\r"}
"""Escapes of line ends in strings, which models leave out."""
BEHIND_STRINGS = ",:)]}\"'"
"""What follows a string, with or without white space between them."""
WORDS: Mapping[str, bool | None] = {"true": True, "false": False, "null": None}
"""Python's values of JSON's literals, which models mix."""


class PythonicCall(CallReader):
    """Parses one call of such a list, which must be of a known tool and name its arguments.

    Arguments are passed on as JSON, each when it has ended. Values are literals of Python or JSON;
    nothing is computed, and what is no literal is text.

    Args:
        types: their keys are the names of the tools.
    """

    def __init__(self, types: Types) -> None:
        super().__init__()
        self._names = tuple(types)
        self._begun = ""
        """Name so far."""
        self._within = False
        """Whether the opening parenthesis has come."""
        self._argument: list[str] = []
        """Characters of the current argument."""
        self._quote = ""
        """Quote that ends the open string; empty: no string is open."""
        self._escaped = False
        self._closing = ""
        """Such a mark and the white space after it, while it is open whether it ends the string:
        models leave apostrophes as they are."""
        self._depth = 0
        """Number of brackets that are open within the argument."""
        self._known: set[str] = set()
        """Names of the arguments so far; the first one of a name counts."""
        self._spoilt = False
        """Whether something was no argument; the object is then left open, like that of a call cut
        off."""

    def feed(self, char: str) -> None:
        """See `CallReader.feed`."""
        if self.done or self.broken:
            return
        if not self._within:
            self._head(char)
        elif self._quote:
            self._string(char)
        else:
            self._structure(char)

    def _head(self, char: str) -> None:
        """Process a character before the arguments."""
        if char == "(":
            self._within, self.broken = True, self._begun not in self._names
        elif char not in WHITE:
            self._begun += char
            self.broken = not any(name.startswith(self._begun) for name in self._names)
        elif self._begun:
            self.broken = self._begun not in self._names

    def _string(self, char: str) -> None:
        if self._closing and char in WHITE:
            self._closing += char
            return
        closing, self._closing = self._closing, ""
        if closing and char in BEHIND_STRINGS:
            self._argument.append(closing)
            self._quote = ""
            self._structure(char)
            return
        if closing:
            self._argument += ["\\", *(LINE_ENDS.get(each, each) for each in closing)]
        if char == self._quote and not self._escaped:
            self._closing = char
            return
        self._argument.append(LINE_ENDS.get(char, char))
        self._escaped = char == "\\" and not self._escaped

    def _structure(self, char: str) -> None:
        """Process a character outside of strings."""
        if self._depth == 0 and char in ",)":
            self._take()
            if char == ")" and not self.broken:
                self._close()
            return
        self._quote = char if char in "\"'" else ""
        self._depth += (char in "([{") - (char in ")]}" and self._depth > 0)
        self._argument.append(char)

    def _take(self) -> None:
        """Finish an argument."""
        text, self._argument = "".join(self._argument).strip(), []
        match = ARGUMENT.fullmatch(text)
        if match is None:
            self._spoilt |= bool(text)
            self.broken = self._spoilt and self.name is None
            return
        self.name, name = self._begun, match["name"]
        if name not in self._known:
            key = json.dumps(name, ensure_ascii=False)
            value = json.dumps(value_of(match["value"].strip()), ensure_ascii=False)
            self._arguments.append(f"{', ' if self._known else '{'}{key}: {value}")
            self._known.add(name)

    def _close(self) -> None:
        self.name, self.done = self._begun, True
        if not self._spoilt:
            self._arguments.append("}" if self._known else "{}")


class _JsonWords(ast.NodeTransformer):
    """Replaces JSON's literals in Python's syntax tree."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Return the constant for a name that is a literal of JSON."""
        return ast.Constant(WORDS[node.id]) if node.id in WORDS else node


def value_of(text: str) -> Any:
    """Return the value of a literal of JSON or Python; other text unquoted."""
    bare = text[1:-1] if text[:1] in "\"'" and text[-1:] == text[:1] else text
    try:
        return parsed(text)
    except ValueError:
        if len(text) > MAX_LITERAL_LENGTH:
            return bare
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes that Python does not know
            tree = _JsonWords().visit(ast.parse(text, mode="eval"))
        return parsed(json.dumps(ast.literal_eval(tree)))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return bare
