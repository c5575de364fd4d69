"""A fleet as a user starts it: two servers, one address, no Ray."""

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("aiohttp")

from tests.common.slices import needs_slices, slice_and_niceness
from tests.model.adapters import make_adapter
from tests.server.parrot import TEMPLATE, write_parrot
from tests.server.serving import (
    PATIENCE,
    Served,
    alive,
    children,
    parsed,
    wait_for,
    write_tiny_model,
)
from twolane.common.resources import SHORT_SLICE
from twolane.engine.kv.prefix_digest import Landmarks
from twolane.engine.prompt_work import UNKNOWN
from twolane.router.choose import choose
from twolane.router.state import ReplicaState, RoutedRequest
from twolane.router.table import Table

PAGE = "https://page.example"
MAX_BODY_BYTES = 33 << 20
"""More than a server takes unless it is told to."""
LARGE_BODY = 31 << 20
"""Bytes that a server takes and judges, but not as one text."""
PROMPT = [3 + i % 97 for i in range(300)]


@contextmanager
def fleet(*args: str, hosts: str = "local"):
    """Run `twolane fleet` on a free port; on leaving, all of its processes are ended."""
    command = [sys.executable, "-m", "twolane", "fleet", *args, "--hosts", hosts, "--port", "0"]
    process = subprocess.Popen(
        [*command, "--device", "cpu"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        line = process.stdout.readline().strip()
        assert line, f"the fleet ended with {process.wait()}"
        yield Served(process, line)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def replicas(served) -> dict[str, dict]:
    return {each["name"]: each for each in served.request("/fleet")[2]["replicas"]}


def serving(served) -> list[dict]:
    return [each for each in replicas(served).values() if each["phase"] == "serving"]


def ask(served, prompt=PROMPT, **more):
    body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True, **more}
    return served.request("/v1/completions", body)


def stream(served, tokens: int, events: list[dict] | None = None) -> list[dict]:
    """The events of one stream, `[DONE]` as {}; they are added to `events` as they come."""
    events = [] if events is None else events
    body = {"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        served.base + "/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        for line in response:
            if line.startswith(b"data: "):
                data = line[6:].strip()
                events.append({} if data == b"[DONE]" else json.loads(data))
    return events


def counted(served, outcome: str) -> float:
    """How many requests the fleet's metrics say ended in this way."""
    with urllib.request.urlopen(served.base + "/metrics", timeout=PATIENCE) as response:
        lines = response.read().decode().splitlines()
    name = f'twolane:fleet_requests_total{{outcome="{outcome}"}} '
    return next((float(line.removeprefix(name)) for line in lines if line.startswith(name)), 0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_parrot(tmp_path_factory.mktemp("fleet") / "model", (), TEMPLATE)


@pytest.fixture(scope="module")
def adapter(model):
    return str(make_adapter(model, model.parent / "adapter", rank=2))


@pytest.fixture(scope="module")
def pair(model):
    """Two tiny servers with little patience for silence."""
    patience = ("--probe-timeout", "1", "--silent-seconds", "2", "--probe-seconds", "0.1")
    args = (str(model), "--kv-tokens", "20000", "--lora-endpoints", *patience)
    shared = ("--cors-origins", PAGE, "--max-body-bytes", str(MAX_BODY_BYTES))
    with fleet(*args, "--replicas", "2", "--drain-seconds", "30", *shared) as served:
        wait_for(lambda: len(serving(served)) == 2, 180)
        yield served


def test_one_address_answers_as_a_server_does(pair):
    assert pair.request("/health")[0] == 200
    model = pair.request("/v1/models")[2]["data"][0]["id"]
    status, headers, answer = ask(pair, model=model)
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 4
    assert headers["x-replica"] in replicas(pair)
    assert len(headers.get_all("date")) == 1
    assert stream(pair, 5)[-1] == {}
    assert pair.request("/v1/completions", {"prompt": []})[0] == 400
    assert pair.request("/nowhere")[0] == 404


@needs_slices
def test_what_delivers_tokens_asks_for_short_slices(pair):
    pids = [pair.process.pid, *(each["pid"] for each in serving(pair))]
    assert len(pids) == 3
    assert {slice_and_niceness(pid)[0] for pid in pids} == {round(1e9 * SHORT_SLICE)}


def test_answers_name_a_pages_origin_once_and_are_counted(pair):
    before = counted(pair, "answered")
    request = urllib.request.Request(pair.base + "/v1/models", headers={"Origin": PAGE})
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        assert response.headers.get_all("access-control-allow-origin") == [PAGE]
    stream(pair, 3)
    assert counted(pair, "answered") == before + 2


def test_the_bound_on_bodies_is_that_of_the_servers(pair):
    body = json.dumps({"prompt": PROMPT, "max_tokens": 1}).encode()
    assert pair.request("/v1/completions", data=body.ljust(MAX_BODY_BYTES))[0] == 200
    length = f"Content-Length: {MAX_BODY_BYTES + 1}\r\n".encode()
    head = b"POST /v1/completions HTTP/1.1\r\nExpect: 100-continue\r\n" + length
    answer = sent(pair, head)  # it is refused unread, and not waited for
    assert b" 413 " in answer.splitlines()[0]


def resident(served) -> int:
    """MiB of memory that the fleet's own process has."""
    pages = int(Path(f"/proc/{served.process.pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() >> 20


def test_the_memory_of_a_large_body_goes_back(pair):
    before = resident(pair)
    large = json.dumps({"prompt": "a" * LARGE_BODY}).encode()
    assert pair.request("/v1/completions", data=large)[0] == 413
    wait_for(lambda: resident(pair) < before + (LARGE_BODY >> 21))


def sent(served, head: bytes) -> bytes:
    """The answer to a head as it stands."""
    place = urllib.parse.urlsplit(served.base)
    with socket.create_connection((place.hostname, place.port), PATIENCE) as connection:
        connection.sendall(head + b"Host: x\r\nConnection: close\r\n\r\n")
        return b"".join(iter(lambda: connection.recv(65536), b""))


def is_sent_home(answer: bytes) -> bool:
    """Return whether the client is told to spell the path otherwise, at the same server."""
    location = re.search(rb"\r\nlocation: (\S*)\r\n", answer)
    return b" 308 " in answer.splitlines()[0] and re.match(rb"/(?![/\\])", location[1]) is not None


def test_no_target_makes_the_fleet_ask_another_server(pair):
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.setblocking(False)
        place = f"127.0.0.1:{other.getsockname()[1]}/"
        for target in (f"@{place}", f"//{place}", f"/@{place}"):
            answer = sent(pair, f"GET {target} HTTP/1.1\r\n".encode())
            assert b" 404 " in answer.splitlines()[0] or is_sent_home(answer)
        answer = sent(pair, f"GET http://{place} HTTP/1.1\r\n".encode())
        assert b"\r\nlocation: /dashboard\r\n" in answer  # whose path is /, whomever it names
        with pytest.raises(BlockingIOError):
            other.accept()


def test_a_replica_gets_the_path_as_the_client_wrote_it(pair):
    for target in ("/v1/models%3Fx=1", "/v1/models%23x", "/x/../v1/models", "/v1/x%2f..%2fmodels"):
        answer = sent(pair, f"GET {target} HTTP/1.1\r\n".encode())
        assert b" 404 " in answer.splitlines()[0] or is_sent_home(answer)
    assert b" 200 " in sent(pair, b"GET /v1/models?x=%23 HTTP/1.1\r\n").splitlines()[0]


def test_the_address_is_as_strict_about_heads_as_a_server(pair):
    both_lengths = b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n"
    assert b"invalid_http" in sent(pair, b"POST /v1/models HTTP/1.1\r\n" + both_lengths)
    assert b"invalid_http" in sent(pair, b"GET /v1/models HTTP/1.1\n")


def test_what_a_server_has_computed_is_known_by_what_another_says_of_a_prompt(pair):
    """Whatever their speeds are."""
    there, other = both(pair)
    home, elsewhere = (Served(pair.process, f"x | {each['url']}") for each in (there, other))
    shared = [5 + i % 89 for i in range(640)]
    found = elsewhere.request("/fleet/landmarks/completions", {"prompt": [*shared, 1]})[2]
    assert ask(home, [*shared, 2])[0] == 200

    def told(served) -> ReplicaState:
        state = msgspec.convert(served.request("/fleet/state?known=-1")[2], ReplicaState)
        return msgspec.structs.replace(state, prompt_pace=UNKNOWN)

    known = wait_for(lambda: set(found["hashes"]) <= (s := told(home)).digest.as_set() and s)
    table = Table()
    table.publish("home", known, 0.0)
    table.publish("elsewhere", told(elsewhere), 0.0)
    asked = RoutedRequest(
        found["prompt_tokens"], landmarks=Landmarks(found["tokens"], found["hashes"])
    )
    choice = choose(asked, table.views(asked, 0.0))
    assert (choice.name, choice.reused) == ("home", max(found["tokens"]))


def adapters(replica: dict) -> set[str]:
    """The adapters that a server lists."""
    with urllib.request.urlopen(f"{replica['url']}/v1/models", timeout=PATIENCE) as response:
        return {each["id"] for each in parsed(response.read())["data"] if each.get("parent")}


def both(served) -> list[dict]:
    return wait_for(lambda: len(found := serving(served)) == 2 and found, 180)


# On a busy machine a server may be silent for so long that it is left out for a moment.
def have(served, names: set[str]) -> None:
    """Wait until both servers list these adapters."""
    wait_for(lambda: [adapters(each) for each in both(served)] == [names] * 2, 180)


def test_adapters_are_loaded_by_all_servers_or_by_none(pair, adapter):
    load, unload = {"lora_name": "fine", "lora_path": adapter}, {"lora_name": "fine"}
    status, _, answer = pair.request("/v1/load_lora_adapter", {**load, "lora_path": "nowhere"})
    assert (status, answer["error"]["param"]) == (400, "lora_path")
    assert pair.request("/v1/load_lora_adapter", load)[0] == 200
    have(pair, {"fine"})
    assert [ask(pair, model="fine")[0] for _ in range(4)] == [200] * 4
    assert pair.request("/v1/unload_lora_adapter", unload)[0] == 200
    have(pair, set())
    assert ask(pair, model="fine")[0] == 404


def test_what_one_server_refuses_the_others_undo(pair, adapter):
    load, unload = {"lora_name": "odd", "lora_path": adapter}, {"lora_name": "odd"}
    one, other = both(pair)
    alone = Served(pair.process, f"x | {one['url']}")
    assert alone.request("/v1/load_lora_adapter", load)[0] == 200

    def refused() -> bool:
        both(pair)
        if pair.request("/v1/load_lora_adapter", load)[0] == 400:
            return True
        pair.request("/v1/unload_lora_adapter", unload)  # it was left out
        alone.request("/v1/load_lora_adapter", load)
        return False

    wait_for(refused, 180)
    wait_for(lambda: adapters(other) == set())
    assert alone.request("/v1/unload_lora_adapter", unload)[0] == 200


def respond(served, **body):
    return served.request("/v1/responses", {"input": "Hello", "max_output_tokens": 3, **body})


def test_a_response_is_gone_on_with_at_the_server_that_stores_it(pair):
    stored: dict[str, tuple[str, str]] = {}

    def of_both() -> bool:
        both(pair)
        _, headers, first = respond(pair)
        stored[headers["x-replica"]] = first["id"], first["output"][0]["id"]
        return len(stored) == 2

    wait_for(of_both)
    for name, (id, item) in stored.items():
        items = [{"type": "item_reference", "id": item}, {"role": "user", "content": "Hello"}]

        def goes_on(name=name, id=id, items=items) -> bool:
            status, headers, _ = respond(pair, previous_response_id=id)
            again = pair.request(f"/v1/responses/{id}")
            referring, there, _ = respond(pair, input=items)
            homes = headers["x-replica"], there["x-replica"]
            return (status, again[0], referring, *homes) == (200, 200, 200, name, name)

        wait_for(lambda: all(goes_on() for _ in range(8)), 120)  # not by chance
    status, _, answer = respond(pair, previous_response_id="resp_0")
    assert (status, answer["error"]["code"]) == (400, "previous_response_not_found")


def test_a_stopped_server_is_left_out_and_taken_back(pair):
    name, stopped = next(iter(replicas(pair).items()))
    os.kill(stopped["pid"], signal.SIGSTOP)
    try:
        wait_for(lambda: replicas(pair)[name]["phase"] == "out")
        assert [ask(pair)[0] for _ in range(4)] == [200] * 4
    finally:
        os.kill(stopped["pid"], signal.SIGCONT)
    wait_for(lambda: replicas(pair)[name]["phase"] == "serving")


def test_a_killed_servers_stream_ends_with_an_error_and_another_takes_its_place(pair, adapter):
    both(pair)
    load = {"lora_name": "kept", "lora_path": adapter}
    assert pair.request("/v1/load_lora_adapter", load)[0] == 200
    events: list[dict] = []
    thread = threading.Thread(target=stream, args=(pair, 15_000, events))
    thread.start()
    wait_for(lambda: events)  # before its first token a request goes to another server
    victim = next(r for r in serving(pair) if r["open"])
    os.kill(victim["pid"], signal.SIGKILL)
    thread.join(120)
    assert events[-1]["error"]["code"] == "replica_gone"
    assert ask(pair)[0] == 200
    wait_for(lambda: len(serving(pair)) == 2 and victim["name"] not in replicas(pair), 180)
    have(pair, {"kept"})
    assert pair.request("/v1/unload_lora_adapter", {"lora_name": "kept"})[0] == 200
    have(pair, set())


@pytest.mark.full
def test_a_rolling_restart_fails_nothing(pair):
    wait_for(lambda: len(replicas(pair)) == 2 == len(serving(pair)), 180)
    before, statuses, stop = set(replicas(pair)), [], threading.Event()

    def keep_asking():
        while not stop.is_set():
            statuses.append(ask(pair)[0])

    asking = threading.Thread(target=keep_asking)
    asking.start()
    pair.process.send_signal(signal.SIGHUP)
    try:
        wait_for(lambda: not before & set(replicas(pair)) and len(serving(pair)) == 2, 240)
    finally:
        stop.set()
        asking.join()
    assert set(statuses) == {200}
    newest = max(int(name.split("-")[1]) for name in replicas(pair))
    assert newest == max(int(name.split("-")[1]) for name in before) + 2  # one successor for each


@pytest.mark.full
def test_a_fleet_that_is_stopped_while_its_servers_start_ends_with_them(tmp_path):
    model = write_tiny_model(tmp_path)
    words = [sys.executable, "-m", "twolane", "fleet", str(model), "--load-format", "dummy"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    how = ("--hosts", "local", "--port", str(port), "--device", "cpu")
    process = subprocess.Popen([*words, *how], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    with process:
        started = wait_for(lambda: len(children(process.pid)) == 2 and children(process.pid))
        at = Served(process, f" | http://127.0.0.1:{port}")
        assert [at.request(path)[0] for path in ("/livez", "/health")] == [200, 503]
        process.terminate()
        assert process.wait(PATIENCE) == 0
        assert process.stdout.read() == b""
    wait_for(lambda: not any(map(alive, started)))


@pytest.mark.full
def test_a_second_signal_ends_a_fleet_with_open_answers(tmp_path):
    model = write_tiny_model(tmp_path)
    args = (str(model), "--load-format", "dummy", "--kv-tokens", "70000", "--replicas", "1")
    with fleet(*args, "--drain-seconds", "600") as served:
        pid = wait_for(lambda: serving(served))[0]["pid"]
        ended: list[list[dict]] = []
        thread = threading.Thread(target=lambda: ended.append(stream(served, 60_000)))
        thread.start()
        wait_for(lambda: any(each["state"]["running"] for each in serving(served)))
        served.process.terminate()
        wait_for(lambda: replicas(served)["replica-1"]["phase"] == "draining")
        served.process.terminate()
        served.process.wait(PATIENCE)
        wait_for(lambda: not alive(pid))
        thread.join(PATIENCE)
        assert ended[0][-1]["error"]["code"] == "replica_gone"


def test_nothing_is_left_behind(tmp_path):
    model = write_tiny_model(tmp_path)
    args = (str(model), "--load-format", "dummy", "--kv-tokens", "20000", "--replicas", "1")
    with fleet(*args) as served:
        pid = wait_for(lambda: serving(served))[0]["pid"]
        served.process.kill()
        served.process.wait()
        wait_for(lambda: not alive(pid))


@pytest.mark.full
def test_the_same_with_rays_actors(tmp_path):
    pytest.importorskip("ray")
    model = write_tiny_model(tmp_path)
    args = (str(model), "--load-format", "dummy", "--kv-tokens", "20000", "--replicas", "2")
    with fleet(*args, hosts="ray") as served:
        wait_for(lambda: len(serving(served)) == 2, 180)
        assert ask(served)[0] == 200
        victim = serving(served)[0]
        os.kill(victim["pid"], signal.SIGKILL)
        wait_for(lambda: len(serving(served)) == 2 and victim["name"] not in replicas(served), 180)
        assert ask(served)[0] == 200
        pids = [each["pid"] for each in serving(served)]
    for pid in pids:
        wait_for(lambda pid=pid: not alive(pid))
