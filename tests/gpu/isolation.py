"""Random schedules on a GPU's lanes, with delays on either stream: no token may be wrong.

    python -m tests.gpu.isolation --folder DIR --seeds 0:100 [--without GUARD]

exits with 0 when all answers of all schedules are right. With --without one guard is removed, and
the exit code is 0 if a schedule then fails. A CUDA error ends a process for good, so every guard
has its own.
"""

import argparse
import json
import os
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import triton

from tests.engine.random_plans import RandomPlans
from tests.engine.world import World
from tests.gpu.catalogue import EOS, PAGE, Answer, Catalogue, Entry, prepare
from tests.gpu.guards import GUARDS
from tests.parity.serving import LaunchLog
from twolane.devices import DeviceSettings, LaneName
from twolane.engine.engine import Engine
from twolane.engine.intake import ServedModel
from twolane.engine.kv.manager import KVCacheManager
from twolane.engine.messages import Output, Submit, ToEngine
from twolane.engine.request import Request
from twolane.engine.state import State
from twolane.estimate.online import OnlineEstimator
from twolane.lanes.cuda.lanes import CudaLanes
from twolane.lanes.cuda.machine import CudaMachine
from twolane.lanes.cuda.runner import Queued
from twolane.lanes.settings import LaneSizes
from twolane.lanes.work import Work
from twolane.model.load.hub import resolve
from twolane.model.load.weights import load_weights

LEVELS = (16, 48, 96)
"""SMs for decode; the prefill share of one level and the decode share of another may overlap."""
SLOTS = 6
POOL = 160
"""Pages on the device; a schedule's books use some of them."""
LONG_POOL, SHORT_POOL = (80, 120), (15, 20)
REQUESTS = 10
LAUNCHES = 20
"""The fewest of a schedule."""
ENDED_SHARE = 0.4
"""Of the aborts and stop strings of a `World`, whose turns are fewer."""
STUCK_SECONDS = 20.0
CYCLES_A_SECOND = 1.7e9
DELAYS = (2e-5, 4e-4)
"""Seconds, shortest and longest."""


class Delays:
    """Holds a stream back now and then: before a launch, between two of its kernels, after it."""

    def __init__(self) -> None:
        self.rng = random.Random(0)
        self.kernels, self.launches = 0.01, 0.25
        """Shares of them that are delayed."""
        self.count = 0

    def maybe(self, share: float) -> None:
        """Delay what comes next on the current stream, or not."""
        if self.rng.random() < share and not torch.cuda.is_current_stream_capturing():
            self.count += 1
            torch.cuda._sleep(int(self.rng.uniform(*DELAYS) * CYCLES_A_SECOND))

    def install(self, lanes: CudaLanes) -> None:
        """Around every launch, between the two graphs of a step, and before any Triton kernel."""
        runner, steps = lanes.runner, lanes.runner.steps
        run, forward = runner.run, steps.forward

        def delayed_run(
            work: Work, lane: LaneName, units: int, between: Callable[[], None] | None
        ) -> Queued:
            self.maybe(self.launches)
            queued = run(work, lane, units, between)
            self.maybe(self.launches)
            return queued

        def delayed_forward(units: int, bucket: int, *, adapted: bool) -> None:
            forward(units, bucket, adapted=adapted)
            self.maybe(self.launches)

        runner.run, steps.forward = delayed_run, delayed_forward
        triton.knobs.runtime.launch_enter_hook.add(lambda _: self.maybe(self.kernels))


class Bench:
    """A tiny model on the GPU, its lanes, and requests whose answers are known."""

    def __init__(self, folder: Path) -> None:
        self.catalogue: Catalogue = prepare(folder)
        model = resolve(str(folder / "model"))
        self.spec, weights = load_weights(model, dtype="float32", device="cuda")
        machine = CudaMachine(self.spec, weights, DeviceSettings(model="", levels=LEVELS))
        sizes = LaneSizes(POOL, PAGE, SLOTS, self.spec.max_positions)
        self.lanes = machine.start(sizes, lambda: None, lambda *_: None)
        self.compiled: list[str] = []
        triton.knobs.runtime.jit_cache_hook = self._note_compiled
        self.delays = Delays()
        self.delays.install(self.lanes)

    def clear(self) -> None:
        """Nothing is at work, and what nobody wrote shows."""
        torch.cuda.synchronize()
        for layer in self.lanes.runner.kv.layers:
            layer.fill_(float("nan"))
        torch.cuda.synchronize()

    def _note_compiled(self, **what: Any) -> None:
        self.compiled.append(what["repr"])


BENCH: Bench


@dataclass
class GpuWorld(World):
    """One engine over a GPU's lanes; arrivals, aborts and stop strings as in `World`."""

    requests: int = REQUESTS
    long: bool = False
    """Whether there are long prompts among the requests."""
    entries: dict[str, Entry] = field(default_factory=dict)
    log: LaunchLog = field(default_factory=LaunchLog)
    turns: int = 0
    _moved: bool = True

    def __post_init__(self) -> None:
        self.pages = self.rng.randint(*(LONG_POOL if self.long else SHORT_POOL))
        self.slots = self.rng.randint(3, SLOTS)
        self.lanes = BENCH.lanes
        spec = BENCH.spec
        books = KVCacheManager(self.pages, PAGE, self.slots, prefix_cache=self.prefix_cache)
        self.engine = Engine(
            self.system,
            State(books, self.lanes, spec.layers, OnlineEstimator(), self.log),
            ServedModel(spec.vocab_size, EOS, spec.max_positions),
        )
        self.submits = [self._submit(i) for i in range(self.requests)]
        self.to_send = list(self.submits)

    def _submit(self, i: int) -> Submit:
        """Three that fill the pool first; some that ask the same, at the same time or later."""
        rng, known = self.rng, BENCH.catalogue
        kind = known.filling if i < 3 else known.short
        if self.long and i % 3 == 0:
            kind = known.long
        entry = rng.choice(kind)
        if i >= 3 and rng.random() < 0.1:
            entry = rng.choice([*self.entries.values()])
        self.entries[f"r{i}"] = entry
        priority = rng.choice((0, 0, 0, 1))
        return msgspec.structs.replace(entry.submit, id=f"r{i}", priority=priority)

    def check(self) -> None:
        """At every eighth turn."""
        self.turns += 1
        if self.turns % 8 == 0:
            super().check()

    def turn(self, messages: Sequence[ToEngine]) -> bool:
        self._moved = super().turn(messages)
        return self._moved

    def _messages(self) -> list[ToEngine]:
        """When something has happened, or nothing can; most turns only look."""
        idle = not self.engine.state.in_flight
        return super()._messages() if self._moved or idle else []

    def _note_output(self, output: Output) -> None:
        answer = self.answers.setdefault(output.id, Answer())
        answer.tokens += output.tokens
        answer.logprobs += [each.logprob for each in output.logprobs or ()]
        answer.prompt_logprobs += [each.logprob for each in output.prompt_logprobs or ()]

    def run_lanes(self) -> bool:
        """They run by themselves; whether they do."""
        if not self.engine.state.in_flight:
            return False
        time.sleep(self.rng.choice((0.0, 2e-5, 1e-4)))
        last = self.engine.state.in_flight[-1]
        stuck = time.monotonic() - last.launched_at
        assert stuck < STUCK_SECONDS, "nothing happens any more"
        return True

    def drain(self) -> None:
        """Let what is still in flight land."""
        while self.engine.state.in_flight:
            self.run_lanes()
            self.turn([])
        super().check()
        self._note_launches()

    def _note_launches(self) -> None:
        launched = sorted(self.log.launches, key=lambda launch: launch.start)
        self.seen["launches"] = len(launched)
        self.seen["merged"] = sum(launch.requests > 1 for launch in launched)
        self.seen["side by side"] = sum(
            a.lane != b.lane and b.start < a.end for a, b in pairwise(launched)
        )

    def _mortal(self) -> list[Request]:
        """Anybody may be ended from outside, but those that fill the pool while they are to."""
        spared = set() if self.seen["memory preemptions"] else {"r0", "r1", "r2"}
        requests = sorted(self.engine.state.requests.values(), key=lambda r: r.order)
        return [request for request in requests if request.id not in spared]

    def _victim(self) -> Request | None:
        return super()._victim() if self.rng.random() < ENDED_SHARE else None

    def _stopped(self) -> Request | None:
        return super()._stopped() if self.rng.random() < ENDED_SHARE else None

    def _check_output(self, submit: Submit) -> None:
        got = self.answers.get(submit.id, Answer())
        want = self.entries[submit.id].answer
        n = len(want.tokens)
        if self.finished[submit.id] == "abort" or submit.id in self.cut:
            n = len(got.tokens)
        self.seen["tokens"] += n
        assert got.tokens == want.tokens[:n], f"{submit.id}: {got.tokens} is not {want.tokens}"
        asked = submit.params
        if asked.logprobs is not None:
            assert got.logprobs == pytest.approx(want.logprobs[:n], abs=2e-3)
        if asked.prompt_logprobs is not None and n:
            assert got.prompt_logprobs == pytest.approx(want.prompt_logprobs, abs=2e-3)


def run_schedule(seed: int) -> Counter[str]:
    """Serve a random schedule; what happened in it.

    Rarely so much is aborted that few launches are left; then another one follows on these lanes.

    Raises:
        AssertionError: a token is wrong, or the books.
    """
    rng = random.Random(seed)
    BENCH.clear()
    BENCH.delays.rng = random.Random(seed)
    seen: Counter[str] = Counter()
    while seen["launches"] < LAUNCHES:
        world = GpuWorld(
            RandomPlans(seed), rng, prefix_cache=rng.random() < 0.8, long=rng.random() < 0.1
        )
        try:
            world.run()
        finally:
            BENCH.lanes.synchronize()  # nothing of it may run on into the next one
        seen += world.seen
    return seen


@dataclass
class Report:
    """Of many schedules."""

    schedules: int = 0
    seconds: float = 0.0
    total: Counter[str] = field(default_factory=Counter)
    having: Counter[str] = field(default_factory=Counter)
    """Schedules in which it happened."""
    failure: str | None = None
    compiled: list[str] = field(default_factory=list)
    """Kernels that were compiled after the start."""


def run_schedules(seeds: range, budget: float | None) -> Report:
    """Until one fails, or the seconds of the budget are over."""
    report, begin = Report(), time.monotonic()
    for seed in seeds:
        try:
            seen = run_schedule(seed)
        except Exception as error:
            report.failure = f"schedule {seed}: {error!r:.300}\n{traceback.format_exc(limit=-3)}"
            break
        report.schedules += 1
        report.total += seen
        report.having += Counter(what for what, count in seen.items() if count)
        report.seconds = time.monotonic() - begin
        if budget is not None and report.seconds > budget:
            break
    report.total["delays"], report.compiled = BENCH.delays.count, BENCH.compiled
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seeds", default="0:100")
    parser.add_argument("--budget", type=float, help="seconds")
    parser.add_argument("--without", choices=GUARDS)
    chosen = parser.parse_args(arguments)
    global BENCH
    BENCH = Bench(chosen.folder)
    seeds = range(*map(int, chosen.seeds.split(":")))
    if chosen.without is not None:
        guard = GUARDS[chosen.without]
        guard.remove(BENCH.lanes)
        BENCH.delays.kernels, BENCH.delays.launches = guard.kernels, 0.5
    report = run_schedules(seeds, chosen.budget)
    print(json.dumps(vars(report)), flush=True)
    return int((report.failure is None) == (chosen.without is not None))


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # after a CUDA error, destructors abort
