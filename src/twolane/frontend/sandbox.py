"""Untrusted programs, such as those of a checkpoint, in processes of their own.

A *zygote* sets a program up once and forks *workers*, which do jobs. A worker that takes too long
or too much memory, or whose job nobody waits for any more, is ended; the next one is there a few
milliseconds later.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import struct
import sys
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

import msgspec

from twolane.common.resources import processor_seconds
from twolane.frontend.sandboxed import BROKEN, HEAD, JOB, KILLED, LIMITS, SETUP

log = logging.getLogger("twolane.frontend")

SETUP_SECONDS = 300.0
"""Most seconds of setting a program up, the conversion of its files included."""
LONG_WORK_NICENESS = 10
"""Niceness (nice(2)) that workers of long jobs add to their own: they yield to processes that
stream tokens."""
STILL_SECONDS, STILL_SHARE = 2.0, 0.01
"""Seconds after which a process that has work counts as stopped if it had the processor for less
than this share of them."""
RAN_SHARE = 0.5
"""Share of a job's time for which its process must have run if the job is to be blamed for it."""
ENDING_SECONDS = 0.2
"""Seconds after a worker's end within which that of its zygote, if it was the cause, is noticed."""
PLAIN = frozenset(
    {
        *("PATH", "HOME", "TMPDIR", "LANG", "TZ", "TWOLANE_CACHE", "VIRTUAL_ENV"),
        *("HF_HOME", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"),
    }
)
PLAIN_PREFIXES = ("LC_", "LD_", "DYLD_", "XDG_", "PYTHON", "CONDA_")
"""Environment variables that sandboxed programs get; the others may have secrets."""
PART = 1 << 18
"""Bytes of a job that are sent at once, before other tasks have their turn."""


class SandboxError(Exception):
    """An untrusted program gave no result; the message says why, as a clause about "it"."""


class WorkerLost(Exception):
    """A worker was stopped or killed from outside while it had a job, which may be sent again; the
    message says so, as a sentence."""


class QueueFull(Exception):
    """Too many jobs are waiting; the message says which, and for what."""


class Limits(msgspec.Struct, frozen=True):
    """Limits on an untrusted program."""

    seconds: float = 5.0
    """Seconds after which a job is killed."""
    memory: int = 2 << 30
    """Most bytes that a worker may allocate."""
    waiting: int = 256 << 20
    """Most bytes of all jobs that wait for a worker."""


class Awaited:
    """A process that has work to do, since now.

    Args:
        pid: the number of the process.
    """

    def __init__(self, pid: int) -> None:
        self._pid, self._since = pid, time.monotonic()
        self._before = processor_seconds(pid)

    def ran(self, share: float) -> bool:
        """Return whether the process had the processor for at least this share of the time."""
        now, elapsed = processor_seconds(self._pid), time.monotonic() - self._since
        return (
            None in (now, self._before) or (now or 0.0) - (self._before or 0.0) >= share * elapsed
        )

    @property
    def stands_still(self) -> bool:
        """Whether the process has not run for a while, because it was stopped or frozen."""
        return time.monotonic() - self._since >= STILL_SECONDS and not self.ran(STILL_SHARE)


class FairLock:
    """A lock that goes to waiting clients in rotation, however many waiters one has."""

    def __init__(self) -> None:
        self._held = False
        self._lines: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def held_by(self, client: str) -> AsyncIterator[None]:
        """Wait for the lock and hold it."""
        if self._held:
            await self._wait(client)
        self._held = True
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, client: str) -> None:
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(client, deque()).append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Pass the lock to the client that has waited longest, if any waits."""
        while self._lines:
            client, line = self._lines.popitem(last=False)
            place = line.popleft()
            if line:
                self._lines[client] = line
            if not place.done():
                place.set_result(None)
                return
        self._held = False


class Worker:
    """A worker process.

    Args:
        reader: the stream of the worker's answers.
        writer: the stream of the worker's jobs.
        zygote: the process that forks it, with which it ends.
    """

    pid: int

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        zygote: asyncio.subprocess.Process,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._zygote = zygote

    async def greet(self) -> None:
        """Wait until the worker is ready."""
        _, reply = await read(self._reader)
        [self.pid] = struct.unpack("<q", reply)
        self._read_next()

    def _read_next(self) -> None:
        """Read the next message from now on, so that the end of the process is noticed."""
        self._reply = asyncio.create_task(read(self._reader))
        self._reply.add_done_callback(lambda reply: reply.cancelled() or reply.exception())

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        reply = self._reply
        if not reply.done() or reply.cancelled():
            return False
        return reply.exception() is not None or reply.result()[0] == KILLED

    async def do(self, job: Sequence[bytes]) -> bytes:
        """Return the result of a job, which is given in parts.

        Raises:
            SandboxError: the program itself failed.
            WorkerLost: the process was killed.
            EOFError, OSError: the process has ended.
        """
        with contextlib.suppress(ConnectionError):  # what ended the process comes as its reply
            await self._send(job)
        kind, reply = await self._reply
        if kind == KILLED:
            raise WorkerLost("the process that had this was killed, as when memory runs out")
        self._read_next()
        if kind == BROKEN:
            raise SandboxError(reply.decode(errors="replace"))
        return reply

    async def _send(self, job: Sequence[bytes]) -> None:
        self._writer.write(HEAD.pack(JOB, sum(map(len, job))))
        for part in job:
            view = memoryview(part)
            for begin in range(0, len(view), PART):
                self._writer.write(view[begin : begin + PART])
                await self._writer.drain()

    async def lost_zygote(self) -> bool:
        """Return whether the zygote has ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ENDING_SECONDS):
                await self._zygote.wait()
        return self._zygote.returncode is not None

    def end(self) -> None:
        """Kill the process."""
        if not self.ended:  # or its number may be another's by now
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self._writer.close()


class Sandbox:
    """A zygote and its workers. All methods belong to one event loop.

    Args:
        module: program to run, which calls `twolane.frontend.sandboxed.run`.
        setup: argument of the program's setup.
        limits: limits of each job and worker.
        jobs: the jobs and what they wait for, as a phrase for `QueueFull`.
    """

    setup_result: bytes
    """Result of the program's setup."""

    def __init__(self, module: str, setup: bytes, limits: Limits, jobs: str = "jobs wait") -> None:
        self.limits = limits
        self.jobs = jobs
        self._module = module
        self._setup = LIMITS.pack(limits.seconds, limits.memory) + setup
        self._zygote: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._queues: list[JobQueue] = []
        self._awaited: set[Awaited] = set()
        self._starting = asyncio.Lock()
        self._closed = False

    @property
    def problem(self) -> str | None:
        """Reason why jobs are not done for the moment; None: they are."""
        if any(awaited.stands_still for awaited in self._awaited):
            return f"a process does not run, and {self.jobs}"
        return None

    @contextlib.contextmanager
    def awaiting(self, pid: int) -> Iterator[Awaited]:
        """Watch whether a process runs while it has work to do."""
        awaited = Awaited(pid)
        self._awaited.add(awaited)
        try:
            yield awaited
        finally:
            self._awaited.discard(awaited)

    async def start(self) -> None:
        """Start the zygote unless it runs.

        Raises:
            OSError: this process has no file or no memory left for it.
            SandboxError: the program cannot be set up, or the sandbox is closed.
        """
        async with self._starting:
            self.check_open()
            if self._zygote is None or self._zygote.returncode is not None:
                await self._start()

    async def _start(self) -> None:
        self._end_zygote()
        own, its = socket.socketpair()
        with its:
            self._control = own
            self._zygote = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", self._module, str(its.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                pass_fds=[its.fileno()],
                env=plain_environment(),
                # The process group lets us kill everything that the conversion starts. It is in the
                # engine's session: niceness may count for nothing in one of its own (see `_spawn`).
                process_group=0,
            )
        try:
            async with asyncio.timeout(SETUP_SECONDS):
                kind, reply = await self._set_up(own)
        except TimeoutError as error:
            self._end_zygote()
            raise SandboxError(f"it was not set up within {SETUP_SECONDS:g} s") from error
        except (EOFError, OSError) as error:
            raise SandboxError("it ended while it was set up") from error
        except asyncio.CancelledError:
            self._end_zygote()
            raise
        if kind == BROKEN:
            raise SandboxError(reply.decode(errors="replace"))
        self.setup_result = reply

    async def _set_up(self, own: socket.socket) -> tuple[bytes, bytes]:
        # The socket itself stays with the sandbox, which sends descriptors over it.
        reader, writer = await asyncio.open_connection(sock=own.dup())
        try:
            writer.write(HEAD.pack(SETUP, len(self._setup)) + self._setup)
            await writer.drain()
            return await read(reader)
        finally:
            writer.close()

    async def worker(self, niceness: int) -> Worker:
        """Return a new worker, which adds `niceness` to its own; see nice(2).

        Raises:
            SandboxError: see `start`.
            WorkerLost: there is none, also with a new zygote.
        """
        for _ in range(2):
            try:
                await self.start()
                own, its = socket.socketpair()
            except OSError as error:  # which a new zygote does not change
                raise WorkerLost(f"no process could be started: {error.strerror}") from error
            try:
                made = await self._fork(own, its, niceness)
            except (EOFError, OSError):
                self._end_zygote()
                continue
            if self._closed:
                made.end()
            self.check_open()
            return made
        raise WorkerLost("no process could be started")

    async def _fork(self, own: socket.socket, its: socket.socket, niceness: int) -> Worker:
        """Have the zygote fork a worker that has the second of two connected sockets.

        Raises:
            EOFError, OSError: it does not, within the limit on a job.
        """
        control, zygote = self._control, self._zygote  # the sandbox may be closed meanwhile
        assert control is not None
        assert zygote is not None
        streams = await asyncio.open_connection(sock=own)
        try:
            with its, self.awaiting(zygote.pid):
                control.setblocking(True)
                socket.send_fds(control, [bytes([niceness])], [its.fileno()])
                its.close()
                made = Worker(*streams, zygote)
                async with asyncio.timeout(self.limits.seconds):
                    await made.greet()
        except BaseException:
            streams[1].transport.abort()
            raise
        return made

    def queue(self, niceness: int = 0) -> "JobQueue":
        """Return a new queue of jobs with its own worker."""
        queue = JobQueue(self, niceness)
        self._queues.append(queue)
        return queue

    async def close(self) -> None:
        """Kill all processes; none is started afterwards."""
        self._closed = True
        for queue in self._queues:
            queue.close()
        zygote = self._zygote
        self._end_zygote()
        if zygote is not None:
            await zygote.wait()

    def check_open(self) -> None:
        """Refuse jobs that were waiting when the sandbox was closed.

        Raises:
            SandboxError: it is closed.
        """
        if self._closed:
            raise SandboxError("it was ended with the server")

    def _end_zygote(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._zygote is not None and self._zygote.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._zygote.pid, signal.SIGKILL)
        self._zygote = None


class JobQueue:
    """Runs jobs in one worker, one at a time, with clients in rotation.

    Args:
        sandbox: the sandbox that starts the workers.
        niceness: the niceness that workers add to their own; see nice(2).
    """

    def __init__(self, sandbox: Sandbox, niceness: int = 0) -> None:
        self._sandbox = sandbox
        self._niceness = niceness
        self._lock = FairLock()
        self._waiting = 0
        self._worker: Worker | None = None

    async def run(self, job: Sequence[bytes], client: str = "") -> bytes:
        """Return the result of a job, given in parts that need not be joined.

        A job whose caller is cancelled is broken off.

        Raises:
            QueueFull: too many jobs wait.
            SandboxError: the program failed, or took too long or too much memory.
            WorkerLost: its process was killed or did not run.
        """
        size = sum(map(len, job))
        if self._waiting and self._waiting + size > self._sandbox.limits.waiting:
            raise QueueFull(self._sandbox.jobs)
        self._waiting += size
        try:
            async with self._lock.held_by(client):
                return await self._run(job)
        finally:
            self._waiting -= size

    async def _run(self, job: Sequence[bytes]) -> bytes:
        if self._worker is not None and self._worker.ended:
            self.close()
        try:
            if self._worker is None:
                self._worker = await self._sandbox.worker(self._niceness)
            return await self._watched(self._worker, job)
        except SandboxError:  # the worker goes on
            raise
        except BaseException as error:
            self.close()
            if isinstance(error, WorkerLost):
                log.warning("%s (%s); the next job gets another one", error, self._sandbox.jobs)
            raise

    async def _watched(self, worker: Worker, job: Sequence[bytes]) -> bytes:
        """Have a worker do a job within the limit, whether or not it keeps that by itself."""
        most = self._sandbox.limits.seconds
        too_long = f"it did not end within {most:g} s"
        began = time.monotonic()
        with self._sandbox.awaiting(worker.pid) as awaited:
            try:
                async with asyncio.timeout(most):
                    return await worker.do(job)
            except TimeoutError as error:
                ran = awaited.ran(RAN_SHARE)
                self.close()
                if ran:
                    raise SandboxError(too_long) from error
                raise WorkerLost("the process that had this did not run") from error
            except (EOFError, OSError) as error:
                self.close()
                if time.monotonic() - began >= most:
                    raise SandboxError(too_long) from error
                self._sandbox.check_open()
                if await worker.lost_zygote():
                    raise WorkerLost("the process that had this ended with its parent") from error
                raise SandboxError("it took too much memory or crashed") from error

    def close(self) -> None:
        """Kill the worker; the next job starts another one."""
        if self._worker is not None:
            self._worker.end()
            self._worker = None


def plain_environment() -> dict[str, str]:
    """Return the part of the environment that sandboxed programs get."""
    named = os.environ.items()
    return {k: v for k, v in named if k in PLAIN or k.startswith(PLAIN_PREFIXES)}


async def read(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Return the kind and the content of the next message.

    Raises:
        EOFError, OSError: there is none.
    """
    kind, size = HEAD.unpack(await reader.readexactly(HEAD.size))
    return kind, await reader.readexactly(size)
