"""What the one address does when its servers misbehave: lose, break off, hang, do not start."""

import asyncio
import json

import pytest

pytest.importorskip("aiohttp")

from twolane.fleet import broadcast
from twolane.fleet.process import StartError

from .scripted import STREAM, Script, Scripted, Writer, chunk, fleet_of, whole

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
ADAPTER = {"lora_name": "some", "lora_path": "/there"}
ANSWER = b'{"id": "x"}'


async def well(path: str, body: bytes, out: Writer) -> None:
    """Answer all that is asked."""
    out.write(whole(ANSWER))


def saying(data: bytes) -> Script:
    """Answer with these bytes, and close."""

    async def script(path: str, body: bytes, out: Writer) -> None:
        out.write(data)

    return script


def holding(path: str, until: asyncio.Event) -> Script:
    """Answer requests at a path only later."""

    async def script(asked: str, body: bytes, out: Writer) -> None:
        if asked == path:
            await until.wait()
        out.write(whole(ANSWER))

    return script


LOSSES = {
    "nothing": b"",
    "no HTTP": b"\x00\xff\r\n\r\n",
    "half a body": b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nabc",
    "more than its length": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nabc",
    "chunks that end early": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
    "a stream without an event": STREAM,
    "another protocol": b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
    "no known status": b"HTTP/1.1 999 Odd\r\nContent-Length: 0\r\n\r\n",
}


@pytest.mark.parametrize("said", LOSSES.values(), ids=LOSSES.keys())
def test_another_server_answers_for_one_that_breaks_off_or_says_nonsense(said) -> None:
    async def run() -> None:
        async with fleet_of(Scripted(saying(said)), Scripted(well)) as fleet:
            for _ in range(2):  # one of them is sent to the broken server first
                assert await fleet.ask() == (200, ANSWER)
            members = fleet.pool.members.values()
            await fleet.until(lambda: not any(member.open for member in members))
            assert not any(replica.open or replica.sent for replica in fleet.pool.table)

    asyncio.run(run())


def test_a_server_that_was_tried_is_not_chosen_again_where_there_is_another() -> None:
    """Also one that has the least to do, since it breaks off at once."""
    broken = Scripted(saying(b""))

    async def run() -> None:
        async with fleet_of(broken, Scripted(well), router="least-loaded") as fleet:
            fleet.pool.table["replica-2"].open = 5
            assert await fleet.ask("/v1/embeddings") == (200, ANSWER)

    asyncio.run(run())
    assert broken.asked == ["/v1/embeddings"]


def test_informational_answers_and_trailers_change_no_answer() -> None:
    begun = b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" * 3
    body = b"Transfer-Encoding: chunked\r\n\r\n" + chunk(ANSWER) + b"0\r\nX-Late: 1\r\n\r\n"

    async def run() -> None:
        async with fleet_of(Scripted(saying(begun + b"HTTP/1.1 200 OK\r\n" + body))) as fleet:
            assert await fleet.ask() == (200, ANSWER)

    asyncio.run(run())


def test_a_request_that_ends_its_servers_is_sent_to_two_of_them() -> None:
    servers = [Scripted(saying(b"")) for _ in range(4)]

    async def run() -> tuple[int, bytes]:
        async with fleet_of(*servers) as fleet:
            return await fleet.ask("/v1/embeddings")

    status, said = asyncio.run(run())
    assert status == 503
    assert b"2 replicas were lost" in said
    assert sum(len(server.asked) for server in servers) == 2


def test_a_stream_that_breaks_off_ends_with_an_error_event(
    caplog: pytest.LogCaptureFixture,
) -> None:
    events = STREAM + chunk(b"data: 1\n\n") + chunk(b"data: 2\n\n")

    async def script(path: str, body: bytes, out: Writer) -> None:
        out.write(events)
        await out.drain()
        await begun.wait()

    async def run() -> bytes:
        async with (
            fleet_of(Scripted(script)) as fleet,
            fleet.client.post(fleet.base + "/v1/messages", json={}) as answer,
        ):
            first = await answer.content.readexactly(18)
            begun.set()
            whole = first + await answer.read()
            counted = 'twolane:fleet_requests_total{outcome="broken_off"}'
            assert await fleet.metric(counted) == 1
            return whole

    begun = asyncio.Event()
    said = asyncio.run(run())
    assert said.startswith(b"data: 1\n\ndata: 2\n\nevent: error\ndata: ")
    assert "an answer was interrupted: its connection ended within the answer" in caplog.text
    assert json.loads(said.splitlines()[-2].removeprefix(b"data: "))["type"] == "error"


def test_a_server_that_cannot_be_forked_or_whose_state_is_nonsense_is_tried_again(
    monkeypatch,
) -> None:
    monkeypatch.setattr("twolane.fleet.pool.RETRY_SECONDS", 0.0)
    states = [whole(b"[" * 100_000), whole(b"\xff"), whole(b"{}", "500 Odd"), b"x\r\n\r\n", b""]

    class Odd(Scripted):
        def answer(self) -> bytes:
            return states.pop(0) if states else super().answer()

    async def run() -> None:
        servers = Scripted(well), OSError(11, "no process"), StartError("no"), Odd(well)
        async with fleet_of(*servers, ready=1, replicas=2) as fleet:
            await fleet.until(lambda: len(fleet.pool.serving) == 2)
        assert not states

    asyncio.run(run())


def test_an_adapter_that_a_stream_still_uses_keeps_no_new_server_out() -> None:
    """Its unloading is answered when the stream has ended."""

    async def run() -> None:
        ended = asyncio.Event()
        held = Scripted(holding(UNLOAD, ended))
        async with fleet_of(held, Scripted(well), Scripted(well), ready=2) as fleet:
            assert await fleet.ask(LOAD, **ADAPTER) == (200, ANSWER)
            unloading = asyncio.create_task(fleet.ask(UNLOAD, lora_name="some"))
            await fleet.until(lambda: UNLOAD in held.asked)
            second = fleet.pool.members["replica-2"]
            fleet.hosts.servers["replica-2"].well = fleet.hosts.servers["replica-2"].alive = False
            await fleet.until(lambda: second.name not in fleet.pool.members)
            await fleet.until(lambda: len(fleet.pool.serving) == 2)
            assert fleet.hosts.servers["replica-3"].asked == []
            assert not unloading.done()
            ended.set()
            assert await unloading == (200, ANSWER)

    asyncio.run(run())


def test_a_server_that_joins_while_an_adapter_is_loaded_gets_it_too() -> None:
    """Also one that is brought up to date in front of the change, and serves behind it."""

    async def run() -> None:
        first_done = asyncio.Event()
        slow = Scripted(holding(LOAD, first_done))
        late = Scripted(well)
        late.well = False
        async with fleet_of(slow, late, ready=1, replicas=2) as fleet:
            one = asyncio.create_task(fleet.ask(LOAD, **ADAPTER))
            await fleet.until(lambda: LOAD in slow.asked)
            late.well = True  # it waits for the change, and the next one for it
            await fleet.until(lambda: fleet.pool.broadcast._lock._waiters)
            two = asyncio.create_task(fleet.ask(LOAD, **ADAPTER | {"lora_name": "other"}))
            first_done.set()
            assert (await one)[0] == (await two)[0] == 200
            await fleet.until(lambda: len(fleet.pool.serving) == 2)
            assert fleet.pool.members["replica-2"].adapters.keys() == {"some", "other"}

    asyncio.run(run())


def test_a_server_that_never_loads_an_adapter_holds_up_the_others_for_a_bounded_time(
    monkeypatch,
) -> None:
    monkeypatch.setattr(broadcast, "LOCKED_SECONDS", 0.05)

    async def run() -> None:
        stuck = Scripted(holding(LOAD, asyncio.Event()))
        async with fleet_of(stuck, Scripted(well)) as fleet:
            for name in ("some", "other"):
                # On a busy machine the other server may be late, too.
                while await fleet.ask(LOAD, **ADAPTER | {"lora_name": name}) != (200, ANSWER):
                    await asyncio.sleep(0.01)

    asyncio.run(run())


def test_a_server_that_is_lost_while_it_loads_gets_nothing_until_it_is_up_to_date() -> None:
    async def script(path: str, body: bytes, out: Writer) -> None:
        server.stuck = True  # it says its state no more, and there is much time to do so

    server = Scripted(script)

    async def run() -> None:
        async with fleet_of(server, probe_timeout=600.0) as fleet:
            assert (await fleet.ask(LOAD, **ADAPTER))[0] == 503
            assert fleet.pool.members["replica-1"].phase == "out"

    asyncio.run(run())


def test_a_change_goes_on_when_its_client_leaves() -> None:
    async def run() -> None:
        loaded = asyncio.Event()
        server = Scripted(holding(LOAD, loaded))
        async with fleet_of(server) as fleet:
            asked = asyncio.create_task(fleet.ask(LOAD, **ADAPTER))
            await fleet.until(lambda: server.asked)
            asked.cancel()
            await asyncio.wait({asked})
            await fleet.until(lambda: not fleet.connections)
            loaded.set()
            await fleet.until(lambda: "some" in fleet.pool.broadcast.adapters)

    asyncio.run(run())


def test_a_fleet_that_is_stopped_refuses_new_requests_at_once() -> None:
    async def run() -> None:
        ended = asyncio.Event()
        server = Scripted(holding("/v1/completions", ended))
        async with fleet_of(server) as fleet:
            asked = asyncio.create_task(fleet.ask())
            await fleet.until(lambda: server.asked)
            closing = asyncio.create_task(fleet.pool.close())
            await fleet.until(lambda: not fleet.pool.serving)
            status, said = await fleet.ask()
            assert status == 503
            assert b"shutting down" in said
            assert server.alive
            ended.set()
            assert await asked == (200, ANSWER)
            await closing

    asyncio.run(run())


def test_a_server_that_is_told_to_end_is_not_missed(monkeypatch, caplog) -> None:
    async def run() -> None:
        async with fleet_of(Scripted(well), Scripted(well), ready=1) as fleet:
            watches = set(fleet.pool._tasks)

            async def stop(name: str, patience: float) -> None:
                fleet.hosts.servers[name].alive = fleet.hosts.servers[name].well = False
                while patience and watches & fleet.pool._tasks:
                    await asyncio.sleep(0.005)

            monkeypatch.setattr(fleet.hosts, "stop", stop)
            assert await fleet.pool.restart()
            assert [each.name for each in fleet.pool.serving] == ["replica-2"]

    asyncio.run(run())
    said = [each for each in caplog.records if each.name == "twolane.fleet"]
    assert not [each for each in said if each.levelname == "ERROR"]
