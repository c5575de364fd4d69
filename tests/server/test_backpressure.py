"""Output that waits for readers: what one holds is known, and all together are bound."""

import asyncio
import contextlib
import errno
import logging
import socket
import threading

import uvicorn
from msgspec import structs

from twolane.frontend.backlog import Backlog
from twolane.frontend.text.output_reader import Delta
from twolane.sampling import PackedLogprobs, TokenLogprobs
from twolane.server.http.backpressure import CHECKS_PER_BOUND, FAULTS, LOG_SECONDS, UnsentOutput
from twolane.server.http.connection import (
    CONNECTION,
    ConnectionLimits,
    connection_class,
    unacknowledged,
)
from twolane.server.run import LoopErrors
from twolane.server.service.respond import EventStream

from .serving import PATIENCE

MIB = 1 << 20
LIMITS = ConnectionLimits(max_connections=99, arrival_seconds=PATIENCE, stall_seconds=PATIENCE)
SCORED = [TokenLogprobs(7, -0.5, 1, [(7, -0.5), (9, float("-inf"))])]


def delta(index):
    return Delta(
        index, "é\x00", [7], [index], "stop", "x", index, SCORED, PackedLogprobs(1, [b"a"])
    )


def test_what_waits_is_taken_in_order_as_it_was_put():
    async def work():
        backlog, grown = Backlog(), []
        backlog.on_growth = grown.append
        events = [delta(0), delta(1), None, delta(2), ValueError("x")]
        for event in events:
            backlog.put(event)
        assert backlog.held == sum(grown) > 0
        taken = [await backlog.take() for _ in events]
        assert backlog.empty
        assert backlog.held == 0
        assert taken[:4] == events[:4]
        assert taken[4] is events[4]

    asyncio.run(work())


@contextlib.asynccontextmanager
async def served(app, output, limits=LIMITS):
    """Serve an ASGI application on connections of ours; yields the address."""
    http = connection_class(limits, output)
    config = uvicorn.Config(app, port=0, http=http, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    try:
        yield server.servers[0].sockets[0].getsockname()
    finally:
        server.should_exit = server.force_exit = True
        await serving


async def until(condition):
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.01)


def asking(address, path=b"/", version=b"1.1"):
    """Ask, and read nothing yet; the client's system takes little."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(address)
    client.sendall(b"GET %b HTTP/%b\r\nHost: x\r\n\r\n" % (path, version))
    return client


START = {"type": "http.response.start", "status": 200, "headers": []}


def answering(answer, client_does, output, *, limits=LIMITS, version=b"1.1"):
    """Ask a server whose application is `answer(connection, send)`; run `client_does(client)` in a
    thread meanwhile, and return when both are through."""

    async def app(scope, receive, send):
        connection = scope["state"][CONNECTION]
        sockets = connection.transport.get_extra_info("socket")
        sockets.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # nor does the server's
        await send(START)
        try:
            await answer(connection, send)
        except Exception as error:
            connection.transport.abort()
            ended.set_exception(error)
        else:
            ended.set_result(None)

    async def work():
        nonlocal ended
        ended = asyncio.get_running_loop().create_future()
        async with served(app, output, limits) as address:
            with asking(address, version=version) as client:
                client.settimeout(PATIENCE)
                async with asyncio.timeout(PATIENCE):
                    await asyncio.to_thread(client_does, client)
                    await ended
            await until(lambda: not output.readers)

    ended = None
    asyncio.run(work())


def nothing(client):
    """Read nothing."""


def everything(client):
    """Read whatever comes."""
    while client.recv(MIB):
        pass


def everything_after(full):
    """Return what reads whatever comes once this is set."""

    def reads(client):
        assert full.wait(PATIENCE)
        everything(client)

    return reads


def read(client):
    """Return how many bytes of an answer's body come."""
    client.settimeout(PATIENCE)
    head = b""
    while b"\r\n\r\n" not in head:
        head += client.recv(65536)
    fields, _, body = head.partition(b"\r\n\r\n")
    [length] = [int(each[16:]) for each in fields.split(b"\r\n") if b"content-length" in each]
    count = len(body)
    while count < length and (part := client.recv(MIB)):
        count += len(part)
    return count


async def sized(scope, receive, send):
    """Answer with as many MiB as the path says."""
    size = int(scope["path"][1:]) * MIB
    headers = [(b"content-length", b"%d" % size)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": bytes(size)})


def test_when_too_much_waits_the_reader_that_held_most_for_longest_goes(caplog):
    """Of three answers of 32, 16 and 32 MiB two fit, and the newest is read."""

    async def work():
        output = UnsentOutput(50 * MIB)
        async with served(sized, output) as address:
            with contextlib.ExitStack() as clients:
                first = clients.enter_context(asking(address, b"/32"))
                await until(lambda: output.together > 16 * MIB)
                second = clients.enter_context(asking(address, b"/16"))
                await until(lambda: sum(each.unsent > 0 for each in output.readers) == 2)
                assert not output.dropped["slow"]
                third = clients.enter_context(asking(address, b"/32"))
                assert await asyncio.to_thread(read, third) == 32 * MIB
                assert await asyncio.to_thread(read, second) == 16 * MIB
                assert await asyncio.to_thread(read, first) < 32 * MIB
            assert output.dropped == {"slow": 1, "stalled": 0}
            await until(lambda: not output.readers)
        assert output.together == 0

    with caplog.at_level(logging.WARNING):
        asyncio.run(work())
    logged = [each.getMessage() for each in caplog.records if each.name == "twolane.server"]
    assert [FAULTS["slow"] in each for each in logged] == [True]


def test_a_stream_that_is_not_read_is_broken_off_when_it_holds_too_much():
    """What a generation keeps for its reader counts beside what the connection keeps."""

    async def endless(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        backlog = Backlog()
        scope["state"][CONNECTION].hold(backlog)
        while not output.dropped["slow"]:
            backlog.put(delta(0))
            await asyncio.sleep(0)
        while (await receive())["type"] != "http.disconnect":
            pass
        ended.set()

    async def work():
        async with served(endless, output) as address:
            with asking(address, b"/"):
                async with asyncio.timeout(PATIENCE):
                    await ended.wait()
            await until(lambda: not output.readers)

    output, ended = UnsentOutput(MIB // 4), asyncio.Event()
    asyncio.run(work())
    assert output.together == 0


def test_a_reader_that_has_caught_up_is_behind_from_now_on():
    """Or else whoever was slow once would go before one that is slow all the time."""
    part = bytes(16 * MIB)

    async def slow_twice(scope, receive, send):
        connection, backlog = scope["state"][CONNECTION], Backlog()
        connection.hold(backlog)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for index in range(2):
            backlog.put(delta(index))
        await send({"type": "http.response.body", "body": part, "more_body": True})
        full.set()
        await until(lambda: not connection.flow.write_paused)
        for _ in range(2):
            await backlog.take()
        caught_up = connection.loop.time()
        await send({"type": "http.response.body", "body": part, "more_body": True})
        backlog.put(delta(0))
        behind.append(connection.flow.write_paused)
        behind.append(connection.seconds_behind <= connection.loop.time() - caught_up)
        ended.set()

    async def work():
        async with served(slow_twice, UnsentOutput()) as address:
            with asking(address, b"/") as client:
                async with asyncio.timeout(PATIENCE):
                    await full.wait()
                    await asyncio.to_thread(client.recv, len(part), socket.MSG_WAITALL)
                    await ended.wait()

    full, ended, behind = asyncio.Event(), asyncio.Event(), []
    asyncio.run(work())
    assert behind == [True, True]


class Reader:
    """A reader of which somebody counts how often it is asked."""

    asked = 0

    def __init__(self, unsent, seconds=1.0):
        self.size, self.seconds, self.gone = unsent, seconds, False

    @property
    def unsent(self):
        Reader.asked += 1
        return 0 if self.gone else self.size

    @property
    def seconds_behind(self):
        Reader.asked += 1
        return self.seconds

    def drop(self, fault):
        assert fault == "slow"
        self.gone = True


def test_many_readers_go_in_one_look():
    """However many, each is looked at twice: with thousands the loop would stand still."""
    output, readers = UnsentOutput(MIB), [Reader(size) for size in range(1000, 2000)]
    output.readers.update(readers)
    Reader.asked = 0
    output.grew(MIB)
    assert output.together <= MIB
    gone = [each.size for each in readers if each.gone]
    assert gone == list(range(2000 - len(gone), 2000))
    assert sum(gone[1:]) < sum(range(1000, 2000)) - MIB <= sum(gone)
    assert Reader.asked == 3 * len(readers)  # with what waits together, asked here


def test_a_client_is_disconnected_that_takes_nothing_between_two_looks():
    """And not one that is slow, however often it is looked at."""

    async def work():
        output = UnsentOutput()
        async with served(sized, output) as address:
            with asking(address, b"/32") as client:
                client.setblocking(False)
                await until(lambda: output.together)
                [connection] = output.readers

                def left():
                    return connection.unsent + unacknowledged(connection.transport)

                def looked():
                    connection._check_progress()
                    return connection.transport.is_closing()

                for _ in range(9):
                    assert not looked()
                    while left() >= connection._unsent:
                        await asyncio.get_running_loop().sock_recv(client, MIB)
                await until(looked)
            assert output.dropped == {"slow": 0, "stalled": 1}
            await until(lambda: not output.readers)

    asyncio.run(work())


def test_parts_are_for_clients_that_read():
    took = []

    async def answer(connection, send):
        took.append(connection.takes_parts)
        connection.write_part(bytes(8 * MIB))
        took.append(connection.takes_parts)
        full.set()
        await until(lambda: connection.takes_parts)
        connection.transport.close()
        took.append(connection.takes_parts)

    full = threading.Event()
    answering(answer, everything_after(full), UnsentOutput())
    assert took == [True, False, False]


def test_http_1_0_has_no_parts():
    took = []

    async def answer(connection, send):
        took.append(connection.takes_parts)

    answering(answer, nothing, UnsentOutput(), version=b"1.0")
    assert took == [False]


def test_parts_count_that_a_connection_takes_at_once():
    """It takes 64 KiB until it is behind: with thousands of them that is much."""
    behind = []

    async def answer(connection, send):
        while not output.dropped["slow"]:
            behind.append(connection.flow.write_paused)
            connection.write_part(bytes(1024))

    output = UnsentOutput(MIB // 64)
    answering(answer, nothing, output)
    assert behind
    assert not any(behind)


def test_who_is_disconnected_counts_no_more_at_once():
    """Or it would be disconnected again, or another for it, before the loop tells."""

    async def answer(connection, send):
        backlog = Backlog()
        connection.hold(backlog)
        while backlog.held < MIB:
            backlog.put(delta(0))
            assert output.together <= MIB // 32  # it is added up now and then

    output = UnsentOutput(MIB // 64)
    answering(answer, nothing, output)
    assert output.dropped == {"slow": 1, "stalled": 0}


def test_what_is_left_of_an_answer_that_has_ended_does_not_count():
    """A stop string was found in it, for instance; the next request may come for long."""
    left = []

    async def answer(connection, send):
        backlog = Backlog()
        connection.hold(backlog)
        for index in range(9):
            backlog.put(delta(index))
        left.append(output.together > 0)
        await send({"type": "http.response.body", "body": b""})
        left.append(output.together)
        connection.transport.close()

    output = UnsentOutput()
    answering(answer, everything, output)
    assert left == [True, 0]


def test_who_has_read_all_is_not_behind():
    behind = []

    async def answer(connection, send):
        behind.append(connection.seconds_behind)
        for _ in range(2):  # without a backlog, and with one of which nothing waits
            connection.write_part(bytes(8 * MIB))
            await asyncio.sleep(0.01)
            behind.append(connection.seconds_behind > 0)
            full.set()
            await until(lambda: connection.takes_parts)
            behind.append(connection.seconds_behind)
            connection.hold(Backlog())
        connection.transport.close()

    full = threading.Event()
    answering(answer, everything_after(full), UnsentOutput())
    assert behind == [0, True, 0, True, 0]


def test_who_has_not_read_all_is_behind_since_then():
    """However often the connection is full again."""
    behind = []

    async def answer(connection, send):
        def note():
            at = connection.loop.time()
            behind.append(connection.seconds_behind >= at - fell)

        backlog = Backlog()
        connection.hold(backlog)
        backlog.put(delta(0))
        connection.write_part(bytes(8 * MIB))
        fell = connection.loop.time()
        full.set()
        await until(lambda: connection.takes_parts)
        note()
        connection.write_part(bytes(8 * MIB))
        note()
        connection.transport.abort()

    def reads(client):
        assert full.wait(PATIENCE)
        with contextlib.suppress(ConnectionError):
            everything(client)

    full = threading.Event()
    answering(answer, reads, UnsentOutput())
    assert behind == [True, True]


def test_who_reads_again_between_two_looks_is_not_stalled():
    """Though as much waits again."""
    dropped = []

    async def answer(connection, send):
        for size in (8 * MIB, 16 * MIB):
            connection.write_part(bytes(size))
            connection._check_progress()
            dropped.append(connection.transport.is_closing())
            full.set()
            await until(lambda: connection.takes_parts or connection.transport.is_closing())
        connection.transport.close()

    full = threading.Event()
    answering(answer, everything_after(full), UnsentOutput())
    assert dropped == [False, False]


def test_an_answer_that_goes_on_says_nothing_of_its_reader():
    """What waits may be more than at the last look, and yet something was read."""
    dropped = []

    async def answer(connection, send):
        for _ in range(4):
            connection.write_part(bytes(8192))
            connection._check_progress()
            dropped.append((connection.transport.is_closing(), connection.is_stalled))
        connection.transport.abort()

    answering(answer, nothing, UnsentOutput())
    assert [closing for closing, _ in dropped] == [False] * 4
    assert dropped[-1] == (False, True)


def test_the_end_of_an_answer_is_not_waited_for_without_end():
    """It is less than what pauses the connection, which closes behind it."""

    async def answer(connection, send):
        connection.write_part(bytes(48 << 10))
        assert connection.takes_parts
        connection.transport.close()
        await until(lambda: output.dropped["stalled"])

    output = UnsentOutput()
    answering(answer, nothing, output, limits=structs.replace(LIMITS, stall_seconds=0.05))
    assert output.dropped == {"slow": 0, "stalled": 1}


def test_what_waits_is_added_up_after_a_part_of_what_may_wait():
    output = UnsentOutput(100 * CHECKS_PER_BOUND)
    output.readers.add(Reader(1))
    Reader.asked, asked = 0, []
    for count in (99, 1, 99, 1):
        output.grew(count)
        asked.append(Reader.asked)
    assert asked == [0, 1, 1, 2]


def test_bytes_and_seconds_both_tell_who_goes():
    output = UnsentOutput(1005)
    late, heavy = Reader(10, 100.0), Reader(1000, 2.0)
    output.readers.update((late, heavy))
    output.grew(1005)
    assert (late.gone, heavy.gone) == (False, True)


def test_the_log_is_told_of_each_kind_once_in_a_while(caplog):
    now = [0.0]
    output = UnsentOutput(clock=lambda: now[0])
    for seconds in (0.0, LOG_SECONDS - 1, LOG_SECONDS, LOG_SECONDS + 1):
        now[0] = seconds
        output.note_drop("slow", "client")
    assert len(caplog.records) == 2
    output.note_drop("stalled", "client")
    assert len(caplog.records) == 3
    assert output.dropped == {"slow": 4, "stalled": 1}


def test_nothing_is_written_to_a_client_that_was_found_gone(caplog):
    """asyncio writes a line for each event that is, and the events take the loop's time."""

    async def work():
        async def gone(scope, receive, send):
            connection = scope["state"][CONNECTION]

            async def events():
                yield b"data: 0\n\n"
                connection.transport.abort()  # as when a write finds that the client has reset it
                for i in range(1, 99):
                    made.append(i)
                    yield b"data: %d\n\n" % i

            with contextlib.suppress(asyncio.CancelledError):
                stream = EventStream(events(), contextlib.nullcontext(), connection)
                await stream(scope, receive, send)
            ended.set()

        async with served(gone, UnsentOutput()) as address:
            with asking(address, b"/"):
                async with asyncio.timeout(PATIENCE):
                    await ended.wait()

    made, ended = [], asyncio.Event()
    with caplog.at_level(logging.WARNING):
        asyncio.run(work())
    assert made == [1]
    assert "socket.send() raised" not in caplog.text


def test_the_log_tells_what_is_wrong_here_and_not_that_a_client_is_out_of_reach(caplog):
    """A reset is known to asyncio; the end of a client's network would be a traceback."""
    client, other = connection_class(LIMITS, UnsentOutput()), object()
    lost, full = OSError(errno.ETIMEDOUT, "lost"), OSError(errno.EMFILE, "full")
    told = [(lost, client, False), (lost, other, True), (ValueError("x"), client, True)]
    loop, handler = asyncio.new_event_loop(), LoopErrors()
    config = uvicorn.Config(sized, lifespan="off", log_config=None)
    config.load()
    for error, kind, expected in [*told, (full, client, True), (full, client, False)]:
        caplog.clear()
        whose = kind
        if kind is client:
            whose = client(config, uvicorn.server.ServerState(), {}, loop)
        handler(loop, {"message": "m", "exception": error, "protocol": whose})
        assert bool(caplog.records) == expected, (error, kind)
    loop.close()
