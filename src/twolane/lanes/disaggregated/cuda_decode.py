"""Prefill and decode on a GPU each (1P1D): this process, rank 0, decodes on the first one.

Rank 1 is `cuda_prefill.py`, on the second GPU; `lanes.py` describes the exchange between them. Each
maps the other's KV pool. The GPUs never wait for each other: rank 1 says when a slice has ended on
its GPU, and only then does anything here read its pages.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor
from torch import distributed as dist

from twolane.common.errors import FieldError
from twolane.devices import DeviceSettings, LaneName, OnProgress
from twolane.lanes.base import Ticket
from twolane.lanes.cuda.lanes import CudaLanes, CudaTicket, HalfLaunch, WatchedLaunch
from twolane.lanes.cuda.launch_thread import Launcher
from twolane.lanes.cuda.machine import CudaMachine
from twolane.lanes.cuda.runner import CudaRunner, LaunchPlace, PendingStep, Queued
from twolane.lanes.cuda.slots import upload
from twolane.lanes.disaggregated.arrivals import Arrival, Arrivals
from twolane.lanes.disaggregated.cuda_mirror import MirroredGpuKVCache
from twolane.lanes.disaggregated.lanes import DisaggregatedLanes
from twolane.lanes.ranks.followers import Followers
from twolane.lanes.sampling_points import BatchRows, SamplingPoints
from twolane.lanes.settings import LaneSizes, check_states_stay, load_shard
from twolane.lanes.work import LaunchRecord, PrefillWork, TokenMask, Work
from twolane.parallel.group import awaited, meet
from twolane.parallel.peer_memory import PeerGroup, map_each_other

T = TypeVar("T")
FOLLOWER = "twolane.lanes.disaggregated.cuda_prefill"
"""The module that rank 1 runs."""
GROUP = "twolane-pools"
"""PyTorch's name of the two processes, which map each other's KV pool."""
POLL_SECONDS = 0.005
"""Seconds between two looks whether prompts of the start have ended."""


def lacks() -> str:
    """Return what this host lacks for prefill and decode on a GPU each; empty if nothing."""
    if (there := torch.cuda.device_count()) < 2:
        return f"takes two GPUs, and PyTorch finds {there}"
    return "" if map_each_other(2) else "takes two GPUs that map each other's memory"


class CudaDecodeRunner(CudaRunner):
    """Queues decode steps, and samples the first tokens of prompts that another GPU computes."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._begun: dict[int, BatchRows] = {}
        """Batches whose last slice was not launched, by id."""
        self._arrived: dict[int, Tensor] = {}
        """Hidden states of rows that are sampled or scored, in host memory, by batch."""

    def arrive(self, arrival: Arrival) -> None:
        """Take what is sampled from; the end of that launch is queued after it."""
        width, dtype = self._decoder.spec.hidden_size, self._decoder.dtype
        if arrival.hidden:
            self._arrived[arrival.batch] = arrival.rows(width, dtype)

    def drop(self, batch: int) -> None:
        """See `CudaRunner.drop`."""
        self._begun.pop(batch, None)

    def _prefill(self, work: PrefillWork, place: LaunchPlace) -> Queued:
        """See `CudaRunner._prefill`: all of it is on the other GPU, but for the end of prompts."""
        if work.first == 0:
            batch = BatchRows(work.rows, work.chunks)
        else:
            batch, _ = self._begun[work.batch].left(work.rows)
        if not work.finishes:
            self._begun[work.batch] = batch
            return Queued((), end=tuple)
        self.drop(work.batch)
        self.slots.upload(row.slot for row in work.rows)
        ends = SamplingPoints.of((), work.rows, batch.chunks)
        self._processors.begin(ends.begun)
        return Queued((), end=partial(self._end_prompts, work.batch, ends, place))

    def _end_prompts(
        self, batch: int, ends: SamplingPoints, place: LaunchPlace
    ) -> Sequence[PendingStep]:
        """Sample and score from the rows that have arrived."""
        needed, device = ends.needed, self._decoder.device
        shape = max(needed, default=-1) + 1, self._decoder.spec.hidden_size
        hidden = torch.empty(shape, dtype=self._decoder.dtype, device=device)
        if needed:
            rows = self._arrived.pop(batch)
            pinned = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=device.type == "cuda")
            sent = pinned.copy_(rows).to(device, non_blocking=True)
            hidden.index_copy_(0, upload(np.array(needed, dtype=np.int32), device).long(), sent)
        return self._sample(hidden, ends, place)()


class DecodeLanes(CudaLanes):
    """The lanes of the GPU that decodes; a slice in their prefill lane ends when another GPU has.

    Args:
        runner: queues the work.
        machine: this GPU.
        launcher: Launcher on the thread that captured the runner's graphs.
        notify: called from a lane's thread whenever a ticket has results.
        arrivals: messages of rank 1.
    """

    runner: CudaDecodeRunner

    def __init__(
        self,
        runner: CudaDecodeRunner,
        machine: CudaMachine,
        launcher: Launcher,
        notify: Callable[[], None],
        arrivals: Arrivals,
    ) -> None:
        super().__init__(runner, machine.partitions, launcher, notify)
        self.explain: Callable[[BaseException], BaseException] = lambda error: error
        """Finds the cause of a lane's error."""
        self._arrivals = arrivals
        self._due: SimpleQueue[tuple[CudaTicket, PrefillWork] | None] = SimpleQueue()
        """The slices that rank 1 computes, in their order."""
        self._arrived: dict[int, Arrival] = {}
        """Slices that have ended there and whose ends are not queued here, by number."""
        self._closing = threading.Event()
        threading.Thread(target=self._await, name="arrivals-due", daemon=True).start()

    def launch(self, lane: LaneName, units: int, work: Work, after: Sequence[int]) -> Ticket:
        """See `Lanes.launch`."""
        ticket = super().launch(lane, units, work, after)
        if isinstance(work, PrefillWork):
            assert isinstance(ticket, CudaTicket)
            self._due.put((ticket, work))
        return ticket

    def close(self, timeout: float = 1.0) -> None:
        """See `CudaLanes.close`."""
        self._closing.set()
        self._due.put(None)
        super().close(timeout)

    def _await(self) -> None:
        """End each slice when rank 1 reports its end; on a thread of its own."""
        while (due := self._due.get()) is not None:
            ticket, work = due
            try:
                arrival = self._arrivals.take(work.batch, work.last)
            except BaseException as error:  # the engine raises it on its own thread
                ticket.fail(self.explain(error))
                self._notify()
                continue
            if not self._closing.is_set():
                self._launcher.submit(partial(self._arrive, ticket.number, arrival), "step")

    def _arrive(self, number: int, arrival: Arrival) -> None:
        self._arrived[number] = arrival
        self._end_ready()

    def _launch(
        self, ticket: CudaTicket, record: LaunchRecord, after: Sequence[CudaTicket]
    ) -> None:
        if isinstance(record.work, PrefillWork) and not record.work.late:
            self._masks[ticket.number] = ()  # its end waits for no masks, but for its pages
        super()._launch(ticket, record, after)

    def _ready(self) -> Collection[int]:
        """See `CudaLanes._ready`: slices that have arrived, and decode steps."""
        ready = super()._ready()
        return {n for n in ready if n in self._arrived or self._halves[n].ticket.lane != "prefill"}

    def _end(self, half: HalfLaunch, masks: Sequence[TokenMask]) -> WatchedLaunch:
        if half.ticket.lane == "prefill":
            self.runner.arrive(self._arrived.pop(half.ticket.number))
        return super()._end(half, masks)


class MirroredCudaMachine(CudaMachine):
    """One of the two GPUs, with the whole model and a KV pool that the other GPU mirrors.

    Args:
        settings: the model.
        rank: The rank of this process, which is the number of its GPU.
        store: The store at which the two processes meet.
        check: called while the other one has not come; raises if it will not.
        progress: called with the steps of loading.

    Raises:
        FieldError: there is no room for the adapters.
        ValueError: a setting is wrong, or the model.
    """

    def __init__(
        self,
        settings: DeviceSettings,
        rank: int,
        store: dist.TCPStore,
        check: Callable[[], None],
        progress: OnProgress,
    ) -> None:
        torch.cuda.set_device(rank)
        self._number, self._store, self._check = rank, store, check
        spec, weights = load_shard(settings, f"cuda:{rank}", progress)
        super().__init__(spec, weights, replace(settings, levels=()))
        notes = self._meet("loaded", json.dumps(self.free_bytes()))
        self.min_free = min(map(int, notes))

    def kv_cache(self, sizes: LaneSizes) -> MirroredGpuKVCache:
        """See `CudaMachine.kv_cache`: both processes allocate and map both pools."""
        group = PeerGroup(GROUP, self._number, 2, dist.PrefixStore("pools", self._store))
        spec, pages, page_size = self.decoder.spec, sizes.pages, sizes.page_size
        pool = pages, page_size, self._kv_dtype, self.device
        return MirroredGpuKVCache(spec, *pool, group, self.decoder.layout)

    def meet_ready(self) -> None:
        """Wait until both have captured their graphs."""
        self._meet("ready")

    def _meet(self, where: str, note: str = "") -> list[str]:
        return meet(self._number, 2, dist.PrefixStore(where, self._store), self._check, note)


class DisaggregatedCudaMachine(MirroredCudaMachine):
    """Rank 0's GPU, which decodes, and the process of the one that computes prompts.

    Raises:
        FieldError: there are not two GPUs, or they cannot write to each other's memory.
        ValueError: a setting is wrong, or the model.
        RankLost: rank 1 does not start.
    """

    runner_type = CudaDecodeRunner
    prefills = False

    def __init__(self, settings: DeviceSettings, progress: OnProgress) -> None:
        if lacking := lacks():
            raise FieldError("disaggregated", lacking)
        check_states_stay(settings)
        read, write = os.pipe()
        followers = self.followers = Followers(settings, FOLLOWER, files=(write,))
        os.close(write)
        self._arrivals = Arrivals(read)
        super().__init__(settings, 0, followers.store, followers.check, progress)

    def start(  # type: ignore[override]  # its launches are sent to another process
        self, sizes: LaneSizes, notify: Callable[[], None], progress: OnProgress
    ) -> DisaggregatedLanes:
        """See `CudaMachine.start`; once only."""
        self.followers.on_lost = notify
        self.followers.start(sizes)
        runner, launcher = self._launched_runner(sizes, progress)
        assert isinstance(runner, CudaDecodeRunner)
        self.meet_ready()
        local = DecodeLanes(runner, self, launcher, notify, self._arrivals)
        lanes = DisaggregatedLanes(local, self.followers)
        progress("warm-up", 0.0)
        units, prompts = self.partitions.units, self.first_prompts(sizes)
        for ticket in [lanes.launch("prefill", units, whole, ()) for whole in prompts]:
            while not ticket.done:
                self.followers.check()
                time.sleep(POLL_SECONDS)
            ticket.check()
        return lanes

    def _awaited(self, future: "Future[T]") -> T:
        return awaited(future, self.followers.check)
