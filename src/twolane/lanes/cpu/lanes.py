"""CPU lanes: threads pinned to shares of the cores, over one copy of the weights and one KV cache.

A lane has one worker thread for every number of cores it has run on, so that each worker's team
of OpenMP threads is created pinned to those cores and stays there; a launch waits for the one
before it in its lane, so only one worker of a lane is ever at work. The whole device takes turns
with both lanes.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch

from twolane.common.resources import ask_for_slice, pin_thread
from twolane.devices import EXCLUSIVE, LaneName
from twolane.lanes.base import OpenTickets, Ticket
from twolane.lanes.cpu.runner import Runner
from twolane.lanes.work import DecodeWork, PrefillWork, TokenMask, Work

TRIED_STEPS, TRIED_EVERY = 3, 256
"""Steps of each number of threads that are tried at first, and after which the slower is tried
again."""
FORGOTTEN = 1.002
"""The factor by which the shortest time of a step grows with each further step."""


def partitions(cores: int) -> tuple[tuple[int, int], ...]:
    """Return all ways to share the cores, (prefill, decode), and the solo ones."""
    shared = [(cores - d, d) for d in range(1, cores)]
    return (*shared, (cores, 0), (0, cores))


@dataclass(slots=True, eq=False)
class _CpuTicket(Ticket):
    finished: threading.Event = field(default_factory=threading.Event)
    masks: Future[Sequence[TokenMask]] = field(default_factory=Future)
    """The masks that it waits for before it samples."""


@dataclass(frozen=True, slots=True)
class _Job:
    ticket: _CpuTicket
    work: Work
    after: tuple[_CpuTicket, ...]


@dataclass(frozen=True, slots=True)
class _Drop:
    batch: int


class CpuLanes:
    """The lanes of one machine's cores.

    Args:
        runner: does the work.
        cores: core numbers as the operating system counts them.
        notify: called from a lane's thread whenever a ticket has results.
    """

    def __init__(self, runner: Runner, cores: Sequence[int], notify: Callable[[], None]) -> None:
        self._runner = runner
        self._cores = tuple(cores)
        self._notify = notify
        self._workers: dict[tuple[LaneName, int], _Worker] = {}
        self._last: dict[LaneName, _CpuTicket] = {}
        self._open: OpenTickets[_CpuTicket] = OpenTickets()
        self._slices: dict[int, _Worker] = {}
        """The worker of the last slice of each batch that is not launched to its end."""
        self.units = len(self._cores)
        self.levels: Sequence[tuple[int, int]] = partitions(self.units)
        self.explain: Callable[[BaseException], BaseException] = lambda error: error
        """Finds the cause of a lane's error."""

    clock = staticmethod(time.monotonic)

    def launch(self, lane: LaneName, units: int, work: Work, after: Sequence[int]) -> Ticket:
        """See `Lanes.launch`."""
        before = self._open.pending(after)
        before += [self._last[name] for name in EXCLUSIVE[lane] if name in self._last]
        ticket = self._open.add(_CpuTicket(lane, units))
        self._last[lane] = ticket
        worker = self._workers.get((lane, units))
        if worker is None:
            share, compiled = self._share(lane, units), self._runner.compiled
            worker = _Worker(lane, share, self._execute, self._runner.bind, tries=not compiled)
            self._workers[lane, units] = worker
        worker.jobs.put(_Job(ticket, work, tuple(t for t in before if not t.done)))
        if isinstance(work, PrefillWork):
            self._slices[work.batch] = worker
            if work.finishes:
                del self._slices[work.batch]
        return ticket

    def set_masks(self, number: int, masks: Sequence[TokenMask]) -> None:
        """See `Lanes.set_masks`."""
        for ticket in self._open.pending((number,)):
            ticket.masks.set_result(masks)

    def waiting(self) -> Sequence[Ticket]:
        """See `OpenLaunches.waiting`."""
        return self._open.waiting()

    def rest(self, seconds: float) -> None:
        """See `MachineLanes.rest`."""
        time.sleep(seconds)

    def fill_kv(self) -> None:
        """See `MachineLanes.fill_kv`: a core reads zeros no faster."""

    def drop(self, batch: int) -> None:
        """See `Lanes.drop`."""
        if (worker := self._slices.pop(batch, None)) is not None:
            worker.jobs.put(_Drop(batch))

    def load_adapter(self, slot: int, path: str, digest: bytes | None = None) -> None:
        """See `Lanes.load_adapter`."""
        torch.set_num_threads(1)  # of the calling thread: the cores are the lanes'
        self._runner.load_adapter(slot, path, digest)

    def drop_adapter(self, slot: int) -> None:
        """See `Lanes.drop_adapter`."""
        self._runner.drop_adapter(slot)

    def silences(self) -> Sequence[float]:
        """See `Lanes.silences`."""
        return ()

    def check(self) -> None:
        """See `Lanes.check`: errors are their tickets'."""

    def close(self, timeout: float = 1.0) -> None:
        """End the threads after what is queued; wait for each for `timeout` seconds at most."""
        for ticket in self._open.waiting():
            ticket.masks.cancel()  # they will not be set any more
        for worker in self._workers.values():
            worker.jobs.put(None)
        for worker in self._workers.values():
            worker.thread.join(timeout)
        self._workers.clear()  # they hold the lanes, which hold them

    def _share(self, lane: LaneName, units: int) -> tuple[int, ...]:
        return self._cores[-units:] if lane == "decode" else self._cores[:units]

    def _execute(self, job: _Job | _Drop) -> None:
        if isinstance(job, _Drop):
            self._runner.drop(job.batch)
            return
        for ticket in job.after:
            ticket.finished.wait()
        ticket = job.ticket
        ticket.start = self.clock()
        try:
            steps = job.work.k if isinstance(job.work, DecodeWork) else 0
            for step, tokens in enumerate(self._runner.run(job.work, ticket.masks.result), 1):
                ticket.add(tokens, self.clock())
                if step != steps:  # the end of the launch follows at once and notifies, too
                    self._notify()
        except BaseException as error:  # the engine raises it on its own thread
            ticket.error = self.explain(error)
        ticket.end = self.clock()
        ticket.finished.set()
        self._notify()


class ThreadCounts:
    """How many of a lane's threads run a decode step: all, or one, whichever was faster.

    Waking threads for each operation costs more than they save where a step reads little memory.
    Times are kept for each power of two of rows, since more rows have more to share.

    Args:
        most: Threads of the lane.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._steps: dict[int, int] = {}
        """Number of steps by class of rows."""
        self._seconds: dict[tuple[int, int], float] = {}
        """The shortest time of a step by class of rows and threads, which grows until it is seen
        again."""

    def choose(self, rows: int) -> int:
        """Return the threads of the next step of this many rows.

        Both numbers are tried first. The slower is tried again every `TRIED_EVERY` steps, unless it
        took twice as long.
        """
        size = rows.bit_length()
        step = self._steps[size] = self._steps.get(size, -1) + 1
        if step < 2 * TRIED_STEPS:
            return (1, self._most)[step % 2]
        fewer, all_of_them = (self._seconds.get((size, n), 0.0) for n in (1, self._most))
        again = step % TRIED_EVERY == 0 and 0.5 < fewer / max(all_of_them, 1e-9) < 2.0
        return 1 if (fewer <= all_of_them) != again else self._most

    def observe(self, rows: int, threads: int, seconds: float) -> None:
        """Note the time of a step of this many rows that ran on so many threads."""
        key = rows.bit_length(), threads
        known = self._seconds.get(key, seconds) * FORGOTTEN
        self._seconds[key] = min(known, seconds)


class _Worker:
    """A thread on its cores, with as many intra-op threads; `tries` how many decode steps take."""

    def __init__(
        self,
        lane: LaneName,
        cores: tuple[int, ...],
        execute: Callable[[_Job | _Drop], None],
        bind: Callable[[LaneName], None],
        *,
        tries: bool,
    ) -> None:
        self.jobs: SimpleQueue[_Job | _Drop | None] = SimpleQueue()
        self._cores = cores
        self._execute = execute
        self._lane, self._bind = lane, bind
        self._threads = ThreadCounts(len(cores)) if tries and len(cores) > 1 else None
        name = f"lane-{lane}-{len(cores)}"
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        pin_thread(self._cores)
        ask_for_slice(0.0)  # what delivers tokens goes before what computes them
        torch.set_num_threads(len(self._cores))  # of the calling thread's OpenMP team
        self._bind(self._lane)
        with torch.inference_mode():
            while (job := self.jobs.get()) is not None:
                self._run(job)

    def _run(self, job: _Job | _Drop) -> None:
        """Execute a job, decode steps on as many threads as are fastest."""
        counts = self._threads
        if counts is None or isinstance(job, _Drop) or not isinstance(job.work, DecodeWork):
            self._execute(job)
            return
        rows, ticket = len(job.work.rows), job.ticket
        threads = counts.choose(rows)
        torch.set_num_threads(threads)
        self._execute(job)
        torch.set_num_threads(len(self._cores))
        if ticket.start is not None and ticket.end is not None:
            counts.observe(rows, threads, (ticket.end - ticket.start) / job.work.k)
