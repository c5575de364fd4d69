"""How decode steps sum is chosen by rank 0 for all, and only what can goes over shared memory."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from twolane.parallel.channel import Silent
from twolane.parallel.two_shot import LARGEST_BYTES, TwoShot

WIDTH = 64
CPU = torch.device("cpu")


class Told(Silent):
    """A channel that notes what is summed; rank 0 has said this before."""

    def __init__(self, rank: int = 0, said: tuple[int, ...] = ()) -> None:
        super().__init__(rank, 2)
        self.summed: list[int] = []
        self._said = said

    def all_reduce(self, tensor: Tensor) -> None:
        self.summed.append(len(tensor))

    def broadcast(self, tensor: Tensor) -> None:
        if self.rank:
            tensor[: len(self._said)] = torch.tensor(self._said, dtype=tensor.dtype)


class Mapped(TwoShot):
    """Memory that nobody else maps."""

    shared: list[int]

    def _map(self, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.shared = []
        return torch.empty((rows, width), dtype=dtype, device=device)

    def _sum(self, tensor: Tensor) -> None:
        self.shared.append(len(tensor))


def faster_below(rows: int) -> Callable[[Callable[[Tensor], None], Tensor], float]:
    """Two-shot takes half of the other's time for fewer rows, and twice as much for more."""

    def seconds(run: Callable[[Tensor], None], tensor: Tensor) -> float:
        if run.__name__ == "all_reduce":
            return 1.0
        return 0.5 if len(tensor) < rows else 2.0

    return seconds


def sums(channel: Mapped, buffer: Tensor, rows: tuple[int, ...]) -> list[int]:
    """Rows of the sums that go over shared memory."""
    channel.shared.clear()
    for count in rows:
        channel.all_reduce(buffer[:count])
    return channel.shared


def made(nccl: Told, *, forced: bool = False, problem: str = "") -> Mapped:
    """Where the other rank has mapped its memory, or has run into a problem."""
    store = dist.HashStore()
    store.set(f"rank-{1 - nccl.rank}", problem)
    return Mapped(nccl, store, forced=forced)


def test_the_faster_way_is_chosen_for_each_number_of_rows() -> None:
    nccl = Told()
    channel = made(nccl)
    buffer = channel.buffer(16, WIDTH, torch.bfloat16, CPU)
    times = channel.choose((1, 8, 16), faster_below(8))
    assert times == {1: (1.0, 0.5), 8: (1.0, 2.0), 16: (1.0, 2.0)}
    assert sums(channel, buffer, (1, 8, 16)) == [1]
    assert nccl.summed == [8, 16]


def test_rank_0_decides_for_all() -> None:
    """Whatever another rank has measured: else one would wait where the others are not."""
    channel = made(Told(rank=1, said=(0, 1, 1)))
    buffer = channel.buffer(16, WIDTH, torch.bfloat16, CPU)
    channel.choose((1, 8, 16), faster_below(8))
    assert sums(channel, buffer, (1, 8, 16)) == [8, 16]


def test_nothing_is_shared_before_it_is_chosen() -> None:
    channel = made(Told())
    assert sums(channel, channel.buffer(4, WIDTH, torch.bfloat16, CPU), (1, 4)) == []


@pytest.mark.parametrize(
    ("rows", "width", "dtype"),
    [
        (1, 8, torch.bfloat16),  # its half is less than 16 bytes
        (1, WIDTH, torch.float16),  # PyTorch's kernel has no such type
        (LARGEST_BYTES // 2 // WIDTH + 1, WIDTH, torch.bfloat16),  # NCCL is no slower
    ],
)
def test_what_shared_memory_does_not_serve_goes_the_other_way(
    rows: int, width: int, dtype: torch.dtype
) -> None:
    channel = made(Told(), forced=True)
    buffer = channel.buffer(rows, width, dtype, CPU)
    channel.choose((rows,), faster_below(1 << 40))
    assert sums(channel, buffer, (rows,)) == []


def test_no_rank_shares_where_one_cannot() -> None:
    channel = made(Told(), problem="peer access is not supported")
    buffer = channel.buffer(4, WIDTH, torch.bfloat16, CPU)
    assert channel.choose((4,), faster_below(8)) == {}
    assert sums(channel, buffer, (4,)) == []


def test_sharing_that_was_asked_for_is_refused_where_one_cannot() -> None:
    channel = made(Told(), forced=True, problem="peer access is not supported")
    with pytest.raises(RuntimeError, match="two-shot sums: peer access is not supported"):
        channel.buffer(4, WIDTH, torch.bfloat16, CPU)


def test_memory_that_is_not_mapped_goes_the_other_way() -> None:
    channel = made(Told(), forced=True)
    buffer = channel.buffer(4, WIDTH, torch.bfloat16, CPU)
    channel.choose((4,), faster_below(1))
    assert sums(channel, buffer, (4,)) == [4]
    assert sums(channel, torch.zeros(4, WIDTH, dtype=torch.bfloat16), (4,)) == []
