"""A client's request to the fleet: its target and headers for a replica, and its answer."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import msgspec
from multidict import CIMultiDict
from starlette.types import Receive, Scope, Send

from twolane.server.http.disconnect import ClientGone
from twolane.server.http.errors import ApiError

HOP_HEADERS = frozenset(
    (
        *("connection", "proxy-connection", "keep-alive", "transfer-encoding", "upgrade", "host"),
        *("te", "trailer"),
    )
)
"""Headers that concern one connection only (hop-by-hop), whether or not its `Connection` header
names them."""
NOT_FORWARDED = HOP_HEADERS | {
    *("content-length", "accept-encoding", "expect"),
    *("x-forwarded-for", "x-forwarded-proto"),  # replicas believe them, and clients can invent them
    "origin",  # the fleet answers for a browser's page, so that its headers stand in answers once
}
"""Headers of a request that are not forwarded to a replica."""


NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class ClientCall(NamedTuple):
    """A client's request and the ASGI `send` of its answer."""

    scope: Scope
    body: bytes
    send: Send
    arrived: float
    """Time of arrival on the pool's clock."""
    homes: frozenset[str] = frozenset()
    """Replicas that have the request's adapter or earlier response; empty: any will do."""

    @property
    def path(self) -> str:
        """Path of the endpoint."""
        path: str = self.scope["path"]
        return path


def target(scope: Scope) -> str:
    """Return path and query as the client wrote them, to append to a replica's address."""
    query = scope["query_string"]
    whole = scope["raw_path"] + (b"?" + query if query else b"")
    return str(whole.replace(b"#", b"%23").decode("ascii"))


def check_target(scope: Scope) -> None:
    """Refuse a target that is not a path and would change a replica's address.

    Raises:
        ApiError: 404.
    """
    if not scope["path"].startswith("/"):
        raise ApiError(404, f"{scope['path']!r} is not a path", code="not_found")


async def read_body(receive: Receive) -> bytes:
    """Read a request's body.

    Raises:
        ApiError: see `BodyReader`.
        ClientGone: the client left meanwhile.
    """
    parts, more = [], True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


def named_by_connection(headers: Sequence[tuple[bytes, bytes]]) -> frozenset[str]:
    """Return the lower-case names of the headers that `Connection` headers name: they concern this
    connection only (RFC 9110, 7.6.1)."""
    named = b",".join(value for name, value in headers if name.lower() == b"connection")
    return frozenset(name.strip().lower() for name in named.decode("latin-1").split(","))


def forwarded_headers(scope: Scope, more: Mapping[str, str] = NO_HEADERS) -> CIMultiDict[str]:
    """Return the headers to forward to a replica: the client's, repeated ones included, and its
    address; `more` are in place of the client's of the same names."""
    dropped = NOT_FORWARDED | named_by_connection(scope["headers"])
    headers = [(name.decode("latin-1"), as_sent(value)) for name, value in scope["headers"]]
    kept = CIMultiDict((name, value) for name, value in headers if name not in dropped)
    if (client := scope.get("client")) is not None:
        kept["x-forwarded-for"] = client[0]
    kept.update(more)
    return kept


def answer_headers(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers of a replica's answer to send to the client, repeated ones included."""
    # Headers of a replica's answer that the fleet sets itself.
    dropped = HOP_HEADERS | {"date"} | named_by_connection(headers)
    lower = [(name.lower(), value) for name, value in headers]
    return [(name, value) for name, value in lower if name.decode("latin-1") not in dropped]


def as_sent(value: bytes) -> str:
    """Return the text that the client library, which writes UTF-8, turns into the same bytes, where
    there is one."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def retry_after(seconds: int) -> dict[str, str]:
    """Return the Retry-After header of a refusal."""
    return {"Retry-After": str(seconds)}


async def start_answer(send: Send, status: int, headers: list[tuple[bytes, bytes]]) -> None:
    """Send an answer's status and headers."""
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def answer_json(send: Send, content: object) -> None:
    """Send an answer with status 200 and a JSON body."""
    await answer(send, 200, msgspec.json.encode(content), "application/json")


async def answer(send: Send, status: int, body: bytes, content_type: str) -> None:
    """Send an answer with a body."""
    length = b"%d" % len(body)
    await start_answer(
        send, status, [(b"content-type", content_type.encode()), (b"content-length", length)]
    )
    await send({"type": "http.response.body", "body": body})
