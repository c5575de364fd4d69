"""Checks large bodies in a sandbox that `body_checks` starts."""

import importlib
from typing import Any

import msgspec
from pydantic import ValidationError

from twolane.frontend import sandboxed
from twolane.frontend.body import IGNORED
from twolane.server.http import strict_json
from twolane.server.http.body_checks import IGNORING, BodyRefusal
from twolane.server.http.errors import ApiError, from_validation


def check_parts(body: Any) -> None:
    """Refuse a body that would take the API process too long to parse.

    Raises:
        ApiError: 413.
    """
    parts = text = 0
    left = [body]
    while left:
        value = left.pop()
        if isinstance(value, str):
            text += len(value)
        elif isinstance(value, dict):
            parts += 1 + len(value)
            text += sum(map(len, value))
            left += value.values()
        elif isinstance(value, list):
            parts += 1
            left += value
    # Most characters of all strings of a body.
    # Most objects, lists and fields of a body: each takes some microseconds to read.
    for amount, most, what in (
        (parts, 1 << 15, "objects, lists and fields"),
        (text, 1 << 24, "characters of text"),
    ):
        if amount > most:
            message = f"the body has {amount} {what}; at most {most} are allowed"
            raise ApiError(413, message, code="body_too_large")


def check(request: bytes) -> BodyRefusal | None:
    """Return the refusal of a body, or None; `request` is its model's name, a newline and the
    body."""
    what, _, data = request.partition(b"\n")
    name = what.decode()
    if name.endswith(IGNORING):
        name = name.removesuffix(IGNORING)
        IGNORED.set([])
    module, _, name = name.partition(":")
    model = getattr(importlib.import_module(module), name)
    try:
        body = strict_json.parse(data)
        check_parts(body)
        model.model_validate(body)
    except ValidationError as error:
        return refusal(from_validation(error.errors()))
    except ApiError as error:
        return refusal(error)
    return None


def refusal(error: ApiError) -> BodyRefusal:
    """Return an error as a struct that can be encoded."""
    return BodyRefusal(error.status_code, error.message, error.code, error.param)


def set_up(_: bytes) -> tuple[bytes, sandboxed.Handler]:
    """Import the models of requests once, before workers are forked."""
    for module in ("openai.protocol", "responses.request", "anthropic.request"):
        importlib.import_module(f"twolane.server.{module}")
    return b"", lambda request: msgspec.msgpack.encode(check(request))


if __name__ == "__main__":
    sandboxed.run(set_up)
