"""What one client may take from the others."""

import asyncio
import json
from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import uvicorn

from twolane.server.http.backpressure import UnsentOutput
from twolane.server.http.bodies import PARSED_AT_ONCE
from twolane.server.http.connection import READ_AT_ONCE, ConnectionLimits, connection_class
from twolane.server.http.gate import Gate

from .conftest import KEYS
from .serving import PATIENCE, wait_for
from .test_gate import ask, bearer
from .test_killing import Client
from .test_lifecycle import LONG

SHORT = {**LONG, "max_tokens": 1}


class Keyed:
    """A server as the holder of one key sees it."""

    def __init__(self, served, key):
        self.base = served.base
        self._served, self._key = served, key

    def post(self, body):
        status, headers, data = ask(
            self._served, "POST", "/v1/completions", json.dumps(body), bearer(self._key)
        )
        return status, headers, json.loads(data)


def test_a_key_has_its_share_of_the_queue(guarded):
    """While one request runs, a key may have two in the queue, and another key two more."""
    running = Client(guarded, LONG, **bearer(KEYS[0]))
    assert running.first.wait(PATIENCE)
    waiting = [Client(guarded, SHORT, **bearer(KEYS[0])) for _ in range(2)]
    wait_for(lambda: guarded.metrics()["num_requests_waiting"] == 2)
    first, second = Keyed(guarded, KEYS[0]), Keyed(guarded, KEYS[1])
    status, headers, body = first.post({"prompt": [5]})
    assert (status, body["error"]["code"]) == (429, "key_queue_full")
    assert 1 <= int(headers["Retry-After"]) <= 60
    status, _, body = second.post({"prompt": [5], "n": 3})
    assert (status, body["error"]["param"]) == (400, "n")
    others = Client(guarded, SHORT, **bearer(KEYS[1]))
    wait_for(lambda: guarded.metrics()["num_requests_waiting"] == 3)
    running.leave()
    assert all(client.first.wait(PATIENCE) for client in (*waiting, others))
    wait_for(lambda: guarded.metrics()["requests_in_flight"] == 0)


def test_a_priority_is_refused_by_name_unless_it_is_allowed(tiny):
    status, _, body = tiny.request("/v1/completions", {"prompt": [5], "priority": -1})
    assert (status, body["error"]["param"]) == (400, "priority")
    assert "--allow-priority" in body["error"]["message"]
    assert tiny.request("/v1/completions", {"prompt": [5], "priority": 0})[0] == 200


@pytest.mark.parametrize("salt", ["", "x" * 1025, 5, "\ud800"])
def test_a_salt_that_is_none_is_refused(tiny, salt):
    status, _, body = tiny.request("/v1/completions", {"prompt": [5], "cache_salt": salt})
    assert status == 400
    assert body["error"]["param"] == "cache_salt"
    assert tiny.request("/health")[0] == 200


@pytest.mark.parametrize("length", [10, 1 << 16], ids=["small", "large"])
def test_calls_of_a_client_are_parsed_a_few_at_a_time_in_order(length) -> None:
    calls: list[SimpleNamespace] = []

    async def app(scope, receive, send) -> None:
        await receive()
        calls.append(scope["state"]["call"])
        await asyncio.Event().wait()

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"x" * length}

    async def settle() -> list[str]:
        for _ in range(9):
            await asyncio.sleep(0)
        return [call.name for call in calls]

    async def scenario() -> None:
        gate, tasks, ended = Gate(app, [], 1 << 20), [], []

        def arrive(name: str, address: str) -> None:
            call = SimpleNamespace(name=name, on_parsed=None)
            connection = SimpleNamespace(probes_only=False, end_turn=lambda: ended.append(name))
            scope = {"type": "http", "path": "/v1/completions", "headers": []}
            scope |= {"state": {"call": call, "connection": connection}, "client": (address, 1)}
            tasks.append(asyncio.create_task(gate(scope, receive, None)))

        for number in range(PARSED_AT_ONCE + 3):
            arrive(f"a{number}", "10.0.0.1")
        arrive("b", "10.0.0.2")
        begun = [f"a{number}" for number in range(PARSED_AT_ONCE)]
        rest = [f"a{PARSED_AT_ONCE + number}" for number in range(3)]
        if length > 10:
            assert await settle() == [*begun, *rest, "b"]
        else:
            assert await settle() == [*begun, "b"]
            calls[0].on_parsed()
            calls[0].on_parsed()  # once more has no effect
            assert await settle() == [*begun, "b", rest[0]]
            assert ended == ["a0", "a0"]
            tasks[1].cancel()  # as when its client leaves
            assert await settle() == [*begun, "b", *rest[:2]]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(scenario())


def test_small_requests_of_a_key_are_read_a_few_at_a_time_in_order() -> None:
    """One that comes right after another client's hundreds is read before most of them."""
    seen: list[str] = []
    released = defaultdict[str, asyncio.Event](asyncio.Event)

    async def app(scope, receive, send) -> None:
        name = dict(scope["headers"])[b"x-name"].decode()
        seen.append(name)
        await released[name].wait()
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def ask(address, name: str, body: bytes = b"{}", method: str = "POST"):
        reader, writer = await asyncio.open_connection(*address)
        head = f"{method} /v1/completions HTTP/1.1\r\nHost: x\r\nX-Name: {name}\r\n"
        head += f"Authorization: Bearer {name[0]}\r\nContent-Length: 2\r\n\r\n"
        writer.write(head.encode() + body)
        await asyncio.sleep(0.01)
        return reader, writer

    async def until(names: Sequence[str]) -> None:
        async with asyncio.timeout(PATIENCE):
            while seen != names:
                assert seen == names[: len(seen)]
                await asyncio.sleep(0.005)

    async def scenario() -> None:
        limits = ConnectionLimits(99, arrival_seconds=PATIENCE, stall_seconds=PATIENCE)
        http = connection_class(limits, UnsentOutput())
        server = uvicorn.Server(
            uvicorn.Config(app, port=0, http=http, lifespan="off", log_config=None)
        )
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        address = server.servers[0].sockets[0].getsockname()
        names = [f"a{i}" for i in range(READ_AT_ONCE + 5)]
        first, rest = names[:READ_AT_ONCE], names[READ_AT_ONCE:]
        asked = {name: await ask(address, name) for name in (*first, *rest)}
        # Those of others, those that are not whole yet and other methods wait for nobody.
        others = {"b": (b"{}", "POST"), "a-slow": (b"{", "POST"), "a-get": (b"{}", "GET")}
        asked |= {name: await ask(address, name, *how) for name, how in others.items()}
        await until([*first, *others])
        asked[rest[1]][1].transport.abort()
        begun = [*first, *others, rest[1]]  # whose client has left, so that it has no turn
        await until(begun)
        released["a1"].set()
        await until([*begun, rest[0]])
        asked[rest[3]][1].write(b"GET /next HTTP/1.1\r\nHost: x\r\nX-Name: next\r\n\r\n")
        asked["a0"][1].transport.abort()
        await until([*begun, rest[0], rest[2]])
        for name in (*first, *others, *rest):
            released[name].set()
        await until([*begun, rest[0], rest[2], rest[3], rest[4], "next"])
        for name in set(asked) - {"a0", rest[1], "a-slow"}:
            assert b" 204 " in await asyncio.wait_for(asked[name][0].readline(), PATIENCE)
        for _, writer in asked.values():
            writer.transport.abort()
        released["next"].set()
        async with asyncio.timeout(PATIENCE):
            while http.turns._open or http.turns._held:
                await asyncio.sleep(0.005)
        server.should_exit = True
        await serving

    asyncio.run(scenario())
