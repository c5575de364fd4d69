"""Checks on every HTTP request: its id, its key, and the bound on its body."""

import hashlib
import hmac
import ipaddress
import re
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from functools import partial

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twolane.server.http import bodies
from twolane.server.http.believed import HostCheck, check_path
from twolane.server.http.calls import Call, set_key, set_reason
from twolane.server.http.connection import CONNECTION, Connection
from twolane.server.http.errors import ANTHROPIC_PATH, ApiError, error_for

REQUEST_ID = "X-Request-Id"
ANTHROPIC_REQUEST_ID = "request-id"
"""Header in which Anthropic's clients read a request's id, besides `REQUEST_ID`."""
KEY_HEADER = "x-api-key"
"""Header in which Anthropic's clients send the key."""
MAX_ID_LENGTH = 128
"""Most characters of a client's request id; the rest is cut."""
IPV6_NETWORK = 64
"""Bits of an IPv6 address that name a client's network."""
NOT_IN_IDS = re.compile(r"[^!-~]")
"""All characters but visible ASCII."""
GUARDED = (
    *("/v1/", "/fleet", "/tokenize", "/detokenize", "/rerank", "/reset_prefix_cache"),
    *("/dashboard/data", "/docs", "/openapi.json"),
)
"""Prefixes of paths that need a key, if keys are set. The others are for probes and scrapers."""
OPERATED = (
    *("/fleet/state", "/fleet/landmarks/", "/reset_prefix_cache"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
)
"""Prefixes of paths that change the server for everybody, or tell of everybody's prompts."""
OPERATOR_HEADER = "x-operator-key"
FORWARDING = frozenset({"x-forwarded-for", "forwarded", "x-real-ip", "via"})
"""Headers that a proxy adds to others' requests."""
LIVE_PATHS = ("/livez", "/health/live")
"""Paths of liveness probes."""
PROBES = frozenset({*LIVE_PATHS, "/health", "/health/ready", "/ping", "/metrics"})
"""Paths that are served even with too many connections."""


CLIENT: ContextVar[str] = ContextVar("client", default="")
"""Client of the current request: the index of its key or, without one, its network."""


class Gate:
    """ASGI middleware that refuses requests before they reach the endpoints.

    Args:
        app: the endpoints.
        api_keys: valid keys; none: no key is needed.
        max_body_bytes: longer bodies are refused (413) without being read.
        allowed_hosts: hosts that requests may name besides local ones; None: any with keys, and
            local ones without, since a web page has no key.
        operator_key: The key for paths of the operator, which this machine needs no key for; None:
            there is none.
        keeps_bodies: true if `app` holds each body until its request has ended.
        on_refusal: is told why `app` does not see a request.
        check_call: Refuses a call by its headers and the index of its key, before its body is read.
    """

    def __init__(
        self,
        app: ASGIApp,
        api_keys: Iterable[str],
        max_body_bytes: int,
        *,
        allowed_hosts: Sequence[str] | None = None,
        operator_key: str | None = None,
        keeps_bodies: bool = False,
        on_refusal: Callable[[str], None] = lambda code: None,
        check_call: Callable[[Headers, Call, int | None], None] = lambda headers, call, key: None,
    ) -> None:
        self._app = app
        self._keys = [digest(key.encode()) for key in api_keys]
        no_names = ("*",) if self._keys else ()
        self._hosts = HostCheck(no_names if allowed_hosts is None else allowed_hosts)
        self._operator_keys = [digest(key.encode()) for key in (operator_key,) if key is not None]
        self._max_body_bytes = max_body_bytes
        self._keeps_bodies = keeps_bodies
        self._on_refusal = on_refusal
        self._check_call = check_call
        self._max_bytes = max(bodies.ARRIVING_BYTES, 4 * max_body_bytes)
        self._arriving = bodies.ArrivingBytes(self._max_bytes)
        self._turns = bodies.ParsingTurns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = MutableHeaders(scope=scope)
        headers[REQUEST_ID] = id = request_id(headers)
        send = with_request_id(send, id, scope["path"])
        try:
            check_room(scope)
            rest = bodies.RestOfBody(scope, receive, send, self._max_bytes)
            receive, send = rest.receive, rest.send
            key = self.check(scope, headers)
            CLIENT.set(client(scope) if key is None else f"key {key}")
            call: Call | None = scope.get("state", {}).get("call")
            if call is not None:
                self._check_call(headers, call, key)
        except ApiError as error:
            set_reason(Request(scope), error.code, error.message)
            self._on_refusal(error.code)
            await refuse(error, scope["path"], send)
            return
        set_key(scope, key)
        whose, kept, turn = CLIENT.get(), self._keeps_bodies, None
        connection: Connection | None = scope.get("state", {}).get(CONNECTION)
        if call is not None:
            turn = self._turns.turn(whose)
            call.on_parsed = partial(parsed, turn, connection)
        elif connection is not None:  # nobody tells when it has been parsed
            connection.end_turn()
        bounds = self._max_body_bytes, self._arriving, whose
        body = bodies.BodyReader(receive, *bounds, kept=kept, turn=turn)
        try:
            await self._app(scope, body.receive, send)
        finally:
            body.end()
            if turn is not None:
                turn.end()

    def check(self, scope: Scope, headers: Headers) -> int | None:
        """Return the index of a request's key; None: it needs none.

        Raises:
            ApiError: its head alone refuses it.
        """
        self._hosts.check(headers)
        check_path(scope)
        key = self._check_key(scope, headers)
        if int(headers.get("content-length", "0")) > self._max_body_bytes:
            raise bodies.too_large(self._max_body_bytes)
        return key

    def _check_key(self, scope: Scope, headers: Headers) -> int | None:
        """Return the index of the request's key; None: it needs none.

        Raises:
            ApiError: 401, it needs a key; 403, it needs the operator's.
        """
        path, key = scope["path"], sent_key(headers)
        place = place_of(key, self._keys)
        if path.startswith(OPERATED):
            sent = headers.get(OPERATOR_HEADER, key)
            if place_of(sent, self._operator_keys) is not None:
                return place
            if not is_of_this_machine(scope, headers):
                message = f"only the operator may ask for {path}: send {OPERATOR_HEADER}"
                raise ApiError(403, message, code="operator_only")
        if not self._keys or not path.startswith(GUARDED):
            return None
        if place is None:
            raise ApiError(
                401,
                'a valid API key is needed: send "Authorization: Bearer KEY"',
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return place


def parsed(turn: bodies.ParsingTurn, connection: Connection | None) -> None:
    """Let the next calls of a client be read and parsed."""
    turn.end()
    if connection is not None:
        connection.end_turn()


def client(scope: Scope) -> str:
    """Return the network that a request comes from: an IPv4 address, or the half of an IPv6 address
    that a client cannot choose."""
    address: str = (scope.get("client") or ("", 0))[0]
    try:
        known = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(known, ipaddress.IPv4Address):
        return address
    return str(known.ipv4_mapped or ipaddress.ip_network((known, IPV6_NETWORK), strict=False))


def sent_key(headers: Headers) -> str:
    """Return the key that a request has sent, or an empty text."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if KEY_HEADER in headers:
        return headers[KEY_HEADER]
    return key if scheme.lower() == "bearer" else ""


def place_of(key: str, digests: Sequence[bytes]) -> int | None:
    """Return the index of a key among those of which there are digests; None: it is none of them.

    All of them are compared, so that the time tells nothing about which one fits.
    """
    if not digests:
        return None
    digested = digest(key.strip().encode("latin-1"))
    fitting = [hmac.compare_digest(digested, known) for known in digests]
    return fitting.index(True) if any(fitting) else None


def is_of_this_machine(scope: Scope, headers: Headers) -> bool:
    """Return whether a request comes from this machine, and not through a proxy on it."""
    address = (scope.get("client") or ("", 0))[0]
    try:
        known = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(known, "ipv4_mapped", None) or known
    return mapped.is_loopback and FORWARDING.isdisjoint(headers)


def check_room(scope: Scope) -> None:
    """Refuse requests, except for probes, on a connection beyond the bound.

    Raises:
        ApiError: 503.
    """
    connection = scope.get("state", {}).get("connection")
    if connection is not None and connection.probes_only and scope["path"] not in PROBES:
        headers = {"Retry-After": "1", "Connection": "close"}
        message = "too many connections: all are busy"
        raise ApiError(503, message, code="too_many_connections", headers=headers)


def digest(key: bytes) -> bytes:
    """Return a key's SHA-256: all digests have one length, and no key is kept in clear."""
    return hashlib.sha256(key).digest()


def request_id(headers: Headers) -> str:
    """Return the client's id of the request, cleaned, or a new one."""
    id = NOT_IN_IDS.sub("", headers.get(REQUEST_ID, ""))
    return id[:MAX_ID_LENGTH] or uuid.uuid4().hex


def id_headers(path: str) -> tuple[str, ...]:
    """Return the headers in which the clients of a path read a request's id."""
    anthropic = path.startswith(ANTHROPIC_PATH)
    return (REQUEST_ID, ANTHROPIC_REQUEST_ID) if anthropic else (REQUEST_ID,)


def with_request_id(send: Send, id: str, path: str) -> Send:
    """Add the id to the answer's headers, under each name that clients of the path read."""

    async def wrapped(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name in id_headers(path):
                headers[name] = id
        await send(message)

    return wrapped


async def refuse(error: ApiError, path: str, send: Send) -> None:
    """Send an error in the format of the API that the path belongs to."""
    headers, body = refusal(error, path)
    await send({"type": "http.response.start", "status": error.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def refusal(error: ApiError, path: str) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Return headers and body of an error in the format of the API that the path belongs to."""
    body = msgspec.json.encode(error_for(path, error.body))
    headers: Sequence[tuple[str, str]] = [
        ("Content-Type", "application/json"),
        ("Content-Length", str(len(body))),
        *(error.headers or {}).items(),
    ]
    return [(name.lower().encode(), value.encode()) for name, value in headers], body
