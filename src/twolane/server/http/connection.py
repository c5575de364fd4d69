"""HTTP/1.1 connections: uvicorn's, with strict heads and bounds on number and time."""

import asyncio
import fcntl
import logging
import re
import socket
import sys
import termios
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import h11
import msgspec
from h11._receivebuffer import ReceiveBuffer, blank_line_regex
from starlette.types import Scope
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from twolane.frontend.body import shortened
from twolane.server.http.backpressure import LOG_SECONDS, Fault, HeldOutput, UnsentOutput
from twolane.server.http.calls import set_refusal
from twolane.server.http.errors import error_body

log = logging.getLogger("twolane.server")

CONNECTION = "connection"
"""Key of a request's `Connection` in the state of its ASGI scope."""
GRACE_SECONDS = 1.0
"""Seconds without a request after which a connection may be closed for a new one."""
EXTRA_CONNECTIONS = 64
"""Connections beyond the bound that are still read, to serve probes and refuse the rest."""
MAX_HEAD = 1 << 16
"""Bytes that a request line and its headers may have together."""
CUT_OFF = "the connection ended before the request was complete"
HALF_CLOSED = (
    "the client closed its side of the connection before its answer, which aborts the request"
)
TOO_LONG = f"the request line and the headers have more than {MAX_HEAD} bytes"
TCP_INFO_BYTES, LAST_DATA_RECEIVED = 56, slice(52, 56)
"""Bytes of `struct tcp_info` that are read, and those of `tcpi_last_data_recv`, in milliseconds
(linux/tcp.h)."""
SMALL_CHUNKS, CHUNK_BYTES = 2048, 512
"""Chunks that any body may have, and bytes of a body for each further chunk. A chunk takes the loop
10 µs, however small it is, and a thousand of them fit into one read."""

REQUEST_LINE = re.compile(
    rb"(?P<method>[^ ]+) (?P<server>(?i:https?)://[^/?#@ ]+(?=[/?#@ ]))?"
    rb"(?P<path>[^ ?]*)(?=[ ?])(?P<rest>.* HTTP/1\.[01])"
)
"""A request line. Each part's end is determined by the next character, so that matching takes
linear time."""


OTHER_VERSION = re.compile(rb"[^ :]+ .* (?P<version>HTTP/(?!1\.)[0-9]\.[0-9])")
"""A request line of another major version, which h11 would read as HTTP/1.1."""


class ConnectionLimits(msgspec.Struct, frozen=True):
    """Bounds on all connections together and on each."""

    max_connections: int
    """Number of connections beyond which new ones replace idle ones or are refused."""
    arrival_seconds: float
    """Seconds within which a request must arrive, headers and body."""
    stall_seconds: float
    """Seconds without reading its answer after which a client is disconnected."""


class StrictBuffer(ReceiveBuffer):
    """Receive buffer that refuses heads which proxies and servers read differently.

    RFC 9112: lines end with CRLF (2.2), are not folded (5.2), and a request has one kind of length
    (6.1); whoever reads these otherwise than the proxy before it lets requests be smuggled.

    A body in very many small chunks is refused, too.
    """

    _chunks = _body_bytes = 0
    """Chunks and bytes, framing included, of the current body."""

    def maybe_extract_next_line(self) -> bytearray | None:
        """Return the line before a chunk once it is complete.

        Raises:
            h11.RemoteProtocolError: there are too many.
        """
        line = super().maybe_extract_next_line()
        self._chunks += line is not None
        if self._chunks > SMALL_CHUNKS + self._body_bytes // CHUNK_BYTES:
            raise h11.RemoteProtocolError("the body comes in too many small chunks")
        return line

    def maybe_extract_at_most(self, count: int) -> bytearray | None:
        """Return at most this many bytes of a body, or None."""
        part = super().maybe_extract_at_most(count)
        self._body_bytes += len(part or b"")
        return part

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """Return the lines of a head or of trailers once they are complete.

        Raises:
            h11.RemoteProtocolError: the head is ambiguous.
        """
        if self._data[:2] != b"\r\n":
            match = blank_line_regex.search(self._data, self._multiple_lines_search)
            if self._data[:1] == b"\n" or match is not None:
                check_head(bytes(self._data[: match.end() if match else 1]))
        after_body = self._chunks > 0
        self._chunks = self._body_bytes = 0
        lines = super().maybe_extract_lines()
        if lines and not after_body:
            lines[0] = bytearray(plain_line(bytes(lines[0])))
        return lines


def plain_line(line: bytes) -> bytes:
    """Return a request line without the server that its target may name (RFC 9112, section
    3.2.2)."""
    match = REQUEST_LINE.fullmatch(line)
    if match is None or not match["server"]:
        return line
    return match["method"] + b" " + (match["path"] or b"/") + match["rest"]


def check_head(head: bytes) -> None:
    """Refuse a head that is ambiguous, too long or of another version of HTTP.

    Raises:
        h11.RemoteProtocolError: it is.
    """
    if len(head) > MAX_HEAD:  # h11 takes one that arrives at once
        raise h11.RemoteProtocolError(TOO_LONG, error_status_hint=431)
    *lines, rest = head.split(b"\r\n")
    if rest or any(b"\n" in line for line in lines):
        raise h11.RemoteProtocolError("a line of the head does not end with CRLF")
    if other := OTHER_VERSION.fullmatch(lines[0]):
        message = f"{other['version'].decode()} is not supported: send HTTP/1.1 or HTTP/1.0"
        raise h11.RemoteProtocolError(message, error_status_hint=505)
    names = [line.partition(b":")[0].lower() for line in lines[1:]]
    if any(names.count(name) > 1 for name in KEY_HEADERS):
        raise h11.RemoteProtocolError("a key is given twice")
    if any(name[:1] in (b" ", b"\t") for name in names):
        raise h11.RemoteProtocolError("a header is folded over two lines")
    if b"transfer-encoding" in names:
        if b"content-length" in names:
            raise h11.RemoteProtocolError("both Content-Length and Transfer-Encoding are given")
        if lines[0].endswith(b"HTTP/1.0"):
            raise h11.RemoteProtocolError("HTTP/1.0 has no Transfer-Encoding")


KEY_HEADERS = b"authorization", b"x-api-key", b"x-operator-key"
"""Headers of which a proxy may check one and a server another, if there are several."""
KEY = re.compile(rb"\r\n(?:authorization|x-api-key):[\t ]*([^\r\n]*)\r\n", re.IGNORECASE)
LENGTH = re.compile(rb"\r\ncontent-length:[\t ]*([0-9]{1,9})[\t ]*\r\n", re.IGNORECASE)
READ_AT_ONCE = 2
"""Small requests of one key that are read, and not parsed yet, at once."""


class ReadingTurns:
    """Has the small requests of a key read a few at a time, in order of arrival.

    Reading a head takes several times as long as accepting its connection, and one key's hundreds
    would keep the event loop from another one's request that comes right after them. Turns decide
    on the order alone, so that a key need not be valid here.
    """

    def __init__(self) -> None:
        self._open = Counter[bytes]()
        self._held = dict[bytes, deque[Connection]]()

    def begin(self, key: bytes, connection: "Connection") -> bool:
        """Return whether a request of a key has its turn; if not, its connection is told later."""
        if self._open[key] < READ_AT_ONCE:
            self._open[key] += 1
            return True
        self._held.setdefault(key, deque()).append(connection)
        return False

    def end(self, key: bytes) -> None:
        """Give a turn of a key to its next request."""
        held = self._held.get(key, ())
        while held:
            if held.popleft().read_held(key):
                return
        self._held.pop(key, None)
        self._open[key] -= 1
        if not self._open[key]:
            del self._open[key]


class EarlyRefusal(NamedTuple):
    """Answer to a request that its head alone has refused."""

    answer: bytes
    """The whole answer."""
    length: int
    """Bytes of the request, head and body."""
    closes: bool
    """Whether the connection ends with it."""


class EarlyCheck(Protocol):
    """Refuses requests by their heads, before anything else is done for them."""

    def __call__(
        self, data: bytes, default_headers: Sequence[tuple[bytes, bytes]], unread: float
    ) -> EarlyRefusal | None:
        """Return the answer to the request that some bytes begin with; None: it goes its usual way.

        Args:
            data: The first bytes of the request.
            default_headers: Headers of every answer.
            unread: Seconds for which the bytes waited to be read.
        """


class Connection(H11Protocol):
    """A client's connection, which refuses invalid HTTP with an error in OpenAI's format."""

    limits: ClassVar[ConnectionLimits]
    output: ClassVar[UnsentOutput]
    """Unsent output of all connections."""
    waiting: ClassVar[dict["Connection", float]]
    """Time on the loop's clock since which each connection has waited for the head of its next
    request, longest first."""
    logged_at: ClassVar[float]
    """Time of the last log line about too many connections."""
    refuse_early: ClassVar[EarlyCheck]
    turns: ClassVar[ReadingTurns]

    probes_only = False
    """Whether the connection came beyond the bound, so that only probes are served on it."""
    _arrival: asyncio.TimerHandle | None = None
    _refused: EarlyRefusal | None = None
    """The last request that its head alone has refused."""
    _unwanted = 0
    """Bytes of it that have not arrived yet, and are dropped."""
    _held = b""
    """A whole request that waits for its turn to be read."""
    _key: bytes | None = None
    """The key whose turn the current request has."""
    _progress: asyncio.TimerHandle
    _unsent = 0
    """Unsent bytes at the last check while writing was paused; 0: the client has read since."""
    _backlog: HeldOutput | None = None
    """Held output of the current answer that is not written yet."""
    _behind_since: float | None = None
    """Time on the loop's clock since which the client has been behind; None: it is not."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        self.app_state = {**self.app_state, CONNECTION: self}
        super().connection_made(transport)
        self.output.readers.add(self)
        self.conn._receive_buffer = StrictBuffer()
        if len(self.connections) > self.limits.max_connections:
            self._make_room()
        self._watch_arrival()
        self._progress = self.loop.call_later(self.limits.stall_seconds, self._check_progress)

    def _make_room(self) -> None:
        """Close the connection that has waited longest for a request, or serve only probes on this
        one.

        Whoever opens many connections and asks nothing keeps nobody else out.
        """
        excess = len(self.connections) - self.limits.max_connections
        longest = next(iter(self.waiting), None)
        if longest is not None:
            waited = self.loop.time() - self.waiting[longest]
            if waited > GRACE_SECONDS or excess > EXTRA_CONNECTIONS:
                longest.close_now()
                return
        self.probes_only = True
        if excess > EXTRA_CONNECTIONS:
            self.close_now()
        if time.monotonic() - type(self).logged_at > LOG_SECONDS:
            type(self).logged_at = time.monotonic()
            most = self.limits.max_connections
            log.warning("all %d connections are busy: further ones get a 503", most)

    def close_now(self) -> None:
        """Close the connection without an answer, and count it no more."""
        self.waiting.pop(self, None)
        self.connections.discard(self)
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self._held:
            self._held += data
            if len(self._held) > MAX_HEAD:
                self.flow.pause_reading()
            return
        if rest := self._after_refusal(data):
            if self._is_idle and not self._has_turn(rest):
                self._held = rest
                self._unset_keepalive_if_required()
                self._stop_watch()
                self.waiting.pop(self, None)
                return
            super().data_received(rest)
        self._watch_arrival()

    @property
    def _is_idle(self) -> bool:
        """Whether the next bytes begin a request."""
        states = {self.conn.their_state, self.conn.our_state}
        return states == {h11.IDLE} and not self.conn.trailing_data[0]

    def _has_turn(self, data: bytes) -> bool:
        """Return whether a request is read now: it has its turn, or is no whole small request with
        a key."""
        end = data.find(b"\r\n\r\n") + 4
        length = LENGTH.search(data, 0, end)
        key = KEY.search(data, 0, end)
        whole = length is not None and len(data) == end + int(length[1]) <= MAX_HEAD
        if key is None or not whole or not data.startswith(b"POST "):
            return True
        if not self.turns.begin(key[1], self):
            return False
        self._key = key[1]
        return True

    def read_held(self, key: bytes) -> bool:
        """Read the request that waits for a turn of its key; return False if the connection has
        ended."""
        if not self._held or self.transport.is_closing():
            return False
        data, self._held = self._held, b""
        self._key = key
        self.flow.resume_reading()
        super().data_received(data)
        self._watch_arrival()
        return True

    def end_turn(self) -> None:
        """Let the key's next request be read: the current one is parsed or answered."""
        key, self._key = self._key, None
        if key is not None:
            self.turns.end(key)

    def _after_refusal(self, data: bytes) -> bytes:
        """Return the data after a request that its head refuses, which is answered here.

        A connection closes once the whole request has been read: see `RestOfBody`.
        """
        if not self._unwanted:
            if not self._is_idle or self.flow.write_paused:
                return data
            headers = self.server_state.default_headers
            refused = self.refuse_early(data, headers, unread_seconds(self.transport))
            if refused is None or self.probes_only:
                return data
            self._refused, self._unwanted = refused, refused.length
            self.waiting.pop(self, None)
            self.transport.write(refused.answer)
            self.output.grew(len(refused.answer))
        dropped = min(self._unwanted, len(data))
        self._unwanted -= dropped
        if self._unwanted:
            return b""
        if self._refused is not None and self._refused.closes:
            self.transport.close()
            return b""
        self.on_response_complete()
        return data[dropped:]

    def on_response_complete(self) -> None:
        """Continue with the next request, part of which may have arrived."""
        self.end_turn()
        self._backlog = None
        if not self.flow.write_paused:
            self._behind_since = None
        super().on_response_complete()
        self._watch_arrival()

    def eof_received(self) -> None:
        """See `asyncio.Protocol`: the request is aborted, and the answer says so.

        A client that has left looks the same as one that will send no more but still reads.
        """
        theirs, ours = self.conn.their_state, self.conn.our_state
        arriving = theirs is h11.SEND_BODY or (theirs is h11.IDLE and self.conn.trailing_data[0])
        if ours is not h11.SEND_RESPONSE and not (ours is h11.IDLE and arriving):
            return
        message = CUT_OFF if arriving else HALF_CLOSED
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._write_error(400, message, "client_closed")

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        held, self._held = self._held, b""
        if held:  # its client has left before its turn, and the application counts it so
            super().data_received(held)
        self.end_turn()
        self._stop_watch()
        self.waiting.pop(self, None)
        self.output.readers.discard(self)
        self._progress.cancel()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        # These refer back to it. Garbage in cycles would stay until a collection of old objects.
        self.app_state = {}
        self.scope = self.cycle = None  # type: ignore[assignment]
        vars(self.transport).pop("_read_ready_cb", None)  # asyncio's transport refers to itself

    def send_400_response(self, msg: str) -> None:
        """Refuse invalid HTTP, with status and reason of the error that uvicorn has caught where it
        calls this."""
        status, error = 400, sys.exception()
        if isinstance(error, h11.RemoteProtocolError):
            status = error.error_status_hint
            problem = TOO_LONG if status == 431 else shortened(str(error))
            msg = f"invalid HTTP: {problem}"
        self._refuse(status, msg, "invalid_http")

    @property
    def is_stalled(self) -> bool:
        """Whether written bytes wait for the client."""
        return self.transport.get_write_buffer_size() > 0

    def _check_progress(self) -> None:
        """Disconnect a client that has read nothing between two checks although output waits for
        it."""
        unsent = self.transport.get_write_buffer_size() + unacknowledged(self.transport)
        if 0 < self._unsent <= unsent:
            self.drop("stalled")
            return
        full = self.flow.write_paused or self.transport.is_closing()
        self._unsent = unsent if full else 0
        self.output.grew(self.unsent)  # some of what is held grows without telling
        self._progress = self.loop.call_later(self.limits.stall_seconds, self._check_progress)

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`: the client is behind."""
        super().pause_writing()
        if self._behind_since is None or self._backlog is None or self._backlog.empty:
            self._behind_since = self.loop.time()  # it had taken all since it was behind before
        self.output.grew(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`: the client has read."""
        self._unsent = 0
        if self._backlog is None or self._backlog.empty:
            self._behind_since = None
        super().resume_writing()

    def hold(self, backlog: HeldOutput) -> None:
        """Count the held output of the current answer until it has been sent."""
        self._backlog = backlog
        backlog.on_growth = self.output.grew

    @property
    def unsent(self) -> int:
        """See `OutputSink`."""
        held = 0 if self._backlog is None else self._backlog.held
        return self.transport.get_write_buffer_size() + held

    @property
    def seconds_behind(self) -> float:
        """See `OutputSink`."""
        return 0.0 if self._behind_since is None else self.loop.time() - self._behind_since

    def drop(self, fault: Fault) -> None:
        """See `OutputSink`."""
        self._backlog = None
        self.output.note_drop(fault, self.client)
        self.transport.abort()

    @property
    def takes_parts(self) -> bool:
        """Whether `write_part` may be called: the client is connected, reads, and speaks
        HTTP/1.1."""
        if self.flow.write_paused or self.transport.is_closing():
            return False
        return self.scope["http_version"] == "1.1"

    def write_part(self, data: bytes) -> None:
        """Write part of the current answer, which has begun and whose length was not given.

        At once: ASGI's way, through the application's layers and a task, takes as long again as all
        else that is done for a token.
        """
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))  # RFC 9112, section 7.1
        self.output.grew(len(data))

    def _watch_arrival(self) -> None:
        state = self.conn.their_state
        asked = self.cycle is not None or self._refused is not None
        if state is h11.IDLE and not self.transport.is_closing():
            self.waiting.setdefault(self, self.loop.time())
        else:
            self.waiting.pop(self, None)
        arriving = self.conn.trailing_data[0] or self._unwanted
        idle = state is h11.IDLE and asked and not arriving
        if idle or state not in (h11.IDLE, h11.SEND_BODY):
            self._stop_watch()
        elif self._arrival is None:
            self._arrival = self.loop.call_later(self.limits.arrival_seconds, self._too_slow)

    def _stop_watch(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None

    def _too_slow(self) -> None:
        if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            self.transport.close()  # nothing was asked
            return
        message = f"the request did not arrive within {self.limits.arrival_seconds:g} s"
        self._refuse(408, message, "request_timeout")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answer with an error, unless an answer has begun, and close."""
        if self.cycle is not None:
            self.cycle.disconnected = True  # the application, if it waits for the body, gives up
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            if self.cycle is not None:
                set_refusal(self.cycle.scope["state"], status, code, message)
            self._write_error(status, message, code)
        self.transport.close()

    def _write_error(self, status: int, message: str, code: str) -> None:
        """Write an error as the whole answer to the current request."""
        body = msgspec.json.encode(error_body(status, message, code))
        length = (b"content-length", str(len(body)).encode())
        headers = [(b"content-type", b"application/json"), length, CLOSE_HEADER]
        answer = h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status])
        asked_head = self.conn.our_state is h11.SEND_RESPONSE and self.scope["method"] == "HEAD"
        parts = () if asked_head else (h11.Data(data=body),)  # RFC 9110, section 9.3.2
        for event in (answer, *parts, h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")


def unacknowledged(transport: asyncio.Transport) -> int:
    """Return the bytes in the socket that the client has not acknowledged; 0: unknown."""
    try:
        answer = fcntl.ioctl(
            transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4)
        )
    except OSError:
        return 0
    return int.from_bytes(answer, sys.byteorder)


def unread_seconds(transport: asyncio.BaseTransport) -> float:
    """Return the seconds since the latest bytes of a connection arrived; 0: unknown.

    On a busy host they wait for the event loop. Linux' TCP stamps them, to a few milliseconds.
    """
    try:
        info = transport.get_extra_info("socket").getsockopt(
            socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES
        )
    except (AttributeError, OSError):
        return 0.0
    return 1e-3 * int.from_bytes(info[LAST_DATA_RECEIVED], sys.byteorder)


def unread_body(scope: Scope) -> float:
    """Return the seconds for which the latest bytes of a request waited to be read."""
    connection: Connection | None = scope.get("state", {}).get(CONNECTION)
    return 0.0 if connection is None else unread_seconds(connection.transport)


def connection_class(
    limits: ConnectionLimits,
    output: UnsentOutput,
    refuse_early: EarlyCheck = lambda data, default_headers, unread: None,
) -> type[Connection]:
    """Return a protocol class for uvicorn with its own limits and state.

    Args:
        limits: the limits of all connections.
        output: unsent output of all connections.
        refuse_early: Refuses requests by their heads.
    """
    shared: dict[str, Any] = {"limits": limits, "output": output}
    shared |= {"waiting": {}, "logged_at": -LOG_SECONDS, "turns": ReadingTurns()}
    shared["refuse_early"] = staticmethod(refuse_early)
    return type("BoundConnection", (Connection,), shared)
