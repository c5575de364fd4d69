"""HTTP/1.1 connections: uvicorn's, with a bound on how long a request may take to arrive."""

import asyncio
from typing import ClassVar

import h11
import msgspec
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from twolane.server.http.calls import set_refusal
from twolane.server.http.errors import error_body

CONNECTION = "connection"
"""Of the state in a request's ASGI scope: the `Connection` that it came on."""


class Connection(H11Protocol):
    """One client's connection. What it sends that is no HTTP is refused in OpenAI's form."""

    arrival_seconds: ClassVar[float]
    """How long a request may take to arrive, from its first byte (of a new connection: from its
    beginning) to its last. Without a bound, clients that fall silent are kept for ever."""

    _arrival: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        self.app_state = {**self.app_state, CONNECTION: self}
        super().connection_made(transport)
        self._watch_arrival()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        super().data_received(data)
        self._watch_arrival()

    def on_response_complete(self) -> None:
        """Go on to the next request, part of which may be here already."""
        super().on_response_complete()
        self._watch_arrival()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._stop_watch()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP."""
        self._refuse(400, msg, "invalid_http")

    @property
    def takes_parts(self) -> bool:
        """Whether `write_part` may be called: not for who has left, reads too slowly, or speaks
        HTTP/1.0."""
        if self.flow.write_paused or self.transport.is_closing() or self.cycle.disconnected:
            return False
        return self.scope["http_version"] == "1.1"

    def write_part(self, data: bytes) -> None:
        """Write part of the answer under way, which has begun and whose length was not given.

        At once: ASGI's way, through the application's layers and a task, takes as long again as all
        else that is done for a token.
        """
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))  # RFC 9112, section 7.1

    def _watch_arrival(self) -> None:
        state = self.conn.their_state
        asked = self.cycle is not None
        idle = state is h11.IDLE and asked and not self.conn.trailing_data[0]
        if idle or state not in (h11.IDLE, h11.SEND_BODY):
            self._stop_watch()
        elif self._arrival is None:
            self._arrival = self.loop.call_later(self.arrival_seconds, self._too_slow)

    def _stop_watch(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None

    def _too_slow(self) -> None:
        if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            self.transport.close()  # nothing was asked
            return
        message = f"the request did not arrive within {self.arrival_seconds:g} s"
        self._refuse(408, message, "request_timeout")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answer, unless an answer is under way, and close."""
        if self.cycle is not None:
            self.cycle.disconnected = True  # the application, if it waits for the body, gives up
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            if self.cycle is not None:
                set_refusal(self.cycle.scope["state"], status, code, message)
            body = msgspec.json.encode(error_body(status, message, code))
            length = (b"content-length", str(len(body)).encode())
            headers = [(b"content-type", b"application/json"), length, CLOSE_HEADER]
            answer = h11.Response(
                status_code=status, headers=headers, reason=STATUS_PHRASES[status]
            )
            for event in (answer, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def connection_class(arrival_seconds: float) -> type[Connection]:
    """Return the protocol that uvicorn makes one of for each connection."""
    return type("BoundConnection", (Connection,), {"arrival_seconds": arrival_seconds})
