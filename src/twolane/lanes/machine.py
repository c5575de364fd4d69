"""The device that an engine runs on, with a model on it: a CPU's cores or a GPU."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from twolane.common.errors import FieldError
from twolane.common.vocabulary import MachineKind, OnProgress
from twolane.lanes.base import Lanes
from twolane.lanes.cpu.disaggregated import DisaggregatedMachine
from twolane.lanes.cpu.machine import CpuMachine
from twolane.lanes.settings import DeviceSettings, LaneSizes, load_shard
from twolane.model.spec import ModelSpec


class MachineLanes(Lanes, Protocol):
    """Lanes that a machine has started, and that end."""

    def rest(self, seconds: float) -> None:
        """Let the lanes work: for this many seconds, or to the next event of a virtual clock."""

    def fill_kv(self) -> None:
        """Fill the KV pool with random keys and values where zeros would be read faster: a GPU
        that reads zeros takes less power, and its clocks stay high."""

    def close(self) -> None:
        """Finish what is queued, within bounds, and end the threads."""


class Machine(Protocol):
    """A loaded model on a device, before there is a KV pool."""

    spec: ModelSpec
    kind: MachineKind
    name: str
    """The device's name, as its driver gives it."""
    settles: bool
    """Whether the device's speed follows its load with some delay."""
    pass_sizes: Sequence[int]
    """Tokens that hybrid passes and prefill batches are padded to, ascending; empty: they are
    computed as they are. Final once the lanes have started."""
    page_sizes: Sequence[int]
    """Tokens of a KV page that are served, the default first; empty: any, 16 being the default."""
    page_token_bytes: int
    """Bytes of one token's keys and values in all layers, on one GPU."""
    itemsize: int
    """Bytes of an element of activations and of the classifier."""
    kv_itemsize: float
    """Bytes of an element of the KV cache, scales included."""
    weight_itemsize: float
    """Bytes of an element of the layers' matrices, scales included."""
    tp: int
    """Ranks that share each layer (tensor parallelism)."""
    revision: str
    """Version of what the name stands for if that is no hardware (a device model); else empty."""

    def kv_bytes(self, max_model_len: int) -> int:
        """Return the bytes for the KV pool where its size is not given."""
        ...

    def start(
        self,
        sizes: LaneSizes,
        notify: Callable[[], None],
        progress: OnProgress,
    ) -> MachineLanes:
        """Allocate the KV pool and start the lanes.

        Args:
            sizes: of KV pool and slots.
            notify: called from a lane's thread whenever a ticket has results.
            progress: called with the steps of the start.
        """
        ...


def load(settings: DeviceSettings, progress: OnProgress) -> Machine:
    """Load the model onto the device that the settings name.

    Raises:
        FieldError: the device is not there, or does not serve what is asked for.
        ValueError: a setting is wrong, or the model.
    """
    device = chosen_device(settings)
    several = device == "cuda" and settings.tensor_parallel_size > 1
    if settings.all_reduce in ("two-shot", "joined") and not several:
        raise FieldError("all_reduce", "is only for several GPUs")
    if device == "cpu":
        return (DisaggregatedMachine if settings.disaggregated else CpuMachine)(settings, progress)
    if settings.disaggregated:
        from twolane.lanes.cuda.disaggregated import CudaPairMachine

        if settings.kv_cache_dtype == "fp8":  # emulated GPUs are right with it, real ones untried
            raise FieldError("kv_cache_dtype", "cannot be fp8 yet with disaggregated on GPUs")
        return CudaPairMachine(settings, progress)
    if settings.tensor_parallel_size > 1:
        from twolane.lanes.cuda.ranks import RankedMachine

        return RankedMachine(settings, progress)
    from twolane.lanes.cuda.machine import CudaMachine

    spec, weights = load_shard(settings, "cuda", progress)
    return CudaMachine(
        spec,
        weights,
        settings.levels,
        settings.gpu_memory_utilization,
        kv_cache_dtype=settings.kv_cache_dtype,
        adapter_slots=settings.adapter_slots,
        max_lora_rank=settings.max_lora_rank,
    )


def chosen_device(settings: DeviceSettings) -> str:
    """Return the device that is asked for, else a GPU if there is one and no cores are asked for.

    Raises:
        FieldError: it is not there.
    """
    there = torch.cuda.is_available()
    if settings.device == "cuda" and not there:
        raise FieldError("device", "is cuda, but PyTorch finds no NVIDIA GPU")
    if settings.device != "auto":
        return settings.device
    if there and settings.cores is None:
        return "cuda"
    if settings.levels is not None:
        raise FieldError("levels", "are only for GPUs, and PyTorch finds no NVIDIA GPU")
    return "cpu"
