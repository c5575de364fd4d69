"""Routes that take their bodies strictly, and JSON answers."""

from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute

from twolane.server.http import strict_json
from twolane.server.http.errors import ApiError


class StrictJson(Request):
    """A request whose body must be JSON by the letter."""

    async def json(self) -> Any:
        """Parse the body.

        Raises:
            ApiError: 400.
        """
        return strict_json.parse(await self.body())


class Route(APIRoute):
    """A route that parses bodies with `StrictJson`, and takes no others."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap FastAPI's handler."""
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            if self.body_field is not None:
                check_media_type(request)
            return await handle(StrictJson(request.scope, request.receive))

        return handler


def check_media_type(request: Request) -> None:
    """Refuse bodies that do not say that they are JSON.

    Raises:
        ApiError: 415.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    encoding = request.headers.get("content-encoding", "identity")
    if kind != "application/json" or encoding != "identity":
        what = repr(kind) if encoding == "identity" else f"encoding {encoding!r}"
        message = f'the body must be plain JSON, with "Content-Type: application/json", not {what}'
        raise ApiError(415, message, code="unsupported_media_type")


def json_response(body: Any, status: int = 200) -> Response:
    """Return `body` as JSON."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")
