"""Bodies on their way in: how long one may be, and how much memory all of them may take."""

from collections import Counter

from starlette.types import Message, Receive

from twolane.server.http.errors import ApiError

FREE_BYTES = 1 << 16
"""This many first bytes of each body count for nothing: small bodies are always read."""
ARRIVING_BYTES = 256 << 20
"""Bodies that are arriving may have this many bytes together, or those of four of the longest;
bodies of one client may have half of it."""


class ArrivingBytes:
    """How many bytes of large bodies are held until these are whole, by client.

    Args:
        most: bytes that they may have together.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = Counter[str]()
        self._together = 0

    def add(self, client: str, count: int) -> None:
        """Hold more bytes.

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
        """Hold fewer bytes."""
        self._held[client] -= count
        self._together -= count
        if self._held[client] <= 0:
            del self._held[client]


class BodyReader:
    """The body of one request; how long it may take to arrive, `Connection` bounds.

    Args:
        receive: ASGI's.
        longest: bytes that it may have.
        arriving: what all bodies hold.
        client: who sends it.
        kept: whether its bytes count on when it is whole, until `end`.
    """

    def __init__(
        self, receive: Receive, longest: int, arriving: ArrivingBytes, client: str, *, kept: bool
    ) -> None:
        self._receive, self._longest = receive, longest
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
        return message

    def end(self) -> None:
        """Hold nothing any more: the body is whole, or nobody needs it."""
        if self._held:
            self._arriving.remove(self._client, self._held)
            self._held = 0


def too_large(longest: int) -> ApiError:
    """Return what a longer body is refused with."""
    message = f"the body is larger than {longest} bytes"
    return ApiError(413, message, code="body_too_large", headers={"Connection": "close"})
