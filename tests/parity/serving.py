"""The real engine in this process: books, KV pool, runner, CPU lanes on real threads, and loop."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch

from twolane.common.resources import usable_cores
from twolane.devices import LaneName
from twolane.engine.adapters.registry import AdapterRegistry
from twolane.engine.engine import Engine
from twolane.engine.intake import ServedModel
from twolane.engine.kv.manager import KVCacheManager
from twolane.engine.loop import run
from twolane.engine.messages import Outputs, Submit, ToEngine, Vocabulary
from twolane.engine.state import State
from twolane.engine.trace import Trace
from twolane.estimate.online import OnlineEstimator
from twolane.lanes.base import Lanes, Step
from twolane.lanes.cpu.lanes import CpuLanes
from twolane.lanes.cpu.runner import AwaitMasks, Runner
from twolane.lanes.work import Work
from twolane.model.attention import KVCache
from twolane.model.decoder import Decoder
from twolane.model.lora import AdapterPool
from twolane.model.page_layout import PageLayout
from twolane.model.spec import ModelSpec
from twolane.sampling import TokenLogprobs
from twolane.systems.base import System

STUCK_SECONDS = 120.0
"""No launch of these tests takes a tenth of that, even on a busy machine."""


@dataclass(frozen=True)
class Flown:
    """A finished launch."""

    lane: LaneName
    name: str
    launched: float
    """When the engine gave it to its lane."""
    start: float
    end: float
    requests: int


class LaunchLog(Trace):
    """Keeps what ran in the lanes."""

    silent = False

    def __init__(self) -> None:
        self.launches: list[Flown] = []

    def launch(self, lane: LaneName, name: str, start: float, end: float, **args: Any) -> None:
        launched = start - args["waited"]
        self.launches.append(Flown(lane, name, launched, start, end, len(args["requests"])))


class OneThread(Runner):
    """Each lane computes on its own thread alone.

    A team of threads that waits for one another in every operation crawls where other programs
    want the cores, too, and tiny models gain nothing from it.
    """

    def run(self, work: Work, masks: AwaitMasks) -> Iterator[Step]:
        torch.set_num_threads(1)
        yield from super().run(work, masks)


class LocalPort:
    """Submits two thirds of the requests at once, the rest when the first one has ended; before
    all of them a tokenizer, if there is one."""

    def __init__(self, submits: Sequence[Submit], vocabulary: Vocabulary | None) -> None:
        first = -(-2 * len(submits) // 3)
        self._now: list[ToEngine] = [] if vocabulary is None else [vocabulary]
        self._now += submits[:first]
        self._later = list(submits[first:])
        self._unfinished = {submit.id for submit in submits}
        self._woken = threading.Event()
        self._clock = CpuLanes.clock
        self.tokens: dict[str, list[int]] = {submit.id: [] for submit in submits}
        self.logprobs: dict[str, list[TokenLogprobs]] = {submit.id: [] for submit in submits}
        self.prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
        self.finish: dict[str, str] = {}

    def wake(self) -> None:
        """A lane has news."""
        self._woken.set()

    def receive(self) -> Sequence[ToEngine] | None:
        self._woken.clear()
        messages, self._now = self._now, []
        return messages if self._unfinished else None

    def send(self, outputs: Outputs) -> None:
        assert not outputs.refused, outputs.refused
        for output in outputs.outputs:
            self.tokens[output.id] += output.tokens
            self.logprobs[output.id] += output.logprobs or ()
            if output.prompt_logprobs is not None:
                self.prompt_logprobs[output.id] = list(output.prompt_logprobs)
            if output.finish is not None:
                self.finish[output.id] = output.finish
                self._unfinished.remove(output.id)  # raises if it had ended before
                self._now, self._later = [*self._now, *self._later], []
                self._woken.set()  # as a message that comes wakes the loop

    def wait(self, wake_at: float | None) -> None:
        seconds = STUCK_SECONDS if wake_at is None else max(0.0, wake_at - self._clock())
        woken = self._woken.wait(seconds)
        assert woken or wake_at is not None, "the engine sleeps with requests unfinished"


@dataclass(frozen=True)
class Served:
    """What came of the requests, in their order, and how they were served."""

    outputs: list[list[int]]
    finish: list[str]
    logprobs: list[list[TokenLogprobs]]
    prompt_logprobs: list[list[TokenLogprobs] | None]
    preemptions: int
    prefix_hits: int
    launches: list[Flown] = field(repr=False)

    @property
    def max_together(self) -> int:
        """Requests in the largest launch."""
        return max(launched.requests for launched in self.launches)

    @property
    def names(self) -> set[str]:
        """Of the launches."""
        return {launched.name for launched in self.launches}

    @property
    def side_by_side(self) -> int:
        """How many launches were given to one lane before an earlier one had ended in another.

        Whether both compute then, or take turns on a core that others want, is up to the machine.
        """
        launched = sorted(self.launches, key=lambda launch: launch.launched)
        return sum(a.lane != b.lane and b.launched < a.end for a, b in pairwise(launched))


def serve(
    decoder: Decoder,
    system: System,
    submits: Sequence[Submit],
    *,
    pages: int,
    page_size: int,
    running: int,
    prefix_cache: bool,
    runner: type[Runner] = OneThread,
    rounded: bool = False,
    adapters: Mapping[str, Path] = MappingProxyType({}),
    vocabulary: Vocabulary | None = None,
) -> Served:
    """Serve these requests to their ends on all cores; nothing may be left over."""
    layout = PageLayout.of(decoder.spec)
    pages *= 1 + layout.window_tables
    shape = decoder.spec, pages, page_size, decoder.dtype
    snapshots = None if decoder.spec.state is None else running
    states = running + (snapshots or 0)
    kv = KVCache(*shape, requests=states, rounded=rounded, layout=layout)
    for layer in (*kv.k, *kv.v, *kv.states.conv, *kv.states.rule):
        layer.copy_(torch.tensor(torch.nan))  # what nobody wrote must not be read: it would show
    books = KVCacheManager(
        pages,
        page_size,
        running,
        prefix_cache=prefix_cache,
        snapshots=snapshots,
        window=layout.window,
        window_tables=layout.window_tables,
    )

    def lanes(wake: Callable[[], None]) -> CpuLanes:
        pool = AdapterPool(decoder.weights, len(adapters))
        return CpuLanes(runner(decoder, kv, running, pool), usable_cores(), wake)

    try:
        return serve_on(lanes, decoder.spec, books, system, submits, adapters, vocabulary)
    finally:
        # Lanes and workers refer to each other: the pool would stay until they are collected.
        kv.layers, kv.k, kv.v = [], (), ()
        for states in (kv.states.conv, kv.states.rule):
            states.clear()


class ClosableLanes(Lanes, Protocol):
    def close(self) -> None: ...


def serve_on(
    make_lanes: Callable[[Callable[[], None]], ClosableLanes],
    spec: ModelSpec,
    books: KVCacheManager,
    system: System,
    submits: Sequence[Submit],
    adapters: Mapping[str, Path] = MappingProxyType({}),
    vocabulary: Vocabulary | None = None,
) -> Served:
    """Serve these requests to their ends, with these adapters by name, and a `tokenizer.json` if
    some have grammars; nothing may be left over."""
    port, log = LocalPort(submits, vocabulary), LaunchLog()
    lanes = make_lanes(port.wake)
    registry = AdapterRegistry(lanes, len(adapters))
    for name, path in adapters.items():
        registry.load_at_start(name, str(path))
    engine = Engine(
        system,
        State(books, lanes, spec.layers, OnlineEstimator(), log),
        ServedModel(spec.vocab_size, spec.eos_token_ids, spec.max_positions),
        notify=port.wake,
        adapters=registry,
    )
    slots = books.free_slots
    try:
        run(engine, port)
        while engine.state.in_flight:  # steps that were launched ahead
            port.receive()
            if not engine.reap():
                port.wait(None)
    finally:
        lanes.close()
    books.check()
    left = books.free_pages + books.reclaimable_pages
    assert left == books.total_pages, "pages did not come back"
    assert books.free_slots == slots, "slots did not come back"
    stats = engine.stats()
    return Served(
        outputs=[port.tokens[submit.id] for submit in submits],
        finish=[port.finish[submit.id] for submit in submits],
        logprobs=[port.logprobs[submit.id] for submit in submits],
        prompt_logprobs=[port.prompt_logprobs.get(submit.id) for submit in submits],
        preemptions=stats.preemptions,
        prefix_hits=stats.prefix_hits,
        launches=log.launches,
    )
