"""What rate systems hold over one loaded model: `benchmarks/ladder.py MODEL RANKS SYSTEM@RATES`.

For comparisons of minutes: the model is loaded and its graphs are made once, on as many GPUs as
there are ranks, and every system then serves alone, with engine and lanes as in a server but
without HTTP. Its requests come at rates that rise by steps, `auto@6,7,8` at three. A rate holds
if P99 of all gaps in its step is within the bound on TBT and 99 % of its requests have their first
token in time; what is under way when the last step ends is aborted. `auto@4,5@15` has a bound of
15 ms in place of `--tbt-ms`, so one start serves several bounds. `--simulate h200` tells first
what a simulation of the same requests says; predictions on the GPUs are by that simulation's
profile. Every step is printed when its system is through, and `--out` is written then.
"""

import argparse
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from measured import StartProgress

from twolane.bench.contenders import parse_system
from twolane.common import garbage
from twolane.engine.build import assemble
from twolane.engine.config import EngineConfig
from twolane.engine.loop import run
from twolane.engine.messages import Abort, Outputs, Submit, ToEngine
from twolane.engine.predict import machine_key
from twolane.estimate.profile import Profile
from twolane.lanes.base import Machine
from twolane.lanes.load import load
from twolane.lanes.settings import DeviceSettings
from twolane.model.load.hub import resolve
from twolane.model.shapes import SHAPES
from twolane.results.provenance import provenance, save
from twolane.results.record import Record
from twolane.sampling import SamplingParams
from twolane.sim.gpus import GPUS
from twolane.sim.lanes import SimLanes
from twolane.sim.machine import SimulatedMachine
from twolane.sim.port import SimPort
from twolane.sim.profile import simulated_profile
from twolane.sim.run import Ledger
from twolane.slo import Slo
from twolane.workload.prompts import PromptMaker, TokenRange
from twolane.workload.spec import WorkloadSpec
from twolane.workload.traces import TraceRequest

BEFORE = 1.0
"""Seconds from the start of an engine to the first step."""
IN_TIME = 0.99
"""Share of a step's requests whose first token must be in time, and percentile of its gaps."""
Arrivals = Sequence[tuple[float, ToEngine]]


class Ladder(NamedTuple):
    """A system, its rates of load, and its bound on TBT."""

    system: str
    rates: tuple[float, ...]
    tbt_ms: float | None = None
    """Milliseconds; None: `--tbt-ms`."""

    def __str__(self) -> str:
        bound = "" if self.tbt_ms is None else f" within {self.tbt_ms:g} ms"
        return self.system + bound

    @classmethod
    def parse(cls, text: str) -> "Ladder":
        """Return what is written SYSTEM@RATE,RATE or SYSTEM@RATE,RATE@MILLISECONDS."""
        system, rates, *bound = text.split("@")
        return cls(system, tuple(map(float, rates.split(","))), *map(float, bound))

    def bound(self, given: argparse.Namespace) -> float:
        """Return the bound on TBT in seconds."""
        return (given.tbt_ms if self.tbt_ms is None else self.tbt_ms) / 1e3


class LivePort:
    """The engine's port on the real clock; it stops when all that was asked has ended.

    Args:
        clock: seconds, of the lanes.
        arrivals: (seconds on that clock, message), in order of time.
        hear: called with (seconds, news).
        ended: whether every request has ended.
        news: set when a lane has news.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        arrivals: Arrivals,
        hear: Callable[[float, Outputs], None],
        ended: Callable[[], bool],
        news: threading.Event,
    ) -> None:
        self._clock, self._arrivals, self._next = clock, arrivals, 0
        self._hear, self._ended, self._news = hear, ended, news

    def receive(self) -> Sequence[ToEngine] | None:
        """See `Port.receive`."""
        first, now = self._next, self._clock()
        while self._next < len(self._arrivals) and self._arrivals[self._next][0] <= now:
            self._next += 1
        if self._over():
            return None
        return [message for _, message in self._arrivals[first : self._next]]

    def send(self, news: Outputs) -> None:
        """See `Port.send`."""
        self._hear(self._clock(), news)

    def wait(self, wake_at: float | None) -> None:
        """See `Port.wait`."""
        if self._over():
            return
        times = [] if wake_at is None else [wake_at]
        if self._next < len(self._arrivals):
            times.append(self._arrivals[self._next][0])
        self._news.wait(max(0.0, min(times) - self._clock()) if times else None)
        self._news.clear()

    def _over(self) -> bool:
        return self._next == len(self._arrivals) and self._ended()


class Kept:
    """A machine whose lanes serve one engine after the other."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._lanes: Any = None
        self._room: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._machine, name)

    def kv_bytes(self, max_model_len: int) -> int:
        """See `Machine.kv_bytes`: what it was before the lanes had their pool."""
        if self._room is None:
            self._room = self._machine.kv_bytes(max_model_len)
        return self._room

    def start(self, *args: Any) -> Any:
        """See `Machine.start`."""
        if self._lanes is None:
            self._lanes = self._machine.start(*args)
            self._lanes.fill_kv()
            garbage.freeze()
        return self._lanes

    def close(self) -> None:
        """End the lanes."""
        if self._lanes is not None:
            self._lanes.close()


def asked_of(given: argparse.Namespace, ladder: Ladder, begin: float) -> list[TraceRequest]:
    """Return the requests of all steps; the first step begins then."""
    requests: list[TraceRequest] = []
    for step, rate in enumerate(ladder.rates):
        count, first = max(1, round(rate * given.seconds)), begin + step * given.seconds
        spec = WorkloadSpec(
            dataset=given.dataset,
            num_prompts=count,
            request_rate=rate,
            seed=given.seed + step,
            max_input_len=given.longest,
        )
        drawn = spec.build()
        # The last one comes at the end of its step, whatever the pattern.
        scale = given.seconds / max((drawn[-1].arrival or 0.0) + 1 / rate, 1e-9)
        requests += [
            msgspec.structs.replace(each, arrival=first + (each.arrival or 0.0) * scale)
            for each in drawn
        ]
    return requests


def messages(given: argparse.Namespace, requests: Sequence[TraceRequest], end: float) -> Arrivals:
    """Return the requests as messages, and at the end an abort of each."""
    prompts = PromptMaker(given.vocab_range, given.seed)
    sent: list[tuple[float, ToEngine]] = []
    for index, request in enumerate(requests):
        params = SamplingParams(max_tokens=request.output_tokens, ignore_eos=True, temperature=0.0)
        asked = Submit(str(index), prompts.token_ids(index, request), params)
        sent.append((request.arrival or 0.0, asked))
    return [*sent, *((end, Abort(str(index))) for index in range(len(requests)))]


def serve(given: argparse.Namespace, machine: Any, config: EngineConfig, ladder: Ladder) -> Any:
    """Serve one system's ladder; (seconds of its first step, records).

    The lanes stay: whoever has the machine ends them.
    """
    news: threading.Event = given.news
    built = assemble(config, machine, news.set, given.progress)
    lanes = built.lanes
    begin = lanes.clock() + BEFORE
    requests = asked_of(given, ladder, begin)
    end = begin + len(ladder.rates) * given.seconds
    ledger = Ledger(requests, lambda record: False, lambda index, times, new: False)
    arrivals = messages(given, requests, end)
    if isinstance(lanes, SimLanes):
        run(built.engine, SimPort(lanes, arrivals, ledger.hear))
    else:

        def ended() -> bool:
            return len(ledger.served) == len(requests) and not built.engine.state.in_flight

        run(built.engine, LivePort(lanes.clock, arrivals, ledger.hear, ended, news))
    return begin, [one.record for one in ledger.in_order()]


def steps_of(
    given: argparse.Namespace, ladder: Ladder, begin: float, records: Sequence[Record]
) -> list[dict[str, Any]]:
    """What came of each step; no step holds above one that does not."""
    ends, bound = begin + len(ladder.rates) * given.seconds, ladder.bound(given)
    found, held = [], True
    for step, rate in enumerate(ladder.rates):
        first = begin + step * given.seconds
        last = first + given.seconds
        gaps = [
            after - before
            for record in records
            for before, after in pairwise(record.token_times)
            if first <= after < last
        ]
        own = [record for record in records if first <= record.scheduled < last]
        known = [late(given, record, ends) for record in own]
        judged = [each for each in known if each is not None]
        share = 1 - sum(judged) / max(1, len(judged))
        p99 = float(np.percentile(gaps, 100 * IN_TIME)) if gaps else 0.0
        held = held and share >= IN_TIME and p99 <= bound
        firsts = [record.ttft for record in own if record.ttft is not None]
        found.append(
            {
                "rate": rate,
                "requests": len(own),
                "not_known": len(own) - len(judged),
                "first_tokens_in_time": round(share, 4),
                "ttft_p50_s": round(float(np.median(firsts)), 3) if firsts else None,
                "ttft_p99_s": round(float(np.percentile(firsts, 99)), 3) if firsts else None,
                "gaps": len(gaps),
                "gaps_in_time": round(float(np.mean(np.array(gaps) <= bound)), 4) if gaps else None,
                "gap_p50_ms": round(float(np.median(gaps)) * 1e3, 2) if gaps else None,
                "gap_p99_ms": round(p99 * 1e3, 2),
                "holds": held,
            }
        )
    return found


def late(given: argparse.Namespace, record: Record, end: float) -> bool | None:
    """Whether a request's first token was late; None: it could still have been in time."""
    bound = given.ttft + given.ttft_per_1k * record.asked_prompt / 1024
    if record.ttft is not None:
        return record.ttft > bound
    return True if end - record.scheduled > bound else None


def settings(given: argparse.Namespace) -> EngineConfig:
    """What all systems are served with."""
    return EngineConfig(
        model=given.model,
        load_format="dummy" if given.load_dummy else "auto",
        device="auto" if given.simulate else given.device,
        tensor_parallel_size=1 if given.simulate else shared_by(given),
        disaggregated=given.disaggregated,
        levels=given.levels,
        max_model_len=given.longest + 4096,
        max_running=given.max_running,
        profile=None if given.profile is None else str(given.profile),
        slo=Slo(ttft=given.ttft, ttft_per_token=given.ttft_per_1k / 1024, tbt=given.tbt_ms / 1e3),
    )


def shared_by(given: argparse.Namespace) -> int:
    """GPUs that share each layer."""
    return 1 if given.disaggregated else given.ranks


def machine_of(given: argparse.Namespace, config: EngineConfig) -> tuple[Any, EngineConfig]:
    """Return the machine, and the settings with a profile of it."""
    spec = SHAPES.get(given.model) or resolve(given.model, "dummy").spec()
    if given.simulate:
        gpu = GPUS[given.simulate]
        machine = SimulatedMachine(gpu, spec, config, tp=shared_by(given), seed=given.seed)
        profile = given.profile or simulated_profile(gpu, spec, shared_by(given), config)
        return machine, msgspec.structs.replace(config, profile=str(profile))
    machine = Kept(load(DeviceSettings.of(config), given.progress))
    if given.profile is None:
        return machine, config
    profile = Profile.read(given.profile)
    units = max(sum(level) for level in profile.levels)
    renamed = given.out.with_suffix(".profile.json")
    profile.key = machine_key(machine, units)
    profile.save(renamed)
    return machine, msgspec.structs.replace(config, profile=str(renamed))


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("model")
    add("ranks", type=int)
    add("ladders", nargs="+", type=Ladder.parse, metavar="SYSTEM@RATES")
    add("--simulate", metavar="GPU", help="h100 or h200")
    add("--device", default="cuda")
    add("--dataset", default="azure-conv")
    add("--tbt-ms", type=float, default=30.0)
    add("--ttft", type=float, default=1.0, help="seconds")
    add("--ttft-per-1k", type=float, default=1.0, help="seconds for each 1,024 prompt tokens")
    add("--seconds", type=float, default=12.0, help="of a step")
    add("--within", type=float, help="seconds after which no other system is begun")
    add("--longest", type=int, default=12_000, help="tokens to which prompts are cut")
    add("--levels", type=lambda text: tuple(map(int, text.split(","))))
    add("--max-running", type=int, default=128)
    add("--vocab-range", type=TokenRange.parse, default=TokenRange(), metavar="LOW:HIGH")
    add("--disaggregated", action="store_true", help="two GPUs: one for prefill, one for decode")
    add("--profile", type=Path, help="a simulation's, of the same model and number of ranks")
    add("--true-weights", dest="load_dummy", action="store_false")
    add("--seed", type=int, default=0)
    add("--out", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    """Serve every system in turn, and save."""
    given = options()
    given.progress, given.news = StartProgress(), threading.Event()
    names = "model", "ranks", "dataset", "tbt_ms", "seconds", "seed", "levels", "simulate"
    about = provenance({name: getattr(given, name) for name in (*names, "disaggregated")})
    machine, config = machine_of(given, settings(given))
    found: dict[str, list[dict[str, Any]]] = {}
    for ladder in given.ladders:
        if given.within is not None and given.progress.seconds > given.within:
            print(f"no time for {ladder}", flush=True)
            continue
        name, words = parse_system(ladder.system)
        slo = msgspec.structs.replace(config.slo, tbt=ladder.bound(given))
        own = msgspec.structs.replace(config, system=name, options=words, slo=slo)
        begin, records = serve(given, machine, own, ladder)
        steps = found[str(ladder)] = steps_of(given, ladder, begin, records)
        held = [step["rate"] for step in steps if step["holds"]]
        most, at = max(held, default=0), given.progress.seconds
        print(f"{at:.1f} s: {ladder} holds {most:g} requests/s", flush=True)
        for step in steps:
            print("  " + ", ".join(f"{key} {value}" for key, value in step.items()), flush=True)
        save(given.out, about, {"simulated": bool(given.simulate), "found": found})
    if isinstance(machine, Kept):
        machine.close()


if __name__ == "__main__":
    main()
