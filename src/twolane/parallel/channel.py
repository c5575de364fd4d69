"""Collectives of the ranks in one lane on GPUs."""

from typing import Protocol

import torch
from torch import Tensor


class Channel(Protocol):
    """The ranks in one lane.

    Every call queues work on the current stream and does not wait. All ranks make the same calls
    in the same order, and at most one of a channel is under way at a time: launches of its lane
    run one after the other.
    """

    rank: int
    size: int

    def buffer(self, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory [rows, width] for partial sums; `all_reduce` takes any other, too."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace the tensor by its sum over all ranks; the bits are the same on all of them."""

    def broadcast(self, tensor: Tensor) -> None:
        """Replace the tensor by rank 0's."""

    def gather(self, parts: Tensor) -> None:
        """Bring all ranks' `parts[0]` to rank 0, whose `parts` is [size, ...]."""


class NullChannel:
    """A channel without communication, for a rank that times its own kernels."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def buffer(self, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Channel.buffer`."""
        return torch.empty((rows, width), dtype=dtype, device=device)

    def all_reduce(self, tensor: Tensor) -> None:
        """See `Channel.all_reduce`."""

    def broadcast(self, tensor: Tensor) -> None:
        """See `Channel.broadcast`."""

    def gather(self, parts: Tensor) -> None:
        """See `Channel.gather`."""
