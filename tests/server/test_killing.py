"""Killing either process at any moment: the other follows, and clients are told."""

import asyncio
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from twolane.engine.config import EngineConfig
from twolane.frontend.startup import start_engine
from twolane.server.app import create_app
from twolane.server.ops.monitoring import Monitoring
from twolane.server.options import ServerOptions
from twolane.server.service.service import Service

from .conftest import MODEL, TINY
from .serving import PATIENCE, alive, engine_of, serving, wait_for
from .test_lifecycle import LONG, Stream

pytestmark = pytest.mark.executed
PROMPT = {**LONG, "prompt": [3 + k % 100 for k in range(8000)], "max_tokens": 50_000}
MOMENTS = [
    *(pytest.param(moment, marks=pytest.mark.full) for moment in ("idle", "prefill", "stream")),
    "both",
]
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2))]


@pytest.mark.full
def test_an_engine_that_waits_for_a_file_at_its_start_goes_with_its_server(tiny_model, tmp_path):
    """It looks at no pipe while it reads."""
    os.mkfifo(file := tmp_path / "profile.json")
    command = [sys.executable, "-m", "twolane", "serve", str(tiny_model), *TINY, "--device", "cpu"]
    server = subprocess.Popen([*command, "--port", "0", "--profile", str(file)])
    writer = None

    def is_read():
        nonlocal writer
        with suppress(OSError):  # nobody reads
            writer = os.open(file, os.O_WRONLY | os.O_NONBLOCK)
        return writer is not None

    try:
        wait_for(is_read)
        engine = engine_of(server.pid)
        server.kill()
        server.wait(PATIENCE)
        wait_for(lambda: not alive(engine))
    finally:
        os.close(writer)


class Client(threading.Thread):
    """One stream, read to its end in a thread of its own."""

    def __init__(self, served, body, **headers):
        super().__init__(daemon=True)
        self.first, self.ended = threading.Event(), threading.Event()
        self.last = None
        self._served, self._body, self._headers = served, body, headers
        self._stream = None
        self.start()

    def run(self):
        try:
            self._stream = stream = Stream(self._served, self._body, **self._headers)
            if stream.response.status != 200:  # refused before the stream began
                self.last = json.loads(stream.response.read())
            for event in stream.events():
                self.first.set()
                self.last = event
        except (OSError, http.client.HTTPException):
            self.last = None  # the server itself is gone
        finally:
            self.ended.set()

    def leave(self):
        """Close the connection."""
        self._stream.connection.sock.shutdown(socket.SHUT_RDWR)


def busy(served, moment):
    """Bring the server into a state; return the clients that wait."""
    clients = []
    if moment in ("stream", "both"):
        clients += [Client(served, LONG) for _ in range(3)]
        assert all(client.first.wait(PATIENCE) for client in clients)
    if moment in ("prefill", "both"):
        clients += [Client(served, PROMPT) for _ in range(4)]
    wait_for(lambda: served.metrics()["requests_in_flight"] == len(clients))
    return clients


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("seed", SEEDS)
def test_killing_the_engine(tiny_model, moment, seed):
    with serving(str(tiny_model), *TINY) as served:
        engine = served.engine_pid
        clients = busy(served, moment)
        time.sleep(random.Random(f"{moment}{seed}").uniform(0.0, 0.3))
        os.kill(engine, signal.SIGKILL)
        for client in clients:
            assert client.ended.wait(PATIENCE)
            assert "signal 9" in client.last["error"]["message"]
            assert client.last["error"]["code"] == "unavailable"
        assert served.process.wait(PATIENCE) == 1
        assert not alive(engine)


def test_an_api_process_whose_engine_is_dead_says_so(tiny_model):
    """In this process, where it lives for as long as it is asked."""

    async def statuses():
        config = EngineConfig(
            model=str(tiny_model), load_format="dummy", kv_tokens=2000, device="cpu"
        )
        engine, texts, *_ = await start_engine(config)
        monitoring = Monitoring.of(engine, "tiny")
        service = Service(engine, texts, "tiny", ServerOptions(max_queue=9), monitoring.metrics)
        try:
            engine.process.kill()
            await engine.failed.wait()
            ask = TestClient(create_app(service, monitoring)).request
            return [
                (await asyncio.to_thread(ask, method, path, json=body)).status_code
                for method, path, body in (
                    ("GET", "/health", None),
                    ("GET", "/health/live", None),
                    ("POST", "/v1/completions", {"prompt": [5]}),
                )
            ]
        finally:
            await service.close()
            await engine.close()

    assert asyncio.run(statuses()) == [503, 200, 503]


def start(model):
    command = [sys.executable, "-m", "twolane", "serve", str(model), *TINY, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    engine = wait_for(lambda: engine_of(process.pid))
    return process, engine


@pytest.mark.parametrize("seed", SEEDS)
def test_killing_the_engine_while_it_starts(tiny_model, seed):
    process, engine = start(tiny_model)
    time.sleep(random.Random(seed).uniform(0.0, 1.5))
    os.kill(engine, signal.SIGKILL)
    out, err = process.communicate(timeout=PATIENCE)
    if not out:  # it was not up yet, though its engine may have been
        assert b"the engine process ended on signal 9" in err
    assert process.returncode == 1
    assert not alive(engine)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
def test_killing_the_server_while_it_starts(tiny_model, seed):
    process, engine = start(tiny_model)
    time.sleep(random.Random(seed).uniform(0.0, 1.5))
    process.kill()
    process.communicate()
    wait_for(lambda: not alive(engine))


@pytest.mark.parametrize("moment", MOMENTS)
def test_killing_the_server(tiny_model, moment):
    with serving(str(tiny_model), *TINY) as served:
        engine = served.engine_pid
        busy(served, moment)
        served.process.kill()
        wait_for(lambda: not alive(engine))


def test_the_front_has_no_torch():
    """What is mapped into the process tells: the API process serves text without PyTorch."""
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    with serving(MODEL, "--kv-tokens", "2000") as served:
        assert served.request("/v1/chat/completions", body)[0] == 200
        mapped = Path(f"/proc/{served.process.pid}/maps").read_text()
        assert "libtorch" not in mapped
        assert "libtorch" in Path(f"/proc/{served.engine_pid}/maps").read_text()


def test_front_modules_import_no_torch():
    code = "import sys, twolane.server.run, twolane.llm; print(json.dumps(sorted(sys.modules)))"
    out = subprocess.run(
        [sys.executable, "-c", f"import json; {code}"], capture_output=True, check=True
    )
    assert not {"torch", "transformers"} & set(json.loads(out.stdout))
