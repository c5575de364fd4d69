"""A rank other than 0 on a CPU: it replays the launch log that comes on its standard input.

Started as `python -m twolane.lanes.cpu.follower`. It lives as long as that pipe is open, and no
longer than the process that started it.
"""

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from typing import BinaryIO

import msgspec
import torch
from torch import distributed as dist

from twolane.lanes.base import Step
from twolane.lanes.cpu.lanes import CpuLanes
from twolane.lanes.cpu.ranks import LENGTH_BYTES, FollowerPool, FollowerStart
from twolane.lanes.cpu.runner import Runner
from twolane.lanes.settings import load_shard
from twolane.lanes.work import LaunchRecord, Record, Work, decode
from twolane.model.attention import KVCache
from twolane.model.decoder import Decoder
from twolane.parallel.group import CpuGroup

PR_SET_PDEATHSIG = 1


class _OrDie(Runner):
    """A runner whose first error ends the process: the ranks have parted ways."""

    def run(self, work: Work) -> Iterator[Step]:
        try:
            yield from super().run(work)
        except BaseException:
            traceback.print_exc()
            os._exit(1)


def main() -> int:
    """Follow until the log ends; the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 drains first, and ends the log
        signal.signal(number, signal.SIG_IGN)
    log = sys.stdin.buffer
    start = msgspec.json.decode(log.readline(), type=FollowerStart)
    if not _dies_with(start.parent):
        return 0
    torch.set_num_threads(1)  # for loading, beside the other ranks; each lane sets its own
    settings = start.settings
    spec, weights = load_shard(settings, "cpu", lambda *_: None, start.rank)
    store = dist.TCPStore("127.0.0.1", start.port, is_master=False, wait_for_workers=False)
    decoder = Decoder(spec, weights, CpuGroup(start.rank, settings.tensor_parallel_size, store))
    if not (line := log.readline()):
        return 0
    pool = msgspec.json.decode(line, type=FollowerPool)
    kv = KVCache(decoder.spec, pool.pages, pool.page_size, decoder.dtype)
    runner = _OrDie(decoder, kv, pool.page_size, pool.slots)
    lanes = CpuLanes(runner, start.cores, lambda: None)
    for record in _records(log):
        if isinstance(record, LaunchRecord):
            lanes.launch(record.lane, record.units, record.work, record.after)
        else:
            lanes.drop(record.batch)
    os._exit(0)  # without what is queued: nobody waits for it


def _dies_with(parent: int) -> bool:
    """Have the system kill this process when its parent dies; whether that still lives."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def _records(log: BinaryIO) -> Iterator[Record]:
    """The records of the log as they come; asleep between them."""
    while len(length := log.read(LENGTH_BYTES)) == LENGTH_BYTES:
        yield decode(log.read(int.from_bytes(length, "little")))


if __name__ == "__main__":
    sys.exit(main())
