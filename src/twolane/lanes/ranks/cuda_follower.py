"""A rank other than 0 on a GPU: `python -m twolane.lanes.ranks.cuda_follower`.

It queues on its GPU what rank 0 has queued on its own, in the same order over both lanes, and waits
for nothing: the device orders launches by events, as rank 0's does.
"""

import os
import traceback
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, NoReturn

import torch

from twolane.common import garbage
from twolane.lanes import work
from twolane.lanes.cuda.device_clock import new_event
from twolane.lanes.cuda.green_contexts import GreenContexts
from twolane.lanes.cuda.lanes import is_slice
from twolane.lanes.cuda.machine import CudaMachine
from twolane.lanes.cuda.runner import CudaRunner, Queued
from twolane.lanes.ranks import log_reader
from twolane.lanes.ranks.cuda_machine import connect, load_rank
from twolane.parallel.group import meeting_at


class _OpenLaunch(NamedTuple):
    """A launch that may be under way."""

    number: int
    ended: torch.cuda.Event
    kept: object


class FollowerLanes:
    """The lanes of a rank other than 0.

    Args:
        runner: queues the work.
        partitions: the levels and their streams.
        log: The launch log, which says what to do.
        reports: sends rank 0 the results of reading adapters.
    """

    def __init__(
        self,
        runner: CudaRunner,
        partitions: GreenContexts,
        log: Iterator[work.Record],
        reports: log_reader.AdapterReports,
    ) -> None:
        self._runner, self._partitions, self._log = runner, partitions, log
        self._reports = reports
        self._open: deque[_OpenLaunch] = deque()
        self._last: dict[str, int] = {}
        """Number of the last launch that used each of what launches share."""
        self._reader = ThreadPoolExecutor(1, "adapters")
        self._layers = 0
        """Layers of the slice that is being launched that go before the next record."""

    def follow(self) -> None:
        """Carry out the log to its end."""
        for record in self._log:
            self._carry_out(record)

    def _carry_out(self, record: work.Record) -> None:
        if isinstance(record, work.LaunchRecord):
            self._launch(record)
        elif isinstance(record, work.DropRecord):
            self._runner.drop(record.batch)
        elif isinstance(record, work.FillRecord):
            self._runner.kv.fill()
        elif isinstance(record, work.AdapterRecord):
            self._reader.submit(self._load, record)
        else:
            raise ValueError(f"the log has {record}, and no slice is being launched")

    def _load(self, record: work.AdapterRecord) -> None:
        torch.cuda.set_device(self._partitions.device)
        self._reports.load(record, self._runner)

    def _launch(self, record: work.LaunchRecord) -> None:
        while self._open and self._open[0].ended.query():  # type: ignore[no-untyped-call]
            self._open.popleft()
        stream = self._partitions.stream(record.lane, record.units)
        used = work.used_by(record.lane, record.work)
        before = {self._last[name] for name in used if name in self._last} | set(record.after)
        ended = new_event()
        with torch.cuda.stream(stream), torch.inference_mode():
            for launch in self._open:
                if launch.number in before:
                    stream.wait_event(launch.ended)
            queued = self._run(record)
            ended.record(stream)
        self._open.append(_OpenLaunch(record.number, ended, queued.kept))
        self._last.update(dict.fromkeys(used, record.number))

    def _run(self, record: work.LaunchRecord) -> Queued:
        """Queue a launch on the current stream."""
        between = self._between if is_slice(record.lane, record.work) else None
        if between is not None:
            self._layers = 0
        return self._runner.run(record.work, record.lane, record.units, between)

    def _between(self) -> None:
        """Before a layer of a slice: what rank 0 has launched before it."""
        while self._layers == 0:
            record = next(self._log)
            if isinstance(record, work.PieceRecord):
                self._layers = record.layers
            else:
                self._carry_out(record)
        self._layers -= 1


def main() -> NoReturn:
    """Follow until the log ends."""
    start = log_reader.read_start()
    with log_reader.reporting_failure(start):
        machine = CudaMachine(*load_rank(start.settings, start.rank, lambda *_: None))
    store = meeting_at(start.port)
    connect(machine, start.settings.all_reduce, store, lambda: None)
    sizes = log_reader.read_sizes()
    with log_reader.reporting_failure(start):
        runner = machine.runner(sizes, lambda *_: None)
    garbage.freeze()
    try:
        log, reports = log_reader.read_log(start.answers), log_reader.AdapterReports(start)
        FollowerLanes(runner, machine.partitions, log, reports).follow()
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # whatever is queued waits for other ranks
    os._exit(0)


if __name__ == "__main__":
    main()
