"""The device that an engine runs on, with a model on it: a CPU's cores or a GPU."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from twolane.common.errors import FieldError
from twolane.common.resources import free_memory, usable_cores
from twolane.common.vocabulary import MachineKind
from twolane.engine.config import EngineConfig
from twolane.lanes.base import Lanes
from twolane.lanes.cpu.lanes import CpuLanes
from twolane.lanes.cpu.runner import Runner
from twolane.model.attention import KVCache
from twolane.model.decoder import Decoder, Weights
from twolane.model.load.hub import resolve
from twolane.model.load.weights import load_weights
from twolane.model.spec import ModelSpec

KV_SHARE = 0.25
"""Share of the free memory that the KV pool takes on a CPU, unless its size is given."""
KV_MOST_BYTES = 4 * 2**30
"""Most bytes of a KV pool on a CPU whose size is not given."""

Progress = Callable[[str, float], None]


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
    computed as they are."""
    page_sizes: Sequence[int]
    """Tokens of a KV page that are served, the default first; empty: any, 16 being the default."""
    page_token_bytes: int
    """Bytes of one token's keys and values in all layers, on one GPU."""
    weight_itemsize: float
    """Bytes of an element of the layers' matrices, scales included."""
    tp: int
    """GPUs that share each layer (tensor parallelism)."""
    revision: str
    """Version of what the name stands for if that is no hardware (a device model); else empty."""

    def kv_bytes(self, max_model_len: int) -> int:
        """Bytes for the KV pool where its size is not given."""
        ...

    def start(
        self,
        pages: int,
        page_size: int,
        slots: int,
        max_model_len: int,
        notify: Callable[[], None],
        progress: Progress,
    ) -> MachineLanes:
        """Allocate the KV pool and start the lanes.

        Args:
            pages: of the KV pool.
            page_size: tokens in a page.
            slots: the most requests at a time.
            max_model_len: the most tokens of one request.
            notify: called from a lane's thread whenever a ticket has news.
            progress: told the steps of the start.
        """
        ...


def load(config: EngineConfig, progress: Progress) -> Machine:
    """Load the model onto the device that the settings name.

    Raises:
        FieldError: the device is not there.
        ValueError: a setting is wrong, or the model.
    """
    if chosen_device(config) == "cpu":
        return CpuMachine(config, progress)
    from twolane.lanes.cuda.machine import CudaMachine

    spec, weights = _weights(config, "cuda", progress)
    return CudaMachine(spec, weights, config.levels, config.gpu_memory_utilization)


def chosen_device(config: EngineConfig) -> str:
    """The device: what is asked for, else a GPU if there is one and no cores are asked for.

    Raises:
        FieldError: it is not there.
    """
    there = torch.cuda.is_available()
    if config.device == "cuda" and not there:
        raise FieldError("device", "is cuda, but PyTorch finds no NVIDIA GPU")
    if config.device != "auto":
        return config.device
    if there and config.cores is None:
        return "cuda"
    if config.levels is not None:
        raise FieldError("levels", "are shares of a GPU's SMs, and PyTorch finds no NVIDIA GPU")
    return "cpu"


class CpuMachine:
    """This machine's cores."""

    kind: MachineKind = "cpu"
    name = "cpu"
    settles = True
    pass_sizes: Sequence[int] = ()
    page_sizes: Sequence[int] = ()
    tp = 1
    revision = ""

    def __init__(self, config: EngineConfig, progress: Progress) -> None:
        self._cores = usable_cores()[: config.cores]
        torch.set_num_threads(len(self._cores))  # for loading; each lane sets its own
        self._decoder = Decoder(*_weights(config, "cpu", progress))
        self.spec = self._decoder.spec
        self.page_token_bytes = self.spec.kv_bytes_per_token(self._decoder.dtype.itemsize)
        self.weight_itemsize = self._decoder.weights.matrix_itemsize

    def kv_bytes(self, max_model_len: int) -> int:
        """See `Machine.kv_bytes`: a share of the free memory."""
        return int(min(free_memory() * KV_SHARE, KV_MOST_BYTES))

    def start(
        self,
        pages: int,
        page_size: int,
        slots: int,
        max_model_len: int,
        notify: Callable[[], None],
        progress: Progress,
    ) -> CpuLanes:
        """See `Machine.start`."""
        kv = KVCache(self.spec, pages, page_size, self._decoder.dtype)
        return CpuLanes(Runner(self._decoder, kv, page_size, slots), self._cores, notify)


def _weights(config: EngineConfig, device: str, progress: Progress) -> tuple[ModelSpec, Weights]:
    return load_weights(
        resolve(config.model, config.load_format),
        dtype=config.dtype,
        load_format=config.load_format,
        quantization=config.quantization,
        max_positions=config.max_positions,
        seed=config.seed,
        device=device,
        progress=progress,
    )
