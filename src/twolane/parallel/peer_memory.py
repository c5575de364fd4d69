"""Memory on one GPU that the processes of other GPUs of this host map: PyTorch's symmetric memory.

Whoever maps memory keeps it: it stays valid when the process that made it has ended.
"""

import os
from collections.abc import Sequence
from itertools import permutations
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch import distributed as dist

from twolane.parallel.group import gloo

SECOND_GROUP = "this process has mapped other GPUs' memory before"
"""Why it cannot do so again."""


def map_each_other(gpus: int) -> bool:
    """Return whether the first GPUs of this host, as many, can map each other's memory."""
    pairs = permutations(range(gpus), 2)
    return all(torch.cuda.can_device_access_peer(*pair) for pair in pairs)


class PeerGroup:
    """Processes, each with a GPU of its own, that map each other's memory.

    All ranks call the same methods in the same order: each waits for the others. Multicast over
    NVLink is not used. A process makes one group in its life: PyTorch numbers messages
    between ranks by those that each process has sent before, so a second group, with a newer
    process, would wait forever.

    Args:
        name: Name of the group, by which PyTorch knows it in this process.
        rank: The rank of this process, whose current device it is.
        size: number of ranks.
        store: The store at which the ranks meet.

    Raises:
        RuntimeError: this process has made a group before, or PyTorch cannot make one.
    """

    made: ClassVar[bool] = False
    """Whether this process has made one."""

    def __init__(self, name: str, rank: int, size: int, store: dist.Store) -> None:
        if PeerGroup.made:
            raise RuntimeError(SECOND_GROUP)
        PeerGroup.made = True
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        from torch._C._distributed_c10d import _register_process_group

        self.name, self.rank, self.size = name, rank, size
        kind = dist.ProcessGroup.BackendType.GLOO
        self._group = dist.ProcessGroup(store, rank, size)
        backend = gloo(rank, size, dist.PrefixStore("gloo", store))
        self._group._register_backend(torch.device("cpu"), kind, backend)
        self._group._set_default_backend(kind)
        self._group._set_group_name(name)
        _register_process_group(name, self._group)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory that others can map; every rank allocates as much."""
        from torch._C._distributed_c10d import _SymmetricMemory

        strides = torch.empty(shape, device="meta").stride()
        return _SymmetricMemory.empty_strided_p2p(tuple(shape), strides, dtype, device)

    def addresses(self, memory: Tensor) -> tuple[int, ...]:
        """Return the address of each rank's memory in this process; its own is from `empty`."""
        bases: list[int] = self._mapped(memory).buffer_ptrs
        offset = memory.data_ptr() - bases[self.rank]
        return tuple(base + offset for base in bases)

    def of(self, rank: int, memory: Tensor) -> Tensor:
        """Return another rank's memory; this process's is from `empty`."""
        mapped = self._mapped(memory).get_buffer(rank, memory.shape, memory.dtype)
        assert isinstance(mapped, Tensor)
        return mapped

    def _mapped(self, memory: Tensor) -> Any:
        from torch._C._distributed_c10d import _SymmetricMemory

        return _SymmetricMemory.rendezvous(memory, self.name)
