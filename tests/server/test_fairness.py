"""What one client may take from the others."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from twolane.server.http.bodies import PARSED_AT_ONCE
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
        gate, tasks = Gate(app, [], 1 << 20), []

        def arrive(name: str, address: str) -> None:
            call = SimpleNamespace(name=name, on_parsed=None)
            scope = {"type": "http", "path": "/v1/completions", "headers": []}
            scope |= {"state": {"call": call}, "client": (address, 1)}
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
            tasks[1].cancel()  # as when its client leaves
            assert await settle() == [*begun, "b", *rest[:2]]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(scenario())
