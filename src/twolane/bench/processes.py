"""A load that several processes send, so that none of them reads too many tokens.

A process that reads thousands of tokens a second is late to read, and late to send. Each request is
sent and read by one process; all count from the same start, on the machine's monotonic clock.
"""

import asyncio
import math
import signal
import struct
import subprocess
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping, Sequence

import msgspec

from twolane.bench.client import Client, Job, LoadRun, RunCounts
from twolane.common import garbage
from twolane.common.resources import usable_cores
from twolane.results.record import Record

TOKENS_PER_PROCESS = 2000.0
"""Output tokens a second beyond which a load is split."""
SHORTEST_SECONDS = 10.0
"""Seconds that a load takes at least, for the estimate of its tokens a second."""
LEAD_SECONDS = 0.1
"""Seconds from the time at which all processes are told to start to the start."""
LENGTH = struct.Struct("<I")


class _LoadPart(msgspec.Struct):
    """The part of a load that a process sends."""

    url: str
    headers: dict[str, str]
    timeout: float
    jobs: list[Job]


class _Sent(msgspec.Struct, tag=True):
    index: int


class _First(msgspec.Struct, tag=True):
    index: int
    ttft: float


class _Ended(msgspec.Struct, tag=True):
    record: Record


class _Over(msgspec.Struct, tag=True):
    """The last message of a process."""

    duration: float
    lags: list[float]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Sent | _First | _Ended | _Over).decode


def processes_for(jobs: Sequence[Job], max_concurrency: int | None) -> int:
    """Return in how many processes to send a load: one if requests wait for each other."""
    if max_concurrency is not None or not jobs:
        return 1
    seconds = max(SHORTEST_SECONDS, max(job.arrival for job in jobs))
    rate = sum(job.output_tokens for job in jobs) / seconds
    return max(1, min(math.ceil(rate / TOKENS_PER_PROCESS), len(usable_cores())))


class LoadProcesses:
    """A load that is sent by several processes; see `LoadRun`, whose results it has.

    Args:
        url: The endpoint.
        headers: Sent with each request.
        timeout: Seconds that one request may take.
        jobs: The jobs, in order of arrival.
        count: Number of processes.
        on_change: See `LoadRun`, as below.
        on_record: Called with each outcome.
        on_first: Called with an index and a TTFT.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        timeout: float,
        jobs: Sequence[Job],
        count: int,
        *,
        on_change: Callable[[RunCounts], None],
        on_record: Callable[[Record], None],
        on_first: Callable[[int, float], None],
    ) -> None:
        parts = [[*jobs[first::count]] for first in range(count)]
        self._parts = [_LoadPart(url, {**headers}, timeout, part) for part in parts]
        self._on_change, self._on_record, self._on_first = on_change, on_record, on_first
        self._tally = RunCounts(len(jobs))
        self.records: list[Record] = []
        self.duration = 0.0
        self.lags: list[float] = []

    async def run(self, stop: asyncio.Event) -> None:
        """Send everything and wait for the answers, or until `stop` is set.

        Raises:
            OSError: a process cannot be started, or has died.
        """
        if stop.is_set():
            return
        made = [await _started() for _ in self._parts]
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.gather(*map(_ready, made, self._parts))
            start = _encode(time.perf_counter() + LEAD_SECONDS)
            for process in made:
                _write(process, start)
            reading = asyncio.create_task(self._read_all(made))
            await asyncio.wait([reading, stopped], return_when=asyncio.FIRST_COMPLETED)
            for process in made:
                if process.stdin is not None:
                    process.stdin.close()  # which stops what has not ended
            await reading
        finally:
            stopped.cancel()
            for process in made:
                if process.returncode is None:
                    process.kill()
                await process.wait()

    async def _read_all(self, made: Sequence[Process]) -> None:
        await asyncio.gather(*map(self._read, made))

    async def _read(self, process: Process) -> None:
        while True:
            message = _decode(await _frame(process))
            match message:
                case _Sent():
                    self._tally.sent += 1
                    self._on_change(self._tally)
                case _First():
                    self._on_first(message.index, message.ttft)
                case _Ended(record):
                    self._note(record)
                case _Over():
                    self.duration = max(self.duration, message.duration)
                    self.lags += message.lags
                    return

    def _note(self, record: Record) -> None:
        self.records.append(record)
        self._on_record(record)
        self._tally.end(record)
        self._on_change(self._tally)


async def _started() -> Process:
    command = sys.executable, "-m", "twolane.bench.processes"
    pipe = subprocess.PIPE
    return await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=1 << 20)


async def _ready(process: Process, part: _LoadPart) -> None:
    """Send a process its part, and wait until it has it."""
    _write(process, _encode(part))
    await _frame(process)


def _write(process: Process, data: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(_framed(data))


def _framed(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data


async def _frame(process: Process) -> bytes:
    assert process.stdout is not None
    try:
        [length] = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
        return await process.stdout.readexactly(length)
    except asyncio.IncompleteReadError as error:
        raise OSError(f"a process of the load has ended with {await process.wait()}") from error


async def _send_part() -> None:
    """Be one of the processes: its part and the start come by standard input."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer

    def tell(message: object) -> None:
        sink.write(_framed(_encode(message)))
        sink.flush()

    def told() -> bytes:
        [length] = LENGTH.unpack(source.read(LENGTH.size))
        return source.read(length)

    part = msgspec.msgpack.decode(told(), type=_LoadPart)
    tell(_Sent(0))
    garbage.freeze()
    start = msgspec.msgpack.decode(told(), type=float)
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_reader(source.fileno(), stop.set)  # its end is all that may come
    async with Client(part.url, part.headers, part.timeout) as client:
        load = LoadRun(
            client,
            part.jobs,
            on_sent=lambda index: tell(_Sent(index)),
            on_record=lambda record: tell(_Ended(record)),
            on_first=lambda index, ttft: tell(_First(index, ttft)),
        )
        await load.run(stop, start)
    tell(_Over(load.duration, [*load.lags]))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    asyncio.run(_send_part())
