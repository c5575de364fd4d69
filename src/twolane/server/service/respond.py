"""Converts the deltas of a generation to an HTTP answer: complete, or a stream of events."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from twolane.frontend.generate_request import GenerateRequest
from twolane.frontend.generation import Generation, GenerationFailed, GenerationRefused
from twolane.frontend.prepare import Prepared
from twolane.frontend.text.output_reader import Delta
from twolane.server.http.calls import Call
from twolane.server.http.connection import CONNECTION, Connection
from twolane.server.http.disconnect import unless_gone
from twolane.server.http.errors import error_body
from twolane.server.http.handlers import from_engine
from twolane.server.http.route import json_response
from twolane.server.service.service import Service

MAX_SCORED = 200
"""Most tokens with log-probabilities for which an answer is encoded on the event loop, in a few
milliseconds; longer ones are encoded in a thread, so that streams go on."""


class Answering(Protocol):
    """An answer in progress, in the format of one API."""

    def add(self, delta: Delta) -> None:
        """Add a delta to an answer that does not stream."""

    def whole(self) -> dict[str, Any]:
        """Return the complete answer after all deltas have been added."""

    def events(self, delta: Delta) -> bytes:
        """Add a delta to a stream; return its events, which may be empty."""

    def closing(self) -> bytes:
        """Return the events that end a stream."""

    def failing(self, error: dict[str, Any]) -> bytes:
        """Return the events that end a stream after an error.

        Args:
            error: the result of `error_body`.
        """


class EventStream(StreamingResponse):
    """A stream of server-sent events that closes its generation, however it ends.

    Args:
        events: the events of the stream.
        generation: their source.
        connection: their target; None: another server's.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        generation: AbstractContextManager[object],
        connection: Connection | None,
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # nginx would collect it
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._generation = generation
        self._connection = connection

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""

        async def unless_lost(message: Message) -> None:
            if self._connection is not None and self._connection.transport.is_closing():
                # The loop has found the client gone and tells the connection in its next turn,
                # which cancels this. All that waits would be written for nobody meanwhile.
                await asyncio.Event().wait()
            await send(message)

        with self._generation:
            await super().__call__(scope, receive, unless_lost)


async def answer(
    request: Request,
    service: Service,
    asked: GenerateRequest,
    call: Call,
    make: Callable[[Prepared], Answering],
) -> Response:
    """Answer a request, completely or as a stream.

    Args:
        request: the HTTP request.
        service: the served model.
        asked: the request in the form of all APIs.
        call: the HTTP call, which is admitted here.
        make: makes the answer in the format of the API.

    Raises:
        ClientGone: the client left meanwhile.
        ApiError, FieldError: the request cannot be served.
    """
    call.on_parsed()
    prepared = await unless_gone(request, service.prepare(asked, call))
    answering = make(prepared)
    generation = service.generate(prepared, call)
    return await respond(request, generation, answering, streams=asked.stream)


async def respond(
    request: Request, generation: Generation, answer: Answering, *, streams: bool
) -> Response:
    """Answer a submitted request, completely or as a stream.

    A stream begins only when the engine has spoken, so that refusals have a status of their own.
    """
    deltas = aiter(generation)
    if not streams:
        with generation:
            scored = await unless_gone(request, collect(deltas, answer))
        if scored > MAX_SCORED:
            return await asyncio.to_thread(lambda: json_response(answer.whole()))
        return json_response(answer.whole())
    try:
        first = await unless_gone(request, anext(deltas))
    except BaseException:
        generation.close()
        raise
    connection: Connection | None = request.scope["state"].get(CONNECTION)
    if connection is not None:  # and not another server's
        connection.hold(generation.backlog)
    begun = partial(write_at_once, connection, generation, answer)
    events = stream(first, deltas, answer, begun)
    return EventStream(events, generation, connection)


async def collect(deltas: AsyncIterator[Delta], answer: Answering) -> int:
    """Read an answer to its end; return the number of tokens with log-probabilities."""
    scored = 0
    async for delta in deltas:
        answer.add(delta)
        scored += len(delta.logprobs or ()) + len(delta.prompt_logprobs or ())
    return scored


async def stream(
    first: Delta, deltas: AsyncIterator[Delta], answer: Answering, begun: Callable[[], None]
) -> AsyncIterator[bytes]:
    """Yield the events of a streamed answer; an error becomes the last event.

    `begun` is called when the first of them has been sent.
    """
    try:
        yield answer.events(first)
        begun()
        async for delta in deltas:
            if events := answer.events(delta):
                yield events
    except GenerationFailed as error:
        yield answer.failing(error_body(503, str(error), "unavailable"))
        return
    except GenerationRefused as error:
        yield answer.failing(from_engine(error).body)
        return
    yield answer.closing()


def write_at_once(connection: Connection | None, generation: Generation, answer: Answering) -> None:
    """Write later deltas of an answer directly to the connection while it takes them."""

    if connection is None:
        return

    def write(delta: Delta) -> bool:
        if not connection.takes_parts:
            return False
        if events := answer.events(delta):
            connection.write_part(events)
        return True

    generation.offer(write)
