"""A client's request at the fleet's address: its target and headers for a replica, its answer."""

from typing import NamedTuple

import msgspec
from multidict import CIMultiDict
from starlette.types import Receive, Scope, Send

from twolane.server.http.errors import ApiError

HOP_HEADERS = frozenset(
    ("connection", "keep-alive", "transfer-encoding", "upgrade", "host", "te", "trailer")
)
"""Headers that belong to one connection."""
NOT_FORWARDED = HOP_HEADERS | {
    *("content-length", "accept-encoding", "expect"),
    *("x-forwarded-for", "x-forwarded-proto"),  # replicas believe them, and clients can invent them
    "origin",  # the fleet answers for a browser's page, so that its headers stand in answers once
}
"""Headers of a request that a replica does not get."""
ANSWERED_FOR = HOP_HEADERS | {"date"}
"""Headers of a replica's answer that the fleet gives itself."""


DISCONNECT = "disconnect"
"""What the metrics call the outcome of a request whose client has left."""


class ClientCall(NamedTuple):
    """A request, and where its answer goes."""

    scope: Scope
    body: bytes
    send: Send
    arrived: float
    """When it came, on the pool's clock."""
    homes: frozenset[str] = frozenset()
    """The replicas that have what it needs; none: all have it."""

    @property
    def path(self) -> str:
        """Path of the endpoint."""
        path: str = self.scope["path"]
        return path


def target(scope: Scope) -> str:
    """Return path and query as the client wrote them, for the address of a replica."""
    query = scope["query_string"]
    whole = scope["raw_path"] + (b"?" + query if query else b"")
    return str(whole.replace(b"#", b"%23").decode("ascii"))


def check_target(scope: Scope) -> None:
    """Refuse a target that is no path: what is joined to a replica's address must not change it.

    Raises:
        ApiError: 404.
    """
    if not scope["path"].startswith("/"):
        raise ApiError(404, f"{scope['path']!r} is not a path", code="not_found")


async def read_body(receive: Receive) -> bytes:
    """Read a body.

    Raises:
        ApiError: see `BodyReader`; or the client is gone.
    """
    parts, more = [], True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "the client left", code=DISCONNECT)
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


async def left(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


def forwarded(scope: Scope) -> CIMultiDict[str]:
    """The client's headers for a replica, as often as they came, and the client's address."""
    headers = [(name.decode("latin-1"), as_sent(value)) for name, value in scope["headers"]]
    kept = CIMultiDict((name, value) for name, value in headers if name not in NOT_FORWARDED)
    if (client := scope.get("client")) is not None:
        kept["x-forwarded-for"] = client[0]
    return kept


def as_sent(value: bytes) -> str:
    """Return the text of a header that the client library writes as the same bytes, if it can be
    had: the library writes UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def retry_after(seconds: int) -> dict[str, str]:
    """The header of a refusal that says when to come again."""
    return {"Retry-After": str(seconds)}


async def start(send: Send, status: int, headers: list[tuple[bytes, bytes]]) -> None:
    """Begin an answer."""
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def answer_json(send: Send, status: int, content: object) -> None:
    """Answer with an object, as a whole."""
    await answer(send, status, msgspec.json.encode(content), "application/json")


async def answer(send: Send, status: int, body: bytes, content_type: str) -> None:
    """Answer with a body, as a whole."""
    length = b"%d" % len(body)
    await start(
        send, status, [(b"content-type", content_type.encode()), (b"content-length", length)]
    )
    await send({"type": "http.response.body", "body": body})
