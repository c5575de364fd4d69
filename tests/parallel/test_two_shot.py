"""How decode steps sum is chosen by rank 0 for all, and only what can goes over shared memory."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from twolane.parallel.channel import NullChannel
from twolane.parallel.peer_memory import SECOND_GROUP, PeerGroup
from twolane.parallel.two_shot import MAX_BYTES, SUM_METHODS, SumMethod, TwoShot

WIDTH = 64
CPU = torch.device("cpu")


class Told(NullChannel):
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


def as_told(channel: Mapped, times: dict[SumMethod, float]) -> Callable[[int], float]:
    """Layers take this long, by the method that they are summed now."""
    return lambda rows: times[channel.method(rows)]


def sums(channel: Mapped, buffer: Tensor, rows: tuple[int, ...]) -> list[int]:
    """Rows of the sums that go over shared memory."""
    channel.shared.clear()
    for count in rows:
        channel.all_reduce(buffer[:count])
    return channel.shared


def made(
    nccl: Told, methods: Sequence[SumMethod] = SUM_METHODS, *, before: str = "", problem: str = ""
) -> Mapped:
    """Where the other rank has mapped its memory, or has run into a problem, perhaps before."""
    store = dist.HashStore()
    for when, told in (("before", before), ("mapped", problem)):
        dist.PrefixStore(when, store).set(f"rank-{1 - nccl.rank}", told)
    return Mapped(nccl, store, methods)


def test_the_fastest_way_is_chosen_for_each_number_of_rows() -> None:
    channel = made(nccl := Told())
    buffer = channel.buffer(16, WIDTH, torch.bfloat16, CPU)
    fastest: dict[int, SumMethod] = {1: "joined", 2: "two-shot", 8: "nccl", 16: "joined"}

    def seconds(rows: int) -> float:
        return 0.5 if channel.method(rows) == fastest[rows] else 1.0

    times = channel.choose(tuple(fastest), seconds)
    assert times[2] == {"nccl": 1.0, "two-shot": 0.5, "joined": 1.0}
    assert {rows: channel.method(rows) for rows in fastest} == fastest
    assert {rows for rows in fastest if channel.mapped(buffer[:rows])} == {1, 16}
    assert sums(channel, buffer, tuple(fastest)) == [1, 2, 16]
    assert nccl.summed == [8]


def test_a_gain_within_what_timings_vary_is_none() -> None:
    channel = made(Told())
    channel.buffer(16, WIDTH, torch.bfloat16, CPU)
    channel.choose((1,), as_told(channel, {"nccl": 1.0, "two-shot": 0.995, "joined": 0.992}))
    assert channel.method(1) == "nccl"
    channel.choose((1,), as_told(channel, {"nccl": 1.0, "two-shot": 0.995, "joined": 0.985}))
    assert channel.method(1) == "joined"


def test_rank_0_decides_for_all() -> None:
    """Whatever another rank has measured: else one would wait where the others are not."""
    said = tuple(SUM_METHODS.index(method) for method in ("nccl", "two-shot", "joined"))
    channel = made(Told(rank=1, said=said))
    channel.buffer(16, WIDTH, torch.bfloat16, CPU)
    times: dict[SumMethod, float] = {"nccl": 1.0, "two-shot": 0.5, "joined": 0.7}
    channel.choose((1, 8, 16), as_told(channel, times))
    assert [channel.method(rows) for rows in (1, 8, 16)] == ["nccl", "two-shot", "joined"]


@pytest.mark.parametrize("method", ["two-shot", "joined"])
def test_one_way_is_taken_without_timing(method: SumMethod) -> None:
    channel = made(Told(), (method,))
    buffer = channel.buffer(16, WIDTH, torch.bfloat16, CPU)
    assert channel.choose((1, 8), lambda rows: pytest.fail("was timed")) == {}
    assert [channel.method(rows) for rows in (1, 8)] == [method, method]
    assert (channel.mapped(buffer[:8]) is not None) == (method == "joined")


def test_nothing_is_shared_before_it_is_chosen() -> None:
    channel = made(Told())
    assert sums(channel, channel.buffer(4, WIDTH, torch.bfloat16, CPU), (1, 4)) == []


@pytest.mark.parametrize(
    ("rows", "width", "dtype"),
    [
        (1, 8, torch.bfloat16),  # its half is less than 16 bytes
        (1, WIDTH, torch.float16),  # PyTorch's kernel has no such type
        (MAX_BYTES // 2 // WIDTH + 1, WIDTH, torch.bfloat16),  # NCCL is no slower
    ],
)
def test_what_shared_memory_does_not_serve_goes_the_other_way(
    rows: int, width: int, dtype: torch.dtype
) -> None:
    channel = made(Told(), ("two-shot",))
    buffer = channel.buffer(rows, width, dtype, CPU)
    channel.choose((rows,), pytest.fail)
    assert sums(channel, buffer, (rows,)) == []


def test_no_rank_shares_where_one_cannot() -> None:
    channel = made(Told(), problem="peer access is not supported")
    buffer = channel.buffer(4, WIDTH, torch.bfloat16, CPU)
    assert channel.choose((4,), pytest.fail) == {}
    assert sums(channel, buffer, (4,)) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_has_mapped_memory_before_does_not_keep_others_waiting(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank maps any where one has, which PyTorch would let the others wait for."""
    monkeypatch.setattr(PeerGroup, "made", rank == 0)
    monkeypatch.setattr(Mapped, "_map", lambda *_: pytest.fail("waits for ever"))
    channel = made(Told(rank), before=SECOND_GROUP if rank else "")
    buffer = channel.buffer(4, WIDTH, torch.bfloat16, CPU)
    assert channel.choose((4,), pytest.fail) == {}
    channel.all_reduce(buffer)


def test_a_process_makes_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PeerGroup, "made", True)
    with pytest.raises(RuntimeError, match="has mapped"):
        PeerGroup("second", 0, 1, dist.HashStore())


@pytest.mark.parametrize("method", ["two-shot", "joined"])
def test_sharing_that_was_asked_for_is_refused_where_one_cannot(method: SumMethod) -> None:
    channel = made(Told(), (method,), problem="peer access is not supported")
    with pytest.raises(RuntimeError, match=f"{method} sums: peer access is not supported"):
        channel.buffer(4, WIDTH, torch.bfloat16, CPU)


def test_memory_that_is_not_mapped_goes_the_other_way() -> None:
    channel = made(Told(), ("two-shot",))
    buffer = channel.buffer(4, WIDTH, torch.bfloat16, CPU)
    channel.choose((4,), pytest.fail)
    assert sums(channel, buffer, (4,)) == [4]
    assert sums(channel, torch.zeros(4, WIDTH, dtype=torch.bfloat16), (4,)) == []
