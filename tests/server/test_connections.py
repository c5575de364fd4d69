"""What clients can do with connections alone: open many, be silent, not read, write odd heads."""

import asyncio
import gc
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.parse
import weakref
from pathlib import Path

import h11
import pytest
import uvicorn
from uvicorn.server import ServerState

from twolane.common.garbage import gc_disabled
from twolane.frontend.socket_folders import SocketFolder
from twolane.server import run
from twolane.server.http.backpressure import UnsentOutput
from twolane.server.http.connection import (
    CONNECTION,
    CUT_OFF,
    EXTRA_CONNECTIONS,
    GRACE_SECONDS,
    HALF_CLOSED,
    LOG_SECONDS,
    READ_AT_ONCE,
    SMALL_CHUNKS,
    ConnectionLimits,
    StrictBuffer,
    check_head,
    connection_class,
    plain_line,
)
from twolane.server.run import address_of, bind

from .conftest import TINY
from .serving import PATIENCE, free_port, serving, wait_for

FILES = 240
"""The limit on open files under which a server is tested."""


def address(served):
    parts = urllib.parse.urlsplit(served.base)
    return parts.hostname, parts.port


def sent(served, data):
    """Send bytes; return all that comes until the server closes, or None if it does not."""
    with socket.create_connection(address(served), timeout=PATIENCE) as client:
        answer = b""
        try:
            client.sendall(data)
            while part := client.recv(65536):
                answer += part
        except ConnectionError:  # it was closed before all was read
            pass
        except TimeoutError:
            return None
        return answer


BODY = b'{"prompt":[5],"max_tokens":1}'
CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
JSON = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(
            JSON + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKED,
            id="both lengths",
        ),
        pytest.param(
            JSON.replace(b"Host", b"Transfer-Encoding: chunked\r\nHost")
            + b"Content-Length: 0\r\n\r\n"
            + CHUNKED,
            id="both lengths, the other way round",
        ),
        pytest.param(
            JSON.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKED,
            id="chunks in HTTP/1.0",
        ),
        pytest.param(b"GET /health HTTP/1.1\nHost: x\n\n", id="bare LF"),
        pytest.param(b"GET /health HTTP/1.1\r\nHost: x\nA: b\r\n\r\n", id="one bare LF"),
        pytest.param(b"GET /health HTTP/1.1\r\nHost: x\r\nA: b\r\n\n", id="bare LF at the end"),
        pytest.param(b"\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n", id="bare LF before"),
        pytest.param(
            JSON + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKED.removesuffix(b"\r\n") + b"\n",
            id="bare LF behind the body",
        ),
        pytest.param(b"GET /health HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n\r\n", id="folded"),
        pytest.param(
            b"GET /health HTTP/1.1\r\nHost: x\r\nX-Api-Key: a\r\nx-api-key: b\r\n\r\n",
            id="two keys",
        ),
        pytest.param(b"GET /health HTTP/1.1\r\nHost: x\r\nA: b\r\n\tc\r\n\r\n", id="folded, tab"),
    ],
)
def test_a_head_that_can_be_read_in_two_ways_is_refused_and_the_connection_closed(tiny, head):
    answer = sent(tiny, head)
    assert answer is not None, "the connection was kept open"
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1


LASTING = b'{"prompt":[5],"max_tokens":20000,"ignore_eos":true}'


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (JSON + b"Content-Length: %d\r\n\r\n%b" % (len(LASTING), LASTING), HALF_CLOSED),
        (JSON + b"Content-Length: 99\r\n\r\n" + LASTING, CUT_OFF),
        (JSON + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{", CUT_OFF),
        (JSON, CUT_OFF),
        (b"", None),
    ],
    ids=["whole", "cut body", "cut chunk", "cut head", "nothing"],
)
def test_a_client_that_closes_its_side_is_told_that_its_request_is_aborted(tiny, data, said):
    """One that has left looks the same."""
    before = tiny.metrics()
    with socket.create_connection(address(tiny), timeout=PATIENCE) as client:
        client.sendall(data)
        if said is HALF_CLOSED:
            wait_for(lambda: tiny.metrics()["num_requests_running"] == 1)
        client.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    if said is None:
        assert answer == b""
        return
    assert answer.startswith(b"HTTP/1.1 400 ")
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert (error["code"], error["message"]) == ("client_closed", said)
    counted = "requests_aborted_total"
    if said is HALF_CLOSED:
        wait_for(lambda: tiny.metrics()[counted] == before[counted] + 1)
        wait_for(lambda: tiny.metrics()["num_requests_running"] == 0)


@pytest.mark.parametrize(
    ("target", "status"),
    [
        (b"http://x/health", b"200"),
        (b"HTTPS://x:80/health?a=http://b/c", b"200"),
        (b"http://x", b"307"),
        (b"http://x?a=b", b"307"),
        (b"http:///health", b"404"),
        (b"http://user@x/health", b"404"),
        (b"/http://x/health", b"404"),
        (b"/health/", b"308"),
        (b"http://x//v1///models/", b"308"),
        (b"/v1x//models", b"404"),
        (b"/health//ready", b"404"),
        (b"*", b"404"),
    ],
)
def test_a_target_may_name_the_server(tiny, target, status):
    """Clients that take the server for a proxy name it (RFC 9112, section 3.2.2)."""
    head = b"GET " + target + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    assert sent(tiny, head).startswith(b"HTTP/1.1 " + status)


@pytest.mark.parametrize("begin", [b"", b"GET /", b"GET /?", b"GET http://", b"GET http://a/"])
@pytest.mark.parametrize("more", [b"a", b"?", b"/", b" "])
def test_a_long_line_is_read_in_linear_time(begin, more):
    """Clients without a key could hold the event loop for a minute with one packet."""
    line = begin + 60_000 * more
    started = time.process_time()
    assert plain_line(line) == line
    check_head(line + b"\r\n\r\n")
    assert time.process_time() - started < 1.0


def test_trailers_are_no_request_line():
    connection = h11.Connection(h11.SERVER)
    connection._receive_buffer = StrictBuffer()
    head = b"POST //a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    connection.receive_data(head + b"2\r\n{}\r\n0\r\nA: //a HTTP/1.1\r\n\r\n" + head)
    events = [connection.next_event() for _ in range(3)]
    assert events[0].target == b"//a"
    assert list(events[2].headers) == [(b"a", b"//a HTTP/1.1")]


@pytest.mark.parametrize(
    ("head", "status", "reason"),
    [
        (
            b"GET /health HTTP/2.0\r\nHost: x\r\n\r\n",
            505,
            "HTTP/2.0 is not supported: send",
        ),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, "HTTP/2.0 is not supported"),
        (b"GET /health HTTP/0.9\r\n\r\n", 505, "HTTP/0.9 is not supported"),
        (JSON + b"Transfer-Encoding: gzip\r\n\r\n", 501, "Only Transfer-Encoding: chunked"),
        (b"GET /health HTTP/1.1\r\nA: " + b"b" * 70_000, 431, "the request line and the headers"),
        (b"GET /" + b"b" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431, "the request line"),
        (b"GET /health HTTP/1.1\r\n\r\n", 400, "Missing mandatory Host: header"),
        (b"GET /" + b" " * 999 + b"HTTP/1.1\r\n\r\n", 400, "illegal request line"),
    ],
)
def test_what_is_no_http_is_told_why(tiny, head, status, reason):
    head, _, body = sent(tiny, head).partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert (int(head.split()[1]), error["code"]) == (status, "invalid_http")
    assert error["message"].startswith(f"invalid HTTP: {reason}")
    assert len(body) < 500


def test_a_higher_minor_version_is_read_as_the_one_that_is_served(tiny):
    """RFC 9110, section 2.5."""
    head = b"GET /health HTTP/1.9\r\nHost: x\r\nConnection: close\r\n\r\n"
    assert sent(tiny, head).startswith(b"HTTP/1.1 200 ")


def test_a_plain_head_is_taken_however_it_is_cut(tiny):
    head = JSON + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n" + CHUNKED
    for cut in range(1, len(head), 7):
        with socket.create_connection(address(tiny), timeout=PATIENCE) as client:
            client.sendall(head[:cut])
            time.sleep(0.002)
            client.sendall(head[cut:])
            assert client.recv(12) == b"HTTP/1.1 200"


@pytest.mark.parametrize(
    ("chunk", "count", "status"),
    [
        (b" ", SMALL_CHUNKS - 99, b"200"),
        (b" ", SMALL_CHUNKS + 99, b"400"),
        (b" " * 999, 4000, b"200"),
    ],
)
def test_a_body_in_very_many_small_chunks_is_refused(tiny, chunk, count, status):
    """400,000 chunks of one byte kept other clients waiting for six seconds."""
    head = JSON + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    data = b"%x\r\n%b\r\n" % (len(chunk), chunk) * count + CHUNKED
    for _ in range(2):  # each connection counts its own
        assert sent(tiny, head + data).startswith(b"HTTP/1.1 " + status)


def test_chunks_are_counted_for_each_body(tiny):
    head = JSON + b"Transfer-Encoding: chunked\r\n"
    data = b"\r\n" + b"1\r\n \r\n" * (SMALL_CHUNKS - 99) + CHUNKED
    answers = sent(tiny, (head + data) * 2 + head + b"Connection: close\r\n" + data)
    assert answers.count(b"HTTP/1.1 200 ") == 3


@pytest.fixture(scope="module")
def narrow(tiny_model, tmp_path_factory):
    """A server that may open few files, its log, and when this was begun."""
    log, began = tmp_path_factory.mktemp("narrow") / "log", time.monotonic()
    limited = ["prlimit", f"--nofile={FILES // 2}:{FILES}"]
    with serving(str(tiny_model), *TINY, stderr=log, before=limited) as served:
        yield served, log, began


def test_the_limit_on_files_is_raised(narrow):
    limits = Path(f"/proc/{narrow[0].process.pid}/limits").read_text()
    [line] = [line for line in limits.splitlines() if line.startswith("Max open files")]
    assert line.split()[3:5] == [str(FILES)] * 2


def test_what_clients_send_writes_no_lines_into_the_log(narrow):
    """Neither a request to become a web socket nor one that is no HTTP; both are answered."""
    served, log, _ = narrow
    upgrade = (
        b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    )
    before = log.read_text()
    for data, status in ((upgrade, b" 200 "), (b"nonsense\r\n\r\n", b" 400 ")):
        with socket.create_connection(address(served), timeout=PATIENCE) as client:
            client.sendall(data)
            assert status in client.recv(1000).split(b"\r\n")[0]
    assert log.read_text() == before


def test_many_idle_connections_keep_nobody_out(narrow):
    served, log, _ = narrow
    idle = [socket.create_connection(address(served)) for _ in range(2 * FILES)]
    try:
        assert served.request("/health")[0] == 200
        time.sleep(1.5)  # by when they have had their chance
        assert served.request("/v1/models")[0] == 200
    finally:
        for client in idle:
            client.close()
    assert log.stat().st_size < 2000


def test_when_all_connections_are_busy_probes_are_served_and_others_told(narrow):
    served, log, began = narrow
    head = JSON + b"Content-Length: 100\r\n\r\n"
    busy = []
    for _ in range(FILES):
        client = socket.create_connection(address(served))
        client.sendall(head)
        busy.append(client)
    try:
        wait_for(lambda: served.request("/v1/models")[0] == 503)
        status, headers, body = served.request("/v1/models")
        assert (status, body["error"]["code"]) == (503, "too_many_connections")
        assert headers["Connection"] == "close"
        assert served.request("/health")[0] == 200
    finally:
        for client in busy:
            client.close()
    wait_for(lambda: served.request("/v1/models")[0] == 200)
    lines = log.read_text().count("connections are busy")
    assert 1 <= lines <= 1 + (time.monotonic() - began) / LOG_SECONDS


class Link(asyncio.Transport):
    """A client's connection, on which nothing comes or goes."""

    closed = False

    def get_extra_info(self, name, default=None):
        return default

    def is_closing(self):
        return self.closed

    def close(self):
        self.closed = True


@pytest.mark.parametrize(
    ("excess", "waited", "place"),
    [
        (0, 60.0, "free"),
        (1, GRACE_SECONDS, "none"),
        (1, GRACE_SECONDS + 0.1, "the idle one's"),
        (EXTRA_CONNECTIONS, 0.0, "none"),
        (EXTRA_CONNECTIONS + 1, 0.0, "the idle one's"),
        (EXTRA_CONNECTIONS, None, "none"),
        (EXTRA_CONNECTIONS + 1, None, "closed"),
    ],
)
def test_a_connection_too_many_takes_the_place_of_one_that_waited_longest(excess, waited, place):
    """Who has just come may still ask, unless there is a crowd."""
    limits = ConnectionLimits(max_connections=4, arrival_seconds=99.0, stall_seconds=99.0)
    bound, loop = connection_class(limits, UnsentOutput()), asyncio.new_event_loop()
    config, state = uvicorn.Config(print, lifespan="off", log_config=None), ServerState()
    config.load()

    def come(now):
        loop.time = lambda: now
        connection = bound(config, state, {}, loop)
        connection.connection_made(Link())
        return connection

    idle = [] if waited is None else [come(0.0), come(waited)]
    others = limits.max_connections + excess - len(idle) - 1
    state.connections.update(range(others))  # all of which are busy
    new = come(waited or 0.0)
    gone = [each for each in (*idle, new) if each.transport.closed]
    assert gone == {"the idle one's": idle[:1], "closed": [new]}.get(place, [])
    assert new.probes_only == (place in ("none", "closed"))
    assert len(state.connections) == others + len(idle) + 1 - len(gone)
    assert not new.waiting.keys() & {*gone}
    loop.close()


@pytest.mark.full
def test_a_client_that_does_not_read_is_disconnected_and_holds_no_end(tiny_model, tmp_path):
    log = tmp_path / "log"
    many = {"prompt": [5], "max_tokens": 900, "n": 32, "logprobs": 20, "stream": True}
    body = json.dumps({**many, "ignore_eos": True}).encode()
    with serving(str(tiny_model), *TINY, "--stall-seconds", "1", stderr=log) as served:

        def stall():
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(address(served))
            client.sendall(JSON + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
            return client

        def files():
            return len(list(Path(f"/proc/{served.process.pid}/fd").iterdir()))

        before = files()
        with stall():
            wait_for(lambda: served.metrics()["requests_received_total"])
            wait_for(lambda: files() <= before)
        first = served.metrics()

        def stalled():
            """So much was made; or less on a slow machine, and the client is disconnected again."""
            now = served.metrics()
            more = now["generation_tokens_total"] - first["generation_tokens_total"]
            came = now["requests_received_total"] > first["requests_received_total"]
            return more > 3000 or (came and now["requests_in_flight"] == 0)

        with stall():
            wait_for(stalled)
            served.process.terminate()
            served.process.terminate()
            assert served.process.wait(PATIENCE) == 0
    assert "Traceback" not in log.read_text()


LOADING = """
import sys
if "twolane.engine" in sys.orig_argv:
    import time
    from pathlib import Path

    while Path({flag!r}).exists():
        time.sleep(0.05)
"""
"""Keeps an engine process from getting ready as long as a file is there."""


def test_while_the_model_loads_probes_are_told(tiny_model, tmp_path):
    port, seen = free_port(), []
    (flag := tmp_path / "flag").touch()
    (tmp_path / "sitecustomize.py").write_text(LOADING.format(flag=str(flag)))
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "twolane", "serve", str(tiny_model), *TINY]
    process = subprocess.Popen([*command, "--port", str(port)], env=env, stdout=subprocess.PIPE)

    def ready():
        """Ask, and tell whether the server is up; it may not listen yet."""
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        try:
            for path in ("/livez", "/health"):
                client.request("GET", path)
                answer = client.getresponse()
                seen.append((path, answer.status, json.loads(answer.read())))
            client.request("HEAD", "/livez")
            answer = client.getresponse()
            assert (answer.status, answer.read()) == (200, b"")
        except OSError:
            return False
        finally:
            client.close()
        return seen[-1][:2] == ("/health", 200)

    def early():
        return [body for _, status, body in seen if status == 503]

    try:
        wait_for(lambda: ready() or early())
        flag.unlink()
        wait_for(ready)
    finally:
        process.terminate()
        process.wait()
    assert all(status == 200 for path, status, _ in seen if path == "/livez")
    assert {body["error"]["code"] for body in early()} == {"loading"}


def has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("host", ["::1", "[::1]", "[::]"])
def test_an_address_of_ipv6_may_have_brackets(host):
    with bind(host, 0) as first:
        address = address_of(first)
        assert address.startswith(f"http://[{host.strip('[]')}]:")
        port = urllib.parse.urlsplit(address).port
        with (
            pytest.raises(OSError, match=re.escape(f"[{host.strip('[]')}]:{port}: Address")),
            bind(host, port),
        ):
            pass


@pytest.mark.parametrize("host", ["[127.0.0.1]", "[::1", "::1]", "[]", "127.0.0.1:80"])
def test_other_brackets_and_ports_are_no_address(host):
    with pytest.raises(OSError, match="cannot listen on --host"), bind(host, 0):
        pass


@pytest.mark.full
def test_the_folder_of_a_killed_server_is_removed_by_the_next(tiny_model, tmp_path, monkeypatch):
    """Not that of a living process."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def folders():
        return set(tmp_path.glob("twolane-*/owner"))

    mine = SocketFolder()
    [kept] = folders()
    with serving(str(tiny_model), *TINY) as other:
        [dead] = folders() - {kept}
        other.process.kill()
        other.process.wait()
        assert dead in folders()
        with serving(str(tiny_model), *TINY):
            assert dead not in folders()
            assert kept in folders()
    mine.remove()


@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
@pytest.mark.parametrize(
    ("body", "ends", "status"), [(b"", "closes its side", b"400"), (b"{", "is slow", b"408")]
)
def test_an_error_of_the_connection_has_the_body_that_its_method_has(method, body, ends, status):
    """That of HEAD has none: the length in its answer is that of GET's."""

    async def app(scope, receive, send):
        while (await receive())["type"] != "http.disconnect":
            pass  # and nothing is answered

    class Recorded(Link):
        written = b""

        def write(self, data):
            self.written += data

        def get_write_buffer_size(self):
            return 0

    async def work():
        limits = ConnectionLimits(max_connections=9, arrival_seconds=PATIENCE, stall_seconds=99.0)
        bound, loop = connection_class(limits, UnsentOutput()), asyncio.get_running_loop()
        config, state = uvicorn.Config(app, lifespan="off", log_config=None), ServerState()
        config.load()
        connection, link = bound(config, state, {}, loop), Recorded()
        connection.connection_made(link)
        length = b"Content-Length: 9\r\n" * len(body)
        connection.data_received(b"%b / HTTP/1.1\r\nHost: x\r\n%b\r\n%b" % (method, length, body))
        await asyncio.sleep(0)
        if ends == "is slow":
            connection._too_slow()
        else:
            connection.eof_received()
        connection.connection_lost(None)
        await asyncio.gather(*state.tasks)
        return link.written

    head, _, answer = asyncio.run(work()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 " + status)
    assert int(re.search(rb"(?i)content-length: (\d+)", head)[1]) > 0
    assert bool(answer) == (method == b"GET")


def test_a_request_whose_client_leaves_before_its_turn_is_told_to_the_application():
    """Which counts it, as it counts others whose client has left."""
    calls = []

    async def app(scope, receive, send):
        calls.append(scope["path"])
        assert (await receive())["type"] == (
            "http.disconnect" if "left" in calls[-1] else "http.request"
        )
        await receive()  # nothing is answered, so that nobody's turn comes

    async def work():
        limits = ConnectionLimits(max_connections=9, arrival_seconds=PATIENCE, stall_seconds=99.0)
        bound, loop = connection_class(limits, UnsentOutput()), asyncio.get_running_loop()
        config, state = uvicorn.Config(app, lifespan="off", log_config=None), ServerState()
        config.load()
        connections = [bound(config, state, {}, loop) for _ in range(READ_AT_ONCE + 1)]
        for place, connection in enumerate(connections):
            connection.connection_made(Link())
            path = b"/left" if place == READ_AT_ONCE else b"/read"
            head = b"POST %b HTTP/1.1\r\nHost: x\r\nX-Api-Key: a\r\nContent-Length: 2\r\n\r\n"
            connection.data_received(head % path + b"{}")
        await asyncio.sleep(0)
        assert calls == ["/read"] * READ_AT_ONCE
        for connection in reversed(connections):
            connection.connection_lost(None)
        await asyncio.gather(*state.tasks)
        assert calls[READ_AT_ONCE:] == ["/left"]

    asyncio.run(work())


def test_a_connection_that_has_ended_leaves_no_cycles_to_be_collected():
    """So its memory, and that of its last request, is free at once."""
    seen = []

    async def app(scope, receive, send):
        connection = scope["state"][CONNECTION]
        seen.extend(map(weakref.ref, (connection, connection.transport)))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"yes"})

    async def ask(address, *, whole):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        if whole:
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        writer.transport.abort()

    async def work():
        never = 9 * PATIENCE
        limits = ConnectionLimits(max_connections=9, arrival_seconds=never, stall_seconds=never)
        config = uvicorn.Config(
            app,
            port=0,
            http=connection_class(limits, UnsentOutput()),
            timeout_keep_alive=never,
            lifespan="off",
            log_config=None,
        )
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        address = server.servers[0].sockets[0].getsockname()
        with gc_disabled():
            for whole in (True, False, True):
                await ask(address, whole=whole)
            async with asyncio.timeout(PATIENCE):
                while len(seen) < 4 or any(one() is not None for one in seen):
                    await asyncio.sleep(0.01)
        server.should_exit = True
        await serving

    asyncio.run(work())


@pytest.mark.parametrize(
    ("requests", "seconds", "full"), [(8, 99.0, True), (9, 99.0, False), (9, 0.0, True)]
)
def test_garbage_is_collected_when_few_requests_are_open_or_after_long(
    monkeypatch, requests, seconds, full
):
    """A collection visits what all open requests hold, and no token is written meanwhile."""
    seen = []
    monkeypatch.setattr(run, "RETURN_SECONDS", 0.01)
    monkeypatch.setattr(run, "COLLECT_SECONDS", seconds)

    def note(phase, info):
        if phase == "start":
            seen.append(info["generation"])

    async def work():
        server = run.UvicornServer(uvicorn.Config(None, lifespan="off", log_config=None))
        server.server_state.tasks |= {
            asyncio.create_task(asyncio.sleep(PATIENCE)) for _ in range(requests)
        }
        gc.callbacks.append(note)
        returning = asyncio.create_task(run.return_memory(server))
        await asyncio.sleep(0.1)
        gc.callbacks.remove(note)
        returning.cancel()

    with gc_disabled():
        asyncio.run(work())
    assert (2 in seen) == full
