"""Ranks that are launched on as many GPUs say what one says.

Here they are threads that take turns.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from tests.kernels.test_runner import Asked, World, fakes, passes, slices
from tests.model.checkpoints import make_checkpoint
from twolane.devices import LANES, LaneName
from twolane.kernels.prefill_attention import flashinfer_kernels as fa3
from twolane.kernels.products.dispatch import GpuProducts
from twolane.kernels.sizes import SIZES
from twolane.lanes.cuda.decode_graphs import DecodeGraphs, shares_to_time
from twolane.lanes.cuda.layer_graphs import LayerGraphs
from twolane.lanes.cuda.logit_processors import LogitProcessors
from twolane.lanes.cuda.runner import CudaRunner
from twolane.lanes.work import TokenMask, used_by
from twolane.model.gpu_decoder import UnsummedPart
from twolane.parallel.channel import Channel, NullChannel
from twolane.parallel.two_shot import TwoShot

PATIENCE = 200.0
"""Seconds that a rank waits for another, whose kernels are interpreted."""


class Meeting:
    """Where ranks that are threads meet. One computes at a time: Triton's interpreter is not
    made for several."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._turn = threading.Lock()
        self._all = threading.Barrier(size, timeout=PATIENCE)
        self._offered: list[Tensor | None] = [None] * size
        self._asked: list[object] = [None] * size

    @contextmanager
    def computing(self) -> Any:
        with self._turn:
            try:
                yield
            except BaseException:
                self._all.abort()
                raise

    def meet(self, rank: int, tensor: Tensor, act: Callable[[list[Tensor]], None]) -> None:
        """Have one rank do it with the tensors of all, which ask for the same."""
        self._offered[rank] = tensor
        self._asked[rank] = act.__qualname__, tensor.dtype, tuple(tensor.shape[-2:])
        self._turn.release()
        try:
            if self._all.wait() == 0:
                assert len(set(self._asked)) == 1, f"ranks have parted ways: {self._asked}"
                act([offered for offered in self._offered if offered is not None])
            self._all.wait()
        finally:
            self._turn.acquire()


class Local:
    """A channel of such ranks."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank, self.size, self._meeting = rank, meeting.size, meeting

    def buffer(self, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty((rows, width), dtype=dtype, device=device)

    def all_reduce(self, tensor: Tensor) -> None:
        def act(tensors: list[Tensor]) -> None:
            total = torch.stack(tensors).sum(0)
            for each in tensors:
                each.copy_(total)

        self._meeting.meet(self.rank, tensor, act)

    def broadcast(self, tensor: Tensor) -> None:
        def act(tensors: list[Tensor]) -> None:
            for each in tensors[1:]:
                each.copy_(tensors[0])

        self._meeting.meet(self.rank, tensor, act)

    def gather(self, parts: Tensor) -> None:
        def act(tensors: list[Tensor]) -> None:
            for i, each in enumerate(tensors[1:], start=1):
                tensors[0][i].copy_(each[0])

        self._meeting.meet(self.rank, parts, act)


class Joined(TwoShot):
    """A channel of steps whose sums are put off until their norm. Its memory is nobody else's."""

    def buffer(self, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        self._buffer = torch.empty((rows, width), dtype=dtype, device=device)
        self._chosen = dict.fromkeys(range(width, (rows + 1) * width, width), "joined")
        return self._buffer

    def _sum(self, tensor: Tensor) -> None:
        self._channel.all_reduce(tensor)


def steps(world: World) -> None:
    """Requests decode several steps at a time, one of them after the other has come."""
    first, second = Asked(1, [*range(3, 23)], [7, 2]), Asked(3, [*range(40, 71)], [5, 11, 9])
    world.prefill(first, 20)
    world.decode([first], 2)
    world.prefill(second, 31)
    world.decode([second, first], 3)


def on_ranks(
    size: int, path: Path, scenario: Callable[[World], None], *, joined: bool = False
) -> None:
    """Have every rank run it; the channels of the two lanes are apart. `joined`: see `Joined`."""
    meeting = Meeting(size)

    def rank(number: int) -> None:
        channels: list[Channel] = [Local(meeting, number) for _ in range(2)]
        if joined:
            channels[1] = Joined(channels[1], dist.HashStore(), ("joined",))
        with meeting.computing():
            scenario(World(path, channels))

    with ThreadPoolExecutor(size) as threads:
        list(threads.map(rank, range(size)))


@pytest.fixture
def path(tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    fakes(device, monkeypatch)
    return make_checkpoint("qwen3", tmp_path / "model", seed=1, layers=2)


@pytest.fixture
def shallow(tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of one layer, where what is between layers does not matter."""
    fakes(device, monkeypatch)
    return make_checkpoint("qwen3", tmp_path / "shallow", seed=1, layers=1)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_decode_steps(path: Path, size: int) -> None:
    on_ranks(size, path, steps)


@pytest.mark.full
def test_decode_steps_whose_sums_are_put_off(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no kernel joins them with the norm, they are summed when this comes."""
    put_off: list[int] = []
    add_and_norm = UnsummedPart.add_and_norm

    def noted(part: UnsummedPart, residual: Tensor, *rest: Any) -> Any:
        put_off.append(len(residual))
        return add_and_norm(part, residual, *rest)

    monkeypatch.setattr(UnsummedPart, "add_and_norm", noted)
    on_ranks(2, path, steps, joined=True)
    assert put_off


@pytest.mark.full
def test_decode_steps_with_norms_over_the_heads_of_all_ranks(tmp_path: Path, path: Path) -> None:
    """Ranks of OLMo 2; four have each KV head twice."""
    olmo = make_checkpoint("olmo2", tmp_path / "olmo2", seed=1, layers=2)
    for size in (2, 4):
        on_ranks(size, olmo, steps)


@pytest.mark.full
@pytest.mark.parametrize("graphs", [True, False])
def test_slices_take_up_where_the_last_one_ended(path: Path, graphs: bool) -> None:
    on_ranks(2, path, lambda world: slices(world, graphs=graphs))


@pytest.mark.full
def test_passes_follow_each_other(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa3, "_PAGED", replace(fa3._PAGED, split=10**9))
    monkeypatch.setattr(fa3, "FILLED", 0.0)  # Triton's kernel would be as right, but is no graph
    on_ranks(2, path, lambda world: passes(world, split=False))


def test_a_step_needs_the_tokens_of_rank_0(shallow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Local, "broadcast", lambda self, tensor: None)
    with pytest.raises((AssertionError, threading.BrokenBarrierError)):
        on_ranks(2, shallow, steps)


@pytest.mark.full
def test_a_pass_by_layers_needs_them_too(shallow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scenario(world: World) -> None:
        """The other rank has the embeddings of some tokens that rank 0 samples."""
        for token in range(3, 35, 8):
            running, other = Asked(4, [token, token + 1], [0]), Asked(1, [7] * 6, [2])
            world.prefill(running, 2)
            world.run([running], [(other, 6)], lane="decode")

    on_ranks(2, shallow, scenario)
    monkeypatch.setattr(Local, "broadcast", lambda self, tensor: None)
    with pytest.raises((AssertionError, threading.BrokenBarrierError)):
        on_ranks(2, shallow, scenario)


def masked(world: World) -> None:
    """A pass whose one row is constrained, and then one without."""
    running, other = Asked(4, [5] * 20, [0, 1]), Asked(1, [7] * 6, [2])
    last = Asked(0, [8] * 5, [3])
    world.prefill(running, 20)
    everything = TokenMask(4, b"\xff" * (world.spec.vocab_size // 8))
    world.masks = (everything,)
    world.run([running], [(other, 6)])
    world.masks = ()
    world.run([running, other], [(last, 5)])


def test_the_path_of_a_pass_follows_from_its_work_alone(
    shallow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums have the sizes that the path asks for: graphs are padded, what has masks is not."""
    monkeypatch.setattr(fa3, "_PAGED", replace(fa3._PAGED, split=10**9))
    monkeypatch.setattr(fa3, "FILLED", 0.0)
    on_ranks(2, shallow, masked)
    monkeypatch.setattr(LogitProcessors, "skip", lambda self, places: None)
    with pytest.raises((AssertionError, threading.BrokenBarrierError)):
        on_ranks(2, shallow, masked)


def either_lane(world: World) -> None:
    """Every kind of work in each of the two lanes."""
    for slot, lane in enumerate(LANES[:2]):
        running, other = Asked(slot, [5 + slot] * 20, [slot, 2 + slot]), Asked(4, [7] * 6, [4])
        world.prefill(running, 20, lane)
        world.decode([running], 1, lane)
        world.run([running], [(other, 6)], lane)


def test_ranks_pad_passes_to_the_same_sizes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that rank 0's times are for: each rank's own times are a little different."""

    def seconds(self: LayerGraphs, size: int) -> float:
        return float(size) if self._decoder.follows or size not in (192, 320) else 2.0 * size

    def scenario(world: World) -> None:
        world.passes._choose_sizes(torch.Stream("cpu"))
        assert {*SIZES} - {*world.passes.sizes} == {192, 320}

    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(LayerGraphs, "_tune", lambda *_: None)
    monkeypatch.setattr(LayerGraphs, "_layer_seconds", seconds)
    on_ranks(2, path, scenario)


class Timed(Joined):
    """A channel of steps whose ways to sum are chosen by time."""

    def buffer(self, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        self._buffer = torch.empty((rows, width), dtype=dtype, device=device)
        return self._buffer


def test_sums_are_chosen_for_the_decode_lane_and_for_the_whole_device(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each share's graphs are captured with what was fastest on the share in the middle."""
    shares = 16, 32, 48, 132
    partitions = SimpleNamespace(decode_units=shares, capture_stream=lambda *_: None)
    captured: dict[int, list[str]] = {}
    timed: list[int] = []

    def seconds(self: DecodeGraphs, products: GpuProducts, rows: int) -> float:
        timed.append(products.units)
        channel = self.workspace.channel
        assert isinstance(channel, TwoShot)
        right = "joined" if products.units < 132 and rows == 4 else "nccl"
        return 0.5 if channel.method(rows) == right else 1.0

    def capture(self: DecodeGraphs, stream: object, units: int, _: object) -> None:
        channel = self.workspace.channel
        assert isinstance(channel, TwoShot)
        captured[units] = [channel.method(rows) for rows in self.buckets]

    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(DecodeGraphs, "_tune", lambda *_: None)
    monkeypatch.setattr(DecodeGraphs, "_layer_seconds", seconds)
    monkeypatch.setattr(DecodeGraphs, "_capture_level", capture)
    steps = Timed(NullChannel(0, 2), dist.HashStore(), ("nccl", "joined"))
    World(path, [NullChannel(0, 2), steps]).runner.steps.capture(partitions, lambda *_: None)
    level = ["nccl", "nccl", "joined", "nccl"]
    assert captured == {16: level, 32: level, 48: level, 132: ["nccl"] * 4}
    assert set(timed) == {32, 132}


@pytest.mark.parametrize(
    ("shares", "timed"),
    [
        ((132,), {132: 132}),
        ((48, 132), {48: 48, 132: 132}),
        ((32, 48, 64, 132), {32: 48, 132: 132}),
    ],
)
def test_few_shares_are_timed(shares: tuple[int, ...], timed: dict[int, int]) -> None:
    assert shares_to_time(shares) == timed


def test_launches_that_sum_over_one_channel_exclude_each_other(
    shallow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two collectives of a channel that are under way at a time stand still on a GPU."""
    heard: set[int] = set()
    ran: list[tuple[frozenset[str], frozenset[int]]] = []
    run = CudaRunner.run

    def noted(runner: CudaRunner, work: Any, lane: LaneName, *more: Any) -> Any:
        if runner._decoder.follows:
            return run(runner, work, lane, *more)
        heard.clear()
        queued = run(runner, work, lane, *more)
        ran.append((frozenset(used_by(lane, work)), frozenset(heard)))
        return queued

    def hear(name: str) -> None:
        call = getattr(Local, name)

        def heard_of(channel: Local, tensor: Tensor) -> None:
            if channel.rank == 0:
                heard.add(id(channel))
            call(channel, tensor)

        monkeypatch.setattr(Local, name, heard_of)

    monkeypatch.setattr(CudaRunner, "run", noted)
    for name in ("all_reduce", "broadcast", "gather"):
        hear(name)
    on_ranks(2, shallow, either_lane)
    assert len({channel for _, channels in ran for channel in channels}) == 2
    for (used, channels), (other_used, others) in combinations(ran, 2):
        assert used & other_used or not channels & others
