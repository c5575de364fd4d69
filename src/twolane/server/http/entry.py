"""What answers from the moment the address is bound: refusals while the model loads, then the
model's API, and before that one, refusals of calls by their heads alone."""

import re
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from twolane.server.http.bodies import ARRIVING_BYTES, RestOfBody
from twolane.server.http.connection import MAX_HEAD, EarlyRefusal
from twolane.server.http.errors import ApiError
from twolane.server.http.gate import LIVE_PATHS, Gate, id_headers, refusal, refuse, request_id

RETRY_SECONDS = 5
"""Retry-After in seconds while the model is loading."""
HEAD = re.compile(
    rb"POST (?P<path>/[a-z0-9/_-]+) HTTP/1\.1\r\n"
    rb"(?P<fields>([\w!#$%&'*+.^`|~-]+:[\t -~]*\r\n)+)\r\n"
)
"""A head about which no two readers disagree, as clients of the API send it."""
LENGTH = re.compile(r"[0-9]{1,20}")
"""A length that h11 reads; it refuses longer ones, and Python reads none of over 4,300 digits."""
DEMANDING = frozenset({b"transfer-encoding", b"expect", b"upgrade", b"origin"})
"""Headers that ask for more than an answer."""
ALONE = b"host", b"content-length"
"""Headers of which a request has exactly one."""


class Entry:
    """ASGI application that answers 503 while the model loads, and then delegates to `app`."""

    def __init__(self) -> None:
        self.app: ASGIApp = loading
        self.early: EarlyGate | None = None
        """Refuses calls by their heads once the model is loaded."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        await self.app(scope, receive, send)

    def refuse_early(
        self, data: bytes, default_headers: Sequence[tuple[bytes, bytes]], unread: float
    ) -> EarlyRefusal | None:
        """See `EarlyGate.refuse`."""
        return None if self.early is None else self.early.refuse(data, default_headers, unread)


@dataclass(eq=False)
class EarlyGate:
    """Refuses calls by their heads as `gate` would, at a quarter of the time.

    In an overload most calls are refused, and the time that this takes is missing to the others.
    """

    gate: Gate
    """Checks hosts, paths and keys."""
    paths: Container[str]
    """The paths of calls."""
    watches: Callable[[bytes], bool]
    """Returns whether the call that some bytes begin with may be refused for overload; the
    others go their usual way."""
    check_call: Callable[[Headers, str, int | None, float], None]
    """Refuses a call by its headers, its path, the index of its key, and the seconds for which
    it waited to be read."""
    on_refusal: Callable[[str, ApiError], None]
    """Counts a refused call by its path and the reason."""

    def refuse(
        self, data: bytes, default_headers: Sequence[tuple[bytes, bytes]], unread: float
    ) -> EarlyRefusal | None:
        """Return the answer to the call that some bytes begin with; None: it is not refused here.

        Args:
            data: The first bytes of a request.
            default_headers: Headers of every answer.
            unread: Seconds for which they waited to be read.
        """
        if not self.watches(data) or (head := HEAD.match(data, 0, MAX_HEAD)) is None:
            return None
        raw = [
            (name.lower(), value.strip(b"\t "))
            for name, _, value in (line.partition(b":") for line in head["fields"].splitlines())
        ]
        names, headers, path = [name for name, _ in raw], Headers(raw=raw), head["path"].decode()
        length = headers.get("content-length", "")
        if not (
            path in self.paths
            and DEMANDING.isdisjoint(names)
            and all(names.count(name) == 1 for name in ALONE)
            and LENGTH.fullmatch(length)
        ):
            return None
        try:
            scope = {"path": path, "raw_path": head["path"], "query_string": b""}
            key = self.gate.check(scope, headers)
            self.check_call(headers, path, key, unread)
        except ApiError as error:
            if "Connection" in (error.headers or {}):
                return None
            closes, id = "close" in headers.get("connection", "").lower(), request_id(headers)
            ids = ((name.lower().encode(), id.encode()) for name in id_headers(path))
            more = [*default_headers, *ids]
            self.on_refusal(path, error)
            answer = whole_answer(error, path, more, closes=closes)
            return EarlyRefusal(answer, head.end() + int(length), closes)
        return None


def whole_answer(
    error: ApiError, path: str, more: Sequence[tuple[bytes, bytes]], *, closes: bool
) -> bytes:
    """Return the bytes of a refusal, with more headers than those of the error."""
    headers, body = refusal(error, path)
    last = [(b"connection", b"close")] if closes else []
    fields = b"".join(b"%b: %b\r\n" % field for field in (*more, *headers, *last))
    phrase = HTTPStatus(error.status_code).phrase.encode()
    return b"HTTP/1.1 %d %b\r\n%b\r\n%b" % (error.status_code, phrase, fields, body)


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
