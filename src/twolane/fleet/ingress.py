"""The one address: an ASGI application that sends each request to the replica that the router
chose, and its answer back as it comes.

A request whose answer has not begun is sent to another replica if its own is gone, drains or is
full. An answer that has begun and breaks off ends with an error event, or a closed connection where
it is no stream of events.
"""

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable
from contextlib import suppress
from typing import TypeVar

import aiohttp
import msgspec
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from twolane.common.prefix_digest import Landmarks
from twolane.fleet.pool import Member, Pool
from twolane.router.choose import Chosen, Refused
from twolane.router.policies import Policy
from twolane.router.state import Ask
from twolane.server.http.errors import ANTHROPIC_PATH, ApiError, error_body, error_for
from twolane.server.http.events import named_event
from twolane.server.http.gate import refuse

log = logging.getLogger("twolane.fleet")
T = TypeVar("T")

LANDMARKS = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}
"""Paths whose prompts replicas can turn into landmarks."""
GENERATES = (*LANDMARKS, "/v1/responses", "/v1/messages")
PROBES = ("/health", "/health/ready", "/ping", "/livez", "/health/live")
LANDMARK_SECONDS = 1.0
"""Seconds within which a replica must say the landmarks of a prompt; else it counts as new."""
CHARACTERS = 4
"""Bytes of a body for each prompt token where nothing else is known."""
TRIES = 4
"""Replicas that a request is sent to until one begins to answer."""
RETRY_UNREADY = 5
"""Whole seconds after which a client should come again when no replica is ready."""
WAIT_SECONDS = 30.0
"""Seconds that a request waits for a replica that is ready."""
SESSION_HEADER, REPLICA_HEADER = "x-session-id", "x-replica"
HOP_HEADERS = frozenset(
    ("connection", "keep-alive", "transfer-encoding", "upgrade", "host", "te", "trailer")
)
"""Headers that belong to one connection."""


class _Body(msgspec.Struct):
    """What the router reads of a request's body."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None
    user: str | None = None


class _Landmarks(msgspec.Struct):
    """The answer of /fleet/landmarks."""

    prompt_tokens: int
    tokens: list[int]
    hashes: list[int]


class BrokenOff(Exception):
    """A replica is gone while it answered, or before it did."""


class Ingress:
    """ASGI application in front of a pool.

    Args:
        pool: the replicas.
        policy: the router.
        session: for requests to replicas.
        most_body: bytes that a body may have.
    """

    def __init__(
        self, pool: Pool, policy: Policy, session: aiohttp.ClientSession, most_body: int
    ) -> None:
        self._pool = pool
        self._policy = policy
        self._session = session
        self._most_body = most_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            return
        path = scope["path"]
        if path in PROBES:
            await self._probe(path, send)
        elif path == "/fleet":
            await self._show(Headers(scope=scope), send)
        else:
            await self._serve(scope, receive, send)

    def overview(self) -> dict[str, object]:
        """Return what /fleet shows: every replica, and what it last said."""
        return {
            "router": self._pool.options.router,
            "replicas": [
                {
                    "name": member.name,
                    "phase": member.phase,
                    "url": None if member.place is None else member.place.url,
                    "pid": None if member.place is None else member.place.pid,
                    "open": member.open,
                    "served": member.served,
                    "state": msgspec.structs.replace(member.state, digest=None),
                }
                for member in self._pool.members.values()
            ],
        }

    async def _show(self, headers: Headers, send: Send) -> None:
        """Answer with the overview, if the client has the replicas' key."""
        given = headers.get("authorization", "").removeprefix("Bearer ").encode("latin-1")
        if self._pool.key is None or hmac.compare_digest(given, self._pool.key.encode()):
            await _json(send, 200, self.overview())
        else:
            error = ApiError(401, "a valid API key is needed", code="invalid_api_key")
            await refuse(error, "/fleet", send)

    async def _probe(self, path: str, send: Send) -> None:
        live = path in ("/livez", "/health/live")
        if live or self._pool.serving:
            await _json(send, 200, {"status": "ok"})
        else:
            await refuse(ApiError(503, "no replica is ready", code="unavailable"), path, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = False

        async def noted(message: Message) -> None:
            nonlocal began
            began = True
            await send(message)

        path = scope["path"]
        try:
            body = await self._read(receive)
            call = asyncio.create_task(self._try_all(scope, body, noted))
            gone = asyncio.create_task(_gone(receive))
            try:
                await asyncio.wait({call, gone}, return_when=asyncio.FIRST_COMPLETED)
                if call.done():
                    call.result()
            finally:
                for task in (call, gone):
                    task.cancel()
                    with suppress(asyncio.CancelledError, Exception):
                        await task
        except ApiError as error:
            if not began:
                await refuse(error, path, send)

    async def _read(self, receive: Receive) -> bytes:
        """Read a body.

        Raises:
            ApiError: 413.
        """
        parts, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ApiError(400, "the client left", code="client_gone")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._most_body:
                what = f"the body is larger than {self._most_body} bytes"
                raise ApiError(413, what, code="body_too_large", headers={"Connection": "close"})
            more = message.get("more_body", False)
        return b"".join(parts)

    async def _try_all(self, scope: Scope, body: bytes, send: Send) -> None:
        """Send a request to one replica after the other until one answers.

        Raises:
            ApiError: 429 or 503.
        """
        ask = await self._ask(scope, body)
        tried: set[str] = set()
        for _ in range(TRIES):
            member = await self._choose(ask, tried)
            tried.add(member.name)
            if self._pool.options.direct and scope["path"] in GENERATES:
                await self._redirect(scope, member, send)
                self._pool.table.ended(member.name)
                return
            member.enter()
            try:
                if await self._forward(scope, body, member, send, last=len(tried) == TRIES):
                    return
            except BrokenOff as error:
                log.warning("%s: %s", member.name, error)
            finally:
                member.leave()
                self._pool.table.ended(member.name)
        raise ApiError(503, "no replica could answer", code="unavailable", headers=_retry(1))

    async def _choose(self, ask: Ask, tried: set[str]) -> Member:
        """Return the replica for a request, not one that was tried if there is another.

        Raises:
            ApiError: 429, or 503 when none is ready for a while.
        """
        end = self._pool.clock() + WAIT_SECONDS
        while True:
            now = self._pool.clock()
            views = self._pool.table.views(ask, now)
            views = [view for view in views if view.name not in tried] or views
            if views:
                break
            if now > end:
                headers = _retry(RETRY_UNREADY)
                raise ApiError(503, "no replica is ready", code="unavailable", headers=headers)
            await asyncio.sleep(self._pool.options.probe_seconds)
        choice = self._policy(ask, views)
        if isinstance(choice, Refused):
            headers = _retry(choice.retry_after)
            raise ApiError(429, choice.reason, code="refused", headers=headers)
        assert isinstance(choice, Chosen)
        self._pool.table.sent(choice.name, ask, now)
        return self._pool.members[choice.name]

    async def _ask(self, scope: Scope, body: bytes) -> Ask:
        """Return what the router needs to know of a request."""
        headers, path = Headers(scope=scope), scope["path"]
        known = _Body()
        with suppress(msgspec.DecodeError):
            known = msgspec.json.decode(body, type=_Body)
        found = None
        if path in LANDMARKS and len(self._pool.serving) > 1:
            found = await self._landmarks(scope, body, LANDMARKS[path])
        ttft = headers.get("x-slo-ttft-ms", "")
        most = known.max_completion_tokens or known.max_tokens or 256
        return Ask(
            prompt_tokens=found.prompt_tokens if found else max(1, len(body) // CHARACTERS),
            output_tokens=most,
            landmarks=Landmarks(found.tokens, found.hashes) if found else Landmarks(),
            ttft=float(ttft) / 1e3 if ttft.isdecimal() and int(ttft) else None,
            session=headers.get(SESSION_HEADER) or known.user,
        )

    async def _landmarks(self, scope: Scope, body: bytes, kind: str) -> _Landmarks | None:
        """Ask the least busy replica for a prompt's landmarks; None: it does not say."""
        member = min(self._pool.serving, key=lambda each: each.open)
        assert member.place is not None
        try:
            async with (
                asyncio.timeout(LANDMARK_SECONDS),
                self._session.post(
                    f"{member.place.url}/fleet/landmarks/{kind}",
                    data=body,
                    headers=_forwarded(scope),
                ) as answer,
            ):
                if answer.status != 200:  # the replica that it is sent to says what is wrong
                    return None
                return msgspec.json.decode(await answer.read(), type=_Landmarks)
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError):
            return None

    async def _forward(
        self, scope: Scope, body: bytes, member: Member, send: Send, *, last: bool
    ) -> bool:
        """Have a replica answer; whether it did, or else another one may be asked.

        Raises:
            BrokenOff: the replica is gone, and the answer has not begun.
        """
        assert member.place is not None
        url = member.place.url + scope["path"]
        query = scope["query_string"].decode("latin-1")
        request = self._session.request(
            scope["method"],
            f"{url}?{query}" if query else url,
            data=body,
            headers=_forwarded(scope),
            allow_redirects=False,
        )
        answer = await _unless_lost(member, request)
        try:
            if answer.status in (429, 503) and not last and len(self._pool.serving) > 1:
                return False
            headers = [
                (name.lower(), value)
                for name, value in answer.raw_headers
                if name.lower().decode("latin-1") not in HOP_HEADERS
            ]
            headers.append((REPLICA_HEADER.encode(), member.name.encode()))
            events = answer.content_type == "text/event-stream"
            if (
                not events
            ):  # nothing is sent before all of it is here, so that it can be tried again
                whole = await _unless_lost(member, answer.read())
                await _start(send, answer.status, headers)
                await send({"type": "http.response.body", "body": whole})
                return True
            await self._stream(scope["path"], member, answer, headers, send)
            return True
        finally:
            answer.close()

    async def _stream(
        self,
        path: str,
        member: Member,
        answer: aiohttp.ClientResponse,
        headers: list[tuple[bytes, bytes]],
        send: Send,
    ) -> None:
        """Send events on as they come; one that breaks off ends with an error event."""
        pieces = _pieces(member, answer)
        first = await anext(pieces, b"")
        await _start(send, answer.status, headers)
        try:
            await send({"type": "http.response.body", "body": first, "more_body": True})
            async for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except BrokenOff as error:
            log.warning("%s: an answer broke off: %s", member.name, error)
            await send({"type": "http.response.body", "body": _failure(path), "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _redirect(self, scope: Scope, member: Member, send: Send) -> None:
        """Tell the client where to ask."""
        assert member.place is not None
        query = scope["query_string"]
        place = (member.place.url + scope["path"]).encode() + (b"?" + query if query else b"")
        await _start(send, 307, [(b"location", place), (b"content-length", b"0")])
        await send({"type": "http.response.body", "body": b""})


async def _unless_lost(member: Member, work: Awaitable[T]) -> T:
    """Wait for a replica.

    Raises:
        BrokenOff: it failed, or nothing more can be expected of it.
    """
    task = asyncio.ensure_future(work)
    lost = asyncio.create_task(member.lost.wait())
    try:
        await asyncio.wait({task, lost}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise BrokenOff("it does not answer any more")
    except (aiohttp.ClientError, OSError) as error:
        raise BrokenOff(str(error) or type(error).__name__) from error
    finally:
        lost.cancel()
        if not task.done():
            task.cancel()


async def _pieces(member: Member, answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield what comes of an answer.

    Raises:
        BrokenOff: see `_unless_lost`.
    """
    while piece := await _unless_lost(member, answer.content.readany()):
        yield piece


async def _gone(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _forwarded(scope: Scope) -> dict[str, str]:
    """The client's headers for a replica."""
    headers = Headers(scope=scope)
    dropped = {*HOP_HEADERS, "content-length", "accept-encoding"}
    return {name: value for name, value in headers.items() if name not in dropped}


def _failure(path: str) -> bytes:
    """The event with which a stream ends that its replica does not go on with."""
    body = error_for(path, error_body(503, "the replica is gone", "replica_gone"))
    if path.startswith(ANTHROPIC_PATH):
        return named_event(body)
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _retry(seconds: int) -> dict[str, str]:
    return {"Retry-After": str(seconds)}


async def _start(send: Send, status: int, headers: list[tuple[bytes, bytes]]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _json(send: Send, status: int, content: object) -> None:
    body = msgspec.json.encode(content)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await _start(send, status, headers)
    await send({"type": "http.response.body", "body": body})
