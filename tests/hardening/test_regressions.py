"""Every request that ever broke the server, by name."""

import asyncio
import http.client
import time

import pytest

from .wire import Case, play

JSON = b"Content-Type: application/json\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + JSON


def post(body: bytes, headers: bytes = b"") -> bytes:
    return POST + headers + b"Content-Length: %d\r\n\r\n" % len(body) + body


ARRIVES_NEVER = {
    "a body shorter than its length": POST + b"Content-Length: 99\r\n\r\n{}",
    "chunks without an end": POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n",
    "a chunk of 2**80 bytes": POST + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffffff\r\n{}",
    "headers without an end": POST,
    "half a request line": b"POST /v1/comp",
    "a body shorter than its length, behind a good request": b"GET /health HTTP/1.1\r\nHost: x\r\n"
    b"\r\n" + POST + b"Content-Length: 99\r\n\r\n{}",
}
"""These kept their connections for ever."""


@pytest.fixture(scope="module")
def given_up(target):
    """What became of them, by name; all wait for the end of the server's patience together."""

    async def all_at_once():
        cases = [Case(n, (data,), answers=1 + ("behind" in n)) for n, data in ARRIVES_NEVER.items()]
        return await asyncio.gather(*(play(case, target.address) for case in cases))

    return dict(zip(ARRIVES_NEVER, asyncio.run(all_at_once()), strict=True))


@pytest.mark.parametrize("name", ARRIVES_NEVER)
def test_what_never_arrives_is_given_up(given_up, name):
    outcome = given_up[name]
    assert not outcome.faults
    assert outcome.statuses[-1:] == [408]
    assert outcome.seconds < 60
    assert b'"code":"request_timeout"' in outcome.bodies[-1]


def test_a_connection_that_asks_nothing_is_closed(target):
    outcome = asyncio.run(play(Case("silence", (b"",)), target.address))
    assert outcome.closed
    assert not outcome.statuses and not outcome.faults


def test_a_length_of_2_to_the_64_is_refused_at_once(target):
    data = POST + b"Content-Length: 18446744073709551616\r\n\r\n{}"
    outcome = asyncio.run(play(Case("length", (data,)), target.address))
    assert not outcome.faults
    assert outcome.statuses == [413]


def test_a_connection_may_idle_between_requests(target):
    """Clients that sent on a connection which the server was just closing lost the request."""
    connection, used = http.client.HTTPConnection(*target.address), set()
    try:
        for pause in (3.5, 0.0):  # longer than a request may take to arrive
            connection.request("GET", "/health")
            assert connection.getresponse().read()
            used.add(connection.sock)
            time.sleep(pause)
        assert len(used) == 1 and None not in used
    finally:
        connection.close()


REFUSED = {
    "no prompt in the list": post(b'{"prompt": []}'),  # 500
    "a chunk size that is none, while the application waits for the body": POST
    + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}",  # a traceback in the log
}


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused(target, name):
    outcome = asyncio.run(play(Case(name, (REFUSED[name],)), target.address))
    assert not outcome.faults
    assert outcome.statuses == [400]
    assert b'"error"' in outcome.bodies[0]
    target.check_good_request()
