"""Equivalents without look-around of regular expressions of schema generators.

llguidance matches regular languages, and look-around is beyond its syntax. Zod 4 writes some in the
schemas of all its users (https://github.com/colinhacks/zod, `core/regexes.ts`).
"""

from collections.abc import Mapping
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
        # z.iso.duration(): at least one number, and one behind a T.
        "^P(?:(\\d+W)|(?!.*W)(?=\\d|T\\d)(\\d+Y)?(\\d+M)?(\\d+D)?"
        "(T(?=\\d)(\\d+H)?(\\d+M)?(\\d+([.,]\\d+)?S)?)?)$": f"^P([0-9]+W|{DATE}({TIME})?|{TIME})$",
    }
)
"""Equivalents by expression."""
