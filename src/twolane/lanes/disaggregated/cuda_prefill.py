"""The process that computes prompts where prefill and decode have a GPU each.

It is rank 1 of two, on the second GPU: `python -m twolane.lanes.disaggregated.cuda_prefill`. See
`lanes.py`.
"""

import os
import threading
import traceback
from collections.abc import Iterator
from queue import SimpleQueue
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from twolane.common import garbage
from twolane.lanes.cuda.logit_processors import fetch
from twolane.lanes.cuda.runner import CudaRunner, End, LaunchPlace, Queued
from twolane.lanes.cuda.slots import upload
from twolane.lanes.disaggregated.arrivals import Arrival, send_arrival
from twolane.lanes.disaggregated.cuda_decode import MirroredCudaMachine
from twolane.lanes.ranks import log_reader
from twolane.lanes.ranks.cuda_follower import FollowerLanes
from twolane.lanes.sampling_points import SamplingPoints
from twolane.lanes.work import LaunchRecord, PrefillWork, Record
from twolane.parallel.group import meeting_at


class CudaPromptRunner(CudaRunner):
    """Queues slices of prompts, and brings what is sampled or scored from to the host."""

    ends: Tensor | None = None
    """Hidden states of the batch that was queued last and ends there, [R, hidden], pinned."""

    def _sample(self, hidden: Tensor, ends: SamplingPoints, place: LaunchPlace) -> End:
        """See `CudaRunner._sample`: the other GPU samples."""
        where = upload(np.array(ends.needed, dtype=np.int32), self._decoder.device)
        self.ends = fetch(hidden[where])
        return tuple


class PromptLanes(FollowerLanes):
    """The prefill lane, which reports the end of each slice to rank 0.

    Args:
        runner: queues the work.
        machine: this GPU.
        log: The launch log, which says what to do.
        reports: sends rank 0 the results of reading adapters.
        arrivals: the pipe to rank 0.
    """

    _runner: CudaPromptRunner

    def __init__(
        self,
        runner: CudaPromptRunner,
        machine: MirroredCudaMachine,
        log: Iterator[Record],
        reports: log_reader.AdapterReports,
        arrivals: int,
    ) -> None:
        super().__init__(runner, machine.partitions, log, reports)
        self._arrivals = arrivals
        self._under_way: SimpleQueue[tuple[torch.cuda.Event, PrefillWork, Tensor | None]] = (
            SimpleQueue()
        )
        threading.Thread(target=self._report_ends, name="arrivals", daemon=True).start()

    def _launch(self, record: LaunchRecord) -> None:
        super()._launch(record)
        work = record.work
        assert isinstance(work, PrefillWork)
        ends, self._runner.ends = self._runner.ends, None
        self._under_way.put((self._open[-1].ended, work, ends))

    def _run(self, record: LaunchRecord) -> Queued:
        """See `FollowerLanes._run`: nothing goes between the layers of a slice."""
        return self._runner.run(record.work, record.lane, record.units)

    def _report_ends(self) -> None:
        """Wait for the end of each slice, in order, and report it to rank 0."""
        try:
            torch.cuda.set_device(self._partitions.device)
            while True:
                ended, work, ends = self._under_way.get()
                ended.synchronize()
                send_arrival(self._arrivals, Arrival.of(work.batch, work.last, ends))
        except BaseException:
            traceback.print_exc()
            os._exit(1)


class PromptMachine(MirroredCudaMachine):
    """The GPU that computes prompts."""

    runner_type = CudaPromptRunner
    decodes = False


def main() -> NoReturn:
    """Compute prompts until the log ends."""
    start = log_reader.read_start()
    store = meeting_at(start.port)
    with log_reader.reporting_failure(start):
        machine = PromptMachine(start.settings, start.rank, store, lambda: None, lambda *_: None)
    sizes = log_reader.read_sizes()
    with log_reader.reporting_failure(start):
        runner = machine.runner(sizes, lambda *_: None)
    assert isinstance(runner, CudaPromptRunner)
    machine.meet_ready()
    garbage.freeze()
    try:
        log, reports = log_reader.read_log(start.answers), log_reader.AdapterReports(start)
        PromptLanes(runner, machine, log, reports, start.files[0]).follow()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # without what is queued: nobody waits for it


if __name__ == "__main__":
    main()
