"""A server as a user starts it, and a model small enough to start it often."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests import zygote

PATIENCE = 120.0
"""Seconds that a test waits for what must happen: right programs end the wait far sooner, also on a
machine that is so busy that a server takes half a minute to start."""
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 128,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}


def write_tiny_model(path: Path, **changes: object) -> Path:
    """Write the config of a tiny model without a tokenizer, for --load-format dummy."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({**TINY, **changes}))
    return path


class Served:
    """A running `twolane serve`."""

    def __init__(self, process: subprocess.Popen, announcement: str, *more: str) -> None:
        self.process = process
        self.announcement = announcement
        self.more = more
        self.base = announcement.split(" | ")[1]
        self.key: str | None = None

    @property
    def engine_pid(self) -> int | None:
        return engine_of(self.process.pid)

    def request(
        self,
        path: str,
        body: object | None = None,
        data: bytes | None = None,
        seconds: float = PATIENCE,
    ):
        """Return status, headers and parsed body."""
        if body is not None:
            data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        request = urllib.request.Request(self.base + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=seconds) as response:
                return response.status, response.headers, parsed(response.read())
        except urllib.error.HTTPError as error:
            return error.code, error.headers, parsed(error.read())

    def metrics(self) -> dict[str, float]:
        """Return the metrics, their labels summed up."""
        figures: dict[str, float] = {}
        for line in self.request("/metrics")[2].splitlines():
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                name = name.split("{")[0].removeprefix("twolane:")
                figures[name] = figures.get(name, 0.0) + float(value)
        return figures


def parsed(data: bytes):
    try:
        return json.loads(data)
    except ValueError:
        return data.decode()


def wait_for(condition: Callable[[], object], seconds: float = PATIENCE) -> object:
    """Wait until `condition` returns something true, and return that."""
    end = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < end, "the condition was not met in time"
        time.sleep(0.02)
    return result


def children(pid: int) -> set[int]:
    """Return the processes that a process has started, by whichever of its threads, without the
    tests' own `zygote`.

    Not every kernel lists them at their parent's.
    """
    found: set[int] = set()
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # a process that has just ended
            name, _, fields = file.read_text().rpartition(")")
            if int(fields.split()[1]) == pid and not name.endswith(f"({zygote.NAME}"):
                found.add(int(file.parent.name))
    return found


def engine_of(pid: int) -> int | None:
    """Return the engine process of a server, if it has one."""
    for child in children(pid):
        with suppress(OSError):  # it has just ended
            if b"twolane.engine" in Path(f"/proc/{child}/cmdline").read_bytes():
                return child
    return None


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Have a process stand still."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # it was killed meanwhile
            os.kill(pid, signal.SIGCONT)


def free_port() -> int:
    """Return a port that nobody listens on, and that nobody else gets meanwhile: it is below those
    that the system gives out, and each of the processes that run tests has ports of its own."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = 20_000 + worker % 4 * 3_000 + random.SystemRandom().randrange(3_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def serving(
    *args: str,
    stderr: Path | None = None,
    before: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> Iterator[Served]:
    """Run `twolane serve` on a free port, by the command `before`, with these variables, too; on
    leaving it is killed, its engine too.

    It serves on the CPU, unless TWOLANE_TEST_SERVE has other arguments.
    """
    device = os.environ.get("TWOLANE_TEST_SERVE", "--device cpu").split()
    command = [*before, sys.executable, "-m", "twolane", "serve", *args, *device, "--port", "0"]
    with (stderr or Path(os.devnull)).open("wb") as log:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **(variables or {})},
        )
    try:
        line = process.stdout.readline()
        assert line, f"the server ended with {process.wait()}"
        yield Served(process, line.strip(), *(process.stdout.readline().strip() for _ in range(2)))
    finally:
        end(process)
        process.stdout.close()


def end(process: subprocess.Popen) -> None:
    """Have a server stop, without those who are still served, or kill it.

    Two signals that are sent at once may arrive as one, and one has it wait for whom it serves.
    """
    for _ in range(40):
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.25)
            return
    process.kill()
    process.wait()
