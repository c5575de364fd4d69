"""Rewrites regular expressions of ECMA-262 (https://tc39.es/ecma262, section 22.2) for llguidance.

JSON Schema takes ECMA-262's with the flag `u`. llguidance reads Rust's, in which a class may hold
others, `&&`, `--` and `~~` combine them, `\\s` and the dot are other characters, and some escapes
mean something else. What is written here has characters by number and no other escapes but `\\p`.
"""

import re
from collections.abc import Sequence

Ranges = list[tuple[int, int]]
"""Characters, as inclusive ranges of code points."""
LAST = 0x10FFFF
"""Largest code point."""
SURROGATES = (0xD800, 0xDFFF)
DIGITS: Ranges = [(0x30, 0x39)]
WORD: Ranges = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
SPACE: Ranges = [
    *((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
    *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
]
LINE_ENDS: Ranges = [(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)]
CONTROLS = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D}
ESCAPE = (
    r"\\(?:u(?P<high>[dD][89abAB][0-9A-Fa-f]{2})\\u(?P<low>[dD][c-fC-F][0-9A-Fa-f]{2})"
    r"|u\{(?P<point>[0-9A-Fa-f]+)\}|u(?P<unit>[0-9A-Fa-f]{4})|x(?P<byte>[0-9A-Fa-f]{2})"
    r"|c(?P<control>[A-Za-z])|(?P<null>0)(?![0-9])|(?P<property>[pP]\{[^{}]*\})|(?P<named>.))"
)
MEMBER = re.compile(ESCAPE + r"|(?P<plain>[^\\])", re.DOTALL)
"""A member of a class, or an end of a range in it."""
TOKEN = re.compile(
    ESCAPE + r"|(?P<class>\[(?P<negated>\^?)(?P<members>(?:\\.|[^\]\\])*)\])"
    r"|(?P<quantifier>(?:[*+?]|\{[0-9]+(?:,[0-9]*)?\})\??)(?P<again>[*+?]|\{[0-9]+(?:,[0-9]*)?\})?"
    r"|(?P<group>\((?:\?(?::|P?<[A-Za-z_$][\w$]*>|i:))?(?!\?))|(?P<sign>[|)^$])|(?P<plain>[^\\\[(])"
    r"|(?P<wrong>.)",
    re.DOTALL,
)
FLAGS = re.compile(r"\(\?([is]+)\)")
"""Flags in front of an expression, as Python and Rust take them."""
LOOKS = ("(?=", "(?!", "(?<=", "(?<!")


def rust_regex(expression: str) -> str:
    r"""Return an expression of Rust's that matches what one of ECMA-262's does.

    A letter that ECMA-262 has no escape of is refused: `\A` and `\Z` mean something to others.

    Raises:
        ValueError: it is wrong, or has what no regular expression in the strict sense has.
    """
    flags = FLAGS.match(expression)
    dot = others([]) if flags and "s" in flags[1] else others(LINE_ENDS)
    written = ["(?i)" if flags and "i" in flags[1] else ""]
    for token in TOKEN.finditer(expression, flags.end() if flags else 0):
        match token.lastgroup:
            case "sign" | "quantifier":
                written.append(token[0])
            case "group":
                written.append("(?i:" if token[0] == "(?i:" else "(?:")
            case "class":
                written.append(_class(token["members"], negated=bool(token["negated"])))
            case "plain":
                written.append(_set(dot) if token[0] == "." else _set([(ord(token[0]),) * 2]))
            case "again":
                raise ValueError(f"{token[0]!r} in {expression[:80]!r} repeats a repetition")
            case "wrong":
                raise _wrong(expression, token.start())
            case "property":
                written.append(token[0])
            case _:
                written.append(_escaped(token))
    return "".join(written)


def _wrong(expression: str, place: int) -> ValueError:
    """Return the error of an expression that cannot be read from a place on."""
    rest = expression[place:]
    if rest.startswith(LOOKS):
        return ValueError(f"look-around is not supported: {rest[:40]!r}")
    return ValueError(f"it is no regular expression of ECMA-262 from {rest[:40]!r} on")


def _escaped(token: re.Match[str]) -> str:
    """Return an escape outside of a class."""
    if (known := _known_set(token)) is not None:
        return _set(known)
    name = token["named"]
    if name in ("b", "B"):
        raise ValueError(f"the word boundary \\{name} is not supported")
    if name == "k" or (name is not None and name in "123456789"):
        raise ValueError(f"the back reference {token[0]} is not supported")
    number = _number(token)
    if SURROGATES[0] <= number <= SURROGATES[1]:
        raise ValueError(f"{token[0]} is half a character, which no text has")
    return _set([(number, number)])


def _known_set(token: re.Match[str]) -> Ranges | None:
    r"""Return the characters of `\d`, `\w` and `\s` and their opposites; None: it is none."""
    name = token["named"] or ""
    known = {"d": DIGITS, "w": WORD, "s": SPACE}.get(name.lower())
    return known if known is None or name.islower() else others(known)


def _number(token: re.Match[str]) -> int:
    """Return the code point that a token stands for.

    Raises:
        ValueError: it stands for none.
    """
    if (plain := token["plain"]) is not None:
        return ord(plain)
    if (high := token["high"]) is not None:
        return 0x10000 + ((int(high, 16) - 0xD800) << 10) + (int(token["low"], 16) - 0xDC00)
    if (control := token["control"]) is not None:
        return ord(control) % 32
    if token["null"] is not None:
        return 0
    if (digits := token["point"] or token["unit"] or token["byte"]) is not None:
        number = int(digits, 16)
    else:
        number = CONTROLS.get(token["named"], ord(token["named"]))
        if token["named"].isalnum() and token["named"] not in CONTROLS:
            raise ValueError(f"{token[0]} is no escape of ECMA-262")
    if number > LAST:
        raise ValueError(f"{token[0]} is no character")
    return number


def _class(members: str, *, negated: bool) -> str:
    """Return a class, given what is between its brackets."""
    ranges, properties = Ranges(), list[str]()
    tokens = [*MEMBER.finditer(members)]
    place = 0
    while place < len(tokens):
        token, after = tokens[place], tokens[place + 1 : place + 3]
        if token["property"] is not None:
            properties.append(token[0])
        elif (known := _known_set(token)) is not None:
            ranges += known
        else:
            low = high = _member(token)
            if len(after) == 2 and after[0][0] == "-" and _is_character(after[1]):
                high, place = _member(after[1]), place + 2
            if high < low:
                raise ValueError(f"the range {token[0]}-{after[1][0]} is out of order")
            ranges.append((low, high))
        place += 1
    if properties:
        return f"[{'^' if negated else ''}{_listed(ranges)}{''.join(properties)}]"
    return _set(others(ranges) if negated else ranges)


def _member(token: re.Match[str]) -> int:
    """Return the code point of a member of a class, in which `b` is a backspace."""
    return 0x08 if token["named"] == "b" else _number(token)


def _is_character(token: re.Match[str]) -> bool:
    return token["property"] is None and _known_set(token) is None


def _set(ranges: Ranges) -> str:
    """Return a class of some characters, or the one there is.

    Raises:
        ValueError: all of them are surrogates.
    """
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        number = ranges[0][0]
        plain = chr(number).isascii() and chr(number).isalnum()
        return chr(number) if plain else f"\\u{{{number:x}}}"
    if ranges and not _listed(ranges):
        raise ValueError("a class has only halves of characters, which no text has")
    return f"[{_listed(ranges)}]" if ranges else f"[^{_listed([(0, LAST)])}]"


def _listed(ranges: Ranges) -> str:
    """Return characters as members of a class, without surrogates, which Rust does not take."""
    before, after = SURROGATES[0] - 1, SURROGATES[1] + 1
    parts = [(low, min(high, before)) for low, high in ranges if low <= before]
    parts += [(max(low, after), high) for low, high in ranges if high >= after]
    return "".join(f"\\u{{{low:x}}}-\\u{{{high:x}}}" for low, high in parts)


def others(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """Return the characters that are in none of the ranges."""
    left, start = Ranges(), 0
    for low, high in sorted(ranges):
        if low > start:
            left.append((start, low - 1))
        start = max(start, high + 1)
    return [*left, (start, LAST)] if start <= LAST else left
