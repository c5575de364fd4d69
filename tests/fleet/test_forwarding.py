"""What servers get of a client's request, and clients of a server's answer."""

import asyncio
import json
import re
from functools import partial

import pytest

pytest.importorskip("aiohttp")

import aiohttp

from tests.server.serving import PATIENCE
from twolane.engine.prompt_work import PromptPace, PromptWork
from twolane.fleet.lost import ReplicaUnreachable, unless_lost
from twolane.router.state import ReplicaState
from twolane.slo import Slo

from .scripted import STREAM, Script, Scripted, Writer, chunk, fleet_of, whole
from .test_replicas import ADAPTER, ANSWER, LOAD, UNLOAD, saying, well

COUNTED = "twolane:fleet_requests_total{outcome="


def script_of(**answers: bytes) -> Script:
    """Answer by the last word of the path; all else as `well`."""

    async def script(path: str, body: bytes, out: Writer) -> None:
        out.write(answers.get(path.split("?")[0].rsplit("/", 1)[-1], whole(ANSWER)))

    return script


def test_a_server_gets_what_the_client_wrote_and_who_it_is() -> None:
    server = Scripted(saying(whole(ANSWER, "200 OK", "Date: Thu, 01 Jan 1970 00:00:00 GMT")))
    odd = "/v1/models/a%2Fb%3F%23?x=%26&y"
    # No proxy is trusted here, so the connection's own address is what the server is told.
    headers = [
        ("X-Forwarded-For", "1.2.3.4"),
        ("X-Forwarded-Proto", "https"),
        ("Accept-Encoding", "br"),
        ("X-Odd", "\u00fc"),
        ("X-Slo-TTFT-Ms", "1"),  # a server goes by the first
        ("X-Slo-TTFT-Ms", "2"),
    ]

    async def run() -> str:
        async with fleet_of(server) as fleet:
            url = aiohttp.client.URL(fleet.base + odd, encoded=True)
            async with fleet.client.get(url, headers=headers) as answer:
                assert [*answer.headers.getall("date")] == [answer.headers["date"]]
        return server.heads[0]

    head = asyncio.run(run())
    assert head.startswith(f"GET {odd} HTTP/1.1\r\n")
    lines = [line.lower() for line in head.split("\r\n")]
    assert [line for line in lines if "forwarded" in line] == ["x-forwarded-for: 127.0.0.1"]
    assert "accept-encoding: br" not in lines
    assert [line[-1] for line in lines if line.startswith("x-slo")] == ["1", "2"]
    assert "X-Odd: \u00fc".encode().decode("latin-1").lower() in lines


def test_headers_that_a_connection_names_end_with_it() -> None:
    ends = ("Connection: X-Hop , keep-alive", "X-Hop: 1", "Proxy-Connection: close", "X-End: 1")
    server = Scripted(saying(whole(ANSWER, "200 OK", *ends)))
    sent = {"connection": "keep-alive,X-Mine", "X-Mine": "1", "Proxy-Connection": "a", "X-All": "1"}

    async def run() -> set[str]:
        async with (
            fleet_of(server) as fleet,
            fleet.client.get(fleet.base + "/v1/models", headers=sent) as answer,
        ):
            return {name.lower() for name in answer.headers}

    came = asyncio.run(run())
    assert "x-end" in came
    assert not came & {"x-hop", "proxy-connection"}
    (head,) = server.heads
    got = {line.partition(":")[0].lower() for line in head.split("\r\n")}
    assert "x-all" in got
    assert not got & {"x-mine", "proxy-connection"}


def test_a_fragment_in_a_target_stays_part_of_the_path() -> None:
    server = Scripted(well)

    async def run() -> None:
        async with fleet_of(server) as fleet:
            host, port = fleet.base.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET /a#b?c=d HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert b" 200 " in await reader.readline()
            writer.close()

    asyncio.run(run())
    assert server.asked == ["/a%23b?c=d"]


@pytest.mark.parametrize("status", ["429 Too Many Requests", "503 Unavailable"])
def test_a_server_that_is_full_is_passed_over_and_where_all_are_so_is_told(status) -> None:
    full = saying(whole(b"{}", status, "Retry-After: 7"))

    async def run() -> None:
        async with fleet_of(Scripted(full), Scripted(well)) as fleet:
            for _ in range(2):
                assert await fleet.ask() == (200, ANSWER)
        async with (
            fleet_of(*all_full) as fleet,
            fleet.client.post(fleet.base + "/v1/embeddings", json={}) as answer,
        ):
            assert answer.status == int(status[:3])
            assert answer.headers["retry-after"] == "7"

    all_full = [Scripted(full) for _ in range(3)]
    asyncio.run(run())
    assert [len(server.asked) for server in all_full] == [1, 1, 1]


@pytest.mark.parametrize(
    ("servers", "queued", "length", "refused"),
    [
        (1, 400, 600, True),  # 150 tokens
        (1, 400, 200, False),
        (1, 600, 4, True),
        (2, 400, 600, False),  # of which a server may have all cached
        (2, 600, 600, True),
    ],
)
def test_a_request_that_is_late_whatever_its_body_holds_is_refused_unread(
    servers, queued, length, refused
) -> None:
    pace, slo, work = PromptPace(token=1e-3), Slo(ttft=0.5), PromptWork(1, queued, 0)
    holding = asyncio.Event()

    async def hold(path: str, body: bytes, writer: Writer) -> None:
        await holding.wait()
        writer.write(whole(b"{}"))

    async def run() -> None:
        scripted = [Scripted(hold) for _ in range(servers)]
        for each in scripted:
            each.state = ReplicaState(
                queued=work, prompt_pace=pace, slo=slo, pages=999, pages_free=999
            )
        async with fleet_of(*scripted, router="predicted") as fleet:
            host, port = fleet.base.removeprefix("http://").split(":")
            open_one = asyncio.create_task(fleet.ask("/v1/embeddings"))
            await fleet.until(lambda: any(member.open for member in fleet.pool.serving))
            reader, writer = await asyncio.open_connection(host, int(port))
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {length}\r\n"
            writer.write(f"{head}Connection: close\r\n\r\n".encode())
            if refused:
                assert b" 429 " in await reader.readline()
                assert await fleet.metric('twolane:fleet_requests_total{outcome="refused"}') == 1
            else:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(reader.readline(), 0.1)
            holding.set()
            assert (await open_one)[0] == 200
            writer.close()

    asyncio.run(run())


def test_a_redirection_is_the_clients_to_follow() -> None:
    moved = saying(whole(b"", "307 Temporary Redirect", "Location: /elsewhere"))
    server = Scripted(moved)

    async def run() -> None:
        async with (
            fleet_of(server) as fleet,
            fleet.client.get(fleet.base + "/docs", allow_redirects=False) as answer,
        ):
            assert answer.status == 307
            assert answer.headers["location"] == "/elsewhere"

    asyncio.run(run())
    assert server.asked == ["/docs"]


@pytest.mark.parametrize("streamed", [False, True])
def test_what_follows_a_response_goes_where_it_is_stored(streamed) -> None:
    body = b'{"id": "resp_1"}'
    created = STREAM + chunk(b"data: " + body + b"\n\n") + chunk(b"") if streamed else whole(body)
    first, second = Scripted(script_of(responses=created)), Scripted(well)
    second.state = ReplicaState(ready=False)

    async def run() -> None:
        async with fleet_of(first, second) as fleet:
            await fleet.ask("/v1/responses")
            second.state = ReplicaState()
            await fleet.until(lambda: fleet.pool.members["replica-2"].state.ready)
            for _ in range(4):
                await fleet.ask("/v1/responses", previous_response_id="resp_1")
                async with fleet.client.get(fleet.base + "/v1/responses/resp_1"):
                    pass

    asyncio.run(run())
    assert not second.asked


def test_a_part_of_an_event_is_not_sent_before_the_error_that_ends_a_stream() -> None:
    parts = (b"data: 1\n\ndata: {", b'"a": "\n', b'"}\n', b"\ndata: 2\n\nda", b"ta: {")
    read = asyncio.Event()

    async def script(path: str, body: bytes, out: Writer) -> None:
        out.write(STREAM + b"".join(map(chunk, parts)))
        await read.wait()

    async def run() -> None:
        async with (
            fleet_of(Scripted(script)) as fleet,
            fleet.client.post(fleet.base + "/v1/messages", json={}) as answer,
        ):
            events = b'data: 1\n\ndata: {"a": "\n"}\n\ndata: 2\n\n'
            assert await answer.content.readexactly(len(events)) == events
            read.set()
            kind, error, *end = (await answer.content.read()).split(b"\n")
            assert (kind, end) == (b"event: error", [b"", b""])
            assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "replica_gone"

    asyncio.run(run())


def test_a_client_that_leaves_is_left_by_its_server() -> None:
    gone = asyncio.Event()

    async def endless(path: str, body: bytes, out: Writer) -> None:
        out.write(STREAM)
        try:
            while True:
                out.write(chunk(b"data: 1\n\n"))
                await out.drain()
                await asyncio.sleep(0.001)
        except ConnectionError:
            gone.set()

    async def run() -> None:
        async with fleet_of(Scripted(endless)) as fleet:
            async with fleet.client.post(fleet.base + "/v1/messages", json={}) as answer:
                await answer.content.readany()
            await gone.wait()

    asyncio.run(run())


def test_each_request_counts_once_by_its_end() -> None:
    asked, began, silent = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def script(path: str, body: bytes, out: Writer) -> None:
        asked.set()
        if path == "/v1/messages":
            out.write(STREAM + chunk(b"data: 1\n\n"))
            await began.wait()
            return  # without an end
        if path == "/v1/embeddings":
            await silent.wait()
        out.write(whole(ANSWER))

    async def run() -> dict[str, str]:
        async with fleet_of(Scripted(script), keys=("key",)) as fleet:
            post = partial(fleet.client.post, headers={"Authorization": "Bearer key"}, json={})
            for path in ("/v1/messages", "/v1/completions", LOAD):
                async with post(fleet.base + path) as answer:
                    await answer.content.readany()
                    began.set()
                    await answer.read()
            asked.clear()
            leaving = asyncio.create_task(post(fleet.base + "/v1/embeddings").__aenter__())
            await asked.wait()
            leaving.cancel()
            async with post(fleet.base + "/v1/models", headers={}) as answer:
                assert answer.status == 401
            while not await fleet.metric(COUNTED + '"disconnect"'):
                await asyncio.sleep(0.005)
            silent.set()
            async with fleet.client.get(fleet.base + "/metrics") as answer:
                return dict(re.findall(re.escape(COUNTED) + r'"(.*)"} (.*)', await answer.text()))

    ended = asyncio.run(run())
    once = dict.fromkeys(("broken_off", "disconnect", "invalid_api_key"), "1.0")
    assert ended == {"answered": "2.0", **once}


def test_an_error_of_a_server_counts_by_its_code_and_has_no_predicted_ttft() -> None:
    error = b'{"error": {"message": "no", "param": "n", "code": "invalid_value"}}'
    script = script_of(
        completions=whole(error, "400 Bad Request"),
        messages=whole(error.replace(b"invalid_value", b"model_not_found"), "404 Not Found"),
        embeddings=whole(b"no", "405 Method Not Allowed"),
        load_lora_adapter=whole(error, "400 Bad Request"),
    )

    async def run() -> tuple[dict[str, str], float]:
        async with fleet_of(Scripted(script)) as fleet:
            paths = ("completions", "messages", "embeddings", "responses")
            for path in (*(f"/v1/{path}" for path in paths), LOAD):
                await fleet.ask(path)
            async with fleet.client.get(fleet.base + "/metrics") as answer:
                counted = re.findall(re.escape(COUNTED) + r'"(.*)"} (.*)', await answer.text())
            name = "twolane:fleet_predicted_ttft_seconds_count"
            return dict(counted), await fleet.metric(name)

    counts, predicted = asyncio.run(run())
    once = dict.fromkeys(("answered", "model_not_found", "http_405"), "1.0")
    assert counts == {**once, "invalid_value": "2.0"}
    assert predicted == 1


def test_who_cannot_be_reached_has_not_seen_the_request() -> None:
    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            with pytest.raises(ReplicaUnreachable):
                await unless_lost(asyncio.Event(), session.get("http://127.0.0.1:1/"))

    asyncio.run(run())


def test_nothing_waits_for_a_loss_when_the_answer_is_there() -> None:
    async def answer() -> int:
        return 7

    async def run() -> None:
        assert await unless_lost(asyncio.Event(), answer()) == 7
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def test_servers_are_asked_for_their_state_with_a_key() -> None:
    server = Scripted(well)

    async def run() -> None:
        async with fleet_of(server, keys=("sk-1", "sk-2")):
            pass

    asyncio.run(run())
    assert "x-operator-key: o" in server.probes[0].lower()


def test_what_is_read_ahead_of_a_slow_client_counts_as_unsent() -> None:
    async def endless(path: str, body: bytes, out: Writer) -> None:
        out.write(STREAM)
        while True:
            out.write(chunk(b": " + b"x" * 60_000 + b"\n\n"))
            await out.drain()

    async def run() -> None:
        patient = {"probe_timeout": PATIENCE, "silent_seconds": PATIENCE}
        async with fleet_of(Scripted(endless), **patient) as fleet:
            asked = fleet.client.post(fleet.base + "/v1/completions", json={"stream": True})
            async with asked as answer:
                assert answer.status == 200
                [one] = fleet.connections
                await fleet.until(
                    lambda: one.unsent > one.transport.get_write_buffer_size() + (1 << 16)
                )
            await fleet.until(lambda: one.unsent == 0)

    asyncio.run(run())


def test_the_load_of_a_fleet_is_that_of_all_servers_that_take_requests() -> None:
    one = ReplicaState(running=3, waiting=5, prefilling=2, pages=10, pages_free=4)
    servers = [Scripted(well) for _ in range(3)]

    async def run() -> None:
        async with fleet_of(*servers, silent_seconds=PATIENCE, probe_timeout=PATIENCE) as fleet:
            for server in servers:
                server.state = one
            last = fleet.pool.members["replica-3"]
            await fleet.until(lambda: all(m.state == one for m in fleet.pool.serving))
            servers[2].well = False
            await fleet.until(lambda: last.phase == "out")
            sums = {"running": 6, "prefilling": 4, "waiting": 6, "kv_pages": 20, "kv_pages_free": 8}
            for path in ("/load", "/v1/load"):
                async with fleet.client.get(fleet.base + path) as answer:
                    assert await answer.json() == {"server_load": 16, **sums, "replicas": 2}

    asyncio.run(run())


def test_a_server_that_was_left_out_is_asked_for_its_whole_digest() -> None:
    server = Scripted(well)

    async def run() -> None:
        async with fleet_of(server) as fleet:
            fleet.pool.members["replica-1"].version = 5
            server.stuck = True
            await fleet.until(lambda: not fleet.pool.serving)
            server.stuck = False
            server.probes.clear()
            await fleet.until(lambda: fleet.pool.serving)

    asyncio.run(run())
    assert "known=-1" in server.probes[0]


def test_open_answers_of_a_silent_server_end_and_it_is_taken_back() -> None:
    events = STREAM + chunk(b"data: 1\n\n")

    async def script(path: str, body: bytes, out: Writer) -> None:
        if path == "/v1/messages":
            out.write(events)
            await asyncio.Event().wait()
        out.write(whole(ANSWER))

    async def run() -> None:
        server = Scripted(script)
        async with fleet_of(server, silent_seconds=0.1) as fleet:
            async with fleet.client.post(fleet.base + "/v1/messages", json={}) as answer:
                await answer.content.readexactly(9)
                server.well = False
                assert b"event: error" in await answer.read()
            server.well = True
            assert await fleet.ask("/v1/embeddings") == (200, ANSWER)

    asyncio.run(run())


def test_a_server_that_is_silent_for_long_is_ended_and_replaced() -> None:
    async def run() -> None:
        silent = Scripted(well)
        seconds = {"silent_seconds": 0.1, "replace_seconds": 0.1}
        async with fleet_of(silent, Scripted(well), ready=1, **seconds) as fleet:
            silent.well = False
            await fleet.until(lambda: not silent.alive)
            await fleet.until(lambda: [m.name for m in fleet.pool.serving] == ["replica-2"])

    asyncio.run(run())


def test_the_youngest_of_idle_servers_is_one_too_many() -> None:
    async def run() -> None:
        options = {"min_replicas": 1, "max_replicas": 3, "scale_down_seconds": 0.0}
        servers = [Scripted(well) for _ in range(2)]
        async with fleet_of(*servers, ready=0, replicas=2, **options) as fleet:
            await fleet.until(lambda: list(fleet.pool.members) == ["replica-1"])
            assert (servers[0].alive, servers[1].alive) == (True, False)

    asyncio.run(run())


def test_an_adapter_is_had_by_all_servers_but_lost_ones_which_get_it_later() -> None:
    """One that refuses another, or has lost one, gets the rest."""
    refusing = script_of()

    async def picky(path: str, body: bytes, out: Writer) -> None:
        if path == LOAD and b"heavy" in body:
            out.write(whole(b"{}", "400 Bad Request"))
        else:
            await refusing(path, body, out)

    async def run() -> None:
        lost = Scripted(saying(b""))
        async with fleet_of(Scripted(well), lost) as fleet:
            for name in ("heavy", "some", "other"):
                lost.script = saying(b"")  # what it is brought up to date with is lost, too
                status = (await fleet.ask(LOAD, **ADAPTER | {"lora_name": name}))[0]
                assert status == 200
                assert name in fleet.pool.broadcast.adapters
            lost.script = picky
            fleet.pool.exclude(fleet.pool.members["replica-2"])
            await fleet.until(lambda: len(fleet.pool.serving) == 2)
            assert fleet.pool.members["replica-2"].adapters.keys() == {"some", "other"}
            member = fleet.pool.members["replica-2"]
            member.adapters["other"] = json.dumps({"lora_name": "other"}).encode()  # another one
            fleet.pool.exclude(member)
            await fleet.until(lambda: member.phase == "serving")
            assert member.adapters == {
                name: body
                for name, body in fleet.pool.broadcast.adapters.items()
                if name != "heavy"
            }
            assert UNLOAD in lost.asked

    asyncio.run(run())


def test_an_adapter_that_nobody_has_loaded_is_not_remembered() -> None:
    async def run() -> None:
        async with fleet_of(Scripted(saying(b""))) as fleet:
            assert (await fleet.ask(LOAD, **ADAPTER))[0] == 503
            assert not fleet.pool.broadcast.adapters

    asyncio.run(run())


def test_an_adapter_that_a_server_does_not_have_is_unloaded_there() -> None:
    server = Scripted(script_of(unload_lora_adapter=whole(b"{}", "404 Not Found")))

    async def run() -> None:
        async with fleet_of(server) as fleet:
            for _ in range(2):
                assert (await fleet.ask(LOAD, **ADAPTER))[0] == 200
                assert (await fleet.ask(UNLOAD, lora_name="some"))[0] == 404
                assert not fleet.pool.members["replica-1"].adapters

    asyncio.run(run())


def test_an_unloading_that_is_refused_leaves_the_adapter_to_servers_that_start_later() -> None:
    server = Scripted(script_of(unload_lora_adapter=whole(b"{}", "400 Bad Request")))

    async def run() -> None:
        async with fleet_of(server) as fleet:
            assert (await fleet.ask(LOAD, **ADAPTER))[0] == 200
            assert (await fleet.ask(UNLOAD, lora_name="some", odd=1))[0] == 400
            assert "some" in fleet.pool.broadcast.adapters

    asyncio.run(run())


def test_what_one_server_refuses_is_unloaded_by_those_that_have_it_alone() -> None:
    bad = Scripted(saying(whole(b"{}", "400 Bad Request")))
    good = Scripted(well)

    async def run() -> None:
        async with fleet_of(good, bad) as fleet:
            assert (await fleet.ask(LOAD, **ADAPTER))[0] == 400

    asyncio.run(run())
    assert good.asked == [LOAD, UNLOAD]
    assert bad.asked == [LOAD]
