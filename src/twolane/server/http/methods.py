"""HEAD for every GET endpoint, and the OPTIONS of browsers before cross-origin requests (CORS)."""

from collections.abc import Sequence
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twolane.server.http.gate import ANTHROPIC_REQUEST_ID, REQUEST_ID

CORS: dict[str, Any] = {
    "allow_methods": ["GET", "HEAD", "POST", "DELETE"],
    "allow_headers": ["*"],
    "expose_headers": [REQUEST_ID, ANTHROPIC_REQUEST_ID, "Retry-After"],
}
"""Methods and headers that pages of allowed origins may use."""


class Head:
    """ASGI middleware next to the endpoints that answers HEAD as GET without the body.

    Args:
        app: the endpoints.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        # The server's own scope keeps the method: by it the server knows that there is no body.
        inner = {**scope, "method": "GET"}

        async def without_body(message: Message) -> None:
            scope.update({key: inner[key] for key in ("route", "endpoint") if key in inner})
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        await self._app(inner, receive, without_body)


class Cors(CORSMiddleware):
    """Starlette's middleware, but with empty answers to preflights."""

    def preflight_response(self, request_headers: Headers) -> Response:
        """See Starlette; the errors keep their text."""
        answer = super().preflight_response(request_headers)
        if answer.status_code != 200:
            return answer
        kept = {k: v for k, v in answer.headers.items() if not k.startswith("content-")}
        return Response(headers=kept)


def cross_origin(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Wrap an application to answer pages of these origins, too; "*" is every page."""
    return Cors(app, allow_origins=list(origins), **CORS) if origins else app
