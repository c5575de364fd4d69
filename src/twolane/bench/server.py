"""Servers that benchmarks start, wait for and stop."""

import asyncio
import contextlib
import functools
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec

from twolane.bench import http
from twolane.bench.preflight import BenchError
from twolane.common.checked_json import UNREADABLE
from twolane.common.resources import allowed_cores, die_with_parent, end_group
from twolane.results.provenance import without_secrets

PORT = "{port}"
"""Placeholder for the port in a server's command."""
READY_SECONDS = 1200.0
"""Seconds that a server of another kind may take to become ready."""
VERSION_PATHS = ("/version", "/server_info")
"""Where servers tell their version, the first that does: vLLM and Twolane, SGLang."""
POLL_SECONDS = 0.2
"""Seconds between two checks of readiness."""
STOP_SECONDS = 30.0
"""Seconds that a server may take to end before it is killed."""
CLIENT_CPUS, ENOUGH_CPUS = 2, 8
"""Number of CPUs reserved for the client, and the least number of CPUs for that: it stands for a
client on another machine, and would delay tokens on the server's CPUs."""


@dataclass(frozen=True)
class Server:
    """A running server."""

    process: subprocess.Popen[str]
    announcement: str
    """First line of its announcement: model, device and address."""
    log: Path
    """File of its standard error."""

    @property
    def url(self) -> str:
        """URL at which it listens."""
        return self.announcement.split(" | ")[1]

    @property
    def system(self) -> str:
        """Name of the system that it runs."""
        return self.announcement.split(" | ")[3].split(" on ")[0]

    def check(self) -> None:
        """Check that the process is running.

        Raises:
            BenchError: it has ended.
        """
        if self.process.poll() is not None:
            raise _dead(self.process, self.log)


@contextlib.contextmanager
def serving(arguments: Sequence[str], log: Path) -> Iterator[Server]:
    """Run `twolane serve` with these arguments on a free port; stop it when the block ends.

    Meanwhile this process and what it starts have CPUs of their own (`CLIENT_CPUS`).

    Raises:
        BenchError: it ended before it served.
    """
    # Captures between runs would delay first tokens; the user's flags win.
    words = ["serve", "--no-capture-when-idle", *arguments, "--port", "0"]
    command = [sys.executable, "-m", "twolane", *words]
    with _divided_cpus() as cpus, _running(command, log, cpus, piped=True) as process:
        assert process.stdout is not None
        announcement = process.stdout.readline().strip()
        if not announcement:
            process.wait()
            raise _dead(process, log)
        yield Server(process, announcement, log)


@contextlib.contextmanager
def serving_by(command: Sequence[str], log: Path) -> Iterator[Server]:
    """Run any server with OpenAI's API, like `serving`.

    Args:
        command: The words of the command; `{port}` in them stands for the port, else `--port PORT`
            is added.
        log: file for its output.

    Raises:
        BenchError: it ended before it served, or did not within `READY_SECONDS`.
    """
    with starting([(command, log)]) as [ready]:
        yield ready()


@contextlib.contextmanager
def starting(
    commands: Sequence[tuple[Sequence[str], Path]],
) -> Iterator[list[Callable[[], Server]]]:
    """Start several servers concurrently, like `serving_by`, on the same CPUs.

    Args:
        commands: command and log file of each.

    Yields:
        for each server a function that waits until it serves, and raises BenchError where that
        does not happen.

    Raises:
        BenchError: a program does not exist.
    """
    with _divided_cpus() as cpus, contextlib.ExitStack() as stack:
        ports = _free_ports(len(commands))
        yield [
            stack.enter_context(_started(command, log, cpus, port))
            for (command, log), port in zip(commands, ports, strict=True)
        ]


@contextlib.contextmanager
def _started(
    command: Sequence[str], log: Path, cpus: Collection[int], port: int
) -> Iterator[Callable[[], Server]]:
    """Run a server on this port; yield a function that waits until it is ready."""
    if shutil.which(command[0]) is None:
        raise BenchError(f"cannot run {command[0]}: there is no such program")
    words = [word.replace(PORT, str(port)) for word in command]
    words += [] if words != list(command) else ["--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    with _running(words, log, cpus, piped=False) as process:

        def ready() -> Server:
            _wait_until_ready(url, process, log)
            about = f"{Path(command[0]).name} {_version(url)}".strip()
            return Server(process, f"{about} | {url} | {shlex.join(without_secrets(command))}", log)

        yield ready


def _wait_until_ready(url: str, process: subprocess.Popen[str], log: Path) -> None:
    """Wait until the server answers a request for its models, even if with 401."""
    latest = time.monotonic() + READY_SECONDS
    while time.monotonic() < latest:
        if process.poll() is not None:
            raise _dead(process, log)
        status, _ = _answer(f"{url}/v1/models")
        if 0 < status < HTTPStatus.INTERNAL_SERVER_ERROR:
            return
        time.sleep(POLL_SECONDS)
    raise BenchError(f"the server does not answer after {READY_SECONDS:.0f} s; see {log}")


def _version(url: str) -> str:
    """Return the version that a server tells at one of `VERSION_PATHS`, or an empty text."""
    for path in VERSION_PATHS:
        status, body = _answer(url + path)
        with contextlib.suppress(*UNREADABLE):
            reply = msgspec.json.decode(body, type=dict[str, Any])
            if status == HTTPStatus.OK and (version := reply.get("version")):
                return str(version)
    return ""


def _answer(url: str) -> tuple[int, bytes]:
    """Return status and body of a GET request; status 0: no answer."""
    try:
        return asyncio.run(http.get(url, {}, POLL_SECONDS + 5.0))
    except (http.HTTPError, TimeoutError):
        return 0, b""


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


@contextlib.contextmanager
def _running(
    command: Sequence[str], log: Path, cpus: Collection[int], *, piped: bool
) -> Iterator[subprocess.Popen[str]]:
    """Run a server within the block, with its output in the log, except what is piped here."""
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE if piped else errors,
            stderr=errors,
            text=True,
            start_new_session=True,  # Ctrl-C is for us: the server is stopped when we have stopped
            preexec_fn=functools.partial(_begin, cpus) if sys.platform == "linux" else None,
        ) as process,
    ):
        try:
            yield process
        finally:
            end_group(process, STOP_SECONDS)


@contextlib.contextmanager
def _divided_cpus() -> Iterator[Collection[int]]:
    """Reserve `CLIENT_CPUS` for this process within the block; yield the server's CPUs."""
    all_of_them = allowed_cores()
    if len(all_of_them) < ENOUGH_CPUS or sys.platform != "linux":
        yield all_of_them
        return
    os.sched_setaffinity(0, all_of_them[-CLIENT_CPUS:])
    try:
        yield all_of_them[:-CLIENT_CPUS]
    finally:
        os.sched_setaffinity(0, all_of_them)


def _begin(cpus: Collection[int]) -> None:
    """Prepare the child process: set its CPUs, and have it killed with this process, lest it
    disturb the next run."""
    os.sched_setaffinity(0, cpus)
    die_with_parent(signal.SIGTERM)


def _dead(process: subprocess.Popen[str], log: Path) -> BenchError:
    # Number of lines shown from the end of a dead server's log.
    end = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
    return BenchError(f"the server ended with {process.returncode}; the end of {log}:\n{end}")
