"""HEAD for every GET endpoint: the same status and headers, without the body."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send


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
