"""JSON and TOML files whose content is checked against a type."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
Json = dict[str, Any]
"""A JSON object."""

UNREADABLE = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)
"""Errors that msgspec raises for malformed JSON, lists nested too deeply and strings that are not
UTF-8."""


def read_json(path: Path) -> Json:
    """Read a JSON file that holds an object; a byte order mark before it is skipped.

    Raises:
        ValueError: it does not; the message names the file.
    """
    return json_object(path, path.read_bytes())


def json_object(path: Path, content: bytes) -> Json:
    """Parse the content of a JSON file that holds an object, as `read_json` does.

    Raises:
        ValueError: see `read_json`.
    """
    try:
        return msgspec.convert(json.loads(content.decode("utf-8-sig")), dict[str, Any])
    except (ValueError, RecursionError) as error:  # of JSON, of UTF-8, or msgspec's
        raise ValueError(f"{path} is not a JSON object: {error}") from error


def converted(raw: object, kind: type[T], file: str = "config.json", *, lax: bool = False) -> T:
    """Convert a decoded JSON value to a type.

    Args:
        raw: decoded JSON.
        kind: the type that it should have.
        file: Name of the file, for the error.
        lax: Whether clear values in odd types are accepted: 50.0 and "50" for the number 50.

    Raises:
        ValueError: something has the wrong type; the message begins with the file.
    """
    try:
        return msgspec.convert(_whole(raw) if lax else raw, kind, strict=not lax)
    except msgspec.ValidationError as error:
        raise ValueError(f"{file}: {error}") from error


def read_tables(
    path: Path, kind: type[T], complete: Callable[[Json], Json] = lambda table: table
) -> dict[str, T]:
    """Read a TOML file of the package whose tables are values of one type, by name.

    A table has what it does not say from the table that its key `like` names. A type with a field
    `name` gets that of the table.

    Args:
        path: The file.
        kind: The type of the values.
        complete: Returns a table with what its short forms stand for.
    """
    tables = msgspec.toml.decode(path.read_bytes(), type=dict[str, Json])

    def whole(table: Json) -> Json:
        return {**(whole(tables[table["like"]]) if "like" in table else {}), **table}

    return {
        name: msgspec.convert({"name": name, **complete(whole(table))}, kind)
        for name, table in tables.items()
    }


def _whole(raw: Any) -> Any:
    """Return a value with whole floats replaced by integers, which msgspec accepts as floats,
    too."""
    if isinstance(raw, float) and raw.is_integer():
        return int(raw)
    if isinstance(raw, list):
        return [_whole(value) for value in raw]
    if isinstance(raw, dict):
        return {name: _whole(value) for name, value in raw.items()}
    return raw
