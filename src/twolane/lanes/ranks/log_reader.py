"""The start and the launch log of a rank other than 0, on any device.

The log comes on its standard input. It lives as long as that pipe is open, and no longer than the
process that started it.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import Protocol

import msgspec

from twolane.common.resources import die_with_parent
from twolane.lanes.ranks.followers import (
    LENGTH_BYTES,
    PING,
    FollowerStart,
    adapter_key,
    failure_key,
)
from twolane.lanes.settings import LaneSizes, memory_errors
from twolane.lanes.work import AdapterRecord, Record, decode
from twolane.parallel.group import meeting_at


class ReadsAdapters(Protocol):
    """The part of a rank that reads adapters."""

    def load_adapter(self, slot: int, path: str, digest: bytes | None = None) -> None:
        """See `Lanes.load_adapter`."""


class AdapterReports:
    """Reports to rank 0 the result of reading each adapter on this rank.

    Args:
        start: The start message of this rank.
    """

    def __init__(self, start: FollowerStart) -> None:
        self._rank = start.rank
        # A client of its own: one that waits for something keeps others out.
        self._store = meeting_at(start.port)

    def load(self, record: AdapterRecord, reader: ReadsAdapters) -> None:
        """Read an adapter and report the result; rank 0 raises an error and frees the slot."""
        problem = ""
        try:
            reader.load_adapter(record.slot, record.path, record.digest)
        except Exception as error:
            problem = str(error) if isinstance(error, ValueError) else repr(error)
        self._store.set(adapter_key(record.number, self._rank), problem)


@contextlib.contextmanager
def reporting_failure(start: FollowerStart) -> Iterator[None]:
    """Report to rank 0 why this rank cannot start, and end the process.

    Raises:
        Exception: an unforeseen error.
    """
    try:
        with memory_errors(start.settings):
            yield
    except (ValueError, OSError, MemoryError) as error:
        store = meeting_at(start.port)
        store.set(failure_key(start.rank), str(error) or type(error).__name__)
        os._exit(1)  # whatever this rank has begun with others


def read_start() -> FollowerStart:
    """Read the start message; end the process if rank 0 has ended."""
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 drains first, and ends the log
        signal.signal(number, signal.SIG_IGN)
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=FollowerStart)
    die_with_parent()
    if os.getppid() != start.parent:
        sys.exit()
    return start


def read_sizes() -> LaneSizes:
    """Read the sizes of the lanes to make; end the process if rank 0 has ended."""
    if not (line := sys.stdin.buffer.readline()):
        sys.exit()
    return msgspec.json.decode(line, type=LaneSizes)


def read_log(answers: int) -> Iterator[Record]:
    """Yield the records of the log as they come.

    Args:
        answers: file for the answers to pings, see `FollowerStart`.
    """
    log = sys.stdin.buffer
    os.write(answers, b".")  # from now on it can answer
    while len(length := log.read(LENGTH_BYTES)) == LENGTH_BYTES:
        if length == PING:
            os.write(answers, b".")
        else:
            yield decode(log.read(int.from_bytes(length, "little")))
