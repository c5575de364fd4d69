"""Several GPUs of one host with a model on them, each a process of its own; this one is rank 0."""

import json
import threading
from collections.abc import Callable

import torch
from torch import distributed as dist

from twolane.common.errors import FieldError
from twolane.lanes.cuda.lanes import CudaLanes
from twolane.lanes.cuda.launch_thread import Launcher
from twolane.lanes.cuda.machine import CudaMachine
from twolane.lanes.cuda.runner import CudaRunner
from twolane.lanes.followers import FollowerPool, Followers
from twolane.lanes.settings import DeviceSettings, load_shard
from twolane.parallel.group import CHANNELS, meet
from twolane.parallel.nccl import Communicator, unique_id

FOLLOWER = "twolane.lanes.cuda.follower"
"""The module that the other ranks run."""


def load_rank(
    settings: DeviceSettings, rank: int, progress: Callable[[str, float], None]
) -> tuple[object, ...]:
    """The arguments of a rank's `CudaMachine`: its part of the model, on the GPU of its number."""
    torch.cuda.set_device(rank)
    spec, weights = load_shard(settings, f"cuda:{rank}", progress, rank)
    share, ranks = settings.gpu_memory_utilization, settings.tensor_parallel_size
    adapters = settings.adapter_slots, settings.max_lora_rank
    return spec, weights, settings.levels, share, rank, ranks, settings.kv_cache_dtype, *adapters


def connect(machine: CudaMachine, store: dist.Store, check: Callable[[], None]) -> int:
    """Meet the other ranks and make a communicator for each lane.

    Args:
        machine: this rank's; its `channels` are set.
        store: where they meet.
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
    channels = {}
    for name in sorted(set(CHANNELS.values())):
        if shard.rank == 0:
            store.set(f"nccl-{name}", unique_id())
        channels[name] = Communicator(shard.rank, shard.size, store.get(f"nccl-{name}"))
    machine.channels = {lane: channels[name] for lane, name in CHANNELS.items()}
    return min(int(free) for _, free in notes)


class RankedMachine(CudaMachine):
    """Rank 0's GPU, and the processes of the others.

    Raises:
        FieldError: there are fewer GPUs than ranks, or the ranks cannot share the model.
        ValueError: a setting is wrong, or the model, or the GPUs are not alike.
        RankLost: another rank does not start.
    """

    def __init__(self, settings: DeviceSettings, progress: Callable[[str, float], None]) -> None:
        there, ranks = torch.cuda.device_count(), settings.tensor_parallel_size
        if ranks > there:
            raise FieldError("tensor_parallel_size", f"is {ranks}, and PyTorch finds {there} GPUs")
        self.followers = Followers(settings, FOLLOWER)
        self._least_free: int | None = None
        super().__init__(*load_rank(settings, 0, progress))  # type: ignore[arg-type]
        self._least_free = connect(self, self.followers.store, self.followers.check)

    def free_bytes(self) -> int:
        """See `CudaMachine.free_bytes`: of the rank that has the fewest."""
        own = super().free_bytes()
        return own if self._least_free is None else min(own, self._least_free)

    def start(
        self,
        pages: int,
        page_size: int,
        slots: int,
        max_model_len: int,
        notify: Callable[[], None],
        progress: Callable[[str, float], None],
    ) -> CudaLanes:
        """See `CudaMachine.start`; once only."""

        def lost() -> None:
            for channel in {id(each): each for each in self.channels.values()}.values():
                assert isinstance(channel, Communicator)
                threading.Thread(target=channel.abort, daemon=True).start()
            notify()

        self.followers.on_lost = lost
        self.followers.start(FollowerPool(pages, page_size, slots, max_model_len))
        return super().start(pages, page_size, slots, max_model_len, notify, progress)

    def _lanes(
        self, runner: CudaRunner, launcher: Launcher, notify: Callable[[], None]
    ) -> CudaLanes:
        return CudaLanes(runner, self.partitions, launcher, notify, self.followers)
