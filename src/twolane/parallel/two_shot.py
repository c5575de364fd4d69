"""Sums of few rows over memory that all ranks map, by PyTorch's two-shot all-reduce or own kernels.

Each rank adds up its share of the numbers, reading the others' parts, and writes the sums to all:
one hop less than NCCL takes. PyTorch's operations must not run on two streams at once (pytorch
#189228), so only the decode lane's graphs have such memory.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch import distributed as dist

from twolane.parallel.channel import Channel
from twolane.parallel.group import meet
from twolane.parallel.peer_memory import SECOND_GROUP, PeerGroup

log = logging.getLogger("twolane.cuda")
SumMethod = Literal["nccl", "two-shot", "joined"]
"""A method to sum: NCCL, PyTorch's two-shot all-reduce, or one launch that includes the norm."""
SUM_METHODS: tuple[SumMethod, ...] = get_args(SumMethod)
GROUP = "twolane-decode"
"""PyTorch's name of the ranks that map the memory."""
MAX_BYTES = 2**22
"""Sums of more bytes go by NCCL, which moves them no slower."""


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

    All ranks must call `buffer` and `choose` in the same order. Sums go by NCCL before `choose`.

    Args:
        channel: A channel of the same ranks and the same lane.
        store: The store at which the ranks meet to map each other's memory.
        methods: The methods that `choose` decides between; a single one is taken for every sum that
            it can do.
        flag_bytes: bytes of flags that others set, for kernels that sum by themselves.
    """

    def __init__(
        self, channel: Channel, store: dist.Store, methods: Sequence[SumMethod], flag_bytes: int = 0
    ) -> None:
        self.rank, self.size = channel.rank, channel.size
        self._flag_bytes, self._addresses = flag_bytes, (0,) * self.size
        self._channel, self._store, self._methods = channel, store, methods
        self._buffer: Tensor | None = None
        """Memory that all ranks map; None if they cannot."""
        self._group: PeerGroup | None = None
        """The ranks as PyTorch knows them, for as long as this lives."""
        self._chosen: dict[int, SumMethod] = {}
        """Method of each sum by its number of elements; other sums go by NCCL."""

    def buffer(self, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Channel.buffer`: mapped by all ranks, once."""
        assert self._buffer is None, "the lane's graphs have one buffer for sums"
        buffer, problem = None, self._problem("before", SECOND_GROUP if PeerGroup.made else "")
        if not problem:  # or others would wait for this process
            own = ""
            try:
                buffer = self._map(rows, width, dtype, device)
            except RuntimeError as error:
                own = str(error).splitlines()[0]
            problem = self._problem("mapped", own)
        if not problem:
            self._buffer = buffer
        elif len(self._methods) == 1:
            raise RuntimeError(f"{self._methods[0]} sums: {problem}")
        else:
            log.warning("all-reduces use NCCL only: %s", problem)
        return self._channel.buffer(rows, width, dtype, device) if buffer is None else buffer

    def _problem(self, when: str, own: str) -> str:
        """Return the first rank's problem, of which this one's is `own`; empty if none has one."""
        here = dist.PrefixStore(when, self._store)
        return next(filter(None, meet(self.rank, self.size, here, lambda: None, own)), "")

    def all_reduce(self, tensor: Tensor) -> None:
        """See `Channel.all_reduce`."""
        if self._method(tensor) != "nccl":
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
        self, rows: Sequence[int], seconds: Callable[[int], float]
    ) -> Mapping[int, Mapping[SumMethod, float]]:
        """Choose for each number of rows how they are summed: rank 0's clock decides for all.

        Args:
            rows: the numbers of rows that will be summed.
            seconds: times layers with this many rows, on the lane's stream, summed as they are now.

        Returns:
            Seconds by rows and by method, where there is a choice.
        """
        if self._buffer is None:
            return {}
        numbers = {count: self._buffer[:count].numel() for count in rows}
        shared = [count for count in rows if self._shared(self._buffer[:count])]
        if len(self._methods) == 1:
            self._chosen = {numbers[count]: self._methods[0] for count in shared}
            return {}
        times: dict[int, dict[SumMethod, float]] = {}
        for count in shared:
            times[count] = {}
            for method in self._methods:
                self._chosen[numbers[count]] = method
                times[count][method] = seconds(count)
        best = [self._methods.index(_fastest(by_method)) for by_method in times.values()]
        decided = torch.tensor([*best, 0], dtype=torch.int32, device=self._buffer.device)
        self._channel.broadcast(decided)
        for count, method in zip(times, decided.tolist(), strict=False):
            self._chosen[numbers[count]] = self._methods[method]
        return times

    def method(self, rows: int) -> SumMethod:
        """Return the method by which this many rows of the buffer are summed."""
        assert self._buffer is not None
        return self._method(self._buffer[:rows])

    def mapped(self, tensor: Tensor) -> Mapped | None:
        """Return the addresses of these partial sums on all ranks, for a kernel that sums them by
        itself; None if `all_reduce` sums them."""
        if self._method(tensor) != "joined":
            return None
        assert self._buffer is not None
        flags = tuple(address + self._buffer.nbytes for address in self._addresses)
        return Mapped(self.rank, self._addresses, flags)

    def _method(self, tensor: Tensor) -> SumMethod:
        return self._chosen.get(tensor.numel(), "nccl") if self._shared(tensor) else "nccl"

    def _map(self, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory that all ranks map, with the flags after it."""
        self._group = PeerGroup(GROUP, self.rank, self.size, self._store)
        flagged = -(-self._flag_bytes // (width * dtype.itemsize))
        memory = self._group.empty((rows + flagged, width), dtype, device)
        memory.zero_()
        torch.cuda.synchronize(device)
        self._addresses = self._group.addresses(memory)
        return memory[:rows]

    def _sum(self, tensor: Tensor) -> None:
        """Sum over shared memory."""
        torch.ops.symm_mem.two_shot_all_reduce_(tensor, "sum", GROUP)

    def _shared(self, tensor: Tensor) -> bool:
        """Return whether a sum can go over shared memory."""
        buffer = self._buffer
        # Each rank's share of a sum must be a multiple of this many bytes.
        return (
            buffer is not None
            and tensor.data_ptr() == buffer.data_ptr()
            and tensor.dtype in (torch.bfloat16, torch.float32)
            and tensor.nbytes <= MAX_BYTES
            and tensor.nbytes % (16 * self.size) == 0
        )


def _fastest(seconds: Mapping[SumMethod, float]) -> SumMethod:
    """Return the fastest method, with NCCL's seconds counted a little lower than they are."""
    # Share of the time with NCCL's sums that layers must be done in with others, for these to be
    # chosen.
    return min(seconds, key=lambda method: seconds[method] * (0.99 if method == "nccl" else 1.0))
