"""Two ranks under random schedules: every output as when alone, and the rules that keep it so.

The other rank is threads of this process, with the real lanes, runner and group, so that the model
can be in float64, and delays can be put where a test wants them.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from tests.engine.random_plans import RandomPlans
from tests.engine.world import PAGE, make_checkpoint
from tests.lanes.test_real_threads import PATIENCE, ThreadedWorld
from tests.model.doubled import _double
from twolane.common.resources import usable_cores
from twolane.lanes.base import Step, Ticket
from twolane.lanes.cpu.lanes import CpuLanes
from twolane.lanes.cpu.runner import AwaitMasks, Runner, no_late_masks
from twolane.lanes.ranks.cpu_follower import carry_out
from twolane.lanes.ranks.ranked_lanes import RankedLanes
from twolane.lanes.work import (
    DecodeRow,
    DecodeWork,
    HybridWork,
    LaunchRecord,
    PrefillWork,
    PromptChunk,
    PromptRow,
    Record,
    Sampling,
    SlotUpdate,
    TokenMask,
    Work,
    decode,
    encode,
    pack,
)
from twolane.model.attention import KVCache
from twolane.model.decoder import Decoder
from twolane.model.load.hub import ModelSource, resolve
from twolane.model.load.weights import load_weights
from twolane.parallel import group
from twolane.parallel.group import CpuGroup
from twolane.sampling import SamplingParams
from twolane.systems.registry import make_system

pytestmark = pytest.mark.usefixtures("one_thread")
WORLDS, FULL_WORLDS = 2, 100
DELAY = 0.004
"""Most seconds that a rank is held up before a step."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a rank that waits for another in vain fail in time to say why."""
    monkeypatch.setattr(group, "COLLECTIVE_TIMEOUT_SECONDS", PATIENCE)


@cache
def source() -> ModelSource:
    """The checkpoint of `tests.engine.world`."""
    folder = TemporaryDirectory()
    found = resolve(str(make_checkpoint("qwen2", Path(folder.name) / "model", seed=1)))
    found.__dict__["kept"] = folder
    return found


class Late(Runner):
    """A runner that is held up now and then."""

    rng = random.Random(0)

    def run(self, work: Work, masks: AwaitMasks = no_late_masks) -> Iterator[Step]:
        torch.set_num_threads(1)
        for step in super().run(work, masks):
            if self.rng.random() < 0.3:
                time.sleep(self.rng.random() * DELAY)
            yield step


def ranks(pages: int, slots: int) -> list[Runner]:
    """A runner for each of two ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model = source()

    def rank(number: int) -> Runner:
        here = dist.TCPStore("127.0.0.1", store.port, is_master=False)
        spec, weights = load_weights(model, rank=number, ranks=2)
        decoder = Decoder(spec, _double(weights), CpuGroup(number, 2, here))
        kv = KVCache(decoder.spec, pages, PAGE, torch.float64)
        for layer in (*kv.k, *kv.v):
            layer.fill_(1e3)  # what nobody wrote must not be read: it would show
        return Late(decoder, kv, slots)

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(rank, range(2)))


class Nearby:
    """Followers that are threads of this process."""

    def __init__(self, runner: Runner) -> None:
        self.lanes = CpuLanes(runner, usable_cores(), lambda: None)
        self._records: SimpleQueue[bytes | None] = SimpleQueue()
        self.lanes.explain = self._fail
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def log(self, record: Record) -> None:
        self._records.put(encode(record))

    def load_adapter(self, slot: int, path: str, digest: bytes | None) -> None:
        self.lanes.load_adapter(slot, path, digest)

    def watch(self, *launches: object) -> None:
        """Nobody is taken away here."""

    def explain(self, error: BaseException) -> BaseException:
        return self.error or error

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def close(self, timeout: float) -> None:
        self._records.put(None)
        self._thread.join(timeout)
        self.lanes.close(timeout)

    def _fail(self, error: BaseException) -> BaseException:
        """Keep the first error, which rank 0 then raises when it has waited long enough."""
        self.error = self.error or error
        return error

    def _follow(self) -> None:
        try:
            while (encoded := self._records.get()) is not None:
                carry_out(self.lanes, decode(encoded))
        except BaseException as error:
            self._fail(error)


def ranked(first: Runner, second: Runner, notify: Callable[[], None] = lambda: None) -> RankedLanes:
    """The lanes of rank 0, with this other rank."""
    lanes = CpuLanes(first, usable_cores(), notify)
    return RankedLanes(lanes, Nearby(second))  # type: ignore[arg-type]


def wait_for(ticket: Ticket) -> None:
    """Wait until rank 0 has ended a launch."""
    until = time.monotonic() + PATIENCE
    while not ticket.done:
        assert time.monotonic() < until, "a rank stands still"
        time.sleep(0.001)
    ticket.check()


class RankedWorld(ThreadedWorld):
    """A world whose lanes are those of two ranks."""

    def make_lanes(self, runner: Runner) -> Any:
        return ranked(*ranks(self.pages, self.slots), self.news.set)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "system", ["random plans", pytest.param("static-split", marks=pytest.mark.full)]
)
def test_outputs_are_those_of_requests_alone(system: str, request: pytest.FixtureRequest) -> None:
    """Under random plans, aborts and delays on both ranks."""
    seen: Counter[str] = Counter()
    for seed in range(FULL_WORLDS if request.config.getoption("--full") else WORLDS):
        plans = make_system("static-split", {"slice_seconds": "0"})
        world = RankedWorld(
            RandomPlans(seed) if system == "random plans" else plans, random.Random(seed)
        )
        world.run()
        seen += world.seen
    for what in ("memory preemptions", "prefix hits", "aborted in flight"):
        assert seen[what] >= 1, f"{what}: {seen[what]}"


class Idle:
    """A runner that does nothing."""

    compiled = False

    def bind(self, lane: str) -> None: ...

    def run(self, work: Work, masks: AwaitMasks) -> Iterator[Step]:
        yield Step()


class Noting(Idle):
    """Keeps what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    def run(self, work: Work, masks: AwaitMasks) -> Iterator[Step]:
        self.asked.append(work)
        yield from super().run(work, masks)

    def drop(self, batch: int) -> None:
        self.asked.append(batch)

    def load_adapter(self, slot: int, path: str, digest: bytes | None) -> None:
        self.asked.append((slot, path, digest))

    def drop_adapter(self, slot: int) -> None:
        self.asked.append(("dropped", slot))


def test_the_other_rank_does_what_rank_0_does_in_its_order() -> None:
    """But for adapters that go: it keeps its parts of them until others come."""
    threads = set(threading.enumerate())
    runners: list[Any] = [Noting(), Noting()]
    first = CpuLanes(runners[0], usable_cores(), lambda: None)
    lanes = RankedLanes(first, Nearby(runners[1]))  # type: ignore[arg-type]
    work = some_work(2)
    lanes.load_adapter(1, "here", b"digest")
    lanes.launch("prefill", lanes.units, work[0], ())
    lanes.drop(0)
    lanes.launch("prefill", lanes.units, work[2], ())
    lanes.close(PATIENCE)
    assert set(threading.enumerate()) <= threads
    lanes.drop_adapter(1)
    everywhere = [(1, "here", b"digest"), work[0], 0, work[2]]
    assert runners[0].asked == [*everywhere, ("dropped", 1)]
    assert runners[1].asked == everywhere


def test_masks_reach_rank_0_which_samples() -> None:
    class Asking(Idle):
        def run(self, work: Work, masks: AwaitMasks) -> Iterator[Step]:
            told.extend(masks())
            yield Step()

    told: list[TokenMask] = []
    runners: list[Any] = [Asking(), Idle()]
    first = CpuLanes(runners[0], usable_cores(), lambda: None)
    lanes = RankedLanes(first, Nearby(runners[1]))  # type: ignore[arg-type]
    ticket = lanes.launch("decode", lanes.units, some_work(2)[2], ())
    lanes.set_masks(ticket.number, [TokenMask(0, b"mask")])
    lanes.close(PATIENCE)
    assert told == [TokenMask(0, b"mask")]


def test_what_became_of_the_other_rank_is_the_cause() -> None:
    class Broken(Idle):
        def run(self, work: Work, masks: AwaitMasks) -> Iterator[Step]:
            raise OSError("the rank's end of a pipe")

    broken: Any = Broken()
    others = Nearby(Idle())  # type: ignore[arg-type]
    lanes = RankedLanes(CpuLanes(broken, usable_cores(), lambda: None), others)  # type: ignore[arg-type]
    lanes.check()
    others.error = cause = ValueError("why it ended")
    ticket = lanes.launch("prefill", lanes.units, some_work(2)[0], ())
    with pytest.raises(ValueError, match="why it ended"):
        lanes.check()
    lanes.close(PATIENCE)
    assert ticket.error is cause


def some_work(layers: int) -> list[Work]:
    """A launch of each kind: slices of a prompt, decode steps, a hybrid pass."""
    greedy = Sampling(SamplingParams(temperature=0.0), 0, 6, ())
    first, second = (SlotUpdate(slot, 0, (2 * slot, 2 * slot + 1), greedy) for slot in range(2))
    row, chunk = PromptRow(0, 0, 6, samples=True), PromptChunk(pack([5, 9, 3, 7, 1, 8]))
    other = PromptChunk(pack([4, 4, 4, 2, 6]))
    return [
        PrefillWork(0, (row,), 0, 1, False, (chunk,), (first,)),
        PrefillWork(0, (row,), 1, layers, True),
        DecodeWork((DecodeRow(0, 6, 1),), 1),
        HybridWork((DecodeRow(0, 7, 1),), (PromptRow(1, 0, 5),), (other,), (second,)),
    ]


def test_a_slice_follows_the_one_before_it_on_every_rank() -> None:
    """Rank 0 has ended that one, in the other lane, and the other rank has not kept its hidden
    states yet."""

    class Slow(Runner):
        def _slice(self, work: PrefillWork, hidden: Tensor) -> Tensor:
            hidden = super()._slice(work, hidden)
            if not work.finishes:
                launched.wait(PATIENCE)
                time.sleep(0.05)
            return hidden

    launched = threading.Event()
    first, second = ranks(8, 4)
    second.__class__ = Slow
    lanes = ranked(first, second)
    slices = some_work(first._decoder.spec.layers)[:2]
    before = lanes.launch("prefill", lanes.units, slices[0], ())
    wait_for(before)
    last = lanes.launch("decode", lanes.units, slices[1], (before.number,))
    launched.set()
    wait_for(last)
    lanes.close(PATIENCE)


def last_accesses(monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[tuple[float, float]]:
    """For each launch: when rank 0 was through with it, and when rank 1 last touched its pool.

    Rank 1 touches its pool when rank 0 is through with the launch, or after so many seconds.
    """
    touched: list[float] = []
    index_copy = Tensor.index_copy_
    through = [threading.Event() for _ in range(4)]

    def slow(pool: Tensor, *args: Any) -> Tensor:
        if pool.data_ptr() in theirs:
            through[len(seen)].wait(seconds)
            touched.append(time.monotonic())
        return index_copy(pool, *args)

    first, second = ranks(8, 4)
    theirs = {layer.data_ptr() for layer in second._kv.layers}
    monkeypatch.setattr(Tensor, "index_copy_", slow)
    ended: list[float] = []

    def run(runner: Runner) -> None:
        runner.bind("prefill")
        with torch.inference_mode():
            for work in some_work(first._decoder.spec.layers):
                for _ in runner.run(work):
                    pass
                if runner is first:
                    ended.append(time.monotonic())
                    through[len(ended) - 1].set()
                else:
                    seen.append(touched[-1])

    seen: list[float] = []
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(run, (first, second)))
    return list(zip(ended, seen, strict=True))


def test_rank_0_ends_a_launch_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 gives pages back when its own part of a launch has ended: no other rank may touch
    them from then on."""
    assert all(ended >= touched for ended, touched in last_accesses(monkeypatch, 0.03))


def test_a_launch_that_ends_without_a_sum_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 would not know when the others are through."""
    monkeypatch.setattr(CpuGroup, "all_reduce", lambda self, partial: partial)
    monkeypatch.setattr(CpuGroup, "gather_columns", lambda self, part: torch.cat([part, part], 1))
    assert not any(ended >= touched for ended, touched in last_accesses(monkeypatch, PATIENCE))


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (0, 2)])
def test_a_log_out_of_order_is_refused(order: Sequence[int]) -> None:
    """The ranks would wait for each other in different launches."""
    followers = Nearby(Idle())  # type: ignore[arg-type]
    for number in order:
        followers.log(LaunchRecord("prefill", 1, some_work(2)[number], (), number))
    followers.close(PATIENCE)
    assert (followers.error is None) == (order == (0, 1, 2))
