"""Equivalents without look-around of regular expressions of schema generators.

llguidance matches regular languages, and look-around is beyond its syntax. Zod 4 writes some in the
schemas of all its users (https://github.com/colinhacks/zod, `core/regexes.ts`).
"""

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

ATOM = "[A-Za-z0-9_'+\\-]"
DATE = "([0-9]+Y([0-9]+M)?([0-9]+D)?|[0-9]+M([0-9]+D)?|[0-9]+D)"
SECONDS = "[0-9]+([.,][0-9]+)?S"
TIME = f"T([0-9]+H([0-9]+M)?({SECONDS})?|[0-9]+M({SECONDS})?|{SECONDS})"
EQUAL: Mapping[str, str] = MappingProxyType(
    {
        # z.email(): no dot in front, and no two side by side.
        "^(?!\\.)(?!.*\\.\\.)([A-Za-z0-9_'+\\-\\.]*)[A-Za-z0-9_+-]"
        "@([A-Za-z0-9][A-Za-z0-9\\-]*\\.)+[A-Za-z]{2,}$": f"^({ATOM}+\\.)*{ATOM}*[A-Za-z0-9_+\\-]"
        "@([A-Za-z0-9][A-Za-z0-9\\-]*\\.)+[A-Za-z]{2,}$",
        # z.iso.duration(): at least one number, and one after a T.
        "^P(?:(\\d+W)|(?!.*W)(?=\\d|T\\d)(\\d+Y)?(\\d+M)?(\\d+D)?"
        "(T(?=\\d)(\\d+H)?(\\d+M)?(\\d+([.,]\\d+)?S)?)?)$": f"^P([0-9]+W|{DATE}({TIME})?|{TIME})$",
    }
)
"""Equivalents by expression."""
MAX_SPLIT_LENGTH = 1024
"""Characters of an expression up to which it is searched for look-ahead: that takes quadratic time
in the worst case."""
AHEAD = "(?="
ANY, IGNORE_CASE = r"[\s\S]*", "(?i)"
STRUCTURE = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|[()|]", re.DOTALL)
"""Escapes and classes, which are skipped, and the marks of groups and alternatives."""


def without_look_ahead(expression: str) -> list[str]:
    """Return expressions that match together what one with positive look-ahead at its begin
    matches, as in those of passwords; another expression is returned alone."""
    parts: list[str] = []
    rest = expression[1:] if len(expression) <= MAX_SPLIT_LENGTH and expression[:1] == "^" else ""
    while rest.startswith(AHEAD):
        ends = (mark.end() for mark, depth in _marks(rest) if depth == 0 and mark[0] == ")")
        if not (end := next(ends, 0)):
            return [expression]
        parts.append(f"^(?:{rest[len(AHEAD) : end - 1]})")
        rest = rest[end:]
    if not parts or rest[:1] in ("*", "+", "?", "{") or _has_alternatives(rest):
        return [expression]
    return ["^" + rest, *parts]


def as_whole(regex: str) -> str:
    """Return an expression that matches whole texts in which one of `ecma.rust_regex` is found.

    Raises:
        ValueError: it has anchors in alternatives.
    """
    flags = IGNORE_CASE if regex.startswith(IGNORE_CASE) else ""
    found = regex.removeprefix(flags)
    begins, ends = found.startswith("^"), found.endswith("$")
    if (begins or ends) and _has_alternatives(found):
        raise ValueError("a pattern with anchors in alternatives is not enforced in calls as text")
    core = found[begins : len(found) - ends]
    return f"{'' if begins else ANY}(?:{flags}{core}){'' if ends else ANY}"


def _has_alternatives(expression: str) -> bool:
    """Return whether an expression has alternatives outside of groups."""
    return any(mark[0] == "|" and depth == 0 for mark, depth in _marks(expression))


def _marks(expression: str) -> Iterator[tuple[re.Match[str], int]]:
    """Yield what `STRUCTURE` finds, with the number of groups that are open after it."""
    depth = 0
    for mark in STRUCTURE.finditer(expression):
        depth += (mark[0] == "(") - (mark[0] == ")")
        yield mark, depth
