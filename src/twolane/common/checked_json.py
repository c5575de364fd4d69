"""JSON files whose content is checked against a form."""

import json
from pathlib import Path
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        ValueError: it does not; the message names the file.
    """
    try:
        return msgspec.convert(json.loads(path.read_text(encoding="utf-8")), dict[str, Any])
    except (ValueError, RecursionError) as error:  # of JSON, of UTF-8, or msgspec's
        raise ValueError(f"{path} is not a JSON object: {error}") from error


def converted(raw: object, form: type[T], file: str = "config.json") -> T:
    """What was read from a file, in a form.

    Raises:
        ValueError: something has the wrong type; the message begins with the file.
    """
    try:
        return msgspec.convert(raw, form)
    except msgspec.ValidationError as error:
        raise ValueError(f"{file}: {error}") from error
