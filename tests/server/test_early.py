"""Calls that their heads alone refuse are answered as any other, only sooner."""

import asyncio
import re
import socket
import time
from collections.abc import Sequence
from functools import partial

import pytest
import uvicorn

from twolane.engine.messages import Stats
from twolane.frontend.liveness import Liveness
from twolane.server.http.backpressure import UnsentOutput
from twolane.server.http.calls import CallMiddleware
from twolane.server.http.connection import ConnectionLimits, connection_class, unread_body
from twolane.server.http.entry import EarlyGate
from twolane.server.http.errors import ApiError
from twolane.server.http.gate import Gate
from twolane.server.ops.metrics import ServerMetrics
from twolane.slo import Slo

from .serving import PATIENCE

CALL = "/v1/completions"
PATHS = {CALL, "/v1/messages"}
KEY = "Authorization: Bearer key"
BODY = b'{"prompt": "' + b"x" * 300 + b'"}'
VARYING = re.compile(rb"(date|x-request-id|request-id): [^\r]*")


def head(*more: str, path: str = CALL, length: int = len(BODY), key: str = KEY) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "Host: localhost", key, f"Content-Length: {length}", *more)
    return "\r\n".join([*filter(None, lines), "", ""]).encode()


LATE = "x-slo-ttft-ms: 1"


def check_call(headers, call: object, key: int | None) -> None:
    assert key == 0
    if headers.get("x-slo-ttft-ms") == "1":
        raise ApiError(429, "late", code="overloaded", headers={"Retry-After": "7"})


def check_head(headers, path: str, key: int | None, unread: float) -> None:
    assert path in PATHS and unread >= 0.0
    check_call(headers, None, key)


def note(metrics: ServerMetrics, path: str, error: ApiError) -> None:
    overload = error.status_code == 429
    metrics.begin_call().refuse(error.code, error.message, overload=overload)
    metrics.count_http("POST", path, error.status_code)


async def endpoint(scope, receive, send) -> None:
    """Tell how many bytes a body has."""
    count, more = 0, True
    while more:
        message = await receive()
        count += len(message.get("body", b""))
        more = message.get("more_body", False)
    answer = b"%d bytes" % count
    headers = [(b"content-length", b"%d" % len(answer))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": answer})


async def no_wait() -> None:
    """Return at once, since no token is due."""


def made(metrics: ServerMetrics, *, early: bool) -> uvicorn.Server:
    """A server whose calls with `LATE` are refused."""
    gate = Gate(endpoint, ["key"], 1000, check_call=check_call)
    fast = EarlyGate(gate, PATHS, lambda data: early, check_head, partial(note, metrics))
    limits = ConnectionLimits(99, arrival_seconds=PATIENCE, stall_seconds=PATIENCE)
    http = connection_class(limits, UnsentOutput(), fast.refuse)
    app = CallMiddleware(gate, metrics, PATHS, no_wait)
    return uvicorn.Server(uvicorn.Config(app, port=0, http=http, lifespan="off", log_config=None))


async def asked(parts: Sequence[bytes], answers: int, *, early: bool) -> tuple[list, set]:
    """Return the answers to some bytes, of which each part is sent when the last has arrived, and
    what was counted."""
    metrics = ServerMetrics(Stats, Liveness(), "tiny", Slo(), 16)
    server = made(metrics, early=early)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    address = server.servers[0].sockets[0].getsockname()
    found = []
    async with asyncio.timeout(PATIENCE):
        reader, writer = await asyncio.open_connection(*address)
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0.02)
        for _ in range(answers):
            start = await reader.readuntil(b"\r\n\r\n")
            length = int(re.search(rb"content-length: (\d+)", start)[1])
            status, *lines = VARYING.sub(rb"\1", start).split(b"\r\n")
            found.append(
                (status, sorted(line.lower() for line in lines), await reader.readexactly(length))
            )
        if b"close" in parts[-1]:
            assert await reader.read() == b""
        writer.close()
    server.should_exit = True
    await serving
    lines = metrics.render().decode().splitlines()
    counted = ("requests_refused_total", "requests_received_total", "requests_in_flight", "http_")
    return found, {
        line for line in lines if any(name in line for name in counted) and "created" not in line
    }


@pytest.mark.parametrize(
    ("parts", "statuses"),
    [
        ([head(LATE) + BODY], "429"),
        ([head(LATE), BODY], "429"),
        ([head(LATE), BODY[:9], BODY[9:] + head() + BODY], "429 200"),
        ([head() + BODY + head(LATE) + BODY, head(LATE) + BODY, head() + BODY], "200 429 429 200"),
        ([head(LATE, "Connection: close") + BODY], "429"),
        ([head(LATE, "Connection: Close"), BODY[:9], BODY[9:]], "429"),
        ([head(LATE, path="/v1/messages") + BODY + head() + BODY], "429 200"),
        ([head(LATE, length=0)], "429"),
        ([head(LATE, key="") + BODY, head(LATE, key="x-api-key: other") + BODY], "401 401"),
        ([head(LATE, "x-api-key: key", key="") + BODY], "429"),
        ([head(LATE, length=1001), bytes(1001)], "413"),
        ([head(LATE, path="/livez") + BODY], "200"),
        ([head(LATE, path=CALL + "/") + BODY], "308"),
    ],
)  # fmt: skip
def test_each_answer_and_count_is_the_same(parts, statuses) -> None:
    (usual, counted), (early, counted_early) = (
        asyncio.run(asked(parts, len(statuses.split()), early=on)) for on in (False, True)
    )
    assert " ".join(status.split()[1].decode() for status, *_ in early) == statuses
    assert early == usual
    assert counted_early == counted


@pytest.mark.parametrize(
    "data",
    [
        b"GET" + head(LATE)[4:],
        head(LATE).replace(b"1.1", b"1.0"),
        head(LATE, path=CALL + "?x=1"),
        head(LATE, path="/v1/c%6Fmpletions"),
        head(LATE, path="http://localhost" + CALL),
        head(LATE, "Transfer-Encoding: chunked"),
        head(LATE, "Expect: 100-continue"),
        head(LATE, "Upgrade: websocket"),
        head(LATE, "Origin: http://localhost"),
        head(LATE, "Content-Length: 312"),
        head(LATE, "Host: localhost"),
        head(LATE, "x: a\r\n folded"),
        head(LATE, "x : a"),
        head(LATE, "x: \x01"),
        head(LATE, "x: a\nb: c"),
        head(LATE).replace(b"Content-Length: 314", b"Content-Length: +314"),
        head(LATE).replace(b"Content-Length: 314", b"Content-Length: 314, 314"),
        head(LATE).replace(b"Content-Length: 314", b"Content-Length: " + b"9" * 5000),
        head(LATE).replace(b"Host: localhost\r\n", b""),
        head(LATE)[:-2],
        head(LATE, "x: " + "y" * 70_000),
        head(),
    ],
)  # fmt: skip
def test_a_head_that_readers_may_read_differently_goes_its_usual_way(data) -> None:
    gate = Gate(endpoint, ["key"], 1000)
    refused = []
    early = EarlyGate(
        gate, PATHS, lambda data: True, check_head, lambda path, error: refused.append(path)
    )
    assert early.refuse(head(LATE), [], 0.0) is not None
    assert early.refuse(data, [], 0.0) is None
    assert refused == [CALL]


async def busy_loop_waits(seconds: float) -> list[float]:
    """Return for how long the head and the body of a request waited for a loop that was busy."""
    found, metrics = [], ServerMetrics(Stats, Liveness(), "tiny", Slo(), 16)
    limits = ConnectionLimits(99, arrival_seconds=PATIENCE, stall_seconds=PATIENCE)
    http = connection_class(limits, UnsentOutput(), lambda data, more, unread: found.append(unread))

    async def app(scope, receive, send) -> None:
        before = time.monotonic()
        await receive()
        found.append(before - scope["state"]["call"].arrival)

    counted = CallMiddleware(app, metrics, PATHS, no_wait, unread_body)
    config = uvicorn.Config(counted, port=0, http=http, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    with socket.create_connection(server.servers[0].sockets[0].getsockname()) as client:
        client.sendall(head() + BODY)
        time.sleep(seconds)
        while len(found) < 2:
            await asyncio.sleep(0.01)
    server.should_exit = True
    await serving
    return found


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="TCP stamps no data")
def test_the_wait_for_a_busy_loop_is_part_of_the_request_s_time() -> None:
    """Clients measure it, too."""
    assert min(asyncio.run(busy_loop_waits(0.1))) >= 0.09
