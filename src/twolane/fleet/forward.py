"""Forwards a request to one replica and streams its answer back."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import aiohttp
from yarl import URL

from twolane.fleet import calls
from twolane.fleet.lost import ReplicaLost, end_when, errors_of_replica, unless_lost
from twolane.fleet.metrics import FleetMetrics, outcome_of
from twolane.fleet.pool import Member, Pool
from twolane.fleet.routing_facts import GENERATING_PATHS, RESPONSE_HEAD, RoutingFacts
from twolane.router.choose import Chosen
from twolane.router.table import SentRequest
from twolane.server.http.connection import CONNECTION, Connection
from twolane.server.http.errors import ANTHROPIC_PATH, error_body, error_for
from twolane.server.http.events import event, named_event
from twolane.server.http.gate import OPERATED

log = logging.getLogger("twolane.fleet")

EVENT_END = b"\n\n"


class ReadAhead:
    """Bytes received of a replica's answer and not yet written to the client (`HeldOutput`): up to
    twice aiohttp's `read_bufsize`, and what was received at once."""

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self.on_growth: Callable[[int], None] = lambda _: None
        self._content: aiohttp.StreamReader | None = content
        self._taken = 0

    @property
    def held(self) -> int:
        """See `HeldOutput`."""
        return 0 if self._content is None else self._content.total_bytes - self._taken

    @property
    def empty(self) -> bool:
        """See `HeldOutput`."""
        return self.held == 0

    def take(self, piece: bytes) -> None:
        """Count a piece that is being written."""
        self._taken += len(piece)
        self.on_growth(len(piece))

    def end(self) -> None:
        """Count nothing as held any more: the answer has ended or is given up."""
        self._content = None


class Forwarder:
    """Forwards requests to replicas.

    Args:
        pool: the replicas.
        session: HTTP client for requests to replicas.
        facts: is told which replica may have stored a response.
        metrics: counts the answers.
    """

    def __init__(
        self, pool: Pool, session: aiohttp.ClientSession, facts: RoutingFacts, metrics: FleetMetrics
    ) -> None:
        self._pool = pool
        self._session = session
        self._facts = facts
        self._metrics = metrics

    async def forward(
        self, call: calls.ClientCall, chosen: Chosen, sent: SentRequest, *, last: bool
    ) -> bool:
        """Forward a request and its answer; return False if another replica may be tried: one that
        is not the last answers no request that it is too full for.

        Raises:
            ReplicaLost: the replica is gone, and the answer has not begun.
        """
        member = self._pool.members[chosen.name]
        # The fleet's own gate has checked that the operator asks.
        more = self._pool.operator if call.path.startswith(OPERATED) else calls.NO_HEADERS
        request = self._session.request(
            call.scope["method"],
            URL(member.url + calls.target(call.scope), encoded=True),
            data=call.body,
            headers=calls.forwarded_headers(call.scope, more),
            allow_redirects=False,
        )
        answer = await unless_lost(member.lost, request)
        try:
            if not 200 <= answer.status < 600:
                raise ReplicaLost(f"it answered with status {answer.status}")
            if answer.status in (429, 503) and not last:
                return False
            if answer.status < 400 and call.path in GENERATING_PATHS:
                self._metrics.predicted.observe(chosen.ttft)
            headers = calls.answer_headers(answer.raw_headers)
            headers.append((b"x-replica", member.name.encode()))
            # Header of answers: predicted TTFT in milliseconds, 0 if unknown.
            headers.append((b"x-predicted-ttft-ms", b"%d" % round(1e3 * chosen.ttft)))
            if answer.content_type == "text/event-stream":
                await self._stream(call, member, sent, answer, headers)
                return True
            # Nothing is sent before all of it has arrived, so that another replica can be tried.
            whole = await unless_lost(member.lost, answer.read())
            self._facts.note_response(call, member, whole[:RESPONSE_HEAD])
            await calls.start_answer(call.send, answer.status, headers)
            await call.send({"type": "http.response.body", "body": whole})
            self._metrics.count(outcome_of(answer.status, whole))
            return True
        finally:
            answer.close()

    async def _stream(
        self,
        call: calls.ClientCall,
        member: Member,
        sent: SentRequest,
        answer: aiohttp.ClientResponse,
        headers: list[tuple[bytes, bytes]],
    ) -> None:
        """Forward events as they come; a stream that breaks off ends with an error event."""
        ahead = ReadAhead(answer.content)
        connection: Connection | None = call.scope.get("state", {}).get(CONNECTION)
        if connection is not None:
            connection.hold(ahead)
        try:
            await self._send_on(call, member, sent, answer, headers, ahead, connection)
        finally:
            ahead.end()

    async def _send_on(
        self,
        call: calls.ClientCall,
        member: Member,
        sent: SentRequest,
        answer: aiohttp.ClientResponse,
        headers: list[tuple[bytes, bytes]],
        ahead: ReadAhead,
        connection: Connection | None,
    ) -> None:
        pieces = _pieces(member, answer, ahead)
        first, send = await anext(pieces, b""), call.send
        self._facts.note_response(call, member, first[:RESPONSE_HEAD])
        now = self._pool.clock()
        self._metrics.first_events.observe(now - call.arrived)
        self._pool.table.began(member.name, sent, now)
        await calls.start_answer(send, answer.status, headers)
        outcome = "answered"
        whole, rest = _whole_events(first)
        try:
            await send({"type": "http.response.body", "body": whole, "more_body": True})
            async for piece in pieces:
                whole, rest = _whole_events(rest + piece)
                if connection is None or not connection.takes_parts:
                    await send({"type": "http.response.body", "body": whole, "more_body": True})
                elif whole:
                    connection.write_part(whole)
        except ReplicaLost as error:
            log.warning("%s: an answer was interrupted: %s", member.name, error)
            outcome = "broken_off"
            rest = _failure(call.path)  # in place of a part of an event
        await send({"type": "http.response.body", "body": rest})
        self._metrics.count(outcome)


async def _pieces(
    member: Member, answer: aiohttp.ClientResponse, ahead: ReadAhead
) -> AsyncIterator[bytes]:
    """Yield the pieces of an answer as they arrive.

    Raises:
        ReplicaLost: see `unless_lost`.
    """
    # One task for the whole stream: two for each piece would take longer than all else.
    watching = asyncio.create_task(end_when(member.lost, answer.content))
    try:
        with errors_of_replica():
            while piece := await answer.content.readany():
                ahead.take(piece)
                yield piece
    finally:
        watching.cancel()


def _whole_events(data: bytes) -> tuple[bytes, bytes]:
    """Return the events that have arrived whole, and the beginning of the next one: an error event
    after a part of another would become a part of it."""
    end = data.rfind(EVENT_END) + len(EVENT_END)
    return (data[:end], data[end:]) if end >= len(EVENT_END) else (b"", data)


def _failure(path: str) -> bytes:
    """Return the error event that ends a stream whose replica is lost."""
    body = error_for(path, error_body(503, "the replica is gone", "replica_gone"))
    return named_event(body) if path.startswith(ANTHROPIC_PATH) else event(body)
