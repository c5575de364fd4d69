"""Bounds on request bodies: the size of one, and the memory of all that are arriving; and the order
in which they are parsed."""

import asyncio
from collections import Counter
from weakref import WeakValueDictionary

from starlette.types import Message, Receive, Scope, Send

from twolane.server.http.errors import ApiError

FREE_BYTES = 1 << 16
"""First bytes of each body that are not counted: small bodies are always read."""
ARRIVING_BYTES = 256 << 20
"""Most bytes of all arriving bodies together, unless four of the longest are more; bodies of one
client may have half of it."""

PARSED_AT_ONCE = 2
"""Calls of one client that are parsed in one turn of the event loop."""
LENGTHS = frozenset({b"content-length", b"transfer-encoding"})
"""Headers one of which every request with a body has."""


class ArrivingBytes:
    """Counts the bytes of large bodies in memory until these are complete, by client.

    Args:
        most: bytes that they may have together.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = Counter[str]()
        self._together = 0

    def add(self, client: str, count: int) -> None:
        """Count more bytes.

        Raises:
            ApiError: 429, there are too many.
        """
        if self._together + count > self._most or self._held[client] + count > self._most // 2:
            headers = {"Retry-After": "1", "Connection": "close"}
            message = "too many large bodies are arriving at once"
            raise ApiError(429, message, code="queue_full", headers=headers)
        self._held[client] += count
        self._together += count

    def remove(self, client: str, count: int) -> None:
        """Count fewer bytes."""
        self._held[client] -= count
        self._together -= count
        if self._held[client] <= 0:
            del self._held[client]


class ParsingTurns:
    """Has the calls of a client parsed a few at a time, in order of arrival: one client's hundreds
    would otherwise keep the event loop from another one's call."""

    def __init__(self) -> None:
        self._places = WeakValueDictionary[str, asyncio.Semaphore]()
        """By client, as long as one of its calls has a turn."""

    def turn(self, client: str) -> "ParsingTurn":
        """Return the turn of a call, which has not begun."""
        if (places := self._places.get(client)) is None:
            places = self._places[client] = asyncio.Semaphore(PARSED_AT_ONCE)
        return ParsingTurn(places)


class ParsingTurn:
    """The turn of one call to be parsed.

    Args:
        places: The places of its client.
    """

    def __init__(self, places: asyncio.Semaphore) -> None:
        self._places, self._has_place = places, False

    async def begin(self) -> None:
        """Wait for a place."""
        self._has_place = await self._places.acquire()

    def end(self) -> None:
        """Give the place to the client's next call, if this one has begun."""
        if self._has_place:
            self._has_place = False
            self._places.release()


class BodyReader:
    """Reads the body of one request within the bounds on bytes; `Connection` bounds its time.

    Args:
        receive: ASGI's.
        longest: bytes that it may have.
        arriving: counts the bytes of all bodies.
        client: the client that sends the body.
        kept: true if the bytes of a complete body count until `end`.
        turn: Begins when a small body is complete; None: it is parsed at once. Large bodies are
            parsed in a process of their own.
    """

    def __init__(
        self,
        receive: Receive,
        longest: int,
        arriving: ArrivingBytes,
        client: str,
        *,
        kept: bool,
        turn: ParsingTurn | None = None,
    ) -> None:
        self._receive, self._longest, self._turn = receive, longest, turn
        self._arriving, self._client = arriving, client
        self._kept = kept
        self._read = self._held = 0

    async def receive(self) -> Message:
        """Return the next message; see ASGI.

        Raises:
            ApiError: 413, the body is too long; 429, all together are.
        """
        message = await self._receive()
        self._read += len(message.get("body", b""))
        if self._read > self._longest:
            raise too_large(self._longest)
        if not message.get("more_body") and not self._kept:
            self.end()
        elif (more := self._read - FREE_BYTES - self._held) > 0:
            self._arriving.add(self._client, more)
            self._held += more
        complete = message["type"] == "http.request" and not message.get("more_body")
        if complete and self._turn is not None and self._read < FREE_BYTES:
            await self._turn.begin()
        return message

    def end(self) -> None:
        """Stop counting the body's bytes: it is complete, or no longer needed."""
        if self._held:
            self._arriving.remove(self._client, self._held)
            self._held = 0


class RestOfBody:
    """Reads and drops the rest of a request's body when its answer is complete, before the answer
    ends.

    A connection that is closed while bytes wait in it is reset, and the client may lose the answer
    (RFC 9112, section 9.6). How long they may take, `Connection` bounds.

    Args:
        scope, receive, send: ASGI's.
        most: bytes to discard before the answer ends anyway.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, most: int) -> None:
        self._receive, self._send, self._most = receive, send, most
        names = {name for name, _ in scope["headers"]}
        # Who expects to be asked for the body (100 Continue) does not send it before that.
        self._left = b"expect" not in names and not names.isdisjoint(LENGTHS)

    async def receive(self) -> Message:
        """Return the next message; see ASGI."""
        message = await self._receive()
        self._left = bool(message.get("more_body"))
        return message

    async def send(self, message: Message) -> None:
        """Send part of the answer; see ASGI."""
        last = message["type"] == "http.response.body" and not message.get("more_body")
        if last and self._left:
            await self._send({**message, "more_body": True})
            while self._left and self._most > 0:
                self._most -= len((await self.receive()).get("body", b""))
            message = {"type": "http.response.body"}
        await self._send(message)


def too_large(longest: int) -> ApiError:
    """Return the refusal of a body over `longest` bytes."""
    message = f"the body is larger than {longest} bytes"
    return ApiError(413, message, code="body_too_large", headers={"Connection": "close"})
