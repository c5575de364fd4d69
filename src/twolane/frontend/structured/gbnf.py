"""GBNF, llama.cpp's format of grammars, rewritten for llguidance's converter."""

import re

LARK = re.compile(r"^[ \t]*(%llguidance\b|[!?]?start(\.\d+)?[ \t]*:(?!:))", re.M)
"""A line that occurs only in Lark grammars."""
PARTS = re.compile(
    r'(?P<literal>"(?:\\.|[^"\\])*")|(?P<class>\[(?:\\.|[^\]\\])*\])|(?P<comment>#[^\n]*)|(?P<any>\.)',
    re.S,
)
"""Literals, classes, comments and dots of a grammar."""
ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.S)
IN_LITERALS = {"\n": r"\n", "\r": r"\r", "\t": r"\t", '"': r"\"", "\\": r"\\"}
SIGNS = frozenset('\\[]^-&~\n\r\t"')
"""Characters with a meaning in a class of a regular expression."""


def is_lark(text: str) -> bool:
    """Return whether a grammar is in Lark's format rather than in GBNF."""
    return LARK.search(text) is not None


def plain_gbnf(text: str) -> str:
    """Return an equivalent grammar without constructs that the converter reads differently:
    characters by number, signs of regular expressions in classes, and the dot, which matches line
    ends, too."""
    return PARTS.sub(_plain, text.removeprefix("\ufeff"))


def _plain(part: re.Match[str]) -> str:
    match part.lastgroup:
        case "literal":
            return f'"{_in_literal(part[0][1:-1])}"'
        case "class":
            inside = part[0][1:-1]
            negated = "^" if inside.startswith("^") else ""
            return f"[{negated}{_in_class(inside.removeprefix('^'))}]"
        case "any":
            return '(.|"\\n")'
    return part[0]


def _in_literal(text: str) -> str:
    def plain(match: re.Match[str]) -> str:
        character = _named(match)
        return IN_LITERALS.get(character, character)

    text = ESCAPE.sub(plain, text)
    return text.replace("\n", r"\n").replace("\r", r"\r").replace("\t", r"\t")


def _in_class(text: str) -> str:
    def plain(match: re.Match[str]) -> str:
        character = _named(match) if match[0].startswith("\\") else match[0]
        special = character in SIGNS or not character.isprintable()
        return f"\\x{ord(character):02x}" if special and ord(character) < 256 else character

    return re.sub(ESCAPE.pattern + "|[&~]", plain, text, flags=re.S)


def _named(escape: re.Match[str]) -> str:
    """Return the character of an escape; GBNF has names only for line ends and tabs."""
    number = escape[1] or escape[2] or escape[3]
    if number is None:
        return {"n": "\n", "r": "\r", "t": "\t"}.get(escape[4], escape[4])
    return chr(int(number, 16))
