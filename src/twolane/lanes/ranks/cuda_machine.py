"""Several GPUs of one host with a model on them, each a process of its own; this one is rank 0."""

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch
from torch import distributed as dist

from twolane.common.errors import FieldError
from twolane.devices import DeviceSettings, OnProgress
from twolane.kernels.collectives.reduce_norm import flag_bytes
from twolane.lanes.cuda.lanes import CudaLanes
from twolane.lanes.cuda.launch_thread import Launcher
from twolane.lanes.cuda.machine import CudaMachine
from twolane.lanes.cuda.runner import CudaRunner
from twolane.lanes.ranks.followers import Followers
from twolane.lanes.settings import LaneSizes, load_shard
from twolane.model.decoder import Weights
from twolane.model.spec import ModelSpec
from twolane.parallel.group import CHANNELS, awaited, connected, meet
from twolane.parallel.nccl import Communicator, NcclError, join, version
from twolane.parallel.peer_memory import map_each_other
from twolane.parallel.two_shot import SUM_METHODS, TwoShot

T = TypeVar("T")
FOLLOWER = "twolane.lanes.ranks.cuda_follower"
"""The module that the other ranks run."""


def load_rank(
    settings: DeviceSettings, rank: int, progress: OnProgress
) -> tuple[ModelSpec, Weights, DeviceSettings, int]:
    """Return the arguments of a rank's `CudaMachine`: its part of the model, on its GPU."""
    torch.cuda.set_device(rank)
    return *load_shard(settings, f"cuda:{rank}", progress, rank), settings, rank


def connect(
    machine: CudaMachine, all_reduce: str, store: dist.Store, check: Callable[[], None]
) -> int:
    """Meet the other ranks and make a communicator for each lane.

    Args:
        machine: this rank's; its `channels` and `step_channel` are set.
        all_reduce: Method by which decode steps sum; see `EngineConfig`.
        store: The store at which the ranks meet.
        check: called while others have not come; raises if they will not.

    Returns:
        The free bytes of the rank that has the fewest.

    Raises:
        ValueError: the ranks' GPUs are not alike.
    """
    shard = machine.decoder.shard
    own = json.dumps([machine.partitions.levels, machine.free_bytes()])
    notes = [json.loads(note) for note in meet(shard.rank, shard.size, store, check, own)]
    for rank, (levels, _) in enumerate(notes):
        if levels != notes[0][0]:
            granted = f"rank 0 was granted {notes[0][0]}, rank {rank} {levels}"
            raise ValueError(f"levels: the GPUs must be alike, and {granted}")

    def communicator(store: dist.Store) -> Communicator:
        torch.cuda.set_device(machine.device)  # of this thread
        return join(shard.rank, shard.size, store)

    ranks = shard.rank, shard.size
    channels = {
        name: connected(name, *ranks, store, check, communicator)
        for name in sorted(set(CHANNELS.values()))
    }
    machine.channels = {lane: channels[name] for lane, name in CHANNELS.items()}
    if all_reduce != "nccl":
        here = dist.PrefixStore("two-shot", store)
        methods = (
            SUM_METHODS
            if all_reduce == "auto"
            else tuple(m for m in SUM_METHODS if m == all_reduce)
        )
        channel, flags = channels[CHANNELS["decode"]], flag_bytes(shard.size)
        machine.step_channel = TwoShot(channel, here, methods, flags)
    return min(int(free) for _, free in notes)


def sum_methods(ranks: int) -> str:
    """Return a description of how the first GPUs of this host can sum.

    Raises:
        NcclError: NCCL is not there.
    """
    mapped = " or two-shot, over memory that all map" if map_each_other(ranks) else ""
    return f"NCCL {version()}{mapped}"


class RankedCudaMachine(CudaMachine):
    """Rank 0's GPU, and the processes of the others.

    Raises:
        FieldError: there are fewer GPUs than ranks, or the ranks cannot share the model.
        ValueError: a setting is wrong, or the model, or the GPUs are not alike.
        RankLost: another rank does not start.
    """

    def __init__(self, settings: DeviceSettings, progress: OnProgress) -> None:
        there, ranks = torch.cuda.device_count(), settings.tensor_parallel_size
        if ranks > there:
            raise FieldError("tensor_parallel_size", f"is {ranks}, and PyTorch finds {there} GPUs")
        self.followers = Followers(settings, FOLLOWER)
        super().__init__(*load_rank(settings, 0, progress))
        followers = self.followers
        self.min_free = connect(self, settings.all_reduce, followers.store, followers.check)

    def start(
        self, sizes: LaneSizes, notify: Callable[[], None], progress: OnProgress
    ) -> CudaLanes:
        """See `CudaMachine.start`; once only."""

        def lost() -> None:
            for channel in {id(each): each for each in self.channels.values()}.values():
                assert isinstance(channel, Communicator)
                threading.Thread(target=channel.abort, daemon=True).start()
            notify()

        self.followers.on_lost = lost
        self.followers.start(sizes)
        try:
            return super().start(sizes, notify, progress)
        except NcclError as error:  # channels are aborted when a rank is lost
            raise self.followers.explain(error) from error

    def _awaited(self, future: "Future[T]") -> T:
        return awaited(future, self.followers.check)

    def _lanes(
        self, runner: CudaRunner, launcher: Launcher, notify: Callable[[], None]
    ) -> CudaLanes:
        return CudaLanes(runner, self.partitions, launcher, notify, self.followers)
