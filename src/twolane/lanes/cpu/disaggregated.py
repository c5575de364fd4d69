"""Prefill and decode on halves of the cores (1P1D): this process, rank 0, decodes.

Rank 1 (`prompts.py`) has the model and a KV pool of its own. It carries out the prefill lane's
launches and pushes the keys and values of each layer into this process's pool. At the end of a
prompt it sends the hidden states from which this process samples. This process pushes what decode
steps write into rank 1's pool, so that both pools hold every page and prefixes are shared.
"""

import os
from collections.abc import Callable, Sequence

import torch
from msgspec.structs import replace
from torch import Tensor

from twolane.common.vocabulary import LaneName
from twolane.lanes.base import Step, Ticket
from twolane.lanes.cpu.lanes import CpuLanes
from twolane.lanes.cpu.machine import CpuMachine
from twolane.lanes.cpu.ranks import RankedLanes
from twolane.lanes.cpu.runner import Runner
from twolane.lanes.followers import FollowerPool, Followers
from twolane.lanes.sampling_points import SamplingPoints
from twolane.lanes.settings import DeviceSettings
from twolane.lanes.work import DecodeWork, LaunchRecord, PrefillWork, Work
from twolane.model.decoder import Decoder
from twolane.model.lora import AdapterPool
from twolane.parallel.group import meet
from twolane.transfer.arrivals import Arrivals
from twolane.transfer.memory import SharedMemory
from twolane.transfer.mirror import MirroredCache

FOLLOWER = "twolane.lanes.cpu.prompts"
"""The module that rank 1 runs."""


def halves(cores: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The cores of prefill and of decode, as many each; one core serves both."""
    half = max(1, len(cores) // 2)
    return tuple(cores[:half]), tuple(cores[-half:])


class DecodeRunner(Runner):
    """Runs decode steps, and samples the first tokens of prompts that rank 1 computes.

    Args:
        decoder: the model.
        kv: this process's pool.
        page_size: tokens in a page.
        slots: the most requests at a time.
        adapters: those that are loaded.
        arrivals: what rank 1 says.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: MirroredCache,
        page_size: int,
        slots: int,
        adapters: AdapterPool | None,
        arrivals: Arrivals,
    ) -> None:
        super().__init__(decoder, kv, page_size, slots, adapters)
        self._arrivals = arrivals

    def _begin(self, work: PrefillWork) -> Tensor:
        """See `Runner._begin`: rank 1 has them, so they are [T, 0]."""
        return torch.empty((sum([row.count for row in work.rows]), 0))

    def _slice(self, work: PrefillWork, hidden: Tensor) -> Tensor:
        """See `Runner._slice`: wait until the pages of these layers have arrived.

        Nothing may read the pages before. At the end of prompts their rows that are sampled or
        scored have come with them, [R, hidden].
        """
        arrival = self._arrivals.take(work.batch, work.last)
        if not work.finishes:
            return hidden
        return arrival.rows(self._decoder.spec.hidden_size, self._decoder.dtype)

    def _finish(self, hidden: Tensor, ends: SamplingPoints) -> Step:
        """See `Runner._finish`, of the rows that have arrived."""
        needed = ends.needed
        whole = torch.empty((max(needed, default=-1) + 1, hidden.shape[1]), dtype=hidden.dtype)
        whole[needed] = hidden
        return super()._finish(whole, ends)


class DisaggregatedLanes(RankedLanes):
    """A prefill lane on rank 1 and a decode lane in this process, each with all of its cores.

    Args:
        lanes: this process's; their prefill lane waits for rank 1 and samples.
        followers: rank 1.
        kv: this process's pool.
    """

    def __init__(self, lanes: CpuLanes, followers: Followers, kv: MirroredCache) -> None:
        self._kv = kv
        self._logged = 0
        """Number of launches that rank 1 was told."""
        super().__init__(lanes, followers)
        units = lanes.units
        self.levels = ((units, units), (units, 0), (0, units))

    def launch(self, lane: LaneName, units: int, work: Work, after: Sequence[int]) -> Ticket:
        """See `Lanes.launch`.

        Raises:
            ValueError: it is neither a slice in the prefill lane nor decode steps in the other one,
                or a slice waits for decode steps.
        """
        if lane == "prefill" and isinstance(work, PrefillWork) and not after:
            ticket = self._lanes.launch(lane, units, work, after)
            told = replace(work, masks=(), late=())  # rank 1 does not sample
            self._followers.log(LaunchRecord(lane, units, told, (), self._logged))
            self._logged += 1
            return ticket
        if lane == "decode" and isinstance(work, DecodeWork):
            return self._lanes.launch(lane, units, work, after)
        raise ValueError(
            f"{type(work).__name__} is launched in the {lane} lane, where prefill and decode have "
            "devices of their own"
        )

    def _watch(self) -> None:
        """Have rank 1 watched by the launches in which it takes part."""
        self._followers.watch(_Prompts(self._lanes), lambda: self._kv.received)


class _Prompts:
    """The launches of the prefill lane."""

    def __init__(self, lanes: CpuLanes) -> None:
        self._lanes = lanes

    def waiting(self) -> Sequence[Ticket]:
        """See `OpenLaunches.waiting`."""
        return [ticket for ticket in self._lanes.waiting() if ticket.lane == "prefill"]


class DisaggregatedMachine(CpuMachine):
    """This machine's cores in two halves, each with the model and a KV pool in its own process.

    Raises:
        ValueError: a setting is wrong, or the model.
        RankLost: rank 1 does not start.
    """

    def __init__(self, settings: DeviceSettings, progress: Callable[[str, float], None]) -> None:
        super().__init__(settings, progress)
        self._memories = SharedMemory.new(), SharedMemory.new()
        self._arrivals, arrivals = os.pipe()
        prompt_cores, self._cores = halves(self._cores)
        ours, theirs = self._memories
        files = theirs.file, ours.file, arrivals
        self._rank_1 = self.followers = Followers(settings, FOLLOWER, prompt_cores, files)
        os.close(arrivals)
        meet(0, 2, self._rank_1.store, self._rank_1.check)  # what it loads is no free memory

    def kv_bytes(self, max_model_len: int) -> int:
        """See `Machine.kv_bytes`: two pools share the memory."""
        return super().kv_bytes(max_model_len) // 2

    def start(
        self,
        pages: int,
        page_size: int,
        slots: int,
        max_model_len: int,
        notify: Callable[[], None],
        progress: Callable[[str, float], None],
    ) -> DisaggregatedLanes:
        """See `Machine.start`."""
        shape = self._decoder.spec, pages, page_size, self._decoder.dtype
        kv = MirroredCache(*shape, self._memories, rounded=self._rounded)
        for memory in self._memories:
            memory.close()
        self._rank_1.on_lost = notify
        self._rank_1.start(FollowerPool(pages, page_size, slots, max_model_len))
        arrivals = Arrivals(self._arrivals)
        runner = DecodeRunner(self._decoder, kv, page_size, slots, self._adapters, arrivals)
        lanes = CpuLanes(runner, self._cores, notify)
        return DisaggregatedLanes(lanes, self._rank_1, kv)
