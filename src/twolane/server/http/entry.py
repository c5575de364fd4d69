"""ASGI application from the moment the address is bound: loading, then the model's API."""

from starlette.types import ASGIApp, Receive, Scope, Send

from twolane.server.http.bodies import ARRIVING_BYTES, RestOfBody
from twolane.server.http.errors import ApiError
from twolane.server.http.gate import LIVE_PATHS, refuse

RETRY_SECONDS = 5
"""Retry-After in seconds while the model is loading."""


class Entry:
    """ASGI application that answers 503 while the model loads, and then delegates to `app`."""

    def __init__(self) -> None:
        self.app: ASGIApp = loading

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        await self.app(scope, receive, send)


async def loading(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer probes of liveness with 200, and everything else with 503."""
    if scope["path"] in LIVE_PATHS:
        headers = [(b"content-type", b"application/json"), (b"content-length", b"15")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"status":"ok"}'})
        return
    headers_out = {"Retry-After": str(RETRY_SECONDS), "Connection": "close"}
    error = ApiError(503, "the model is loading", code="loading", headers=headers_out)
    rest = RestOfBody(scope, receive, send, ARRIVING_BYTES)
    await refuse(error, scope["path"], rest.send)
