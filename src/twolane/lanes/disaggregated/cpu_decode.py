"""Prefill and decode on halves of the cores (1P1D): this process, rank 0, decodes.

Rank 1 is `cpu_prefill.py`; `lanes.py` describes the exchange between them.
"""

import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from twolane.devices import DeviceSettings, OnProgress
from twolane.lanes.base import Step
from twolane.lanes.cpu.lanes import CpuLanes
from twolane.lanes.cpu.machine import CpuMachine
from twolane.lanes.cpu.runner import Runner
from twolane.lanes.disaggregated.arrivals import Arrivals
from twolane.lanes.disaggregated.cpu_mirror import MirroredKVCache
from twolane.lanes.disaggregated.lanes import DisaggregatedLanes
from twolane.lanes.disaggregated.shared_memory import SharedMemory
from twolane.lanes.ranks.followers import Followers
from twolane.lanes.sampling_points import SamplingPoints
from twolane.lanes.settings import LaneSizes
from twolane.lanes.work import PrefillWork
from twolane.parallel.group import meet

FOLLOWER = "twolane.lanes.disaggregated.cpu_prefill"
"""The module that rank 1 runs."""


def halves(cores: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the cores of prefill and of decode, as many each; a single core serves both."""
    half = max(1, len(cores) // 2)
    return tuple(cores[:half]), tuple(cores[-half:])


class DecodeRunner(Runner):
    """Runs decode steps, and samples the first tokens of prompts that rank 1 computes."""

    arrivals: Arrivals
    """Messages of rank 1, which are set before anything runs."""

    def _begin(self, work: PrefillWork) -> Tensor:
        """See `Runner._begin`: rank 1 has them, so they are [T, 0]."""
        return torch.empty((sum([row.count for row in work.rows]), 0))

    def _slice(self, work: PrefillWork, hidden: Tensor) -> Tensor:
        """See `Runner._slice`: wait until the pages of these layers have arrived.

        Nothing may read the pages before. At the end of prompts their rows that are sampled or
        scored have come with them, [R, hidden].
        """
        arrival = self.arrivals.take(work.batch, work.last)
        if not work.finishes:
            return hidden
        return arrival.rows(self._decoder.spec.hidden_size, self._decoder.dtype)

    def _finish(self, hidden: Tensor, ends: SamplingPoints) -> Step:
        """See `Runner._finish`, of the rows that have arrived."""
        needed = ends.needed
        whole = torch.empty((max(needed, default=-1) + 1, hidden.shape[1]), dtype=hidden.dtype)
        whole[needed] = hidden
        return super()._finish(whole, ends)


class DisaggregatedCpuMachine(CpuMachine):
    """This machine's cores in two halves, each with the model and a KV pool in its own process.

    Raises:
        ValueError: a setting is wrong, or the model.
        RankLost: rank 1 does not start.
    """

    def __init__(self, settings: DeviceSettings, progress: OnProgress) -> None:
        super().__init__(settings, progress)
        self._memories = SharedMemory.new(), SharedMemory.new()
        self._arrivals, arrivals = os.pipe()
        prompt_cores, self._cores = halves(self._cores)
        ours, theirs = self._memories
        files = theirs.file, ours.file, arrivals
        self.followers = Followers(settings, FOLLOWER, prompt_cores, files)
        os.close(arrivals)
        meet(0, 2, self.followers.store, self.followers.check)  # what it loads is no free memory

    def kv_bytes(self, max_model_len: int) -> int:
        """See `Machine.kv_bytes`: two pools share the memory."""
        return super().kv_bytes(max_model_len) // 2

    def start(
        self, sizes: LaneSizes, notify: Callable[[], None], progress: OnProgress
    ) -> DisaggregatedLanes:
        """See `Machine.start`."""
        shape = self._decoder.spec, sizes.pages, sizes.page_size, self._decoder.dtype
        layout = sizes.layout(self.spec)
        kv = MirroredKVCache(*shape, self._memories, rounded=self._rounded, layout=layout)
        for memory in self._memories:
            memory.close()
        self.followers.on_lost = notify
        self.followers.start(sizes)
        runner = DecodeRunner(self._decoder, kv, sizes.slots, self._adapters)
        runner.arrivals = Arrivals(self._arrivals)
        lanes = CpuLanes(runner, self._cores, notify)
        return DisaggregatedLanes(lanes, self.followers, lambda: kv.received)
