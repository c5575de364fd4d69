"""GPUs that are processes of this machine: kernels run through Triton's interpreter.

What is queued on a stream is done at once, a graph is what it would replay, and ranks meet through
gloo. All else of lanes, graphs, launch log and start is what runs on GPUs.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

UNITS = 3
LEVELS = ((2, 1),)


def install() -> None:
    """Have this process's CPU stand for a GPU; before anything of twolane is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    from twolane.kernels import sizes

    sizes.SIZES, sizes.BUCKETS, sizes.WHOLE, sizes.WORKSPACE_TOKENS = (
        (16, 32, 64),
        (1, 2, 4),
        32,
        64,
    )
    from tests.kernels.interpreter import define

    define()
    _cuda()
    _lanes()
    _ranks()


class Event:
    """Happens when it is recorded."""

    def __init__(self, **_: object) -> None:
        self.at = 0.0

    def record(self, stream: object = None) -> None:
        self.at = time.monotonic()

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: "Event") -> float:
        return (other.at - self.at) * 1e3


class Stream:
    """Is through with everything as soon as it is queued."""

    cuda_stream = 0

    def synchronize(self) -> None: ...

    def wait_event(self, event: Event) -> None:
        assert event.at, "a launch waits for one that is launched behind it"


class Partitions:
    """`GreenContexts` of a device of a few units."""

    def __init__(self, device: int = 0, decode_units: object = None) -> None:
        self.device, self.units, self.levels = device, UNITS, LEVELS
        self.offered = (*LEVELS, (UNITS, 0), (0, UNITS))
        self.decode_units = (*(d for _, d in LEVELS), UNITS)
        self.prefill_units = (*(p for p, _ in LEVELS), UNITS)
        self._streams: dict[object, Stream] = {}

    def stream(self, lane: str, units: int) -> Stream:
        return self._streams.setdefault((lane, units), Stream())

    def capture_stream(self, lane: str, units: int) -> Stream:
        return Stream()


@contextmanager
def _on(stream: Stream) -> Iterator[None]:
    yield


def _cuda() -> None:
    import torch

    from tests.kernels.test_prefill_attention import Fa3
    from twolane.kernels.prefill_attention import flashinfer_kernels as fa3

    cuda: Any = torch.cuda
    cuda.Event, cuda.stream, cuda.graph_pool_handle = Event, _on, lambda: None
    cuda.current_stream = lambda *_: torch.Stream("cpu")
    cuda.set_device, cuda.empty_cache = lambda *_: None, lambda: None
    cuda.mem_get_info = lambda *_: (2**34, 2**34)
    cuda.get_device_name, cuda.device_count = lambda *_: "emulated", lambda: 8
    cuda.is_available, cuda.can_device_access_peer = lambda: True, lambda *_: True
    cuda.synchronize = cuda._sleep = lambda *_: None
    loaded = Fa3(132), None
    fa3._load = lambda dtype, dim: loaded  # type: ignore[assignment]


def _lanes() -> None:
    import torch

    from twolane.lanes.cuda import decode_graphs, hybrid_graphs, layer_graphs, machine, runner

    def captured(
        stream: Stream, pool: object, queue: Callable[[], None], *, later: bool = False
    ) -> Any:
        return SimpleNamespace(replay=queue)

    def seconds(run: Callable[[], None], repeats: int) -> float:
        begun = time.monotonic()
        run()
        return time.monotonic() - begun

    def layer_seconds(self: layer_graphs.LayerGraphs, size: int) -> float:
        """Rank 0's passes of 16 rows are as slow as those of 32; another rank's are not."""
        return {16: 1.0 if self._decoder.shard.rank == 0 else 0.5, 32: 1.0, 64: 2.0}[size]

    layer_graphs.LayerGraphs._layer_seconds = layer_seconds  # type: ignore[method-assign]
    for module in (decode_graphs, hybrid_graphs, layer_graphs):
        module.captured = captured  # type: ignore[attr-defined]
    decode_graphs.graph_seconds = seconds  # type: ignore[attr-defined]
    machine.GreenContexts = Partitions  # type: ignore[misc, assignment]
    machine._reserve_pinned = lambda: None
    runner.served = lambda decoder: True
    empty = torch.empty

    def unpinned(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return empty(*args, **options)

    torch.empty = unpinned  # type: ignore[assignment]


class Gloo:
    """`Communicator` of processes on CPUs."""

    def __init__(self, rank: int, size: int, unique: bytes) -> None:
        from torch import distributed as dist

        from twolane.parallel.group import CpuGroup

        self.rank, self.size = rank, size
        here = dist.TCPStore("127.0.0.1", int(unique), is_master=False)
        self._group = CpuGroup(rank, size, here)

    def buffer(self, rows: int, width: int, dtype: Any, device: Any) -> Any:
        import torch

        return torch.empty((rows, width), dtype=dtype, device=device)

    def all_reduce(self, tensor: Any) -> None:
        self._group.bind("prefill")
        tensor.copy_(self._group.all_reduce(tensor))

    def broadcast(self, tensor: Any) -> None:
        self._group.bind("prefill")
        self._group.broadcast(tensor)

    def gather(self, parts: Any) -> None:
        self._group.bind("prefill")
        rows, width = parts.shape[1:]
        whole = self._group.gather_columns(parts[0])
        if self.rank == 0:
            parts.copy_(whole.view(rows, self.size, width).transpose(0, 1))

    def abort(self) -> None: ...


def _mapped() -> Any:
    """`TwoShot` of such processes, which have no memory in common: sums go by gloo."""
    import torch

    from twolane.parallel.two_shot import TwoShot

    class Mapped(TwoShot):
        def _map(self, rows: int, width: int, dtype: Any, device: Any) -> Any:
            return torch.empty((rows, width), dtype=dtype, device=device)

        def _sum(self, tensor: Any) -> None:
            self._channel.all_reduce(tensor)

    return Mapped


class Files:
    """`PeerGroup` of such processes: memory that others map is a file."""

    def __init__(self, name: str, rank: int, size: int, store: Any) -> None:
        self.rank, self._store = rank, store
        if rank == 0:
            store.set("folder", tempfile.mkdtemp())
        self._folder = Path(store.get("folder").decode())
        self._made = 0

    def empty(self, shape: Any, dtype: Any, device: Any) -> Any:
        self._made += 1
        memory = self._tensor(self.rank, shape, dtype)
        self._store.set(f"{self._made}-{self.rank}", "")
        return memory

    def of(self, rank: int, memory: Any) -> Any:
        self._store.get(f"{self._made}-{rank}")
        return self._tensor(rank, memory.shape, memory.dtype)

    def _tensor(self, rank: int, shape: Any, dtype: Any) -> Any:
        import torch

        name, size = str(self._folder / f"{self._made}-{rank}"), prod(shape) * dtype.itemsize
        data = torch.from_file(name, shared=True, size=size, dtype=torch.uint8)
        return data.view(dtype).view(*shape)


def _ranks() -> None:
    from torch import distributed as dist

    from twolane.lanes import base
    from twolane.lanes.disaggregated import cuda_decode
    from twolane.lanes.ranks import cuda_machine
    from twolane.lanes.settings import load_shard
    from twolane.parallel import nccl

    base.UNPREDICTED_SECONDS = 900.0  # interpreted kernels take long

    stores = []

    def unique_id() -> bytes:
        stores.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        return str(stores[-1].port).encode()

    cuda_machine.Communicator = nccl.Communicator = Gloo  # type: ignore[misc, assignment]
    nccl.unique_id = unique_id
    cuda_machine.TwoShot = _mapped()
    cuda_machine.FOLLOWER = "tests.kernels.emulated_follower"
    cuda_decode.FOLLOWER = "tests.kernels.emulated_prompts"
    cuda_decode.PeerGroup = Files  # type: ignore[misc, assignment]
    for module in (cuda_machine, cuda_decode):
        module.load_shard = lambda settings, device, *rest: load_shard(settings, "cpu", *rest)
