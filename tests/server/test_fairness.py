"""What one client may take from the others."""

import json

import pytest

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
