"""ASGI application at the fleet's address that forwards each request to the replica that the router
chooses.

A request whose answer has not begun is sent to another replica if its own is gone, drains or is
full. An answer that has begun and breaks off ends with an error event, or a closed connection where
it is no stream of events.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import aiohttp
import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from twolane.fleet import calls
from twolane.fleet.broadcast import BROADCAST_PATHS, LOST
from twolane.fleet.forward import Forwarder
from twolane.fleet.lost import ReplicaLost, ReplicaUnreachable
from twolane.fleet.metrics import FleetMetrics, outcome_of
from twolane.fleet.pool import Member, Pool
from twolane.fleet.routing_facts import LANDMARKS, RoutingFacts
from twolane.router.choose import Chosen, NoReplica, choose
from twolane.router.policies import Policy
from twolane.router.state import RoutedRequest, total_load
from twolane.router.table import ReplicaView, SentRequest
from twolane.server.http.disconnect import ClientGone, unless_gone
from twolane.server.http.errors import ApiError
from twolane.server.http.gate import refuse
from twolane.server.ops.metrics import CONTENT_TYPE

log = logging.getLogger("twolane.fleet")
T = TypeVar("T")

PROBES = ("/health", "/health/ready", "/ping", "/livez", "/health/live")
NO_DASHBOARD = "a fleet has no dashboard: open that of a server, at a url that GET /fleet names"
"""Error of /dashboard, whose requests for data would reach another server each time."""
MAX_TRIES = 4
"""Most replicas that a request is tried at."""
WAIT_SECONDS = 30.0
"""Seconds that a request waits for a ready replica."""


class Ingress:
    """ASGI application in front of a pool.

    Args:
        pool: the replicas.
        policy: the router.
        session: HTTP client for requests to replicas.
        max_body_bytes: bytes that a body may have.
    """

    def __init__(
        self, pool: Pool, policy: Policy, session: aiohttp.ClientSession, max_body_bytes: int
    ) -> None:
        self._pool = pool
        self._policy = policy
        self.metrics = FleetMetrics(pool.members.values)
        self._facts = RoutingFacts(pool, session, max_body_bytes)
        self._forwarder = Forwarder(pool, session, self._facts, self.metrics)
        self._changing: set[asyncio.Task[str]] = set()
        """Running changes of all replicas, which do not end with their clients."""

    @property
    def watches(self) -> bool:
        """Whether a request may be refused because it would be late."""
        return any(member.open for member in self._pool.serving)

    def check_arrival(self, headers: Headers, path: str, key: int | None, unread: float) -> None:
        """Refuse a request by its headers, before its body is read.

        Raises:
            ApiError: 429, no replica can answer in time, whatever the body holds.
        """
        if self._policy is choose:  # others refuse nothing, and some remember what they are asked
            least = self._facts.least(headers, path)
            if views := self._pool.table.candidates(least, self._pool.clock()):
                taken(choose(least, views))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            return
        path = scope["path"]
        if path in PROBES:
            await self._probe(path, send)
        elif path == "/metrics":
            await calls.answer(send, 200, self.metrics.render(), CONTENT_TYPE)
        elif path == "/fleet":
            await calls.answer_json(send, self.overview())
        elif path in ("/load", "/v1/load"):
            await calls.answer_json(send, self.load())
        elif path == "/dashboard" or path.startswith("/dashboard/"):
            await refuse(ApiError(501, NO_DASHBOARD, code="not_served"), path, send)
        else:
            await self._serve(scope, receive, send)

    def overview(self) -> dict[str, object]:
        """Return the answer of /fleet: every replica with its latest state."""
        return {
            "router": self._pool.options.router,
            "replicas": [
                {
                    "name": member.name,
                    "phase": member.phase,
                    "url": None if member.address is None else member.address.url,
                    "pid": None if member.address is None else member.address.pid,
                    "open": member.open,
                    "served": member.served,
                    "state": msgspec.structs.replace(member.state, digest=None),
                }
                for member in self._pool.members.values()
            ],
        }

    def load(self) -> dict[str, int]:
        """Return the answer of /load: sums over the latest states of all serving replicas."""
        states = [member.state for member in self._pool.serving]
        return {**total_load(states), "replicas": len(states)}

    async def _probe(self, path: str, send: Send) -> None:
        live = path in ("/livez", "/health/live")
        if live or self._pool.serving:
            await calls.answer_json(send, {"status": "ok"})
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
            calls.check_target(scope)
            body = await calls.read_body(receive)
            call = calls.ClientCall(scope, body, noted, self._pool.clock())
            await unless_gone(Request(scope, receive), self._try_all(call))
        except ClientGone:
            self.metrics.count("disconnect")
        except ApiError as error:
            self.metrics.count(error.code or "invalid")
            if not began:
                await refuse(error, path, send)
        except Exception:
            log.exception("%s %r failed", scope["method"], path)
            self.metrics.count("internal_error")
            if began:
                raise
            await refuse(ApiError(500, "internal error", code="internal_error"), path, send)

    async def _try_all(self, call: calls.ClientCall) -> None:
        """Forward a request to one replica after the other until one answers.

        Raises:
            ApiError: 429 or 503.
        """
        if call.path in BROADCAST_PATHS and call.scope["method"] == "POST":
            # Some replicas would be changed and others not if this ended with the client.
            changing = asyncio.create_task(self._change_all(call))
            self._changing.add(changing)
            changing.add_done_callback(self._changing.discard)
            self.metrics.count(await asyncio.shield(changing))
            return
        call, routed = await self._facts.ask(call)
        tried, lost = set[str](), 0
        for attempt in range(1, MAX_TRIES + 1):
            chosen, sent = await self._choose(routed, tried, call.homes)
            self.metrics.choosing.observe(self._pool.clock() - call.arrived)
            member = self._pool.members[chosen.name]
            tried.add(member.name)
            # Paths that `direct` redirects; not `RESPONSES`, since the fleet must know where
            # responses are stored.
            if self._pool.options.direct and call.path in (*LANDMARKS, "/v1/messages"):
                self._pool.table.ended(member.name)
                self.metrics.count("redirected")
                await _redirect(call, member)
                return
            member.enter()
            try:
                last = attempt == MAX_TRIES or tried >= self._able(call)
                if await self._forwarder.forward(call, chosen, sent, last=last):
                    return
            except ReplicaLost as error:
                log.warning("%s: %s", member.name, error)
                lost += not isinstance(error, ReplicaUnreachable)
                # Lost replicas after which a request is not tried again: it may be what kills them.
                if lost == 2:
                    message = f"{lost} replicas were lost while they had this request"
                    raise ApiError(503, message, code="unavailable") from error
            else:
                self.metrics.count("retried")
            finally:
                member.leave()
                self._pool.table.ended(member.name, sent)
        raise _unavailable("no replica could answer", 1)

    def _able(self, call: calls.ClientCall) -> set[str]:
        """Return the names of the replicas that may get a request."""
        serving = {member.name for member in self._pool.serving}
        return serving & call.homes or serving

    async def _change_all(self, call: calls.ClientCall) -> str:
        """Make a change at all serving replicas now, and at the others before they serve; return
        its outcome.

        Raises:
            ApiError: 503, there is none.
        """
        await self._awaited(lambda: self._pool.serving)
        headers = calls.forwarded_headers(call.scope, self._pool.operator)
        replies = await self._pool.broadcast.make(call.path, call.body, headers)
        for name, reply in replies.items():
            if reply.status == LOST and name in self._pool.members:
                self._pool.exclude(self._pool.members[name])
        answers = [reply for reply in replies.values() if reply.status != LOST]
        if not answers:
            raise _unavailable("no replica could answer", 1)
        worst = max(answers, key=lambda reply: reply.status)
        await calls.answer(call.send, worst.status, worst.body, "application/json")
        return outcome_of(worst.status, worst.body)

    async def _choose(
        self, routed: RoutedRequest, tried: set[str], homes: frozenset[str]
    ) -> tuple[Chosen, SentRequest]:
        """Choose a replica for a request, an untried one if there is any, and record the choice in
        the table.

        Raises:
            ApiError: 429, or 503 when none is ready for a while.
        """
        views = await self._awaited(lambda: self._views(routed, homes))
        views = [view for view in views if view.name in homes] or views
        views = [view for view in views if view.name not in tried] or views
        choice = taken(self._policy(routed, views))
        now = self._pool.clock()
        return choice, self._pool.table.sent(choice.name, routed, now, choice.ttft)

    def _views(self, routed: RoutedRequest, homes: frozenset[str]) -> Sequence[ReplicaView]:
        """Return the replicas among which the policy chooses."""
        table, now = self._pool.table, self._pool.clock()
        if self._policy is choose:
            return table.candidates(routed, now, homes)
        return table.views(routed, now)

    async def _awaited(self, ready: Callable[[], Sequence[T]]) -> Sequence[T]:
        """Wait until `ready` returns replicas, and return them.

        Raises:
            ApiError: 503, there are none for a while, or will be none.
        """
        end = self._pool.clock() + WAIT_SECONDS
        while not (found := ready()):
            if self._pool.closing:
                raise ApiError(503, "the fleet is shutting down", code="unavailable")
            if self._pool.clock() > end:
                # Retry-After in whole seconds when no replica is ready.
                raise _unavailable("no replica is ready", 5)
            await asyncio.sleep(self._pool.options.probe_seconds)
        return found


def taken(choice: Chosen | NoReplica) -> Chosen:
    """Return a choice of a replica.

    Raises:
        ApiError: 429, there is none.
    """
    if isinstance(choice, NoReplica):
        headers = calls.retry_after(choice.retry_after)
        raise ApiError(429, choice.reason, code="refused", headers=headers)
    return choice


def _unavailable(problem: str, retry_seconds: int) -> ApiError:
    return ApiError(503, problem, code="unavailable", headers=calls.retry_after(retry_seconds))


async def _redirect(call: calls.ClientCall, member: Member) -> None:
    """Redirect the client to a replica."""
    location = member.url + calls.target(call.scope)
    await calls.start_answer(
        call.send, 307, [(b"location", location.encode()), (b"content-length", b"0")]
    )
    await call.send({"type": "http.response.body", "body": b""})
