"""Routes that read their bodies as strict JSON, and JSON responses."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel

from twolane.server.http import strict_json
from twolane.server.http.body_checks import LARGE_BODY
from twolane.server.http.disconnect import unless_gone
from twolane.server.http.errors import ApiError
from twolane.server.http.unknown import UnknownFields


class StrictJson(Request):
    """A request whose body must be strictly valid JSON for its model."""

    model: type[BaseModel]

    _whole: bytes | None = None

    async def body(self) -> bytes:
        """Read the body; a large one is checked in another process before its parts are joined.

        Raises:
            ApiError: 400, 413, 429 or 503.
        """
        if self._whole is None:
            parts = [part async for part in self.stream()]
            if sum(map(len, parts)) >= LARGE_BODY:
                await unless_gone(self, self.app.state.body_checker.check(self.model, parts))
            self._whole = b"".join(parts)
        return self._whole

    async def json(self) -> Any:
        """Parse the body.

        Raises:
            ApiError: 400, or see `body`.
        """
        body = await self.body()
        if len(body) < LARGE_BODY:
            return strict_json.parse(body)
        await asyncio.sleep(0)  # others have their turn before each step
        parsed = strict_json.parse_again(body)
        await asyncio.sleep(0)
        return parsed


class Route(APIRoute):
    """A route that reads its body with `StrictJson`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler with `StrictJson` as its request."""
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            strict = StrictJson(request.scope, request.receive)
            if self.body_field is not None:
                check_media_type(request)
                model = self.body_field.field_info.annotation
                assert isinstance(model, type) and issubclass(model, BaseModel)
                strict.model = model
            unknown: UnknownFields = request.app.state.unknown_fields
            with unknown.during(self.path):
                return await handle(strict)

        return handler


UTF8 = frozenset({"utf-8", "utf8", "us-ascii", "ascii"})
"""Names of what bodies are read as (RFC 8259), and of its part that is ASCII."""


def check_media_type(request: Request) -> None:
    """Refuse bodies whose headers do not declare plain JSON.

    Raises:
        ApiError: 415.
    """
    kinds, encoding = (
        ",".join(dict.fromkeys(request.headers.getlist(name))).strip().lower()
        for name in ("content-type", "content-encoding")
    )
    kind, *options = map(str.strip, kinds.split(";"))
    charsets = [o.removeprefix("charset=").strip('"') for o in options if o.startswith("charset=")]
    what = "" if kind == "application/json" else repr(kind)
    if encoding not in ("", "identity"):
        what = f"encoding {encoding!r}"
    elif not what and not UTF8.issuperset(charsets):
        what = f"charset {charsets[0]!r}"
    if what:
        message = f'the body must be plain JSON, with "Content-Type: application/json", not {what}'
        raise ApiError(415, message, code="unsupported_media_type")


def json_response(body: Any, status: int = 200) -> Response:
    """Return a JSON response."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")
