"""HTTP/1.1 for the load client, which timestamps data before processing it.

Where the kernel tells when it received data, that time counts. The client parses in C and wakes no
task before an answer has ended, so that many streams that get a token at once delay each other's
little. Redirects, proxies, cookies and compression are not for it.
"""

import asyncio
import base64
import os
import socket
import ssl
import struct
import sys
import time
from collections.abc import Callable, Mapping
from typing import Protocol, cast
from urllib.parse import SplitResult, quote, unquote, urlsplit

from httptools import (
    HttpParserCallbackError,
    HttpParserError,
    HttpParserUpgrade,
    HttpResponseParser,
)

Clock = Callable[[], float]
_PORTS = {"http": 80, "https": 443}
_URL_CHARACTERS = "/%:@!$&'()*+,;=?~"


TIMESTAMPS = 35 if sys.platform == "linux" else -1
"""Linux' option SO_TIMESTAMPNS (socket(7)), which Python does not name."""
STAMP = struct.Struct("@ll")
"""Seconds and nanoseconds since the epoch (`struct timespec`)."""
STAMP_SPACE = socket.CMSG_SPACE(STAMP.size)


MAX_PAGE = 16 << 20
"""Bytes that an answer outside of the measured load may have, such as the list of models."""


class HTTPError(Exception):
    """No complete answer: the connection broke, or the data is not HTTP."""


class ConnectError(HTTPError):
    """The server cannot be connected to."""


class _UnansweredError(HTTPError):
    """The connection broke before the first byte of the answer."""


class Receiver(Protocol):
    """Receives one answer. An exception that it raises ends the exchange."""

    def on_head(self, status: int, content_type: str) -> None:
        """Handle the answer's head; the media type is in lower case without parameters."""

    def on_data(self, data: bytes, now: float) -> None:
        """Handle a piece of the body that arrived at `now`."""

    def on_end(self, now: float) -> None:
        """Handle the end of the body."""


class Connections:
    """A pool of connections to the server of one URL.

    Args:
        url: The URL of every request.
        headers: sent with each; they replace those that are sent anyway.
        clock: tells when data came.
    """

    def __init__(
        self, url: str, headers: Mapping[str, str], clock: Clock = time.perf_counter
    ) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._port = parts.port or _PORTS[parts.scheme]
        self._ssl = _ssl_context() if parts.scheme == "https" else None
        self._head = _head(parts, headers)
        self._clock = clock
        # Most bytes of one read from a socket.
        self._buffer = memoryview(bytearray(64 << 10))
        self._idle: list[_Connection] = []

    async def request(self, body: bytes | None, receiver: Receiver) -> None:
        """POST a body, or GET for None, and wait until the receiver has the complete answer.

        Raises:
            ConnectError: the server cannot be reached.
            HTTPError: the answer broke off.
        """
        length = b"" if body is None else b"Content-Length: %d\r\n" % len(body)
        method = b"GET " if body is None else b"POST "
        request = b"".join((method, self._head, length, b"\r\n", body or b""))
        kept = self._kept()
        if kept is not None:
            try:
                return await self._exchange(kept, request, receiver)
            except _UnansweredError:
                pass  # closed by the server while the request was on its way
        return await self._exchange(await self._connect(), request, receiver)

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()

    async def _exchange(
        self, connection: "_Connection", request: bytes, receiver: Receiver
    ) -> None:
        await connection.exchange(request, receiver)
        if connection.open:
            connection.idle_since = time.monotonic()
            self._idle.append(connection)

    def _kept(self) -> "_Connection | None":
        while self._idle:
            connection = self._idle.pop()
            # Seconds that an idle connection is kept for another request.
            if connection.open and time.monotonic() - connection.idle_since < 15.0:
                return connection
            connection.close()
        return None

    async def _connect(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        try:
            # Seconds after which a name's next address is tried in parallel (RFC 8305).
            transport, connection = await loop.create_connection(
                lambda: _Connection(self._buffer, self._clock),
                self._host,
                self._port,
                ssl=self._ssl,
                happy_eyeballs_delay=0.25,
            )
            if self._ssl is None and self._clock is time.perf_counter:
                stamped = StampedSocket.of(transport)
                if stamped is not None:
                    _, connection = await loop.create_connection(
                        lambda: _Connection(self._buffer, stamped.received), sock=stamped
                    )
        except (OSError, UnicodeError) as error:  # the latter: no name of a host
            problem = f"Cannot connect to host {self._host}:{self._port} [{error}]"
            raise ConnectError(problem) from error
        return connection


class StampedSocket(socket.socket):
    """A socket that knows when the kernel received what was read from it last.

    However late this process reads, because others have its core or because it parses what came for
    other streams, the time is that of the arrival.
    """

    _arrived = 0.0
    """Arrival of the latest data on the clock `time.perf_counter`."""

    @classmethod
    def of(cls, transport: asyncio.Transport) -> "StampedSocket | None":
        """Return the socket of a connection that is only just made, whose transport is closed;
        None, and the transport stays: the kernel gives no times."""
        own = transport.get_extra_info("socket")
        try:
            own.setsockopt(socket.SOL_SOCKET, TIMESTAMPS, 1)
        except OSError:
            return None
        stamped = cls(fileno=os.dup(own.fileno()))
        transport.abort()
        return stamped

    def recv_into(  # type: ignore[override]
        self, buffer: bytearray | memoryview, nbytes: int = 0, flags: int = 0
    ) -> int:
        """Read as `socket.recv_into` does, and keep the time of arrival."""
        count, extra, _, _ = self.recvmsg_into([buffer], STAMP_SPACE, flags)
        self._arrived, now = time.perf_counter(), time.time()
        for level, kind, data in extra:
            if (level, kind) == (socket.SOL_SOCKET, TIMESTAMPS):
                seconds, nanoseconds = STAMP.unpack(data)
                self._arrived -= max(0.0, now - seconds - 1e-9 * nanoseconds)
        return count

    def received(self) -> float:
        """Return the arrival of the data that was read last."""
        return self._arrived


class _Connection(asyncio.BufferedProtocol):
    """A connection with at most one exchange at a time.

    Connections share the buffer: what is in it is used before any of them reads again. Without one
    asyncio would allocate 256 KiB each time, which may take longer than all that is done here.
    """

    idle_since = 0.0

    def __init__(self, buffer: memoryview, clock: Clock) -> None:
        self._buffer = buffer
        self._clock = clock
        self._now = 0.0
        self._transport: asyncio.Transport
        self._parser: HttpResponseParser | None = None
        self._receiver: Receiver
        self._ended: asyncio.Future[BaseException | None]
        self._heard = False
        self._headers: dict[bytes, bytes] = {}
        self._until_close = False

    @property
    def open(self) -> bool:
        """Whether another request may be sent."""
        return not self._transport.is_closing()

    def close(self) -> None:
        """Close the connection immediately."""
        self._transport.abort()

    async def exchange(self, request: bytes, receiver: Receiver) -> None:
        """Send a request and receive its answer; leave the connection open if possible.

        Raises:
            HTTPError: the answer broke off.
        """
        self._receiver = receiver
        self._parser = HttpResponseParser(self)
        # As other clients do: headers after bare newlines are understood.
        self._parser.set_dangerous_leniencies(
            lenient_headers=True,
            lenient_optional_cr_before_lf=True,
            lenient_spaces_after_chunk_size=True,
        )
        self._heard = self._until_close = False
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            failure = await self._ended
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            self._parser = None
        if failure is not None:
            raise failure

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Called by the event loop."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Called by the event loop."""
        self._now = self._clock()  # before all else
        self._heard = True
        if self._parser is None:
            self.close()  # nobody asked
            return
        try:
            self._parser.feed_data(self._buffer[:nbytes])
        except HttpParserCallbackError as error:
            self._fail(error.__context__ or error)
        except (HttpParserError, HttpParserUpgrade) as error:
            self._fail(HTTPError(f"the answer is not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        if self._parser is None or self._ended.done():
            return
        self._now = self._clock()
        if exc is None and self._until_close:
            self._end_at_close()
            return
        problem = f"{type(exc).__name__}: {exc}" if exc else "the server disconnected"
        when = "within its answer" if self._heard else "before it answered"
        kind = HTTPError if self._heard else _UnansweredError
        self._fail(kind(f"{problem} {when}"))

    def on_message_begin(self) -> None:
        """Called by the parser."""
        if self._ended.done():
            raise HTTPError("more came than the answer")
        self._headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        status = self._status()
        if status < 200:  # 100 Continue and the like: the answer is yet to come
            return
        coding = self._headers.get(b"transfer-encoding", b"").lower()
        self._until_close = not (coding.endswith(b"chunked") or b"content-length" in self._headers)
        kind = self._headers.get(b"content-type", b"application/octet-stream")
        self._receiver.on_head(status, kind.decode("latin-1").partition(";")[0].strip().lower())

    def on_body(self, data: bytes) -> None:
        """Called by the parser."""
        self._receiver.on_data(data, self._now)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        if self._status() < 200:
            return
        self._receiver.on_end(self._now)
        if self._parser is None or not self._parser.should_keep_alive():
            self.close()
        self._settle(None)

    def _status(self) -> int:
        return 0 if self._parser is None else self._parser.get_status_code()

    def _end_at_close(self) -> None:
        try:
            self._receiver.on_end(self._now)
        except Exception as error:  # whoever waits for the answer gets it
            self._fail(error)
        else:
            self._settle(None)

    def _fail(self, failure: BaseException) -> None:
        self.close()
        self._settle(failure)

    def _settle(self, failure: BaseException | None) -> None:
        if not self._ended.done():
            self._ended.set_result(failure)


class _Page:
    """Stores an answer: a `Receiver`."""

    def __init__(self) -> None:
        self.status = 0
        self.body = bytearray()

    def on_head(self, status: int, content_type: str) -> None:
        self.status = status

    def on_data(self, data: bytes, now: float) -> None:
        self.body += data
        if len(self.body) > MAX_PAGE:
            raise HTTPError(f"the answer has more than {MAX_PAGE >> 20} MiB")

    def on_end(self, now: float) -> None:
        pass


async def get(url: str, headers: Mapping[str, str], timeout: float) -> tuple[int, bytes]:
    """Return status and body of a GET request.

    Raises:
        HTTPError: no whole answer came.
        TimeoutError: it took longer than `timeout` seconds.
    """
    return await _ask(url, headers, None, timeout)


async def post(
    url: str, headers: Mapping[str, str], body: bytes, timeout: float
) -> tuple[int, bytes]:
    """Return status and body of a POST request with a JSON body; raises what `get` does."""
    return await _ask(url, {"Content-Type": "application/json", **headers}, body, timeout)


async def _ask(
    url: str, headers: Mapping[str, str], body: bytes | None, timeout: float
) -> tuple[int, bytes]:
    connections, page = Connections(url, headers), _Page()
    try:
        async with asyncio.timeout(timeout):
            await connections.request(body, page)
    finally:
        connections.close()
    return page.status, bytes(page.body)


def _ssl_context() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


def _head(parts: SplitResult, more: Mapping[str, str]) -> bytes:
    """Return a request's text from its target to its headers, without those of the body."""
    headers = {"host": ("Host", _host(parts)), "accept": ("Accept", "*/*")}
    headers["user-agent"] = ("User-Agent", "twolane")
    if parts.username is not None:
        secret = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        headers["authorization"] = ("Authorization", f"Basic {base64.b64encode(secret).decode()}")
    headers |= {name.lower(): (name, value) for name, value in more.items()}
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    lines = [f"{name}: {value}\r\n" for name, value in headers.values()]
    return f"{quote(target, safe=_URL_CHARACTERS)} HTTP/1.1\r\n{''.join(lines)}".encode()


def _host(parts: SplitResult) -> str:
    host = parts.hostname or ""
    name = f"[{host}]" if ":" in host else host.encode("idna").decode()
    return name if parts.port in (None, _PORTS[parts.scheme]) else f"{name}:{parts.port}"
