"""Strict parser of JSON bodies."""

import json
import sys
from codecs import BOM_UTF8
from collections.abc import Iterable
from typing import Any, NoReturn

import msgspec

from twolane.common.surrogates import LONE_SURROGATE
from twolane.frontend.body import Location, field_name, shortened
from twolane.server.http.errors import ApiError

MAX_VALUES = 1 << 18
"""Most values of a body, counted by its commas and brackets: parsing blocks the event loop for
about 0.3 µs a value."""
MAX_NAMED = 8
"""Most fields and indices in an error's path into a body."""
COUNTED_AT_ONCE = 1 << 18
"""Bytes of a body that are counted before the next check."""


def check_values(data: bytes, name: str) -> None:
    """Refuse a body with too many values before it is parsed.

    Raises:
        ApiError: 413.
    """
    count = 0
    for begin in range(0, len(data), COUNTED_AT_ONCE):
        end = begin + COUNTED_AT_ONCE
        count += sum(data.count(mark, begin, end) for mark in (b",", b"[", b"{"))
        if count > MAX_VALUES:
            message = f"{name} has more than {MAX_VALUES} values (commas and brackets)"
            raise ApiError(413, message, code="body_too_large")


def parse(data: bytes, name: str = "the body") -> Any:
    """Parse a body: UTF-8, no NaN or Infinity, no key twice, no lone surrogates, not too much.

    A byte order mark before it is skipped, as RFC 8259 allows: Windows' tools put one there.

    Args:
        data: the body.
        name: the name of the value in errors.

    Raises:
        ApiError: 400 or 413.
    """
    check_values(data, name)
    try:
        text = data.removeprefix(BOM_UTF8).decode()
        value = json.loads(text, object_pairs_hook=unique, parse_constant=no_constant)
        if "\\u" in text:
            check_pairs(text, value, name)
        return value
    except (ValueError, RecursionError) as error:
        problem = str(error)
        if isinstance(error, RecursionError):
            problem = "lists and objects are nested too deeply"
        elif "integer string conversion" in problem:
            problem = f"a number has more than {sys.get_int_max_str_digits()} digits"
        message = f"{name} is not valid JSON: {problem}"
        raise ApiError(400, message, code="invalid_json") from error


def parse_again(data: bytes) -> Any:
    """Parse a body that `parse` accepted before, in a fraction of the time.

    Raises:
        ApiError: 400, it has numbers too large for anything.
    """
    try:
        return msgspec.json.decode(data.removeprefix(BOM_UTF8))
    except (ValueError, RecursionError) as error:
        message = f"the body is not valid JSON: {error}"
        raise ApiError(400, message, code="invalid_json") from error


def check_pairs(text: str, value: Any, name: str) -> None:
    """Refuse JSON with a lone surrogate.

    Args:
        text: the JSON.
        made: the parsed value.
        name: the name of the value in errors.

    Raises:
        ApiError: 400, it has.
        ValueError: a number is too large for anything.
    """
    try:
        msgspec.json.decode(text)
    except msgspec.ValidationError:  # of numbers
        raise
    except msgspec.DecodeError as error:
        param = field_name(lone_surrogate(value) or ())
        message = f"{param or name} has a lone surrogate, as of an emoji cut in two"
        raise ApiError(400, message, code="invalid_value", param=param) from error


def lone_surrogate(made: Any) -> Location | None:
    """Return the path to a lone surrogate: to its string, or to the object with it in a key."""
    left: list[tuple[Location, Any]] = [((), made)]
    while left:
        place, value = left.pop()
        if isinstance(value, str) and LONE_SURROGATE.search(value):
            return place
        parts: Iterable[tuple[str | int, Any]] = ()
        if isinstance(value, dict):
            if any(map(LONE_SURROGATE.search, value)):
                return place
            parts = value.items()
        elif isinstance(value, list):
            parts = enumerate(value)
        named = len(place) < MAX_NAMED
        left += [((*place, name) if named else place, each) for name, each in parts]
    return None


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of its pairs.

    Raises:
        ValueError: a key is repeated, and which one is meant cannot be known.
    """
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {shortened(twice)!r} is repeated")
    return made


def no_constant(name: str) -> NoReturn:
    """Refuse NaN and Infinity, which Python parses and JSON does not have."""
    raise ValueError(f"{name} is not JSON")
