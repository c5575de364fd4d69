"""Keys, ids and bounds, as clients see them on the wire."""

import asyncio
import http.client
import json
import urllib.parse
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from starlette.requests import Request

from twolane.server.http.bodies import FREE_BYTES, ArrivingBytes, BodyReader, RestOfBody
from twolane.server.http.errors import ApiError
from twolane.server.http.gate import CLIENT, Gate, client, refuse
from twolane.server.http.route import check_media_type

from .conftest import KEYS, MAX_BODY, OPERATOR
from .serving import PATIENCE

ASK = {"prompt": [5, 6], "max_tokens": 2, "ignore_eos": True}


def ask(served, method, path, body=b"", headers=None, **send):
    address = urllib.parse.urlsplit(served.base)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=PATIENCE)
    headers = {"Content-Type": "application/json", **(headers or {})}
    connection.request(method, path, body, headers, **send)
    response = connection.getresponse()
    data = response.read()
    connection.close()
    return response.status, response.headers, data


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/v1/nothing", "/tokenize"])
@pytest.mark.parametrize(
    "headers",
    [
        *({}, bearer("wrong"), bearer(""), bearer(KEYS[0] + "x")),
        *({"Authorization": KEYS[0]}, {"Authorization": f"Basic {KEYS[0]}"}),
    ],
)
def test_without_a_key_there_is_a_401(guarded, path, headers):
    method = "GET" if "models" in path else "POST"
    status, got, data = ask(guarded, method, path, json.dumps(ASK), headers)
    assert (status, got["WWW-Authenticate"]) == (401, "Bearer")
    error = json.loads(data)["error"]
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")


FORWARDED = {"X-Forwarded-For": "192.0.2.1"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (bearer(KEYS[0]), 200),
        ({}, 401),
        (bearer(OPERATOR), 200),
        ({"X-Operator-Key": OPERATOR}, 200),
        ({**bearer(KEYS[0]), **FORWARDED}, 403),
        ({**bearer(KEYS[0]), "Forwarded": "for=192.0.2.1"}, 403),
        ({**bearer(KEYS[0]), "X-Operator-Key": "wrong", **FORWARDED}, 403),
        ({**bearer(KEYS[0]), "X-Operator-Key": OPERATOR, **FORWARDED}, 200),
        ({"X-Operator-Key": OPERATOR, **FORWARDED}, 200),
    ],
)
def test_the_operators_paths_open_to_the_operator_and_to_this_machine(
    guarded, headers, status
) -> None:
    assert ask(guarded, "GET", "/fleet/state", headers=headers)[0] == status
    asked = ask(guarded, "POST", "/fleet/landmarks/completions", json.dumps(ASK), headers)
    assert asked[0] == status
    for path in ("/reset_prefix_cache", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        got = ask(guarded, "POST", path, b"{}", headers)[0]
        assert got == (404 if status == 200 else status), path


def test_the_operators_key_is_no_users_key(guarded) -> None:
    assert ask(guarded, "GET", "/v1/models", headers=bearer(OPERATOR))[0] == 401


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens(guarded, key):
    assert ask(guarded, "POST", "/v1/completions", json.dumps(ASK), bearer(key))[0] == 200
    assert ask(guarded, "GET", "/v1/models", headers={"authorization": f"bearer {key}"})[0] == 200


@pytest.mark.parametrize("path", ["/health", "/health/live", "/ping", "/version", "/metrics"])
def test_probes_need_no_key(guarded, path):
    assert ask(guarded, "GET", path)[0] == 200


def test_keys_show_nowhere(guarded):
    ask(guarded, "POST", "/v1/completions", json.dumps(ASK), bearer(KEYS[0]))
    ask(guarded, "POST", "/v1/completions", json.dumps(ASK), bearer("wrong-key"))
    engine = Path(f"/proc/{guarded.engine_pid}")
    front = Path(f"/proc/{guarded.process.pid}")
    seen = [engine / "cmdline", engine / "environ", front / "cmdline", guarded.log]
    for key in (*KEYS, "wrong-key"):
        assert not any(key.encode() in place.read_bytes() for place in seen)
        assert key.encode() not in ask(guarded, "GET", "/metrics")[2]


def big(size):
    body = json.dumps({**ASK, "user": ""})
    return json.dumps({**ASK, "user": "x" * (size - len(body))}).encode()


@pytest.mark.parametrize("chunked", [False, True])
def test_the_bound_on_bodies_is_exact(guarded, chunked):
    for size, expected in ((MAX_BODY, 200), (MAX_BODY + 1, 413)):
        body = big(size)
        assert len(body) == size
        sent = (body[i : i + 999] for i in range(0, size, 999)) if chunked else body
        status, _, data = ask(
            guarded, "POST", "/v1/completions", sent, bearer(KEYS[0]), encode_chunked=chunked
        )
        assert status == expected
    assert json.loads(data)["error"]["code"] == "body_too_large"


def test_a_body_too_large_is_not_read(guarded):
    headers = {**bearer(KEYS[0]), "Content-Length": str(10**12)}
    assert ask(guarded, "POST", "/v1/completions", b"{", headers)[0] == 413


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/nothing", "/health"])
@pytest.mark.parametrize("close", [{}, {"Connection": "close"}])
@pytest.mark.parametrize("chunked", [False, True])
def test_an_answer_before_its_body_has_come_is_not_lost(guarded, path, close, chunked):
    """Clients send all of it before they read, and a reset would be all that they see: the system
    takes some MiB for a connection."""
    size = 24 << 20
    body = iter([bytes(1 << 20)] * 24) if chunked else bytes(size)
    headers = {**bearer(KEYS[0]), **close}
    status = ask(guarded, "POST", path, body, headers, encode_chunked=chunked)[0]
    of_chunks = {"/v1/completions": 413, "/v1/nothing": 404, "/health": 405}
    assert status == (of_chunks[path] if chunked else 413)


@pytest.mark.parametrize(
    ("headers", "dropped"),
    [
        ([(b"transfer-encoding", b"chunked")], 3),
        ([(b"content-length", b"99")], 3),
        ([(b"content-length", b"99"), (b"expect", b"100-continue")], 0),
        ([], 0),
    ],
)
def test_what_is_left_of_a_body_is_dropped_up_to_a_bound(headers, dropped):
    told = []

    async def receive():
        told.append("received")
        return {"type": "http.request", "body": bytes(10), "more_body": True}

    async def send(message):
        told.append(message["type"].removeprefix("http.response."))

    async def answer():
        rest = RestOfBody({"headers": headers}, receive, send, 25)
        await refuse(ApiError(400, "no", code="no"), "/", rest.send)

    asyncio.run(answer())
    assert told == ["start", "body", *["received"] * dropped, *["body"] * bool(dropped)]


@pytest.mark.parametrize(
    ("given", "comes_back"),
    [
        ("abc-123", "abc-123"),
        ("a b\tc", "abc"),
        ("x" * 500, "x" * 128),
        ("caf\u00e9<script>", "caf<script>"),
    ],
)
def test_request_ids_come_back_clean(guarded, given, comes_back):
    for path in ("/health", "/nothing"):
        assert ask(guarded, "GET", path, headers={"X-Request-Id": given})[1]["X-Request-Id"] == (
            comes_back
        )


def test_requests_without_an_id_get_one(guarded):
    ids = {ask(guarded, "GET", "/v1/models")[1]["X-Request-Id"] for _ in range(3)}
    assert len(ids) == 3
    assert all(ids)


@pytest.mark.parametrize(
    "name",
    [
        *("x-slo-ttft-ms", "x-slo-tbt-ms", "x-slo-tpot-ms"),
        *("x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms"),
    ],
)
def test_slo_headers_are_positive_finite_numbers(guarded, name):
    key = bearer(KEYS[0])
    for value in ("0", "-1", "nan", "inf", "1e999", "", "ten", "5ms", "0x10"):
        status, _, data = ask(
            guarded, "POST", "/v1/completions", json.dumps(ASK), {**key, name: value}
        )
        assert (status, json.loads(data)["error"]["param"]) == (400, name), value
    for value in ("50", "0.5", "1e-300", "1e300"):
        headers = {**key, name: value}
        assert ask(guarded, "POST", "/v1/completions", json.dumps(ASK), headers)[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": ""},
        {"Content-Encoding": "gzip"},
        {"Content-Type": "application/json; charset=utf-16"},
        {"Content-Type": 'application/json;a=b;CHARSET="ISO-8859-1"'},
    ],
)
def test_bodies_that_are_no_json_are_refused(guarded, headers):
    status, _, data = ask(
        guarded, "POST", "/v1/completions", json.dumps(ASK), {**bearer(KEYS[0]), **headers}
    )
    assert (status, json.loads(data)["error"]["code"]) == (415, "unsupported_media_type")


def test_a_second_header_is_not_overlooked():
    json_type = (b"content-type", b"application/json")

    def check(*headers):
        check_media_type(Request({"type": "http", "headers": [json_type, *headers]}))

    check(json_type, (b"content-encoding", b"identity"))
    for second in ((b"content-type", b"text/plain"), (b"content-encoding", b"gzip")):
        with pytest.raises(ApiError) as refused:
            check((b"content-encoding", b"identity"), second)
        assert refused.value.status_code == 415


@pytest.mark.parametrize(
    "charset", [";charset=UTF-8", '; charset="utf8"; a=b', ";charset=US-ASCII"]
)
def test_a_body_may_say_that_it_is_utf8(guarded, charset):
    headers = {**bearer(KEYS[0]), "Content-Type": "application/json" + charset}
    assert ask(guarded, "POST", "/v1/completions", json.dumps(ASK), headers)[0] == 200


@pytest.mark.parametrize("encoding", ["identity", "Identity", ""])
def test_a_body_may_say_that_it_is_not_encoded(guarded, encoding):
    headers = {**bearer(KEYS[0]), "Content-Encoding": encoding}
    assert ask(guarded, "POST", "/v1/completions", json.dumps(ASK), headers)[0] == 200


def test_the_docs_need_a_key_and_no_third_party(guarded):
    assert ask(guarded, "GET", "/docs")[0] == 401
    assert ask(guarded, "GET", "/openapi.json")[0] == 401
    status, headers, page = ask(guarded, "GET", "/docs", headers=bearer(KEYS[0]))
    assert status == 200
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert b"<script src=" not in page
    assert b"cdn." not in page
    assert page.index(b"POST /v1/chat/completions") < page.index(b"GET /health")


def test_bodies_that_are_kept_count_until_they_are_needed_no_more():
    arriving = ArrivingBytes(8 * FREE_BYTES)

    async def receive():
        return {"type": "http.request", "body": bytes(3 * FREE_BYTES), "more_body": False}

    body = BodyReader(receive, 1 << 30, arriving, "we", kept=True)
    asyncio.run(body.receive())
    assert arriving._together == 2 * FREE_BYTES
    body.end()
    assert arriving._together == 0


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::1", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("no address", "no address"),
    ],
)
def test_a_client_is_told_from_others_by_what_it_cannot_choose(address, network):
    assert client({"client": (address, 1)}) == network
    assert client({"client": None}) == client({}) == ""


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer one"},
        {"authorization": "bearer  one "},
        {"x-api-key": "one"},
        {"x-api-key": "one", "authorization": "Bearer whatever"},
    ],
)
def test_one_key_is_one_client_however_it_is_sent(headers):
    """Who was another one by each spelling took the turns of several."""
    seen = []

    async def app(scope, receive, send):
        seen.append(CLIENT.get())

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "path": "/v1/models", "headers": raw, "client": ("192.0.2.7", 1)}
    asyncio.run(Gate(app, ["none", "one"], 1000)(scope, None, None))
    assert seen == ["key 1"]


def passing(path="/v1/models", state=None, **headers):
    """What reaches the application behind a gate with the keys none and one, and what is sent."""
    reached, sent = [], []

    async def app(scope, receive, send):
        reached.append(CLIENT.get())

    async def send(message):
        sent.append(message)

    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "path": path, "headers": raw, "client": ("192.0.2.7", 1)}
    asyncio.run(Gate(app, ["none", "one"], 1000)({**scope, "state": state or {}}, None, send))
    return reached, sent


def test_a_call_is_told_its_key_and_who_needs_none_is_known_by_the_network():
    for path, headers, key, known in (
        ("/v1/models", {"x_api_key": "one"}, 1, "key 1"),
        ("/v1/models", {"x_api_key": "none"}, 0, "key 0"),
        ("/health", {"x_api_key": "one"}, None, "192.0.2.7"),
    ):
        call = SimpleNamespace(key="not told", refusal=None)
        assert passing(path, {"call": call}, **headers) == ([known], [])
        assert call.key == key


def test_beyond_the_bound_on_connections_only_probes_are_served():
    for crowded, path, served in (
        (True, "/v1/models", False),
        (True, "/livez", True),
        (False, "/v1/models", True),
    ):
        turn = SimpleNamespace(ended=0)
        connection = SimpleNamespace(
            probes_only=crowded, end_turn=partial(setattr, turn, "ended", True)
        )
        state = {"connection": connection}
        reached, sent = passing(path, state, x_api_key="one")
        assert bool(reached) == bool(turn.ended) == served
        if not served:
            assert state["reason"][0] == "too_many_connections"
            assert sent[0]["status"] == 503
            assert {(b"retry-after", b"1"), (b"connection", b"close")} <= set(sent[0]["headers"])


def test_a_body_of_which_nobody_reads_the_rest_counts_no_more():
    """Or else those of clients that left would leave no room for others."""
    held = []

    async def app(scope, receive, send):
        await receive()
        held.append(gate._arriving._together)
        raise ConnectionError

    async def receive():
        return {"type": "http.request", "body": bytes(3 * FREE_BYTES), "more_body": True}

    gate = Gate(app, [], 1 << 30)
    assert gate._arriving._most == 4 << 30
    scope = {"type": "http", "path": "/", "headers": []}
    with pytest.raises(ConnectionError):
        asyncio.run(gate(scope, receive, None))
    assert (held, gate._arriving._together) == ([2 * FREE_BYTES], 0)


def test_what_is_no_http_passes():
    seen = []

    async def app(scope, receive, send):
        seen.append(scope["type"])

    asyncio.run(Gate(app, ["one"], 1000)({"type": "lifespan"}, None, None))
    assert seen == ["lifespan"]


def test_bodies_that_arrive_at_once_are_bounded_together_and_for_each_client():
    """Thirty clients that sent 31 MiB each without an end held 1 GiB."""
    part = {"type": "http.request", "body": bytes(FREE_BYTES), "more_body": True}
    arriving = ArrivingBytes(8 * FREE_BYTES)

    def body(client):
        async def receive():
            return part

        return BodyReader(receive, 1 << 30, arriving, client, kept=False)

    async def read(body, parts):
        for _ in range(parts):
            await body.receive()

    async def run():
        ours, ours_too, theirs, small = map(body, ["we", "we", "they", "else"])
        await read(ours, 1 + 3)
        with pytest.raises(ApiError, match="too many large bodies"):
            await read(ours_too, 1 + 2)  # we have half
        await read(theirs, 1 + 4)
        with pytest.raises(ApiError, match="too many large bodies"):
            await read(small, 1 + 1)
        await read(body("else"), 1)
        ours.end()
        ours_too.end()
        await read(small, 1)
        part["more_body"] = False
        await read(theirs, 1)
        await read(small, 1)

    asyncio.run(run())
    assert (arriving._together, dict(arriving._held)) == (0, {})
