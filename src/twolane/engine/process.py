"""The engine process: model, lanes and loop behind two ZeroMQ sockets.

Started as `python -m twolane.engine` with an `EngineStart` on its standard input. It lives as
long as that pipe is open and its parent lives.
"""

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from math import ceil
from types import FrameType

import msgspec
import zmq

from twolane.common import garbage
from twolane.common.errors import FieldError
from twolane.common.log_lines import log_to
from twolane.common.resources import die_with_parent
from twolane.devices import StartTimes
from twolane.engine.build import Built, build
from twolane.engine.config import EngineStart
from twolane.engine.loop import run
from twolane.engine.messages import (
    Fatal,
    FromEngine,
    Progress,
    ToEngine,
    decode_to_engine,
    encode,
)

log = logging.getLogger("twolane.engine")

SWITCH_SECONDS = 0.0001
"""Python's switch interval in the engine's process. A thread that launches, or has seen tokens,
waits this long for Python's lock while the loop plans: each time that it has called the driver. The
default of 5 ms is half a decode step."""


class ApiProcessGone(Exception):
    """The API process has ended."""


class Waker:
    """Wakes the loop from another thread; wake-ups before the next wait are not lost."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        os.set_blocking(self._write_fd, False)

    def wake(self) -> None:
        """Make the loop's wait return."""
        with contextlib.suppress(BlockingIOError):  # the pipe is full: the loop will wake anyway
            os.write(self._write_fd, b"x")

    def clear(self) -> None:
        """Forget the wake-ups so far."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.read_fd, 4096):
                pass


class ZmqPort:
    """The loop's port to the API process: messages, its pipe, and the lanes' wake-ups.

    The clock of lanes that run on a real device is `time.monotonic`.

    Args:
        start: the addresses of the API process's sockets.
        waker: wakes the loop when a ticket has results.
    """

    def __init__(self, start: EngineStart, waker: Waker) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._inbox = context.socket(zmq.PULL)
        self._inbox.set_hwm(0)
        self._inbox.connect(start.to_engine)
        self._outbox = context.socket(zmq.PUSH)
        self._outbox.set_hwm(0)
        # Milliseconds after which an API process that does not read counts as gone or stuck; its
        # pipe shows which.
        self._outbox.setsockopt(zmq.SNDTIMEO, 5000)
        self._outbox.connect(start.from_engine)
        self._waker = waker
        self._poller = zmq.Poller()
        for source in (self._inbox, waker.read_fd, sys.stdin.fileno()):
            self._poller.register(source, zmq.POLLIN)
        self.stopped = False

    def receive(self) -> Sequence[ToEngine] | None:
        """See `Port.receive`."""
        if self.stopped:
            return None
        messages: list[ToEngine] = []
        while True:
            try:
                messages.append(decode_to_engine(self._inbox.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return messages

    def send(self, message: FromEngine) -> None:
        """See `Port.send`; it sends any message to the API process."""
        self._outbox.send(encode(message))

    def wait(self, wake_at: float | None) -> None:
        """See `Port.wait`."""
        timeout = None if wake_at is None else ceil(max(0.0, wake_at - time.monotonic()) * 1e3)
        ready = dict(self._poller.poll(timeout))
        self._waker.clear()
        self.stopped |= sys.stdin.fileno() in ready  # nothing but its end ever comes

    def end_with(self, parent: int) -> None:
        """Stop when the API process ends, even if its pipe does not: what it has forked, such as a
        program's own workers, may hold it open for long.

        A signal instead of `die_with_parent`'s own lets the loop write its trace out.
        """

        def look(number: int, frame: FrameType | None) -> None:
            if os.getppid() != parent:  # or else a thread of it has ended
                self.stopped = True
                self._waker.wake()

        signal.signal(signal.SIGUSR1, look)
        die_with_parent(signal.SIGUSR1)

    def tell_progress(self, stage: str, fraction: float) -> None:
        """Send a step of the start; nothing is loaded for an API process that is gone.

        Raises:
            ApiProcessGone: its pipe has ended.
        """
        self.wait(0.0)
        if self.stopped:
            raise ApiProcessGone
        self.send(Progress(stage, fraction))

    def close(self) -> None:
        """Send out queued messages, within bounds."""
        self._inbox.close(linger=0)
        self._outbox.close(linger=1000)
        zmq.Context.instance().term()


def main() -> int:
    """Serve until the API process ends the pipe; return the exit code."""
    parent = os.getppid()
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineStart)
    log_to(sys.stderr.fileno(), start.log_level, "engine: %(message)s")
    # For the API process, which drains first: a terminal's Ctrl-C, and what a supervisor such as
    # systemd sends to all processes of a server.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_SECONDS)
    waker = Waker()
    built: Built | None = None
    port = ZmqPort(start, waker)
    die_with_parent()  # a start may wait for long, such as for a file that does not come
    begun = time.monotonic() if start.begun is None else start.begun
    times = StartTimes(begun, port.tell_progress)
    try:
        built = build(start.config, waker.wake, progress=times)
        garbage.return_free_memory()  # what loading took
        garbage.freeze()
        log.info(times.end())
        port.end_with(parent)
        port.send(built.ready)
        run(built.engine, port)
    except ApiProcessGone:
        return 0
    except Exception as error:
        field = error.field if isinstance(error, FieldError) else None
        port.send(Fatal(_explain(error), field))
        return 1
    finally:
        if built is not None:
            built.close()
        port.close()
    return 0


def _explain(error: Exception) -> str:
    """Return one line for the user; print the traceback of an unforeseen error to the log."""
    if isinstance(error, (ValueError, OSError, MemoryError)):
        return str(error) or type(error).__name__
    import traceback

    traceback.print_exc()
    return f"{type(error).__name__}: {error}"
