"""What a rank other than 0 does on any device: it reads how to start, and then the launch log.

The log comes on its standard input. It lives as long as that pipe is open, and no longer than the
process that started it.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator

import msgspec

from twolane.lanes.followers import LENGTH_BYTES, PING, FollowerStart
from twolane.lanes.settings import LaneSizes
from twolane.lanes.work import Record, decode

PR_SET_PDEATHSIG = 1


def read_start() -> FollowerStart | None:
    """How to start; None: rank 0 has ended."""
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 drains first, and ends the log
        signal.signal(number, signal.SIG_IGN)
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=FollowerStart)
    return start if _dies_with(start.parent) else None


def read_sizes() -> LaneSizes | None:
    """The sizes of the lanes to make; None: rank 0 has ended."""
    line = sys.stdin.buffer.readline()
    return msgspec.json.decode(line, type=LaneSizes) if line else None


def read_log(answers: int) -> Iterator[Record]:
    """The records of the log as they come; asleep between them.

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


def _dies_with(parent: int) -> bool:
    """Have the system kill this process when its parent dies; whether that still lives."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent
