"""A `twolane serve` of the benchmark's own: started, waited for, stopped."""

import contextlib
import ctypes
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from twolane.bench.serve import BenchError

STOP_SECONDS = 30.0
"""How long a server may take to end before it is killed."""
LOG_LINES = 5
"""Of the end of a dead server's log, that are shown."""


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

    Raises:
        BenchError: it ended before it served.
    """
    command = [sys.executable, "-m", "twolane", "serve", *arguments, "--port", "0"]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,  # Ctrl-C is for us: the server is stopped when we have stopped
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )
    with process:  # closes its pipe
        try:
            assert process.stdout is not None
            announcement = process.stdout.readline().strip()
            if not announcement:
                process.wait()
                raise _dead(process, log)
            yield Server(process, announcement, log)
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def _end_with_parent() -> None:
    """Have the kernel stop the server if this process is killed: it would spoil the next run."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


def _dead(process: subprocess.Popen[str], log: Path) -> BenchError:
    end = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
    return BenchError(f"the server ended with {process.returncode}; the end of {log}:\n{end}")
