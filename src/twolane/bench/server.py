"""A `twolane serve` of the benchmark's own: started, waited for, stopped."""

import contextlib
import ctypes
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from twolane.bench.serve import BenchError
from twolane.common.resources import usable_cores

STOP_SECONDS = 30.0
"""How long a server may take to end before it is killed."""
CLIENT_CPUS, ENOUGH_CPUS = 2, 8
"""CPUs that the client keeps to itself where there are so many: it stands for one on a machine of
its own. Where the kernel wakes it on the server's CPU, it delays the tokens that it is to time."""
LOG_LINES = 5
"""Number of lines shown from the end of a dead server's log."""


@dataclass(frozen=True)
class Server:
    """A running server."""

    process: subprocess.Popen[str]
    announcement: str
    """The line in which it says what it serves, on what, and where."""
    log: Path
    """Its standard error."""

    @property
    def url(self) -> str:
        """Where it listens."""
        return self.announcement.split(" | ")[1]

    @property
    def system(self) -> str:
        """Name of the system that it runs."""
        return self.announcement.split(" | ")[3].split(" on ")[0]

    def check(self) -> None:
        """See that it is still there.

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
    command = [sys.executable, "-m", "twolane", "serve", *arguments, "--port", "0"]
    with (
        _divided_cpus() as cpus,
        log.open("wb") as errors,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,  # Ctrl-C is for us: the server is stopped when we have stopped
            preexec_fn=functools.partial(_begin, cpus) if sys.platform == "linux" else None,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            announcement = process.stdout.readline().strip()
            if not announcement:
                process.wait()
                raise _dead(process, log)
            yield Server(process, announcement, log)
        finally:
            _stop(process)


@contextlib.contextmanager
def _divided_cpus() -> Iterator[Collection[int]]:
    """Keep `CLIENT_CPUS` for this process, while the block lasts; yield the server's."""
    all_of_them = usable_cores()
    if len(all_of_them) < ENOUGH_CPUS or sys.platform != "linux":
        yield all_of_them
        return
    os.sched_setaffinity(0, all_of_them[-CLIENT_CPUS:])
    try:
        yield all_of_them[:-CLIENT_CPUS]
    finally:
        os.sched_setaffinity(0, all_of_them)


def _stop(process: subprocess.Popen[str]) -> None:
    """End it in order, and at once after `STOP_SECONDS` or at Ctrl-C: it is not left behind."""
    try:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
    finally:
        process.kill()  # nothing, if it has ended
        process.wait()


def _begin(cpus: Collection[int]) -> None:
    """In the server, before it starts: take the CPUs that are left to it, and have the kernel stop
    it if this process is killed, for it would spoil the next run."""
    os.sched_setaffinity(0, cpus)
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


def _dead(process: subprocess.Popen[str], log: Path) -> BenchError:
    end = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
    return BenchError(f"the server ended with {process.returncode}; the end of {log}:\n{end}")
