"""Bytes to a server and back: requests as they are written, broken ones too."""

import asyncio
import json
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import h11

from ..server.serving import PATIENCE

ANSWER_SECONDS = PATIENCE
"""A request without an answer and without an end for so long counts as hung."""
PIECE_SECONDS = 0.01
"""Between two pieces of a request."""

Ending = Literal["wait", "leave", "reset"]


@dataclass(frozen=True)
class Case:
    """One conversation with the server, told by bytes.

    After the last piece the client waits for `answers` answers ("wait"), closes the connection
    ("leave") or resets it ("reset"). With `taste` it hangs up after so many bytes of the answer.
    """

    name: str
    pieces: tuple[bytes, ...]
    ending: Ending = "wait"
    answers: int = 1
    taste: int | None = None

    @property
    def bytes(self) -> bytes:
        """All that is sent."""
        return b"".join(self.pieces)


@dataclass
class Outcome:
    """What became of a case."""

    case: Case
    statuses: list[int] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    closed: bool = False
    """The server closed the connection."""
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)
    """What a server must never do."""


class Answers:
    """Parses answers as they come, by HTTP's letter."""

    def __init__(self, case: Case, outcome: Outcome) -> None:
        self._outcome = outcome
        self._case = case
        self._method = "HEAD" if case.bytes.startswith(b"HEAD ") else "GET"
        self._body = b""
        self._next()

    def feed(self, data: bytes) -> bool:
        """Take bytes, none at the end of the connection; return whether all answers are there.

        Raises:
            h11.RemoteProtocolError: they are no HTTP.
        """
        if not data and self._fresh:
            return True  # closed instead of an answer, which is an end, too
        self._fresh = False
        self._parser.receive_data(data)
        while (event := self._parser.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            match event:
                case h11.Response():
                    self._outcome.statuses.append(event.status_code)
                    self._type = dict(event.headers).get(b"content-type", b"")
                case h11.Data():
                    self._body += event.data
                case h11.EndOfMessage():
                    self._complete()
                    if len(self._outcome.bodies) >= self._case.answers:
                        return True
                    rest, _ = self._parser.trailing_data
                    self._next()
                    if rest:
                        return self.feed(rest)
                case h11.ConnectionClosed():
                    return True
        return False

    def _next(self) -> None:
        self._parser = h11.Connection(h11.CLIENT)
        self._parser.send(h11.Request(method=self._method, target="/", headers=[("Host", "x")]))
        self._parser.send(h11.EndOfMessage())
        self._fresh = True

    def _complete(self) -> None:
        outcome, body, status = self._outcome, self._body, self._outcome.statuses[-1]
        outcome.bodies.append(body)
        self._body = b""
        if status >= 500 and b'"invalid_http"' not in body:  # 501 and 505 are the client's fault
            outcome.faults.append(f"status {status}")
        if status >= 400 and self._type == b"application/json" and self._method != "HEAD":
            error = json.loads(body)["error"]
            if not error["message"] or {"type", "param", "code"} - error.keys():
                outcome.faults.append(f"not an error of OpenAI's: {body!r}")
        if self._type.startswith(b"text/event-stream"):
            last = body.rstrip().rsplit(b"\n\n", 1)[-1]
            if last != b"data: [DONE]":
                outcome.faults.append(f"a stream ended with {last!r}")


async def play(case: Case, address: tuple[str, int]) -> Outcome:
    """Play a case against the server at `address`."""
    outcome = Outcome(case)
    begin = time.monotonic()
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            await _converse(case, address, outcome)
    except TimeoutError:
        outcome.faults.append(f"no answer and no end in {ANSWER_SECONDS:g} s")
    except (h11.RemoteProtocolError, ValueError, KeyError, TypeError) as error:
        outcome.faults.append(f"a broken answer: {error!r}")
    outcome.seconds = time.monotonic() - begin
    return outcome


async def play_all(
    cases: Sequence[Case], address: tuple[str, int], together: int = 16
) -> list[Outcome]:
    """Play cases, some at a time; the outcomes are in their order."""
    places = asyncio.Semaphore(together)

    async def one(case: Case) -> Outcome:
        async with places:
            return await play(case, address)

    return await asyncio.gather(*map(one, cases))


async def _converse(case: Case, address: tuple[str, int], outcome: Outcome) -> None:
    reader, writer = await asyncio.open_connection(*address)
    try:
        sending = asyncio.create_task(_send(case, writer))
        if case.ending == "wait":
            await _receive(case, reader, outcome)
        else:
            await sending
        if case.ending == "reset":
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def _send(case: Case, writer: asyncio.StreamWriter) -> None:
    """Send the pieces; a server may refuse and close before it has read all of them."""
    try:
        for place, piece in enumerate(case.pieces):
            if place:
                await asyncio.sleep(PIECE_SECONDS)
            writer.write(piece)
            await writer.drain()
    except ConnectionError:
        pass


async def _receive(case: Case, reader: asyncio.StreamReader, outcome: Outcome) -> None:
    answers = Answers(case, outcome)
    received = 0
    while True:
        try:
            data = await reader.read(65536)
        except ConnectionError:  # it closed with bytes of ours unread
            outcome.closed = True
            return
        received += len(data)
        outcome.closed = not data
        if answers.feed(data) or not data:
            return
        if case.taste is not None and received >= case.taste:
            return
