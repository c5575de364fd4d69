"""Sends a request to one replica, and its answer back as it comes."""

import logging
from collections.abc import AsyncIterator, Callable

import aiohttp
from yarl import URL

from twolane.fleet.calls import ANSWERED_FOR, ClientCall, forwarded, start, target
from twolane.fleet.inquiry import RESPONSE_HEAD, Inquiry
from twolane.fleet.lost import BrokenOff, unless_lost
from twolane.fleet.metrics import FleetMetrics
from twolane.fleet.pool import Member, Pool
from twolane.router.choose import Chosen
from twolane.server.http.connection import CONNECTION, Connection
from twolane.server.http.errors import ANTHROPIC_PATH, error_body, error_for
from twolane.server.http.events import event, named_event

log = logging.getLogger("twolane.fleet")

REPLICA_HEADER = "x-replica"
PREDICTED_HEADER = "x-predicted-ttft-ms"
"""Header of answers: milliseconds to the first token as the router predicted, 0 if unknown."""


class ReadAhead:
    """What has come of a replica's answer and was not written to its client (`HeldOutput`): up to
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
        """Note a piece that is written now."""
        self._taken += len(piece)
        self.on_growth(len(piece))

    def end(self) -> None:
        """Hold nothing more: the answer has ended, or is given up."""
        self._content = None


class Forwarder:
    """Has replicas answer.

    Args:
        pool: the replicas.
        session: for requests to replicas.
        inquiry: is told which replica may have stored a response.
        metrics: counts the answers.
    """

    def __init__(
        self,
        pool: Pool,
        session: aiohttp.ClientSession,
        inquiry: Inquiry,
        metrics: FleetMetrics,
    ) -> None:
        self._pool = pool
        self._session = session
        self._inquiry = inquiry
        self._metrics = metrics

    async def forward(self, call: ClientCall, chosen: Chosen, *, last: bool) -> bool:
        """Have a replica answer; whether it did, or else another one may be asked: one that is not
        the last answers no request that it is too full for.

        Raises:
            BrokenOff: the replica is gone, and the answer has not begun.
        """
        member = self._pool.members[chosen.name]
        assert member.place is not None
        request = self._session.request(
            call.scope["method"],
            URL(member.place.url + target(call.scope), encoded=True),
            data=call.body,
            headers=forwarded(call.scope),
            allow_redirects=False,
        )
        answer = await unless_lost(member.lost, request)
        try:
            if not 200 <= answer.status < 600:
                raise BrokenOff(f"it answered with status {answer.status}")
            if answer.status in (429, 503) and not last:
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
            whole = await unless_lost(member.lost, answer.read())
            self._inquiry.note_response(call, member, whole[:RESPONSE_HEAD])
            await start(call.send, answer.status, headers)
            await call.send({"type": "http.response.body", "body": whole})
            self._metrics.count("answered")
            return True
        finally:
            answer.close()

    async def _stream(
        self,
        call: ClientCall,
        member: Member,
        answer: aiohttp.ClientResponse,
        headers: list[tuple[bytes, bytes]],
    ) -> None:
        """Send events on as they come; one that breaks off ends with an error event."""
        ahead = ReadAhead(answer.content)
        connection: Connection | None = call.scope.get("state", {}).get(CONNECTION)
        if connection is not None:
            connection.hold(ahead)
        try:
            await self._send_on(call, member, answer, headers, ahead)
        finally:
            ahead.end()

    async def _send_on(
        self,
        call: ClientCall,
        member: Member,
        answer: aiohttp.ClientResponse,
        headers: list[tuple[bytes, bytes]],
        ahead: ReadAhead,
    ) -> None:
        pieces = _pieces(member, answer, ahead)
        first, send = await anext(pieces, b""), call.send
        self._inquiry.note_response(call, member, first[:RESPONSE_HEAD])
        self._metrics.first_events.observe(self._pool.clock() - call.arrived)
        await start(send, answer.status, headers)
        outcome = "answered"
        try:
            await send({"type": "http.response.body", "body": first, "more_body": True})
            async for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except BrokenOff as error:
            log.warning("%s: an answer was interrupted: %s", member.name, error)
            outcome = "broken_off"
            body = _failure(call.path)
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        self._metrics.count(outcome)


async def _pieces(
    member: Member, answer: aiohttp.ClientResponse, ahead: ReadAhead
) -> AsyncIterator[bytes]:
    """Yield what comes of an answer.

    Raises:
        BrokenOff: see `unless_lost`.
    """
    while piece := await unless_lost(member.lost, answer.content.readany()):
        ahead.take(piece)
        yield piece


def _failure(path: str) -> bytes:
    """The event with which a stream ends that its replica does not go on with."""
    body = error_for(path, error_body(503, "the replica is gone", "replica_gone"))
    return named_event(body) if path.startswith(ANTHROPIC_PATH) else event(body)
