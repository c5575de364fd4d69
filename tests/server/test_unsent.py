"""Output that waits for readers: what one holds is known, and all together are bound."""

import asyncio
import contextlib
import errno
import logging
import socket

import uvicorn

from twolane.frontend.backlog import Backlog
from twolane.frontend.text.output_reader import Delta
from twolane.sampling import PackedLogprobs, TokenLogprobs
from twolane.server.http.connection import (
    CONNECTION,
    ConnectionLimits,
    connection_class,
    unacknowledged,
)
from twolane.server.http.unsent import FAULTS, LOG_SECONDS, LOOKS, UnsentOutput
from twolane.server.respond import EventStream
from twolane.server.run import LoopErrors

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
async def served(app, output):
    """Serve an ASGI application on connections of ours; yields the address."""
    http = connection_class(LIMITS, output)
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


def asking(address, path):
    """Ask, and read nothing yet; the client's system takes little."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(address)
    client.sendall(b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % path)
    return client


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
                    return connection._dropped

                for _ in range(9):
                    assert not looked()
                    while left() >= connection._unsent:
                        await asyncio.get_running_loop().sock_recv(client, MIB)
                await until(looked)
            assert output.dropped == {"slow": 0, "stalled": 1}
            await until(lambda: not output.readers)

    asyncio.run(work())


def test_what_waits_is_added_up_after_a_part_of_what_may_wait():
    output = UnsentOutput(100 * LOOKS)
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
