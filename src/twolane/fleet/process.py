"""A replica as a child process that runs `twolane serve`."""

import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress

from twolane.common.resources import PR_SET_PDEATHSIG, end_group

START_SECONDS = 600.0
"""Seconds within which a replica must have loaded its model."""
LAUNCH = (
    "import ctypes, os, signal, sys\n"
    f"ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, signal.SIGKILL)\n"
    "if os.getppid() != int(sys.argv[1]): sys.exit(1)\n"
    "sys.argv = ['twolane', *sys.argv[2:]]\n"
    "from twolane.cli.main import main\n"
    "main()\n"
)
"""Program of the child process, which is killed when its parent ends."""


class StartError(Exception):
    """A replica could not start; the message says why."""


class ReplicaProcess:
    """A server process, killed when the thread that started it ends.

    Args:
        arguments: Command-line arguments of `twolane serve`, without host and port.
        host: address to listen on.
        variables: Environment variables, besides those of this process.
    """

    def __init__(self, arguments: Sequence[str], host: str, variables: Mapping[str, str]) -> None:
        words = ["serve", *arguments, "--host", host, "--port", "0"]
        command = [sys.executable, "-c", LAUNCH, str(os.getpid()), *words]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, **variables},
        )

    @property
    def pid(self) -> int:
        """Process id of the API process, whose child the engine is."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self._process.poll() is None

    def stop(self, patience: float) -> None:
        """Ask the process to end, kill it after `patience` seconds, and wait for its end."""
        end_group(self._process, patience)

    def wait_for_url(self) -> str:
        """Wait until the server accepts requests; return its URL.

        Raises:
            StartError: it ended before.
        """
        assert self._process.stdout is not None
        late = threading.Timer(START_SECONDS, self._process.kill)
        late.start()
        try:
            line = self._process.stdout.readline()
        finally:
            late.cancel()
        parts = [part.strip() for part in line.split("|")]
        urls = [part for part in parts if part.startswith("http")]
        if not urls:
            self.stop(0.0)
            raise StartError(
                f"the server ended with status {self._process.returncode} before it was ready"
            )
        threading.Thread(target=self._discard_output, daemon=True).start()
        return urls[0]

    def _discard_output(self) -> None:
        """Discard further output, so that the process never blocks on it."""
        assert self._process.stdout is not None
        with suppress(ValueError, OSError):
            while self._process.stdout.read(65536):
                pass
