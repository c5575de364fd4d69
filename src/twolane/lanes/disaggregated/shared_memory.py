"""Memory that several processes map."""

import mmap
import os
import tempfile
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor


class SharedMemory:
    """A file without a name, which is gone when the last process that has it ends, however it ends.

    All processes ask for the same tensors in the same order. One of them has asked for all of its
    tensors before another one begins.

    Args:
        file: the open file; a process inherits it by this number.
    """

    def __init__(self, file: int) -> None:
        self.file = file
        self._end = 0
        """Bytes of the file that tensors have."""

    @classmethod
    def new(cls) -> "SharedMemory":
        """Make one that is empty."""
        if hasattr(os, "memfd_create"):
            return cls(os.memfd_create("twolane-kv"))
        with tempfile.TemporaryFile() as file:
            return cls(os.dup(file.fileno()))

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Map the next tensor, whose numbers are zeros at first.

        Raises:
            OSError: the system gives this process no more of its address space.
        """
        count, begin = prod(shape), self._end
        unit = mmap.ALLOCATIONGRANULARITY
        self._end += -(-count * dtype.itemsize // unit) * unit
        if os.fstat(self.file).st_size < self._end:
            os.ftruncate(self.file, self._end)
        memory = mmap.mmap(self.file, self._end - begin, offset=begin)
        return torch.frombuffer(memory, dtype=dtype, count=count).view(*shape)

    def close(self) -> None:
        """Close the file; what is mapped stays until its tensors are gone."""
        os.close(self.file)
