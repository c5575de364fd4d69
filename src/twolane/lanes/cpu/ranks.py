"""Rank 0's side of several ranks on a CPU: it starts the others and writes their launch log."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import msgspec
from torch import distributed as dist

from twolane.common.vocabulary import LaneName
from twolane.lanes.base import Ticket
from twolane.lanes.cpu.lanes import CpuLanes
from twolane.lanes.settings import DeviceSettings
from twolane.lanes.work import DropRecord, LaunchRecord, Record, Work, encode
from twolane.parallel.group import CpuGroup, RankLost

LENGTH_BYTES = 4
"""Bytes, little-endian, of the length before each record of the log."""


class FollowerStart(msgspec.Struct, frozen=True):
    """The first line on a follower's standard input, as JSON."""

    settings: DeviceSettings
    rank: int
    cores: tuple[int, ...]
    port: int
    """TCP port of the store where the ranks meet."""
    parent: int
    """Process id of rank 0."""


class FollowerPool(msgspec.Struct, frozen=True):
    """The second line; the launch log follows it."""

    pages: int
    page_size: int
    slots: int


class Followers:
    """The processes of ranks 1 and up, which load their parts of the model.

    They end with the pipe that carries their log, and with the process that started them.

    Args:
        settings: the model and the number of ranks.
        cores: all ranks run on them.
    """

    def __init__(self, settings: DeviceSettings, cores: Sequence[int]) -> None:
        self._size = settings.tensor_parallel_size
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._lost: RankLost | None = None
        self._closing = False
        self._queues: list[SimpleQueue[bytes | None]] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank in range(1, self._size):
            start = FollowerStart(settings, rank, tuple(cores), self._store.port, os.getpid())
            self._spawn(msgspec.json.encode(start) + b"\n")

    def join(self) -> CpuGroup:
        """The group of all ranks, when they have loaded.

        Raises:
            RankLost: one has died.
        """

        def check() -> None:
            for rank, process in enumerate(self.processes, start=1):
                if (code := process.poll()) is not None:
                    raise self._lost_rank(rank, code)

        return CpuGroup(0, self._size, self._store, check)

    def start(
        self, pages: int, page_size: int, slots: int, notify: Callable[[], None]
    ) -> "Followers":
        """Have them make their KV pools; `notify` is called when one is lost from now on."""
        self._send(msgspec.json.encode(FollowerPool(pages, page_size, slots)) + b"\n")
        for rank, process in enumerate(self.processes, start=1):
            name = f"rank-{rank}"
            watch = threading.Thread(
                target=self._watch, args=(rank, process, notify), name=name, daemon=True
            )
            watch.start()
        return self

    def log(self, record: Record) -> None:
        """Have all of them carry it out behind what was logged before; does not wait."""
        encoded = encode(record)
        self._send(len(encoded).to_bytes(LENGTH_BYTES, "little") + encoded)

    def check(self) -> None:
        """See that all are alive.

        Raises:
            RankLost: one is not.
        """
        if self._lost is not None:
            raise self._lost

    def close(self, timeout: float) -> None:
        """End them: by the end of their log, or else by force."""
        self._closing = True
        for queue in self._queues:
            queue.put(None)
        for process in self.processes:
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _spawn(self, start: bytes) -> None:
        command = [sys.executable, "-m", "twolane.lanes.cpu.follower"]
        environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}  # ranks share the cores
        process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
        self.processes.append(process)
        queue: SimpleQueue[bytes | None] = SimpleQueue()
        self._queues.append(queue)
        threading.Thread(target=_write, args=(process, queue), daemon=True).start()
        queue.put(start)

    def _send(self, message: bytes) -> None:
        for queue in self._queues:
            queue.put(message)

    def _watch(
        self, rank: int, process: "subprocess.Popen[bytes]", notify: Callable[[], None]
    ) -> None:
        code = process.wait()
        if not self._closing:
            self._lost = self._lost_rank(rank, code)
            notify()

    def _lost_rank(self, rank: int, code: int) -> RankLost:
        return RankLost(f"rank {rank} of {self._size} has died (exit code {code})")


def _write(process: "subprocess.Popen[bytes]", queue: "SimpleQueue[bytes | None]") -> None:
    """Write to one follower what is queued for it; whoever queues never waits for it."""
    assert process.stdin is not None
    try:
        while (message := queue.get()) is not None:
            process.stdin.write(message)
            process.stdin.flush()
        process.stdin.close()
    except OSError:  # it has died, which `Followers.check` tells
        return


class RankedLanes:
    """Rank 0's lanes, whose every launch all other ranks carry out, too, in the same order."""

    def __init__(self, lanes: CpuLanes, followers: Followers) -> None:
        self._lanes, self._followers = lanes, followers
        self.units = lanes.units
        self.levels = lanes.levels

    clock = staticmethod(CpuLanes.clock)

    def launch(self, lane: LaneName, units: int, work: Work, after: Sequence[int]) -> Ticket:
        """See `Lanes.launch`."""
        self._followers.log(LaunchRecord(lane, units, work, tuple(after)))
        return self._lanes.launch(lane, units, work, after)

    def drop(self, batch: int) -> None:
        """See `Lanes.drop`."""
        self._followers.log(DropRecord(batch))
        self._lanes.drop(batch)

    def check(self) -> None:
        """See `Lanes.check`."""
        self._followers.check()

    def rest(self, seconds: float) -> None:
        """See `MachineLanes.rest`."""
        self._lanes.rest(seconds)

    def fill_kv(self) -> None:
        """See `MachineLanes.fill_kv`."""
        self._lanes.fill_kv()

    def close(self, timeout: float = 1.0) -> None:
        """See `CpuLanes.close`; ends the other ranks, too."""
        self._lanes.close(timeout)
        self._followers.close(timeout)
