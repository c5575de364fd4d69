"""Rank 0's side of several ranks: it starts the others, watches them and writes the log."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import msgspec

from twolane.devices import DeviceSettings
from twolane.lanes import base
from twolane.lanes.base import OpenLaunches, Ticket
from twolane.lanes.settings import LaneSizes
from twolane.lanes.work import AdapterRecord, Record, encode
from twolane.parallel.group import RankLost, meeting_place

LENGTH_BYTES = 4
"""Bytes, little-endian, of the length before each record of the log."""
EXPLAIN_SECONDS = 0.5
"""Seconds to wait, after a collective failed, for the news that a rank has died."""
POLL_SECONDS = 0.25
"""Seconds between two looks whether launches go on."""
PING_SECONDS = 1.0
"""Seconds between two pings of a rank that has nothing to do."""
PING = bytes(LENGTH_BYTES)
"""A record without a content: the follower writes a byte to its `FollowerStart.answers`."""
STOPPED_SECONDS = 8.0
"""Seconds for which a rank may be stopped by a signal, at the start, at rest and in a launch."""


class FollowerStart(msgspec.Struct, frozen=True):
    """The first line on a follower's standard input, as JSON."""

    settings: DeviceSettings
    rank: int
    cores: tuple[int, ...]
    """The cores that all ranks run on; those of GPUs run where they like."""
    port: int
    """TCP port of the store where the ranks meet."""
    parent: int
    """Process id of rank 0."""
    answers: int
    """File to which it writes a byte when it begins with the log, and one for each ping."""
    files: tuple[int, ...] = ()
    """Other files that it inherits."""


class Heartbeat:
    """Whether the other ranks answer while there is nothing to do.

    Args:
        files: those of the answers of ranks 1 and up.
    """

    def __init__(self, files: Sequence[int]) -> None:
        self._files = files
        self._unanswered: set[int] = set()
        """Ranks that have not answered the last ping."""
        self._known: set[int] = set()
        """Ranks that have begun with the log; before that they are starting."""
        self._asked_at = 0.0
        self._heard = [0.0] * len(files)

    def heard(self, now: float) -> None:
        """Note that launches went on, in which all ranks take part."""
        self._heard = [now] * len(self._files)

    def silences(self, now: float) -> list[float]:
        """Return the seconds since each rank's last sign of life; 0 for those that are starting."""
        return [
            now - at if rank in self._known else 0.0 for rank, at in enumerate(self._heard, start=1)
        ]

    def beat(self, now: float, ping: Callable[[], None]) -> tuple[int, float] | None:
        """Read the answers, and ping again when all have answered.

        Returns:
            The first rank that owes an answer, and for how many seconds; None: none does.
        """
        for rank, file in enumerate(self._files, start=1):
            with contextlib.suppress(BlockingIOError):
                if os.read(file, 64):
                    self._heard[rank - 1] = now
                    self._unanswered.discard(rank)
                    self._known.add(rank)
        if not self._unanswered and now - self._asked_at >= PING_SECONDS:
            self._asked_at = now
            self._unanswered = set(range(1, len(self._files) + 1))
            ping()
        late = self._unanswered & self._known
        return (min(late), now - self._asked_at) if late else None

    def skip(self, now: float) -> None:
        """Note that there is work, in which ranks may be late: silence counts from now on."""
        self._asked_at = now


class Followers:
    """The processes of ranks 1 and up, which load their parts of the model.

    They end with the pipe that carries their log, and with the process that started them.

    Args:
        settings: the model and the number of ranks.
        module: Name of the module that a follower runs.
        cores: all ranks run on them.
        files: File descriptors of this process, which all followers inherit.
    """

    def __init__(
        self,
        settings: DeviceSettings,
        module: str,
        cores: Sequence[int] = (),
        files: Sequence[int] = (),
    ) -> None:
        self.size = settings.ranks
        self.store = meeting_place()
        """Store where the ranks meet."""
        self.on_lost: Callable[[], None] = lambda: None
        """Called from a thread of its own when a rank is lost."""
        self._adapters = 0
        """Number of adapters that they were asked to read."""
        self._lost: RankLost | None = None
        self._found_lost = threading.Event()
        self._closing = threading.Event()
        self._queues: list[SimpleQueue[bytes | None]] = []
        self._answers: list[int] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank in range(1, self.size):
            answers, answer = os.pipe()
            os.set_blocking(answers, False)
            self._answers.append(answers)
            meeting = self.store.port, os.getpid(), answer
            start = FollowerStart(settings, rank, tuple(cores), *meeting, tuple(files))
            self._spawn(module, start)
            os.close(answer)
        self._heartbeat = Heartbeat(self._answers)
        self.silences: Sequence[float] = [0.0] * (self.size - 1)
        """Seconds since each of ranks 1 and up last gave a sign of life, by the watch."""
        for rank, process in enumerate(self.processes, start=1):
            self._thread(self._await_end, rank, process)
        self._thread(self._watch_stops)

    def check(self) -> None:
        """Check that all ranks are alive and go on.

        Raises:
            RankLost: one is not, or does not.
        """
        if self._lost is not None:
            raise self._lost

    def explain(self, error: BaseException) -> BaseException:
        """Return a lane's error, or the loss of another rank that is found within a moment."""
        if isinstance(error, RankLost):
            self._found_lost.wait(EXPLAIN_SECONDS)
        return self._lost or error

    def start(self, sizes: LaneSizes) -> None:
        """Have the ranks make lanes of these sizes (the second line) and be ready for the log,
        which follows it."""
        self._send(msgspec.json.encode(sizes) + b"\n")

    def watch(self, launches: OpenLaunches, progress: Callable[[], int] = lambda: 0) -> None:
        """Count a rank as lost, from now on, when launches do not go on within their timeout or
        when it does not answer while there are none.

        Args:
            launches: those in which all ranks take part.
            progress: changes when one goes on, also before it has ended a step.
        """
        self._thread(self._watch, launches, progress)

    def log(self, record: Record) -> None:
        """Send a record to all ranks, after what was logged before; does not wait."""
        encoded = encode(record)
        self._send(len(encoded).to_bytes(LENGTH_BYTES, "little") + encoded)

    def load_adapter(self, slot: int, path: str, digest: bytes | None) -> None:
        """Have all ranks read an adapter, as `Lanes.load_adapter` does; wait until they have.

        Raises:
            ValueError: one of them cannot; the message says which, and why.
            RankLost: one of them is lost, or they are being ended.
        """
        self._adapters += 1
        names = [adapter_key(self._adapters, rank) for rank in range(1, self.size)]
        self.log(AdapterRecord(slot, path, digest, self._adapters))
        while not self.store.check(names):
            self.check()
            # Seconds between two looks whether all ranks have read an adapter.
            if self._closing.wait(0.02):
                raise RankLost("the ranks are being ended")
        problems = [self.store.get(name).decode() for name in names]
        for name in names:
            self.store.delete_key(name)
        for rank, problem in enumerate(problems, start=1):
            if problem:
                raise ValueError(f"rank {rank}: {problem}")

    def close(self, timeout: float) -> None:
        """End the ranks: by the end of their log, or else by force."""
        self._closing.set()
        for queue in self._queues:
            queue.put(None)
        for process in self.processes:
            try:
                process.wait(0.0 if self._lost is not None else timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _spawn(self, module: str, start: FollowerStart) -> None:
        command = [sys.executable, "-m", module]
        environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}  # ranks share the cores
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, env=environment, pass_fds=(start.answers, *start.files)
        )
        self.processes.append(process)
        queue: SimpleQueue[bytes | None] = SimpleQueue()
        self._queues.append(queue)
        self._thread(_write, process, queue)
        queue.put(msgspec.json.encode(start) + b"\n")

    def _thread(self, run: Callable[..., None], *args: object) -> None:
        name = f"ranks-{run.__name__.strip('_')}"
        threading.Thread(target=run, args=args, name=name, daemon=True).start()

    def _send(self, message: bytes) -> None:
        for queue in self._queues:
            queue.put(message)

    def _await_end(self, rank: int, process: "subprocess.Popen[bytes]") -> None:
        code = process.wait()
        if self.store.check([key := failure_key(rank)]):
            self._lose(f"rank {rank} of {self.size}: {self.store.get(key).decode()}")
        if code > 0:  # perhaps because it missed another one, which was killed
            self._found_lost.wait(EXPLAIN_SECONDS / 2)
        self._lose(f"rank {rank} of {self.size} has died (exit code {code})")

    def _polls(self) -> Iterator[float]:
        """Yield a clock's seconds at each look at the ranks, until one is lost or all are closed.

        While this process itself stands still, the clock does too.
        """
        looked, now = time.monotonic(), 0.0
        while not self._closing.wait(POLL_SECONDS) and self._lost is None:
            last, looked = looked, time.monotonic()
            # Seconds between two looks that count at most: if they are further apart, this process
            # itself stood still.
            now += min(looked - last, 1.0)
            yield now

    def _watch_stops(self) -> None:
        """Count a rank as lost that stays stopped: it does not come back by itself."""
        since: dict[int, float] = {}
        for now in self._polls():
            since = {rank: since.get(rank, now) for rank in self._stopped()}
            for rank, begun in since.items():
                if now - begun > STOPPED_SECONDS:
                    seconds = f"{now - begun:.1f} s"
                    self._lose(f"rank {rank} of {self.size} has been stopped for {seconds}")

    def _stopped(self) -> list[int]:
        """Ranks that a signal has stopped."""
        processes = enumerate(self.processes, start=1)
        return [rank for rank, process in processes if _is_stopped(process.pid)]

    def _watch(self, launches: OpenLaunches, progress: Callable[[], int]) -> None:
        progressed_at = 0.0
        before: dict[Ticket, int] = {}
        progressed = progress()
        heartbeat = self._heartbeat
        for now in self._polls():
            steps = {ticket: len(ticket.steps) for ticket in launches.waiting()}
            last_progress, progressed = progressed, progress()
            if (
                not before
                or progressed != last_progress
                or any(steps.get(ticket) != count for ticket, count in before.items())
            ):
                progressed_at = now
                if before:
                    heartbeat.heard(now)
            elif now - progressed_at > max(ticket.timeout for ticket in before):
                self._lose(self._overdue(next(iter(before)), now - progressed_at))
            before = steps
            self.silences = heartbeat.silences(now)
            if steps:
                heartbeat.skip(now)
            elif late := heartbeat.beat(now, partial(self._send, PING)):
                self._lose_silent(*late)

    def _lose_silent(self, rank: int, seconds: float) -> None:
        """Count a rank as lost if it has been silent, with nothing to do, for far longer than one
        that is short of CPU time may be."""
        if seconds > base.UNPREDICTED_SECONDS - PING_SECONDS:  # perhaps since before the ping
            self._lose(f"rank {rank} of {self.size} has not answered for {seconds:.1f} s")

    def _overdue(self, ticket: Ticket, seconds: float) -> str:
        return (
            f"rank 0 of {self.size} has waited {seconds:.1f} s for the others in launch "
            f"{ticket.number}, in the {ticket.lane} lane{self._stopped_note()}"
        )

    def _stopped_note(self) -> str:
        """Return the end of a sentence that names the stopped ranks; empty if none is."""
        return ", and ".join(["", *(f"rank {rank} is stopped" for rank in self._stopped())])

    def _lose(self, why: str) -> None:
        if not self._closing.is_set() and self._lost is None:
            self._lost = RankLost(why)
            self._found_lost.set()
            self.on_lost()


def adapter_key(number: int, rank: int) -> str:
    """Return the store's key under which a rank reports on an adapter: empty, or why it could not
    be read."""
    return f"adapter-{number}-{rank}"


def failure_key(rank: int) -> str:
    """Return the store's key under which a rank reports why it cannot start."""
    return f"failure-{rank}"


def _is_stopped(process: int) -> bool:
    """Return whether a process was stopped by a signal."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")")[-1].split()[0] in ("T", "t")
    except OSError:
        return False


def _write(process: "subprocess.Popen[bytes]", queue: "SimpleQueue[bytes | None]") -> None:
    """Write the queued messages to a follower, so that the sender never waits for it."""
    assert process.stdin is not None
    try:
        while (message := queue.get()) is not None:
            process.stdin.write(message)
            process.stdin.flush()
        process.stdin.close()
    except OSError:  # it has died, which `Followers.check` reports
        return
