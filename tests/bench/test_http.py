"""The load client's connections against servers that write bytes by script."""

import asyncio
import contextlib
import itertools
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time

import pytest

from tests.server.serving import PATIENCE
from twolane.bench import client, http
from twolane.bench.client import Client, Job
from twolane.bench.http import ConnectError, Connections, HTTPError, get

from .scripted import EXPIRE, expire_timeouts, settle

PLAIN = (
    b"HTTP/1.1 200 OK\r\nContent-Type: Text/Plain; charset=utf-8\r\nContent-Length: 5\r\n\r\nhello"
)
EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
CLOSE = object()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Server:
    """`script(n)` gives what is written for the n-th request: bytes, `EXPIRE`, or `CLOSE`."""

    def __init__(self, script) -> None:
        self.script = script
        self.requests: list[bytes] = []
        self.connections = 0
        self.told = 0
        """Requests for which everything is written."""
        self.left = asyncio.Event()

    async def _serve(self, reader, writer) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]
                self.requests.append(head + await reader.readexactly(int(length or 0)))
                for step in self.script(len(self.requests) - 1):
                    if step is CLOSE:
                        writer.close()
                        self.told += 1
                        return
                    if step is EXPIRE:
                        expire_timeouts()
                        continue
                    writer.write(step)
                    await settle()
                self.told += 1
        self.left.set()
        writer.close()

    @contextlib.asynccontextmanager
    async def serving(self, host="127.0.0.1", **options):
        server = await asyncio.start_server(self._serve, host, 0, **options)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            await settle()  # until the connections have seen that the client is gone
            server.close()


class Kept:
    """Keeps an answer: a `Receiver`."""

    def __init__(self) -> None:
        self.status, self.kind, self.ends = 0, "", 0
        self.pieces: list[tuple[bytes, float]] = []

    def on_head(self, status, content_type):
        self.status, self.kind = status, content_type

    def on_data(self, data, now):
        self.pieces.append((data, now))

    def on_end(self, now):
        self.ends += 1

    @property
    def body(self) -> bytes:
        return b"".join(data for data, _ in self.pieces)


def exchange(*answers, requests=1, idle=False):
    """Send requests one after the other; what was received, and the server.

    With `idle` the next one waits until all that is written for the last one has come.
    """

    async def main():
        server = Server(lambda number: answers[min(number, len(answers) - 1)])
        kept = []
        async with server.serving() as port:
            connections = Connections(f"http://127.0.0.1:{port}/", {})
            for _ in range(requests):
                kept.append(Kept())
                await connections.request(b"{}", kept[-1])
                while idle and server.told < len(kept):
                    await asyncio.sleep(0)
                if idle:
                    await settle()
            connections.close()
        return kept, server

    return asyncio.run(main())


@pytest.mark.parametrize(
    "answer",
    [
        PLAIN,
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </>\r\n\r\n" + PLAIN,
        PLAIN.replace(b"\r\n", b"\n"),
        PLAIN.partition(b"Content-Length")[0]
        + b"transfer-encoding: chunked\r\n\r\n"
        + chunk(b"he") + chunk(b"llo") + b"0\r\nTrailer: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type:text/plain\r\n\r\nhello",
        b"HTTP/1.0 200 OK\r\nContent-Type:text/plain\r\n\r\nhello",
    ],
    ids=["length", "informational", "newlines", "chunked", "until-close", "http-1.0"],
)  # fmt: skip
def test_bodies_of_every_kind_however_they_are_cut(answer):
    for places in ([], [1], [12, 30, len(answer) - 1], [len(answer) - 4, len(answer) - 2]):
        cuts = itertools.pairwise([0, *places, len(answer)])
        ((kept,), _) = exchange([*(answer[a:b] for a, b in cuts), CLOSE])
        assert (kept.status, kept.kind, kept.body, kept.ends) == (200, "text/plain", b"hello", 1)


def test_a_connection_is_used_again():
    kept, server = exchange([PLAIN], [PLAIN.replace(b"200 OK", b"429 Full")], [PLAIN], requests=3)
    assert [one.status for one in kept] == [200, 429, 200]
    assert (server.connections, len(server.requests)) == (1, 3)


def test_a_connection_that_the_server_ends_is_not_used_again():
    answer = PLAIN.replace(b"Content-Type", b"Connection: close\r\nContent-Type")
    kept, server = exchange([answer], requests=2)
    assert [one.body for one in kept] == [b"hello"] * 2
    assert server.connections == 2


@pytest.mark.parametrize("more", [PLAIN, b"?", b"HTTP/1.1 408 Request Timeout\r\n\r\n"])
@pytest.mark.parametrize("together", [True, False])
def test_what_nobody_asked_for_is_no_answer(more, together):
    steps = [PLAIN + more] if together else [PLAIN, more]
    kept, server = exchange(steps, [PLAIN], requests=2, idle=True)
    assert [(one.status, one.body, one.ends) for one in kept] == [(200, b"hello", 1)] * 2
    assert server.connections == 2


@pytest.mark.parametrize("idle", [False, True], ids=["at once", "while it idled"])
def test_an_idle_connection_that_was_closed_loses_no_request(idle):
    if idle:
        kept, server = exchange([PLAIN, CLOSE], [PLAIN], requests=2, idle=True)
        assert len(server.requests) == 2
    else:  # as the second request was on its way
        kept, server = exchange([PLAIN], [CLOSE], [PLAIN], requests=2)
        assert len(server.requests) == 3
    assert [one.body for one in kept] == [b"hello"] * 2
    assert server.connections == 2


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([CLOSE], "before it answered"),
        ([PLAIN[:1], CLOSE], "within its answer"),
        ([PLAIN[:30], CLOSE], "within its answer"),
        ([PLAIN[:-1], CLOSE], "within its answer"),
        ([EVENTS + chunk(b"hello"), CLOSE], "within its answer"),
        ([b"SSH-2.0\r\n"], "not HTTP"),
        ([EVENTS + b"five\r\nhello\r\n"], "not HTTP"),
        (
            [b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"],
            "HTTP",
        ),
    ],
)
def test_broken_answers_are_not_asked_for_again(steps, said):
    with pytest.raises(HTTPError, match=said):
        exchange(steps, [PLAIN])
    if steps != [CLOSE]:  # nor if the connection had been used before
        with pytest.raises(HTTPError, match=said):
            exchange([PLAIN], steps, [PLAIN], requests=2)


def test_pieces_are_timed_as_they_come():
    """One time for all that came at once."""
    ticks = itertools.count()

    async def main():
        server = Server(lambda n: [EVENTS, chunk(b"a") + chunk(b"b"), chunk(b"c") + b"0\r\n\r\n"])
        kept = Kept()
        async with server.serving() as port:
            connections = Connections(f"http://127.0.0.1:{port}/", {}, lambda: float(next(ticks)))
            await connections.request(b"{}", kept)
            connections.close()
        return kept.pieces

    assert asyncio.run(main()) == [(b"a", 1.0), (b"b", 1.0), (b"c", 2.0)]


def test_a_request_as_it_is_sent():
    async def main():
        server = Server(lambda number: [PLAIN])
        async with server.serving() as port:
            at = f"127.0.0.1:{port}"
            for url, headers in (
                (f"http://{at}", {}),
                (f"http://us%40er:pw@{at}/base/v1 x?a=é#part", {"x-trace": "ü", "HOST": "other"}),
            ):
                connections = Connections(url, headers)
                await connections.request(b"{}", Kept())
                connections.close()
            assert await get(f"http://{at}/v1/models", {"X": "y"}, PATIENCE) == (200, b"hello")
        return at, server.requests

    at, (first, second, third) = asyncio.run(main())
    common = b"Accept: */*\r\nUser-Agent: twolane\r\n"
    host = f"Host: {at}\r\n".encode()
    length = b"Content-Length: 2\r\n\r\n{}"
    assert first == b"POST / HTTP/1.1\r\n" + host + common + length
    assert second == (
        b"POST /base/v1%20x?a=%C3%A9 HTTP/1.1\r\nHOST: other\r\n" + common
        + b"Authorization: Basic dXNAZXI6cHc=\r\nx-trace: \xc3\xbc\r\n" + length
    )  # fmt: skip
    assert third == b"GET /v1/models HTTP/1.1\r\n" + host + common + b"X: y\r\n\r\n"


def test_a_cancelled_exchange_hangs_up():
    async def main():
        server = Server(lambda number: [EVENTS, chunk(b"a")] if number == 0 else [PLAIN])
        async with server.serving() as port:
            connections = Connections(f"http://127.0.0.1:{port}/", {})
            kept = Kept()
            asking = asyncio.create_task(connections.request(b"{}", kept))
            while not kept.pieces:
                await asyncio.sleep(0.001)
            asking.cancel()
            await asyncio.wait({asking})
            assert asking.cancelled()
            await asyncio.wait_for(server.left.wait(), PATIENCE)
            await connections.request(b"{}", Kept())
            connections.close()
        return server.connections

    assert asyncio.run(main()) == 2


def test_what_a_receiver_raises_ends_the_exchange():
    class Picky(Kept):
        def on_data(self, data, now):
            raise LookupError(data)

    async def main():
        server = Server(lambda number: [EVENTS, chunk(b"a"), chunk(b"b")])
        async with server.serving() as port:
            with pytest.raises(LookupError, match="a"):
                await Connections(f"http://127.0.0.1:{port}/", {}).request(b"{}", Picky())
            await asyncio.wait_for(server.left.wait(), PATIENCE)

    asyncio.run(main())


def test_no_server():
    async def main(url):
        await Connections(url, {}).request(b"{}", Kept())

    for url in ("http://127.0.0.1:9", "http://[::1]:9", "http://no.such.name.invalid"):
        with pytest.raises(ConnectError, match="Cannot connect to host"):
            asyncio.run(main(url))


def test_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")

    async def main():
        server = Server(lambda number: [PLAIN])
        async with server.serving("::1") as port:
            assert await get(f"http://[::1]:{port}/", {}, PATIENCE) == (200, b"hello")
        assert f"Host: [::1]:{port}\r\n".encode() in server.requests[0]

    asyncio.run(main())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_https(tmp_path, monkeypatch):
    key, certificate = tmp_path / "key", tmp_path / "certificate"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-keyout", key, "-out", certificate, "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    async def main():
        long = b"x" * 300_000
        answer = EVENTS + chunk(long) + b"0\r\n\r\n"
        server = Server(lambda number: [answer])
        async with server.serving(ssl=context) as port:
            url = f"https://127.0.0.1:{port}/"
            with pytest.raises(ConnectError, match="certificate"):
                await get(url, {}, PATIENCE)
            monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
            connections = Connections(url, {})
            for _ in range(3):
                kept = Kept()
                await connections.request(b"{}" * 200_000, kept)
                assert kept.body == long
            connections.close()
        assert server.connections == 1

    asyncio.run(main())


def outcome(*steps):
    async def main():
        async with Server(lambda number: steps).serving() as port:
            url = f"http://127.0.0.1:{port}/v1/completions"
            async with Client(url, {}, 60.0) as client:
                job = Job(0, 0.0, 1, 1, b"{}")
                record = await client.send(job, client.clock(), 0.0, 0.0)
        return record.outcome, record.error

    return asyncio.run(main())


def test_outcomes_of_broken_answers():
    lost = "the server disconnected"
    assert outcome(CLOSE) == ("disconnect", f"{lost} before it answered")
    assert outcome(EVENTS[:9], CLOSE) == ("disconnect", f"{lost} within its answer")
    assert outcome(EVENTS, CLOSE) == ("disconnect", f"{lost} within its answer")
    long = b"HTTP/1.1 500 Oops\r\nContent-Length: 900\r\n\r\n" + b"w" * 900
    assert outcome(long) == ("status_500", "w" * 500)
    assert outcome(long[:-1], CLOSE) == ("status_500", "w" * 500)
    assert outcome(long[:-1], EXPIRE) == ("timeout", "no whole answer in 60 s")
    whole = chunk(b'data: {"choices": [{"text": "a"}]}\n\n') + chunk(b"data: [DONE]\n\n")
    assert outcome(EVENTS + whole, CLOSE) == ("ok", "")
    assert outcome(EVENTS + whole + b"?\r\n") == ("ok", "")
    assert outcome(EVENTS + whole, EXPIRE) == ("ok", "")


def test_answers_without_an_end_are_bounded(monkeypatch):
    monkeypatch.setattr(client, "MAX_EVENT", 1 << 20)
    monkeypatch.setattr(http, "MAX_PAGE", 1 << 20)
    line = chunk(b"data: " + b"x" * (1 << 19))
    assert outcome(EVENTS + line * 3) == ("malformed", "an event has more than 1 MiB")
    lines = chunk((b"data: " + b"x" * 1024 + b"\n") * 600)
    assert outcome(EVENTS + lines * 2) == ("malformed", "an event has more than 1 MiB")
    page = b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * ((1 << 20) + 1)

    async def main():
        async with Server(lambda number: [page]).serving() as port:
            await get(f"http://127.0.0.1:{port}/v1/models", {}, 60.0)

    with pytest.raises(HTTPError, match="the answer has more than 1 MiB"):
        asyncio.run(main())


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel does not tell")
def test_what_came_while_the_client_was_busy_has_the_time_at_which_it_came():
    """The loop is kept from reading until after the second piece has arrived. The kernel begins to
    note arrivals a while after the first socket has asked for them."""
    for _ in range(100):
        kept = ask_while_busy()
        assert [data for data, _ in kept.pieces] == [b"first", b"second"]
        if kept.before <= kept.pieces[1][1] <= kept.after - 0.005:
            return
    pytest.fail("no arrival had its own time")


def ask_while_busy():
    """What is kept of an answer whose second piece arrives while the loop does something else."""
    listener = socket.create_server(("127.0.0.1", 0))
    write, written = threading.Event(), threading.Event()

    def serve():
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(EVENTS + chunk(b"first"))
            write.wait()
            connection.sendall(chunk(b"second") + chunk(b""))
            written.set()

    class Busy(Kept):
        def on_data(self, data, now):
            super().on_data(data, now)
            if data == b"first":
                self.before = time.perf_counter()
                write.set()
                written.wait()
                time.sleep(0.01)
                self.after = time.perf_counter()

    async def ask():
        connections = Connections(f"http://127.0.0.1:{listener.getsockname()[1]}/", {})
        await connections.request(b"{}", kept)
        connections.close()

    kept, server = Busy(), threading.Thread(target=serve)
    server.start()
    asyncio.run(ask())
    server.join()
    listener.close()
    return kept
