"""What becomes of requests and processes when something goes away."""

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
from contextlib import asynccontextmanager
from types import SimpleNamespace

import aiohttp
import msgspec
import pytest

from twolane.common.errors import FieldError
from twolane.engine.build import captures_when_idle, device_settings
from twolane.engine.config import TRANSPORT_SECONDS, EngineConfig
from twolane.engine.kv.prefix_digest import PrefixBook
from twolane.engine.lateness import Lateness
from twolane.engine.messages import Stats
from twolane.engine.settings import check_settings
from twolane.frontend.adapters import AdapterInfo
from twolane.frontend.answer_formats import ModelFormats
from twolane.frontend.liveness import Liveness
from twolane.frontend.sandbox import Limits, Sandbox
from twolane.frontend.text.codec import TextCodec
from twolane.frontend.text.jobs import Encode
from twolane.frontend.text.texts import Texts
from twolane.server.app import create_app
from twolane.server.ops.monitoring import Monitoring
from twolane.server.options import ServerOptions
from twolane.server.service.service import Service
from twolane.slo import Slo

from .conftest import TINY
from .serving import PATIENCE, alive, children, serving, wait_for

LONG = {"prompt": [5, 6, 7], "max_tokens": 60_000, "ignore_eos": True}


class Stream:
    """A streamed completion, read as it comes."""

    def __init__(self, served, body=LONG, **more):
        address = urllib.parse.urlsplit(served.base)
        self.connection = http.client.HTTPConnection(
            address.hostname, address.port, timeout=PATIENCE
        )
        self.last = None
        headers = {"Content-Type": "application/json", **more}
        body = json.dumps({**body, "stream": True, "return_token_ids": True})
        self.connection.request("POST", "/v1/completions", body, headers)
        self.response = self.connection.getresponse()

    def events(self):
        """Yield the events until the stream ends."""
        for line in self.response:
            if line.startswith(b"data: ") and line != b"data: [DONE]\n":
                self.last = json.loads(line[6:])
                yield self.last

    def next_token(self):
        return next(self.events())["choices"][0]["token_ids"]

    def end(self):
        """Read to the end; return the last event, which may have come before."""
        for _ in self.events():
            pass
        return self.last

    def close(self):
        self.response.close()
        self.connection.close()


def quiet(served):
    """Whether nothing runs any more."""
    figures = served.metrics()
    names = ("requests_in_flight", "num_requests_running", "num_requests_waiting")
    return all(figures[name] == 0 for name in names)


def aborted(served):
    return served.metrics().get("requests_aborted_total", 0)


def aborted_before(served):
    """How many were aborted, when nothing is left of what other tests have asked."""
    wait_for(lambda: quiet(served))
    return aborted(served)


def held_share(served):
    """Return the share of the KV pages in use while one token is made, the least there can be."""
    served.request("/v1/completions", {"prompt": [9], "max_tokens": 1, "ignore_eos": True})
    return served.metrics()["kv_cache_usage_perc"]


def test_a_client_that_leaves_a_stream_frees_the_engine(tiny):
    before, stream = aborted_before(tiny), Stream(tiny)
    for _ in range(240):
        stream.next_token()
    assert tiny.metrics()["requests_in_flight"] == 1
    stream.close()
    wait_for(lambda: quiet(tiny))
    wait_for(lambda: aborted(tiny) == before + 1)
    wait_for(lambda: held_share(tiny) < 0.0005)  # 240 tokens hold 0.0012


def test_a_client_that_leaves_before_its_answer_frees_the_engine(tiny):
    before, address = aborted_before(tiny), urllib.parse.urlsplit(tiny.base)
    connection = http.client.HTTPConnection(address.hostname, address.port)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(LONG), headers)
    wait_for(lambda: tiny.metrics()["num_requests_running"] == 1)
    connection.close()
    wait_for(lambda: quiet(tiny))
    wait_for(lambda: aborted(tiny) == before + 1)


def unchunked(data):
    """Yield the chunks of a body, of which nothing may be behind the last one."""
    begin, size = 0, None
    while size != 0:
        end = data.index(b"\r\n", begin) + 2
        size = int(data[begin:end], 16)
        begin = end + size + 2
        assert data[begin - 2 : begin] == b"\r\n"
        yield data[end : end + size]
    assert begin == len(data)


def events_in(data, version):
    """What a raw answer with a stream of events has in its body."""
    head, _, rest = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert (b"transfer-encoding: chunked" in head.lower()) == (version == "1.1")
    body = b"".join(unchunked(rest)) if version == "1.1" else rest
    *events, done, nothing = body.split(b"\n\n")
    assert (done, nothing) == (b"data: [DONE]", b"")
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


SIXTEEN = {"max_tokens": 500, "temperature": 0, "n": 16, "logprobs": 12, "return_token_ids": True}


@pytest.fixture(scope="module")
def whole(tiny):
    """The choices of an answer that is not streamed."""
    return tiny.request("/v1/completions", {**LONG, **SIXTEEN})[2]["choices"]


@pytest.mark.parametrize(
    ("version", "late"),
    [
        ("1.1", True),
        ("1.0", False),
        pytest.param("1.1", False, marks=pytest.mark.full),
        pytest.param("1.0", True, marks=pytest.mark.full),
    ],
)
def test_streams_are_whole_and_in_order(tiny, whole, version, late):
    """Also for who does not read until all has been made, which is more than the sockets hold."""
    asked = json.dumps({**LONG, **SIXTEEN, "stream": True}).encode()
    address = urllib.parse.urlsplit(tiny.base)
    made = tiny.metrics()["generation_tokens_total"]
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((address.hostname, address.port))
        client.sendall(
            b"POST /v1/completions HTTP/%b\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Connection: close\r\nContent-Length: %d\r\n\r\n%b"
            % (version.encode(), len(asked), asked)
        )
        if late:
            wait_for(lambda: tiny.metrics()["generation_tokens_total"] >= made + 16 * 500)
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    streams = {choice["index"]: [] for choice in whole}
    for event in events_in(answer, version):
        [choice] = event["choices"]
        streams[choice["index"]].append(choice)
    for choice in whole:
        parts = streams[choice["index"]]
        assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]
    assert len(answer) > 3 << 20


@asynccontextmanager
async def slow_service(**options):
    """A service whose tokenizer takes half a second a text; see `count_slowly`."""
    sandbox = Sandbox("tests.frontend.sandboxed_programs", b"slow", Limits(seconds=600.0))
    await sandbox.start()
    service = service_of(Texts(TextCodec(None), sandbox), **options)
    try:
        await service.texts.tokens(Encode("its worker is there", True))
        yield service
    finally:
        await service.close()


def service_of(texts, **options):
    async def no_wait():
        pass

    ready = SimpleNamespace(
        max_model_len=100,
        vocab_size=100,
        eos_token_ids=(),
        slo=Slo(),
        page_size=16,
        kv_cache_dtype="auto",
        prefix_cache=True,
        state_bytes=0,
    )
    engine = SimpleNamespace(
        ready=ready,
        failure=None,
        liveness=Liveness(),
        lateness=Lateness(),
        stats=Stats(),
        watchers=[],
        wait_for_gap=no_wait,
        prefixes=PrefixBook(16),
        adapters=SimpleNamespace(loaded={}),
    )
    metrics = Monitoring.of(engine, "slow").metrics
    given, formats = ServerOptions(max_queue=9, **options), ModelFormats(None, shows_tools=False)
    return Service(engine, texts, "slow", given, metrics, formats=formats)


async def ask(service, path, body, leaves=None):
    """Ask in this process; return the status and the body. The client `leaves` at that event."""
    answer = []
    asked = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    headers = [(b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": headers,
        "query_string": b"",
    }

    async def receive():
        if asked:
            return asked.pop()
        await (leaves or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message):
        answer.append(message)

    await create_app(service, Monitoring.of(service.engine, "slow"))(scope, receive, send)
    return answer[0]["status"], json.loads(answer[1]["body"] or b"null")


def test_a_client_that_leaves_is_not_tokenised_for():
    """The text under way is broken off: nobody waits behind those of a client that has left."""

    async def run():
        async with slow_service() as service:
            leaves = asyncio.Event()
            asked = {"prompt": ["held"] * 9}
            asking = asyncio.create_task(ask(service, "/v1/completions", asked, leaves=leaves))
            async with asyncio.timeout(PATIENCE):
                while not any(queue._waiting for queue in service.texts._queues):
                    await asyncio.sleep(0.01)
                leaves.set()
                status, _ = await asking
                return status, await service.texts.tokens(Encode("another client's", True))

    assert asyncio.run(run()) == (499, [1])  # the first of a new worker


@pytest.mark.parametrize("any_name", [False, True])
def test_an_adapter_that_is_unloaded_while_a_prompt_is_tokenised_is_not_counted(any_name):
    """Else it would keep a label of the metrics that no unloading gives back."""

    async def run():
        async with slow_service(any_model_name=any_name) as service:
            loaded = service.engine.adapters.loaded
            loaded["gone"] = AdapterInfo("", 0, "")
            asked = {"prompt": "slow", "model": "gone"}
            asking = asyncio.create_task(ask(service, "/v1/completions", asked))
            async with asyncio.timeout(PATIENCE):
                while not any(queue._waiting for queue in service.texts._queues):
                    await asyncio.sleep(0.01)
                del loaded["gone"]
                status, answer = await asking
            return status, answer["error"]["code"], service._observer.render()

    status, code, metrics = asyncio.run(run())
    assert (status, code) == (404, "model_not_found")
    assert b'adapter="gone"' not in metrics


def test_stopping_refuses_what_is_being_tokenised():
    """Nothing is admitted any more, be it under way or in line, and nothing is an error of ours."""

    async def run():
        async with slow_service() as service:
            bodies = ({"prompt": ["held", "b"]}, {"prompt": "held"}, {"prompt": "held, too"})
            asked = [asyncio.create_task(ask(service, "/v1/completions", b)) for b in bodies]
            asked.append(asyncio.create_task(ask(service, "/tokenize", bodies[1])))
            short, long = service.texts._queues  # lists are long work
            async with asyncio.timeout(PATIENCE):
                while sum(map(len, short._lock._lines.values())) < 2 or not long._waiting:
                    await asyncio.sleep(0.01)
            await service.close()
            answers = [*await asyncio.gather(*asked), await ask(service, "/tokenize", bodies[1])]
            return {(status, body.get("error", {}).get("code")) for status, body in answers}

    assert asyncio.run(run()) == {(503, "unavailable")}


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(doomed, number):
    stream = Stream(doomed, {**LONG, "max_tokens": 300})
    stream.next_token()
    engine = doomed.engine_pid
    doomed.process.send_signal(number)
    assert stream.end()["choices"][0]["finish_reason"] == "length"
    assert doomed.process.wait(PATIENCE) == 0
    assert not alive(engine)


@pytest.mark.executed
def test_a_supervisors_signal_to_all_processes_drains(doomed):
    """As systemd sends it: the engine leaves it to the API process."""
    stream = Stream(doomed, {**LONG, "max_tokens": 300})
    stream.next_token()
    for pid in (doomed.engine_pid, doomed.process.pid):
        os.kill(pid, signal.SIGTERM)
    assert stream.end()["choices"][0]["finish_reason"] == "length"
    assert doomed.process.wait(PATIENCE) == 0


@pytest.mark.executed
@pytest.mark.parametrize("model", ["smollm2-135m-instruct", "owner/name"])
def test_a_signal_ends_the_fetching_of_a_model(model, tmp_path):
    """From an index, and a hub, that say nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        own = {"PIP_INDEX_URL": url, "PIP_CONFIG_FILE": os.devnull, "HF_ENDPOINT": url}
        folders = {"TWOLANE_CACHE": str(tmp_path), "HF_HOME": str(tmp_path)}
        command = [sys.executable, "-m", "twolane", "serve", model, "--port", "0"]
        with subprocess.Popen(command, env={**os.environ, **own, **folders}) as process:
            silent.settimeout(PATIENCE)
            silent.accept()
            pids = children(process.pid)
            process.send_signal(signal.SIGTERM)
            try:
                assert process.wait(PATIENCE) == 0
            finally:
                process.kill()
    assert not any(map(alive, pids))
    assert not list(tmp_path.rglob(".pull-*"))


@pytest.mark.executed
def test_a_draining_server_says_so(tiny_model):
    """Probes fail and new requests are refused, on new connections and old ones, while a stream
    goes on; a second signal stops it at once."""
    with serving(str(tiny_model), *TINY, "--drain-seconds", "600") as served:
        address = urllib.parse.urlsplit(served.base).netloc
        old = http.client.HTTPConnection(address, timeout=PATIENCE)
        engine = served.engine_pid
        old.request("GET", "/health")
        assert old.getresponse().read() == b'{"status":"ok"}'
        stream = Stream(served)
        stream.next_token()
        ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # as under nohup
        served.process.send_signal(signal.SIGTERM if ignored else signal.SIGHUP)
        wait_for(lambda: served.request("/health/ready")[0] == 503)
        time.sleep(0.5)  # a listener that is told to close does so within 0.1 s
        assert served.request("/health/ready")[0] == 503
        old.request("GET", "/health")
        assert old.getresponse().status == 503
        status, _, body = served.request("/v1/completions", {"prompt": [5]})
        assert (status, body["error"]["code"]) == (503, "unavailable")
        assert served.request("/health/live")[0] == 200
        assert served.metrics()["requests_in_flight"] == 1
        stream.next_token()
        old.close()
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(PATIENCE) == 0
        assert not alive(engine)


@pytest.mark.full
def test_draining_is_bounded(tiny_model):
    with serving(str(tiny_model), *TINY, "--drain-seconds", "0.3") as served:
        stream = Stream(served)
        stream.next_token()
        served.process.send_signal(signal.SIGTERM)
        assert stream.end()["error"]["message"] == "the server is shutting down"
        assert served.process.wait(PATIENCE) == 0


def test_a_terminals_interrupt_reaches_only_the_api_process(tiny):
    assert os.getpgid(tiny.engine_pid) == tiny.engine_pid


def test_niceness_counts_between_the_processes_of_a_server(tiny):
    """Linux may share the processor between sessions first; see autogroup in sched(7)."""
    below = children(tiny.process.pid)
    assert tiny.engine_pid in below
    for pid in below:
        assert os.getsid(pid) == os.getsid(tiny.process.pid)


@pytest.mark.full
def test_256_streams_at_a_bound_of_128(tiny_model):
    """Some clients leave; in the end everything is free, and each request was counted once."""

    async def one(session, url, index):
        body = {
            "prompt": [3 + (index + k) % 100 for k in range(200)],
            "max_tokens": 20,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        async with session.post(url, json=body) as response:
            if response.status == 429:
                return "refused"
            if index % 5 == 0:
                await response.content.readline()
                return "left"
            lines = [line async for line in response.content if line.startswith(b"data: ")]
        assert lines.pop() == b"data: [DONE]\n"
        choices = [json.loads(line[6:])["choices"][0] for line in lines]
        assert sum(len(choice["token_ids"]) for choice in choices) == 20
        return choices[-1]["finish_reason"]

    async def all_of_them(base):
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            return await asyncio.gather(
                *(one(session, f"{base}/v1/completions", index) for index in range(256))
            )

    args = ("--load-format", "dummy", "--kv-tokens", "20000", "--max-queue", "128")
    with serving(str(tiny_model), *args) as served:
        ends = asyncio.run(all_of_them(served.base))
        assert set(ends) == {"length", "refused", "left"}
        assert len(ends) - ends.count("refused") >= 128
        wait_for(lambda: quiet(served))
        wait_for(lambda: held_share(served) < 0.002)
        figures = served.metrics()
        assert figures["requests_refused_total"] == ends.count("refused")
        ended = ("request_success_total", "requests_refused_total", "requests_aborted_total")
        assert figures["requests_received_total"] == sum(figures.get(name, 0) for name in ended)
        wait_for(lambda: quiet(served))


def test_without_a_tokenizer_text_is_refused_and_ids_are_served(tiny):
    for path, body in (
        ("/v1/completions", {"prompt": "text"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "text"}]}),
    ):
        status, _, answer = tiny.request(path, body)
        assert (status, answer["error"]["code"]) == (400, "invalid_prompt")
        assert "without a tokenizer" in answer["error"]["message"]
    body = {"prompt": [4, 5], "max_tokens": 3, "ignore_eos": True, "return_token_ids": True}
    choice = tiny.request("/v1/completions", body)[2]["choices"][0]
    assert (choice["text"], len(choice["token_ids"])) == ("", 3)


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be a container's first process")
@pytest.mark.parametrize("seconds", [0.2, 0.5, 1.0, 3.0])
def test_a_container_ends_by_sigterm_at_any_time_of_its_start(tiny_model, seconds):
    """The first process of a container ignores what it does not handle."""
    server = [sys.executable, "-m", "twolane", "serve", str(tiny_model), *TINY, "--port", "0"]
    namespace = ["unshare", "--pid", "--fork", "--mount-proc", *server]
    container = subprocess.Popen(namespace, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        time.sleep(seconds)
        [first] = children(container.pid)
        os.kill(first, signal.SIGTERM)
        assert container.wait(PATIENCE) in (0, 128 + signal.SIGTERM)
    finally:
        container.kill()


@pytest.mark.parametrize(("told", "captures"), [(None, True), (False, False), (True, True)])
def test_a_server_captures_the_rest_of_its_graphs_when_idle_unless_told(told, captures):
    config = EngineConfig(model="m", capture_when_idle=told, transport=TRANSPORT_SECONDS)
    assert captures_when_idle(config) is captures
    assert captures_when_idle(msgspec.structs.replace(config, transport=0.0)) is bool(told)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tensor_parallel_size": 2}, "capture_when_idle is only for one GPU"),
        ({"disaggregated": True}, "capture_when_idle is only for one GPU"),
        ({"device": "cpu"}, "capture_when_idle is only for GPUs, and the device is the CPU"),
        ({"cores": 1}, "capture_when_idle is only for GPUs, and the device is the CPU"),
    ],
)
def test_captures_when_idle_are_refused_where_there_are_none(settings, said):
    for told in (None, False):
        checked(EngineConfig(model="m", capture_when_idle=told, **settings))
    with pytest.raises(FieldError, match=said):
        checked(EngineConfig(model="m", capture_when_idle=True, **settings))


def checked(config):
    """What is checked before anything is loaded."""
    check_settings(config)
    return device_settings(config)
