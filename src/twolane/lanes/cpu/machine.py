"""A CPU made ready to serve: weights, KV pool, lanes, and the other ranks."""

from collections.abc import Callable, Sequence

import torch

from twolane.common.resources import free_memory, usable_cores
from twolane.common.vocabulary import MachineKind
from twolane.lanes.cpu.lanes import CpuLanes
from twolane.lanes.cpu.ranks import Followers, RankedLanes
from twolane.lanes.cpu.runner import Runner
from twolane.lanes.settings import DeviceSettings, load_shard
from twolane.model.attention import KVCache
from twolane.model.decoder import Decoder

KV_SHARE = 0.25
"""Share of the free memory that all ranks' KV pools take, unless their size is given."""
KV_MOST_BYTES = 4 * 2**30
"""Most bytes of all ranks' KV pools whose size is not given."""


class CpuMachine:
    """This machine's cores; all ranks share them.

    Raises:
        FieldError: the ranks cannot share the model.
        ValueError: a setting is wrong, or the model.
        RankLost: another rank does not start.
    """

    kind: MachineKind = "cpu"
    name = "cpu"
    settles = True
    pass_sizes: Sequence[int] = ()
    page_sizes: Sequence[int] = ()
    revision = ""

    def __init__(self, settings: DeviceSettings, progress: Callable[[str, float], None]) -> None:
        self._cores = usable_cores()[: settings.cores]
        self.tp = settings.tensor_parallel_size
        torch.set_num_threads(len(self._cores))  # for loading; each lane sets its own
        self.spec, weights = load_shard(settings, "cpu", progress)
        self._followers = Followers(settings, self._cores) if self.tp > 1 else None
        group = self._followers.join() if self._followers else None
        self._decoder = Decoder(self.spec, weights, group)
        self.weight_itemsize = weights.matrix_itemsize
        self.page_token_bytes = self._decoder.spec.kv_bytes_per_token(self._decoder.dtype.itemsize)

    def kv_bytes(self, max_model_len: int) -> int:
        """See `Machine.kv_bytes`: a share of the free memory."""
        return int(min(free_memory() * KV_SHARE, KV_MOST_BYTES)) // self.tp

    def start(
        self,
        pages: int,
        page_size: int,
        slots: int,
        max_model_len: int,
        notify: Callable[[], None],
        progress: Callable[[str, float], None],
    ) -> CpuLanes | RankedLanes:
        """See `Machine.start`."""
        kv = KVCache(self._decoder.spec, pages, page_size, self._decoder.dtype)
        lanes = CpuLanes(Runner(self._decoder, kv, page_size, slots), self._cores, notify)
        if self._followers is None:
            return lanes
        return RankedLanes(lanes, self._followers.start(pages, page_size, slots, notify))
