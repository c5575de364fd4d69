"""Sums of few rows over memory that all ranks map: PyTorch's two-shot all-reduce.

Each rank adds up its share of the numbers, reading the others' parts, and writes the sums to all:
one hop less than NCCL takes. Its operations must not run on two streams at once (pytorch
#189228), so only the decode lane's graphs have such memory.
"""

import logging
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from twolane.parallel.channel import Channel
from twolane.parallel.group import gloo, meet

log = logging.getLogger("twolane.cuda")
GROUP = "twolane-decode"
"""PyTorch's name of the ranks that map the memory."""
ALIGNED_BYTES = 16
"""Each rank's share of a sum must be a multiple of this many bytes."""
LARGEST_BYTES = 2**22
"""Sums of more bytes go by NCCL, which moves them no slower."""
GAIN = 0.97
"""Share of NCCL's time that the two-shot sum may take at most, to be chosen."""


class Mapped(NamedTuple):
    """Partial sums that all ranks map, as this process sees them."""

    rank: int
    """Rank of this process."""
    partials: tuple[int, ...]
    """Address of each rank's partial sums."""
    flags: tuple[int, ...]
    """Address of each rank's flags."""


class TwoShot:
    """A channel whose sums may go over shared memory; all else is the other channel's.

    All ranks must call `buffer` and `choose` in the same order.

    Args:
        channel: of the same ranks and the same lane.
        store: where they meet to map each other's memory.
        forced: whether every sum that can goes over shared memory; `choose` decides otherwise.
        flag_bytes: bytes of flags that others set, for kernels that sum by themselves; 0: there
            are none.
    """

    def __init__(
        self,
        channel: Channel,
        store: dist.Store,
        *,
        forced: bool = False,
        flag_bytes: int = 0,
    ) -> None:
        self.rank, self.size = channel.rank, channel.size
        self._flag_bytes, self._addresses = flag_bytes, (0,) * self.size
        self._channel, self._store, self._forced = channel, store, forced
        self._buffer: Tensor | None = None
        """What all ranks map; None: they cannot."""
        self._group: dist.ProcessGroup | None = None
        """The ranks as PyTorch knows them, by `GROUP`, for as long as this lives."""
        self._counts: frozenset[int] = frozenset()
        """How many numbers a sum has that goes over shared memory: none before `choose`."""

    def buffer(self, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Channel.buffer`: mapped by all ranks, once."""
        assert self._buffer is None, "the lane's graphs have one buffer for sums"
        try:
            buffer, problem = self._map(rows, width, dtype, device), ""
        except RuntimeError as error:
            buffer = self._channel.buffer(rows, width, dtype, device)
            problem = str(error).splitlines()[0]
        problems = meet(self.rank, self.size, self._store, lambda: None, problem)
        if not any(problems):
            self._buffer = buffer
        elif self._forced:
            raise RuntimeError(f"two-shot sums: {next(filter(None, problems))}")
        else:
            log.warning("sums go by NCCL alone: %s", next(filter(None, problems)))
        return buffer

    def all_reduce(self, tensor: Tensor) -> None:
        """See `Channel.all_reduce`."""
        if tensor.numel() in self._counts and self._shared(tensor):
            self._sum(tensor)
        else:
            self._channel.all_reduce(tensor)

    def broadcast(self, tensor: Tensor) -> None:
        """See `Channel.broadcast`."""
        self._channel.broadcast(tensor)

    def gather(self, parts: Tensor) -> None:
        """See `Channel.gather`."""
        self._channel.gather(parts)

    def choose(
        self, rows: Sequence[int], seconds: Callable[[Callable[[Tensor], None], Tensor], float]
    ) -> dict[int, tuple[float, float]]:
        """Choose for each number of rows how they are summed: rank 0's clock decides for all.

        Args:
            rows: the numbers of rows that will be summed.
            seconds: times one call, on the lane's stream, with the tensor it is to sum.

        Returns:
            Seconds of NCCL and of two-shot, by rows.
        """
        if self._buffer is None:
            return {}
        summed = [self._buffer[:count] for count in rows if self._shared(self._buffer[:count])]
        if self._forced:
            self._counts = frozenset(tensor.numel() for tensor in summed)
            return {}
        by_nccl, by_two_shot = self._channel.all_reduce, self._sum
        times = [(seconds(by_nccl, tensor), seconds(by_two_shot, tensor)) for tensor in summed]
        faster = [int(two_shot < GAIN * nccl) for nccl, two_shot in times]
        chosen = torch.tensor([*faster, 0], dtype=torch.int32, device=self._buffer.device)
        self._channel.broadcast(chosen)
        kept = zip(summed, chosen.tolist(), strict=False)
        self._counts = frozenset(tensor.numel() for tensor, chosen in kept if chosen)
        return {len(x): pair for x, pair in zip(summed, times, strict=True)}

    def mapped(self, tensor: Tensor) -> Mapped | None:
        """Where all ranks have such partial sums, for a kernel that sums them by itself; None: they
        are summed by `all_reduce`."""
        buffer = self._buffer
        if not self._flag_bytes or tensor.numel() not in self._counts or not self._shared(tensor):
            return None
        assert buffer is not None
        flags = tuple(address + buffer.nbytes for address in self._addresses)
        return Mapped(self.rank, self._addresses, flags)

    def _map(self, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory that all ranks map, with the flags behind it."""
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory

        kind = dist.ProcessGroup.BackendType.GLOO
        self._group = dist.ProcessGroup(self._store, self.rank, self.size)
        backend = gloo(self.rank, self.size, dist.PrefixStore("gloo", self._store))
        self._group._register_backend(torch.device("cpu"), kind, backend)
        self._group._set_default_backend(kind)
        self._group._set_group_name(GROUP)
        _register_process_group(GROUP, self._group)
        flagged = -(-self._flag_bytes // (width * dtype.itemsize))
        shape = rows + flagged, width
        memory = _SymmetricMemory.empty_strided_p2p(shape, (width, 1), dtype, device)
        memory.zero_()
        torch.cuda.synchronize(device)
        bases = _SymmetricMemory.rendezvous(memory, GROUP).buffer_ptrs
        offset = memory.data_ptr() - bases[self.rank]
        self._addresses = tuple(base + offset for base in bases)
        return memory[:rows]

    def _sum(self, tensor: Tensor) -> None:
        """Sum over shared memory."""
        torch.ops.symm_mem.two_shot_all_reduce_(tensor, "sum", GROUP)

    def _shared(self, tensor: Tensor) -> bool:
        """Whether a sum can go over shared memory."""
        buffer = self._buffer
        return (
            buffer is not None
            and tensor.data_ptr() == buffer.data_ptr()
            and tensor.dtype in (torch.bfloat16, torch.float32)
            and tensor.nbytes <= LARGEST_BYTES
            and tensor.nbytes % (ALIGNED_BYTES * self.size) == 0
        )
