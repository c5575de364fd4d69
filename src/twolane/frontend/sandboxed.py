"""The untrusted side of a sandbox; see `twolane.frontend.sandbox`."""

import array
import contextlib
import gc
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TypeVar

from twolane.common.resources import die_with_parent, yield_processor

T = TypeVar("T")
HEAD = struct.Struct("<cQ")
"""Header of a message: its kind and its size in bytes."""
SETUP, JOB, DONE, BROKEN, KILLED = b"s", b"j", b"d", b"b", b"k"
"""Kinds of messages: setup, job, result, error, and the zygote's that a worker was killed."""
LIMITS = struct.Struct("<dQ")
"""Header of the setup: limits on a job's seconds and on bytes of memory."""
SETUP_MEMORY = 4 << 30
"""Most bytes of memory of setting an untrusted program up."""
Handler = Callable[[bytes], bytes]
"""Runs one job."""
SetUp = Callable[[bytes], tuple[bytes, Handler]]
"""Sets an untrusted program up; returns the setup's result and the handler of its jobs."""


def run(set_up: SetUp) -> None:
    """Set an untrusted program up, then fork a worker for each socket received; the main loop of
    the zygote.

    It lives as long as the socket whose descriptor is its first argument, and as its parent, whose
    forks may hold that socket, too.
    """
    die_with_parent()
    # They are for the API process, which drains first and closes its end of the socket.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    setup = receive(control)
    if setup is None:
        return
    seconds, memory = LIMITS.unpack_from(setup)
    limit_memory(SETUP_MEMORY)
    kind, reply, handler = attempt(lambda: set_up(setup[LIMITS.size :]))
    send(control, kind, reply)
    if handler is None:
        return
    gc.collect()
    gc.freeze()
    workers: dict[int, socket.socket] = {}
    """The sockets of the workers, by process id."""
    signal.signal(signal.SIGCHLD, lambda *_: bury(workers))
    while (worker := receive_descriptor(control)) is not None:
        descriptor, niceness = worker
        own = socket.socket(fileno=descriptor)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        if (pid := os.fork()) == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
            for other in (control, *workers.values()):
                other.close()
            die_with_parent()
            yield_processor(niceness)
            work(own, handler, seconds, memory)
            os._exit(0)
        workers[pid] = own
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])


def bury(workers: dict[int, socket.socket]) -> None:
    """Wait for the workers that have ended, and close their sockets.

    A job whose worker was killed, as the kernel does when memory runs out, is told so: it may be
    sent again. No limit of the job's own kills with that signal.
    """
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            with workers.pop(pid) as own, contextlib.suppress(OSError):
                if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
                    send(own, KILLED, b"")


def work(own: socket.socket, handler: Handler, seconds: float, memory: int) -> None:
    """Run jobs in order. A job that takes too long ends the process."""
    limit_memory(memory)
    # What a native library writes about its panics is nothing that a client may fill a log with.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    send(own, DONE, struct.pack("<q", os.getpid()))
    while (job := receive(own)) is not None:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            kind, reply = DONE, handler(job)
        except BaseException as error:
            kind, reply = BROKEN, reason(error).encode(errors="replace")
        signal.setitimer(signal.ITIMER_REAL, 0)
        send(own, kind, reply)


class TookTooLong(BaseException):
    """An untrusted program did not end within its time.

    It is no `Exception`, so that code that tries one thing after another does not go on.
    """


def within(seconds: float, work: Callable[[], T]) -> T:
    """Run Python code in a process's main thread, and interrupt it after some seconds.

    Raises:
        TookTooLong: it was broken off.
    """

    def break_off(number: int, frame: FrameType | None) -> None:
        raise TookTooLong(f"it did not end within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, break_off)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return work()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def attempt(set_up: Callable[[], tuple[bytes, Handler]]) -> tuple[bytes, bytes, Handler | None]:
    """Set a program up; return the kind and content of the answer, and the handler of jobs."""
    try:
        reply, handler = set_up()
    except BaseException as error:
        return BROKEN, reason(error).encode(errors="replace"), None
    return DONE, reply, handler


def reason(error: BaseException) -> str:
    """Return an error as a message for a person; a panic is no `Exception`."""
    if isinstance(error, MemoryError):
        return "it took too much memory"
    if isinstance(error, ValueError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def limit_memory(memory: int) -> None:
    """Limit this process's memory to `memory` bytes more than it has."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[5])
    except OSError:  # this system tells of no such figure, nor keeps such a limit
        return
    most = pages * resource.getpagesize() + memory
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    # The soft one alone, since a process raises it for a program that it starts or forks.
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def send(to: socket.socket, kind: bytes, message: bytes) -> None:
    """Send a message."""
    to.sendall(HEAD.pack(kind, len(message)))
    to.sendall(message)


def receive(by: socket.socket) -> bytes | None:
    """Return the next message of any kind; None: the socket was closed."""
    head = receive_exactly(by, HEAD.size)
    return None if head is None else receive_exactly(by, HEAD.unpack(head)[1])


def receive_exactly(by: socket.socket, size: int) -> bytes | None:
    """Return `size` bytes; None: the socket was closed."""
    into, done = memoryview(bytearray(size)), 0
    while done < size:
        got = by.recv_into(into[done:])
        if got == 0:
            return None
        done += got
    return bytes(into)


def receive_descriptor(control: socket.socket) -> tuple[int, int] | None:
    """Return the descriptor of a new worker's socket and its niceness (nice(2)); None: the socket
    was closed."""
    size = socket.CMSG_SPACE(array.array("i").itemsize)
    niceness, [*ancillary], _, _ = control.recvmsg(1, size)
    if not ancillary:
        return None
    descriptors = array.array("i")
    descriptors.frombytes(ancillary[0][2])
    return descriptors[0], niceness[0]
