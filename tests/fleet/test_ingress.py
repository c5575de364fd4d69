"""What the one address answers by itself, with no replica behind it."""

import asyncio
import json
import math
import re
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")

import aiohttp

from twolane.fleet.hosts import LocalHosts
from twolane.fleet.options import FleetOptions
from twolane.fleet.pool import Member, Pool
from twolane.fleet.routing_facts import _bound, _known, _Landmarks, _with_tokens, session_key
from twolane.fleet.run import announcement, application
from twolane.server.http.backpressure import UnsentOutput
from twolane.server.options import ServerOptions

PAGE = "https://page.example"
METRICS = Path(__file__).parents[2] / "docs" / "guides" / "metrics.md"


def ask(path: str, keys=(), origins=(), **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Ask a fleet whose replicas have not been started."""
    raw = [(name.replace("_", "-").encode(), each.encode()) for name, each in headers.items()]
    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": raw}
    scope["client"] = ("127.0.0.1", 1)
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    async def answer():
        async with aiohttp.ClientSession() as session:
            pool = Pool(LocalHosts((), {}), FleetOptions(), session, keys, operator_key="o")
            shared = ServerOptions(api_keys=keys, cors_origins=origins, max_body_bytes=1000)
            app, _ = application(pool, session, shared, UnsentOutput())
            await app(scope, receive, send)

    asyncio.run(answer())
    begun = {name.decode(): each.decode() for name, each in sent[0]["headers"]}
    return sent[0]["status"], begun, b"".join(each.get("body", b"") for each in sent[1:])


@pytest.mark.parametrize("key", ["one", "two"])
def test_each_of_several_keys_shows_the_fleet(key) -> None:
    assert ask("/fleet", ("one", "two"), authorization=f"Bearer {key}")[0] == 200


@pytest.mark.parametrize("given", [{}, {"authorization": "Bearer three"}])
def test_without_one_of_the_keys_the_fleet_is_not_shown(given) -> None:
    assert ask("/fleet", ("one", "two"), **given)[0] == 401


def test_a_fleet_without_servers_lives_and_is_not_ready() -> None:
    assert ask("/livez")[0] == ask("/health/live")[0] == 200
    assert ask("/health/ready")[0] == ask("/ping")[0] == 503


def test_pages_of_allowed_origins_may_read_what_the_fleet_itself_answers() -> None:
    status, headers, _ = ask("/health", origins=(PAGE,), origin=PAGE)
    assert status == 503
    assert headers["access-control-allow-origin"] == PAGE
    assert "access-control-allow-origin" not in ask("/health", origin=PAGE)[1]


def test_metrics_need_no_key_and_count_the_replicas() -> None:
    status, headers, body = ask("/metrics", ("one",))
    assert status == 200
    assert headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert b'twolane:fleet_replicas{phase="serving"} 0.0' in body


def test_the_page_of_metrics_defines_those_of_a_fleet() -> None:
    shown = re.findall(r"# TYPE (twolane:fleet_\S+) (\w+)", ask("/metrics")[2].decode())
    defined = re.findall(r"^\| `(twolane:fleet_\S+)` \| (\w+) \|", METRICS.read_text(), re.M)
    assert sorted(shown) == sorted(defined)


@pytest.mark.parametrize("path", ["/dashboard", "/dashboard/data"])
def test_a_fleet_says_where_dashboards_are(path) -> None:
    status, _, body = ask(path)
    assert status == 501
    assert b"GET /fleet" in body


def test_the_first_line_has_the_address_second_and_says_how_many_servers_there_may_be() -> None:
    first, second = announcement(
        "m", FleetOptions(max_replicas=4), "http://a:1", "no SLOs"
    ).splitlines()
    assert first.split(" | ")[1:3] == ["http://a:1", "m"]
    assert "fleet of 2 (2 to 4), router predicted, hosts ray" in first
    assert second.endswith("http://a:1/fleet")


def test_without_a_key_no_path_but_probes_reaches_a_replica() -> None:
    for path in ("/v1/completions", "/fleet/state", "/tokenize", "/dashboard/data"):
        assert ask(path, ("one",))[0] == 401


@pytest.mark.parametrize("path", ["@elsewhere.example/", "http://elsewhere.example/", ":1/", "*"])
def test_a_target_that_is_no_path_is_joined_to_no_address(path) -> None:
    assert ask(path)[0] == 404


@pytest.mark.parametrize(
    "body",
    [b'{"user": ' + b"[" * 100_000, b"[" * 100_000, b'{"user": "\xff"}', b'{"user": 1}', b""],
)
def test_of_a_body_that_cannot_be_read_the_router_knows_nothing(body) -> None:
    assert _known(body) == _known(b"{}")


@pytest.mark.parametrize(
    ("asked", "believed"),
    [
        (b"7", 7),
        (b'7, "max_completion_tokens": 9', 9),
        (b"-5", 1),
        (b"9" * 40, 1 << 20),
        (b"null", 256),
    ],
)
def test_the_router_believes_no_odd_length_of_an_answer(asked, believed) -> None:
    assert _known(b'{"max_tokens": ' + asked + b"}").max_output == believed


def test_sessions_take_no_more_memory_than_their_number() -> None:
    assert len(session_key("x" * 10**6)) == len(session_key("")) == 32
    assert session_key("a") != session_key("b")


def test_a_restart_whose_first_successor_does_not_start_leaves_the_others(monkeypatch) -> None:
    monkeypatch.setattr("twolane.fleet.pool.RETRY_SECONDS", 0.0)

    async def restart():
        async with aiohttp.ClientSession() as session:
            pool = Pool(
                LocalHosts(("--no-such-option",), {}), FleetOptions(), session, operator_key="o"
            )
            old = pool.members["old"] = Member("old", phase="serving")
            return await pool.restart(), old.phase, list(pool.members)

    assert asyncio.run(restart()) == (False, "serving", ["old"])


FOUND = _Landmarks(3, [], [], [5, 6, 7])


def test_a_body_gets_the_tokens_of_its_prompt_and_keeps_the_rest() -> None:
    body = {"messages": [{"role": "user", "content": "{ }"}], "max_tokens": 4}
    given = b"\n " + json.dumps(body).encode()
    assert json.loads(_with_tokens(given, FOUND)) == {"prompt_token_ids": [5, 6, 7], **body}


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b'{"prompt": "a"}', None),
        (b'{"prompt": ["a", "b"]}', _Landmarks(3, [], [])),
        (b'{"prompt": "a", "prompt_token_ids": [1]}', FOUND),
        (b'{"prompt": "a", "truncate_prompt_tokens": 2}', FOUND),
    ],
)
def test_a_body_is_left_as_it_is_where_tokens_are_unknown_or_not_its_prompts(body, found) -> None:
    assert _with_tokens(body, found) == body


@pytest.mark.parametrize(
    ("path", "asked", "bound"),
    [
        ("/v1/chat/completions", "250", 0.25),
        ("/v1/completions", "2.5", 0.0025),
        ("/v1/completions", "", None),
        ("/v1/completions", "9" * 5000, None),
        ("/v1/completions", "nan", None),
        ("/v1/completions", "soon", None),
        ("/v1/models", "250", math.inf),
    ],
)
def test_only_what_generates_has_a_bound_and_can_be_refused(path, asked, bound) -> None:
    assert _bound(path, asked) == bound
