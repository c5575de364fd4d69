"""A CPU made ready to serve: weights, KV pool and lanes."""

from collections.abc import Callable, Sequence

import torch

from twolane.common.errors import FieldError
from twolane.common.resources import free_memory, usable_cores
from twolane.devices import DeviceSettings, MachineKind, OnProgress
from twolane.lanes.base import MachineLanes
from twolane.lanes.cpu.lanes import CpuLanes
from twolane.lanes.cpu.runner import Runner
from twolane.lanes.settings import LaneSizes, load_shard, without_adapters
from twolane.model.attention import KVCache
from twolane.model.decoder import Decoder
from twolane.model.lora import AdapterPool
from twolane.model.page_layout import PageLayout
from twolane.parallel.group import CpuGroup


class CpuMachine:
    """This machine's cores with a model on them.

    Raises:
        FieldError: adapters are asked for, and the model is served without them.
        ValueError: a setting is wrong, or the model.
    """

    kind: MachineKind = "cpu"
    name = "cpu"
    settles = True
    pass_sizes: Sequence[int] = ()
    page_sizes: Sequence[int] = ()
    revision = ""

    def __init__(self, settings: DeviceSettings, progress: OnProgress) -> None:
        self._cores: Sequence[int] = usable_cores()[: settings.cores]
        self.tp = settings.tensor_parallel_size
        torch.set_num_threads(len(self._cores))  # for loading; each lane sets its own
        self.spec, weights = load_shard(settings, "cpu", progress)
        self._decoder = Decoder(self.spec, weights, self._group(settings))
        self.weight_itemsize = weights.matrix_itemsize
        self.itemsize = self._decoder.dtype.itemsize
        if settings.adapter_slots and (why := without_adapters(self.spec)) is not None:
            raise FieldError("lora", why)
        self._adapters = AdapterPool(weights, settings.adapter_slots, settings.max_lora_rank)
        self._rounded = settings.kv_cache_dtype == "fp8"
        self.kv_itemsize = self.spec.kv_itemsize(settings.kv_cache_dtype, self.itemsize)
        self.page_token_bytes = self._decoder.spec.kv_bytes_per_token(self.kv_itemsize)
        self.page_layout = PageLayout.of(self.spec)
        self.state_bytes = self._decoder.spec.state_bytes(self.itemsize)

    def _group(self, settings: DeviceSettings) -> CpuGroup | None:
        """Return the ranks that share the model; None if this process has all of it."""
        return None

    def kv_bytes(self, max_model_len: int) -> int:
        """See `Machine.kv_bytes`: a share of the free memory."""
        # All ranks' KV pools take at most this share of the free memory, and this many bytes.
        return int(min(free_memory() * 0.25, 4 * 2**30)) // self.tp

    def start(
        self, sizes: LaneSizes, notify: Callable[[], None], progress: OnProgress
    ) -> MachineLanes:
        """See `Machine.start`."""
        return self._lanes(sizes, notify)

    def _lanes(self, sizes: LaneSizes, notify: Callable[[], None]) -> CpuLanes:
        """Allocate the KV pool and start the lanes of this process."""
        spec, dtype = self._decoder.spec, self._decoder.dtype
        shape = spec, sizes.pages, sizes.page_size, dtype
        states, layout = sizes.slots + sizes.snapshots, sizes.layout(spec)
        kv = KVCache(*shape, requests=states, rounded=self._rounded, layout=layout)
        runner = Runner(self._decoder, kv, sizes.slots, self._adapters)
        return CpuLanes(runner, self._cores, notify)
