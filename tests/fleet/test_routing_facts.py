"""What the router is told of a request, and of whom it is asked."""

import asyncio
import json

import pytest

pytest.importorskip("aiohttp")

from tests.server.serving import PATIENCE
from twolane.engine.kv.prefix_digest import Landmarks, PrefixBook
from twolane.fleet import routing_facts
from twolane.fleet.calls import ClientCall
from twolane.fleet.routing_facts import RoutingFacts, session_key
from twolane.frontend.text.output_reader import Delta
from twolane.router.state import ReplicaState, RoutedRequest
from twolane.server.responses.events import ResponseAnswer

from .scripted import Fleet, Script, Scripted, Writer, fleet_of, whole
from .test_replicas import ANSWER, holding, well

COMPLETIONS, ASKED = "/v1/completions", "/fleet/landmarks/completions?token_ids=true"
FOUND = {"prompt_tokens": 3, "tokens": [], "hashes": [], "token_ids": [5, 6, 7]}


async def knowing(path: str, body: bytes, out: Writer) -> None:
    """Answer what a prompt's landmarks are."""
    out.write(whole(json.dumps(FOUND).encode() if path == ASKED else ANSWER))


def call(path: str = COMPLETIONS, *headers: tuple[str, str], **body: object) -> ClientCall:
    async def send(message: object) -> None:
        raise AssertionError(message)

    raw = [(name.encode(), value.encode()) for name, value in headers]
    scope = {"type": "http", "method": "POST", "path": path, "headers": raw}
    return ClientCall(scope, json.dumps(body).encode(), send, 0.0)


async def told(
    fleet: Fleet, given: ClientCall, most: int = 1000
) -> tuple[ClientCall, RoutedRequest]:
    return await RoutingFacts(fleet.pool, fleet.client, most).ask(given)


def two(script: Script = knowing) -> tuple[Scripted, Scripted]:
    return Scripted(script), Scripted(script)


def test_a_body_gets_its_tokens_where_a_server_takes_it_still() -> None:
    async def run() -> None:
        async with fleet_of(*two()) as fleet:
            given = call(prompt="a" * 40)
            asked, ask = await told(fleet, given)
            assert json.loads(asked.body) == {"prompt": "a" * 40, "prompt_token_ids": [5, 6, 7]}
            assert ask.prompt_tokens == 3
            asked, ask = await told(fleet, given, most=len(given.body))
            assert asked.body == given.body
            assert ask.prompt_tokens == 3

    asyncio.run(run())


def test_the_server_with_the_least_to_do_is_asked() -> None:
    first, second = two()

    async def run() -> None:
        async with fleet_of(first, second) as fleet:
            fleet.pool.members["replica-1"].open = 1
            await told(fleet, call(prompt="a"))

    asyncio.run(run())
    assert (first.asked, second.asked) == ([], [ASKED])


@pytest.mark.parametrize("there", [0, 1])
def test_a_prompt_goes_where_its_beginning_was_computed(there: int, monkeypatch) -> None:
    """Once the router has the digest that says so."""
    monkeypatch.setattr(routing_facts, "LANDMARK_SECONDS", PATIENCE)
    found = Landmarks.of(range(700), 16)
    said = {"prompt_tokens": 700, "tokens": found.tokens, "hashes": found.hashes}
    book = PrefixBook(16)
    book.change({each: tokens // 16 for tokens, each in zip(*found[:2], strict=True)})

    async def script(path: str, body: bytes, out: Writer) -> None:
        out.write(whole(ANSWER if path == COMPLETIONS else json.dumps(said).encode()))

    async def run() -> None:
        servers, patient = two(script), {"probe_timeout": PATIENCE, "silent_seconds": PATIENCE}
        async with fleet_of(*servers, router="predicted", **patient) as fleet:
            home = fleet.pool.table[f"replica-{there + 1}"]
            servers[there].state = ReplicaState(page_size=16, digest=book.digest())
            await fleet.until(lambda: home.known)
            for _ in range(3):
                assert await fleet.ask(prompt="a") == (200, ANSWER)
            assert servers[there].asked.count(COMPLETIONS) == 3

    asyncio.run(run())


def test_a_server_that_says_no_landmarks_delays_a_request_for_a_moment_only(monkeypatch) -> None:
    monkeypatch.setattr(routing_facts, "LANDMARK_SECONDS", 0.05)

    async def run() -> None:
        async with fleet_of(*two(holding(ASKED, asyncio.Event()))) as fleet:
            given = call(prompt="a" * 40)
            asked, ask = await told(fleet, given)
            assert asked.body == given.body
            assert ask.prompt_tokens == len(given.body) // routing_facts.BYTES_PER_TOKEN

    asyncio.run(run())


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": [16, 32], "hashes": [1]},
        {"tokens": [2, 2], "hashes": [1, 2]},
        {"tokens": [0], "hashes": [1]},
        {"tokens": [4], "hashes": [1]},
        {"prompt_tokens": 0},
        {"prompt_tokens": 10**18},
        "[" * 100_000,
    ],
    ids=range(7),
)
def test_landmarks_that_no_prompt_has_are_not_believed(wrong) -> None:
    said = wrong if isinstance(wrong, str) else json.dumps({**FOUND, **wrong})

    async def script(path: str, body: bytes, out: Writer) -> None:
        out.write(whole(said.encode()))

    async def run() -> None:
        async with fleet_of(*two(script)) as fleet:
            asked, ask = await told(fleet, call(prompt="a"))
            assert asked.body == call(prompt="a").body
            assert ask.landmarks == Landmarks()

    asyncio.run(run())


def test_a_request_for_an_adapter_is_at_home_where_that_is_loaded() -> None:
    async def run() -> None:
        async with fleet_of(*two()) as fleet:
            fleet.pool.broadcast.adapters["some"] = b""
            fleet.pool.members["replica-2"].adapters["some"] = b""
            assert (await told(fleet, call(model="some")))[0].homes == {"replica-2"}
            assert not (await told(fleet, call(model="base")))[0].homes

    asyncio.run(run())


def test_homes_of_only_so_many_responses_are_known(monkeypatch) -> None:
    monkeypatch.setattr(routing_facts, "KNOWN_RESPONSES", 1)

    async def run() -> None:
        async with fleet_of(Scripted(well)) as fleet:
            known = RoutingFacts(fleet.pool, fleet.client, 1000)
            [member] = fleet.pool.serving
            for id in ("resp_1", "resp_2"):
                known.note_response(call("/v1/responses"), member, b'{"id":"%b"}' % id.encode())
            homes = [
                (await known.ask(call(f"/v1/responses/{id}")))[0].homes
                for id in ("resp_1", "resp_2")
            ]
            assert homes == [frozenset(), {"replica-1"}]
            counting = call("/v1/responses/input_tokens", previous_response_id="resp_2")
            assert (await known.ask(counting))[0].homes == {"replica-1"}
            answer = ResponseAnswer("m", 1, {}, None, {}, lambda response: None)
            answer.add(Delta(0, "Hello", [5], [0], finish="stop"))
            shown = answer.whole()
            known.note_response(call("/v1/responses"), member, json.dumps(shown).encode())
            [item] = shown["output"]
            for items, homes in (
                ([1, {"id": item["id"]}], frozenset()),
                ([{"role": "user", "content": "Hi"}, {"id": item["id"]}], {"replica-1"}),
                ([{"type": "item_reference", "id": item["id"]}], {"replica-1"}),
                ([{"type": "item_reference", "id": "msg_1"}, {"id": None}], frozenset()),
                ("Hi", frozenset()),
            ):
                referring = call("/v1/responses", input=items)
                assert (await known.ask(referring))[0].homes == homes

    asyncio.run(run())


def test_a_session_is_that_of_its_header_or_of_the_user() -> None:
    async def run() -> None:
        async with fleet_of(Scripted(well)) as fleet:
            header = ("x-session-id", "one")
            asks = [
                (await told(fleet, given))[1]
                for given in (call(COMPLETIONS, header, user="two"), call(user="two"), call())
            ]
            keys = [session_key("one"), session_key("two"), None]
            assert [ask.session for ask in asks] == keys

    asyncio.run(run())
