"""The one address: an ASGI application that sends each request to the replica that the router
chose, and its answer back as it comes.

A request whose answer has not begun is sent to another replica if its own is gone, drains or is
full. An answer that has begun and breaks off ends with an error event, or a closed connection where
it is no stream of events.
"""

import asyncio
import hashlib
import logging
import math
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar

import aiohttp
import msgspec
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send
from yarl import URL

from twolane.common.prefix_digest import Landmarks
from twolane.fleet.changes import EVERYWHERE, LOST
from twolane.fleet.metrics import CONTENT_TYPE, FleetMetrics
from twolane.fleet.pool import Member, Pool
from twolane.router.choose import Chosen, NoReplica
from twolane.router.policies import Policy
from twolane.router.state import Ask
from twolane.router.table import Sent
from twolane.server.http.errors import ANTHROPIC_PATH, ApiError, error_body, error_for
from twolane.server.http.events import named_event
from twolane.server.http.gate import refuse

log = logging.getLogger("twolane.fleet")
T = TypeVar("T")

LANDMARKS = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}
"""Paths whose prompts replicas can turn into landmarks."""
RESPONSES = "/v1/responses"
GENERATES = (*LANDMARKS, RESPONSES, "/v1/messages")
REDIRECTED = (*LANDMARKS, "/v1/messages")
"""Not `RESPONSES`: the fleet has to know which replica stores a response."""
RESPONSE_ID = re.compile(rb'"id": ?"(resp_[0-9a-f]+)"')
"""The first one in an answer of `RESPONSES`, or in the first event of its stream, is its own."""
RESPONSE_HEAD = 1024
"""It stands within this many bytes."""
KNOWN_RESPONSES = 65536
"""Number of responses of which the fleet knows the replica that may have stored them."""
PROBES = ("/health", "/health/ready", "/ping", "/livez", "/health/live")
LANDMARK_SECONDS = 1.0
"""Seconds within which a replica must say the landmarks of a prompt; else it counts as new."""
BYTES_PER_TOKEN = 4
"""Bytes of a body for each prompt token where nothing else is known."""
USUAL_OUTPUT, MOST_OUTPUT = 256, 1 << 20
"""Tokens of an answer whose request names none, and the most that the router believes."""
MOST_TRIES = 4
"""Replicas that a request is sent to until one begins to answer."""
RETRY_UNREADY = 5
"""Whole seconds after which a client should come again when no replica is ready."""
WAIT_SECONDS = 30.0
"""Seconds that a request waits for a replica that is ready."""
SESSION_HEADER, REPLICA_HEADER = "x-session-id", "x-replica"
PREDICTED_HEADER = "x-predicted-ttft-ms"
"""Header of answers: milliseconds to the first token as the router predicted, 0 if unknown."""
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


class _Body(msgspec.Struct):
    """What the router reads of a request's body."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None
    user: str | None = None
    model: str | None = None
    previous_response_id: str | None = None

    @property
    def most_output(self) -> int:
        """Tokens that the answer may have, as far as a router believes it."""
        asked = self.max_completion_tokens or self.max_tokens or USUAL_OUTPUT
        return min(max(asked, 1), MOST_OUTPUT)


class _Landmarks(msgspec.Struct):
    """The answer of /fleet/landmarks."""

    prompt_tokens: int
    tokens: list[int]
    hashes: list[int]
    token_ids: list[int] | None = None


class _Call(NamedTuple):
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
        self.metrics = FleetMetrics(pool.members.values)
        self._responses: OrderedDict[str, str] = OrderedDict()
        """Names of the replicas that answered, by the response's id."""
        self._changing: set[asyncio.Task[None]] = set()
        """Changes of all replicas that go on without their clients."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            return
        path = scope["path"]
        if path in PROBES:
            await self._probe(path, send)
        elif path == "/metrics":
            await _answer(send, 200, self.metrics.render(), CONTENT_TYPE)
        elif path == "/fleet":
            await _json(send, 200, self.overview())
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
            check_target(scope)
            body = await _read(receive)
            call = _Call(scope, body, noted, self._pool.clock())
            answering = asyncio.create_task(self._try_all(call))
            gone = asyncio.create_task(_gone(receive))
            try:
                await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
                if answering.done():
                    answering.result()
            finally:
                for task in (answering, gone):
                    task.cancel()
                    with suppress(asyncio.CancelledError, Exception):
                        await task
        except ApiError as error:
            self._count(error.code or "invalid")
            if not began:
                await refuse(error, path, send)
        except Exception:
            log.exception("%s %r failed", scope["method"], path)
            self._count("internal_error")
            if began:
                raise
            await refuse(ApiError(500, "internal error", code="internal_error"), path, send)

    def _count(self, outcome: str) -> None:
        self.metrics.requests.labels(outcome).inc()

    async def _try_all(self, call: _Call) -> None:
        """Send a request to one replica after the other until one answers.

        Raises:
            ApiError: 429 or 503.
        """
        if call.path in EVERYWHERE and call.scope["method"] == "POST":
            # Some replicas would be changed and others not if this ended with the client.
            changing = asyncio.create_task(self._change_all(call))
            self._changing.add(changing)
            changing.add_done_callback(self._changing.discard)
            await asyncio.shield(changing)
            return
        call, ask = await self._ask(call)
        tried: set[str] = set()
        for _ in range(MOST_TRIES):
            chosen, sent = await self._choose(ask, tried, call.homes)
            self.metrics.choosing.observe(self._pool.clock() - call.arrived)
            if call.path in GENERATES:
                self.metrics.predicted.observe(chosen.ttft)
            member = self._pool.members[chosen.name]
            tried.add(member.name)
            if self._pool.options.direct and call.path in REDIRECTED:
                self._pool.table.ended(member.name)
                self._count("redirected")
                await _redirect(call, member)
                return
            member.enter()
            try:
                last = len(tried) == MOST_TRIES or tried >= call.homes > frozenset()
                if await self._forward(call, chosen, last=last):
                    return
            except BrokenOff as error:
                log.warning("%s: %s", member.name, error)
            else:
                self._count("retried")
            finally:
                member.leave()
                self._pool.table.ended(member.name, sent)
        raise ApiError(503, "no replica could answer", code="unavailable", headers=_retry(1))

    async def _change_all(self, call: _Call) -> None:
        """Have all replicas that take requests make a change, and the others later.

        Raises:
            ApiError: 503, there is none.
        """
        serving = await self._awaited(lambda: self._pool.serving)
        members = {member.name: member for member in serving}
        replies = await self._pool.changes.make(
            [*members.values()], call.path, call.body, _forwarded(call.scope)
        )
        for reply in replies:
            if reply.status == LOST:
                self._pool.leave_out(members[reply.name])
        said = [reply for reply in replies if reply.status != LOST]
        if not said:
            raise ApiError(503, "no replica could answer", code="unavailable", headers=_retry(1))
        shown = max(said, key=lambda reply: reply.status)
        self._count("answered")
        await _answer(call.send, shown.status, shown.body, "application/json")

    async def _choose(
        self, ask: Ask, tried: set[str], homes: frozenset[str]
    ) -> tuple[Chosen, Sent]:
        """Send a request to a replica, not to one that was tried if there is another.

        Raises:
            ApiError: 429, or 503 when none is ready for a while.
        """
        views = await self._awaited(lambda: self._pool.table.views(ask, self._pool.clock()))
        views = [view for view in views if view.name in homes] or views
        views = [view for view in views if view.name not in tried] or views
        choice = self._policy(ask, views)
        if isinstance(choice, NoReplica):
            headers = _retry(choice.retry_after)
            raise ApiError(429, choice.reason, code="refused", headers=headers)
        assert isinstance(choice, Chosen)
        return choice, self._pool.table.sent(choice.name, ask, self._pool.clock())

    async def _awaited(self, ready: Callable[[], Sequence[T]]) -> Sequence[T]:
        """Wait until there are such replicas, and return them.

        Raises:
            ApiError: 503, there are none for a while.
        """
        end = self._pool.clock() + WAIT_SECONDS
        while not (found := ready()):
            if self._pool.clock() > end:
                headers = _retry(RETRY_UNREADY)
                raise ApiError(503, "no replica is ready", code="unavailable", headers=headers)
            await asyncio.sleep(self._pool.options.probe_seconds)
        return found

    def _homes(self, path: str, known: _Body) -> frozenset[str]:
        """Names of the replicas that have a request's adapter or its earlier response; none: any
        will do, or there is none, as that will say."""
        response = known.previous_response_id
        if path.startswith(f"{RESPONSES}/"):
            response = path.removeprefix(f"{RESPONSES}/").partition("/")[0]
        if (home := self._responses.get(response or "")) is not None:
            return frozenset((home,))
        if known.model not in self._pool.changes.adapters:
            return frozenset()
        serving = self._pool.serving
        return frozenset(each.name for each in serving if known.model in each.adapters)

    def _note_response(self, call: _Call, member: Member, begun: bytes) -> None:
        """Remember which replica may have stored a response, by how its answer begins."""
        if call.path == RESPONSES and (found := RESPONSE_ID.search(begun)):
            self._responses[found[1].decode()] = member.name
            if len(self._responses) > KNOWN_RESPONSES:
                self._responses.popitem(last=False)

    async def _ask(self, call: _Call) -> tuple[_Call, Ask]:
        """Return the request with the tokens of its prompt, and what the router needs to know."""
        headers, body = Headers(scope=call.scope), call.body
        known = _known(body)
        call = call._replace(homes=self._homes(call.path, known))
        found = None
        if call.path in LANDMARKS and len(self._pool.serving) > 1:
            found = await self._landmarks(call, LANDMARKS[call.path])
            told = _with_tokens(body, found)
            if len(told) <= self._most_body:  # or the replica would refuse what its client may send
                call = call._replace(body=told)
        asked = headers.get(SESSION_HEADER) or known.user
        return call, Ask(
            prompt_tokens=found.prompt_tokens if found else max(1, len(body) // BYTES_PER_TOKEN),
            output_tokens=known.most_output,
            landmarks=Landmarks(found.tokens, found.hashes) if found else Landmarks(),
            ttft=_bound(call.path, headers.get("x-slo-ttft-ms", "")),
            session=asked and session_key(asked),
        )

    async def _landmarks(self, call: _Call, kind: str) -> _Landmarks | None:
        """Ask the least busy replica for a prompt's landmarks; None: it does not say."""
        member = min(self._pool.serving, key=lambda each: each.open)
        assert member.place is not None
        try:
            async with (
                asyncio.timeout(LANDMARK_SECONDS),
                self._session.post(
                    f"{member.place.url}/fleet/landmarks/{kind}?token_ids=true",
                    data=call.body,
                    headers=_forwarded(call.scope),
                ) as answer,
            ):
                if answer.status != 200:  # the replica that it is sent to says what is wrong
                    return None
                return msgspec.json.decode(await answer.read(), type=_Landmarks)
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError):
            return None

    async def _forward(self, call: _Call, chosen: Chosen, *, last: bool) -> bool:
        """Have a replica answer; whether it did, or else another one may be asked.

        Raises:
            BrokenOff: the replica is gone, and the answer has not begun.
        """
        member = self._pool.members[chosen.name]
        assert member.place is not None
        request = self._session.request(
            call.scope["method"],
            URL(member.place.url + target(call.scope), encoded=True),
            data=call.body,
            headers=_forwarded(call.scope),
            allow_redirects=False,
        )
        answer = await _unless_lost(member, request)
        try:
            if answer.status in (429, 503) and not last and len(self._pool.serving) > 1:
                return False
            headers = [
                (name.lower(), value)
                for name, value in answer.raw_headers
                if name.lower().decode("latin-1") not in ANSWERED_FOR
            ]
            headers.append((REPLICA_HEADER.encode(), member.name.encode()))
            headers.append((PREDICTED_HEADER.encode(), b"%d" % round(1e3 * chosen.ttft)))
            if answer.content_type == "text/event-stream":
                await self._stream(call, member, answer, headers)
                return True
            # Nothing is sent before all of it is here, so that it can be tried again.
            whole = await _unless_lost(member, answer.read())
            self._count("answered")
            self._note_response(call, member, whole[:RESPONSE_HEAD])
            await _start(call.send, answer.status, headers)
            await call.send({"type": "http.response.body", "body": whole})
            return True
        finally:
            answer.close()

    async def _stream(
        self,
        call: _Call,
        member: Member,
        answer: aiohttp.ClientResponse,
        headers: list[tuple[bytes, bytes]],
    ) -> None:
        """Send events on as they come; one that breaks off ends with an error event."""
        pieces = _pieces(member, answer)
        first, send = await anext(pieces, b""), call.send
        self._note_response(call, member, first[:RESPONSE_HEAD])
        self.metrics.first_events.observe(self._pool.clock() - call.arrived)
        await _start(send, answer.status, headers)
        try:
            await send({"type": "http.response.body", "body": first, "more_body": True})
            async for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except BrokenOff as error:
            log.warning("%s: an answer broke off: %s", member.name, error)
            self._count("broken_off")
            body = _failure(call.path)
            await send({"type": "http.response.body", "body": body, "more_body": True})
        else:
            self._count("answered")
        await send({"type": "http.response.body", "body": b""})


def _bound(path: str, asked: str) -> float | None:
    """Seconds to the first token: as a header asks, or None, the replica's. What generates nothing
    has no bound, and is never refused."""
    if path not in GENERATES:
        return math.inf
    with suppress(ValueError):  # the replica says what is wrong
        if 0.0 < (seconds := float(asked) / 1e3) < math.inf:
            return seconds
    return None


def _known(body: bytes) -> _Body:
    """Read what the router wants to know of a body, which may be anything."""
    # The decoder's own error, deep nesting, and strings that are no UTF-8.
    with suppress(msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return msgspec.json.decode(body, type=_Body)
    return _Body()


def session_key(name: str) -> str:
    """Return what stands for a session in the router's table: clients choose how long names are."""
    return hashlib.blake2b(name.encode(errors="replace"), digest_size=16).hexdigest()


def target(scope: Scope) -> str:
    """Return path and query as the client wrote them, for the address of a replica."""
    query = scope["query_string"]
    whole = scope["raw_path"] + (b"?" + query if query else b"")
    return str(whole.replace(b"#", b"%23").decode("ascii"))


def _with_tokens(body: bytes, found: _Landmarks | None) -> bytes:
    """A body, with the tokens of its prompt if they are known and change nothing else.

    A replica has read the body as an object with fields, so that it begins with a brace.
    """
    if found is None or found.token_ids is None:
        return body
    if b'"prompt_token_ids"' in body or b'"truncate_prompt_tokens"' in body:
        return body
    _, _, fields = body.partition(b"{")
    return b'{"prompt_token_ids":' + msgspec.json.encode(found.token_ids) + b"," + fields


async def _redirect(call: _Call, member: Member) -> None:
    """Tell the client where to ask."""
    assert member.place is not None
    place = member.place.url + target(call.scope)
    await _start(call.send, 307, [(b"location", place.encode()), (b"content-length", b"0")])
    await call.send({"type": "http.response.body", "body": b""})


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


def check_target(scope: Scope) -> None:
    """Refuse a target that is no path: what is joined to a replica's address must not change it.

    Raises:
        ApiError: 404.
    """
    if not scope["path"].startswith("/"):
        raise ApiError(404, f"{scope['path']!r} is not a path", code="not_found")


async def _read(receive: Receive) -> bytes:
    """Read a body.

    Raises:
        ApiError: see `BodyReader`; or the client is gone.
    """
    parts, more = [], True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "the client left", code="client_gone")
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


async def _gone(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _forwarded(scope: Scope) -> dict[str, str]:
    """The client's headers for a replica, and the client's address."""
    headers = {
        name.decode("latin-1"): as_sent(value)
        for name, value in scope["headers"]
        if name.decode("latin-1") not in NOT_FORWARDED
    }
    client = scope.get("client")
    return headers | ({"x-forwarded-for": client[0]} if client else {})


def as_sent(value: bytes) -> str:
    """Return the text of a header that the client library writes as the same bytes, if it can be
    had: the library writes UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


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
    await _answer(send, status, msgspec.json.encode(content), "application/json")


async def _answer(send: Send, status: int, body: bytes, content_type: str) -> None:
    length = b"%d" % len(body)
    await _start(
        send, status, [(b"content-type", content_type.encode()), (b"content-length", length)]
    )
    await send({"type": "http.response.body", "body": body})
