"""What the CPU lanes do: `python benchmarks/cpu.py [--seconds 15] [--out FILE]`.

Three questions, on a small model on all cores of this machine, which should be doing nothing else:

1. Do lanes help? Four requests decode while a 600-token prompt comes every 3 seconds, under
   `static-split`, `auto` and `prefill-first`, in turn. Time between tokens is taken where
   the API process receives them; throughput is prompt tokens of prompts answered plus
   output tokens. `--systems` names others; `1P1D` gives prefill and decode half of the cores each
   (`--disaggregated`). With `--lanes-only` the other two questions are left out.
2. Is the base slow? One, four and 16 streams, prompts alone, and memory, in turn with llama.cpp on
   the same GGUF file if `--llama-cpp` names the folder in which `npm install node-llama-cpp@3.22`
   was run; and a prompt whose prefix is cached against the same prompt for the first time.
3. What does an idle engine cost?
"""

import argparse
import asyncio
import itertools
import json
import random
import re
import statistics
import subprocess
import time
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
from measured import Figure, at_least, at_most, cpu_seconds, show

from twolane import SamplingParams
from twolane.common.resources import usable_cores
from twolane.engine.config import EngineConfig
from twolane.engine.messages import Output, Submit
from twolane.frontend.engine_client import EngineClient, Event
from twolane.model.load.hub import resolve
from twolane.results.provenance import provenance, save

DECODING = 4
"""Number of requests that decode all the time."""
ANSWER = 8
"""Output tokens of each prompt that comes meanwhile."""
LANE_SYSTEMS = ("prefill-first", "static-split", "auto")
DISAGGREGATED = "1P1D"
"""Name of the setup in which prefill and decode have a process with half of the cores each."""
PAGE = 16
"""Tokens of a page of the KV cache on a CPU: the prefix cache holds whole pages."""
TOKENS = 1000, 40_000
"""Token ids that prompts are drawn from, the second excluded, where the vocabulary has them."""

Measured = dict[str, float]
vocab_size = cache(lambda model: resolve(model).spec().vocab_size)


class Load(msgspec.Struct, frozen=True):
    """The load and its settings."""

    model: str
    seconds: float
    """Duration of a round."""
    rounds: int
    """Number of rounds of each system, in turn. The longest gap is a round's, the median of the
    rounds: on a shared machine one hiccup of the host in two minutes says nothing about lanes. The
    worst is shown, too."""
    prompt: int
    """Tokens of each prompt that arrives while others decode."""
    every: float
    """Seconds between two such prompts."""
    output: int
    """Output tokens of each stream in the second question."""
    idle: float
    """Seconds for which an idle engine is measured."""
    systems: tuple[str, ...] = LANE_SYSTEMS
    """Systems that the first question compares, or `DISAGGREGATED`."""

    def tokens(self, rng: random.Random, n: int) -> list[int]:
        """Return a random prompt of n tokens."""
        low, high = TOKENS
        size = vocab_size(self.model)
        if size < high:
            low, high = 3, size
        return [rng.randrange(low, high) for _ in range(n)]


class Stream:
    """A request and the arrival times of its tokens."""

    def __init__(self, client: EngineClient, prompt: list[int], output: int) -> None:
        self.prompt = prompt
        self.times: list[float] = []
        self.cached = 0
        self.done = asyncio.Event()
        self.sent = time.perf_counter()
        self._left = output
        self._id = f"s{id(self)}-{self.sent}"
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        client.submit(Submit(self._id, prompt, params), self._sink)

    def _sink(self, event: Event) -> None:
        if isinstance(event, Output):
            now = time.perf_counter()
            self.times += [now] * len(event.tokens)
            self.cached = event.cached if event.cached is not None else self.cached
        if not isinstance(event, Output) or event.finish is not None:
            self.done.set()

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in itertools.pairwise(self.times)]


async def start(model: str, system: str) -> EngineClient:
    apart = system == DISAGGREGATED
    name = None if apart else system
    config = EngineConfig(model=model, system=name, disaggregated=apart, kv_tokens=60_000)
    return await EngineClient.start(config)


async def load(asked: Load, system: str, seed: int) -> tuple[list[float], float]:
    """Return gaps of the decoding requests in seconds, and tokens per second."""
    client = await start(asked.model, system)
    rng = random.Random(seed)
    most = int(asked.seconds * 100)
    decoding = [Stream(client, asked.tokens(rng, 50), most) for _ in range(DECODING)]
    while min(len(stream.times) for stream in decoding) < 5:
        await asyncio.sleep(0.01)
    began = time.perf_counter()
    prompts: list[Stream] = []
    while time.perf_counter() - began < asked.seconds:
        prompts.append(Stream(client, asked.tokens(rng, asked.prompt), ANSWER))
        await asyncio.sleep(asked.every)
    ended = time.perf_counter()
    gaps = [
        gap for s in decoding for gap, at in zip(s.gaps, s.times[1:], strict=True) if at > began
    ]
    answered = sum(asked.prompt for s in prompts if s.times)
    output = sum(began < at <= ended for s in (*decoding, *prompts) for at in s.times)
    await client.close()
    return gaps, (answered + output) / (ended - began)


async def lanes(asked: Load) -> tuple[Measured, list[Figure]]:
    """Answer the first question: gaps beside prefill, by system."""
    gaps: dict[str, list[float]] = {}
    rates: dict[str, list[float]] = {}
    longest: dict[str, list[float]] = {}
    for seed in range(asked.rounds):
        for system in asked.systems:
            some, rate = await load(asked, system, seed)
            gaps.setdefault(system, []).extend(some)
            longest.setdefault(system, []).append(max(some))
            rates.setdefault(system, []).append(rate)
    measured: Measured = {}
    for system in gaps:
        p50, p99 = map(float, np.percentile(gaps[system], [50, 99]))
        measured[f"{system}, P50 TBT (ms)"] = p50 * 1e3
        measured[f"{system}, P99 TBT (ms)"] = p99 * 1e3
        middle = statistics.median(longest[system])
        measured[f"{system}, longest gap of a round (ms)"] = middle * 1e3
        measured[f"{system}, longest gap of all rounds (ms)"] = max(longest[system]) * 1e3
        measured[f"{system}, tokens/s"] = statistics.mean(rates[system])

    return measured, compared(measured) if {*LANE_SYSTEMS} <= gaps.keys() else []


def compared(measured: Measured) -> list[Figure]:
    """Return the comparison of `static-split` with the others."""

    def ratio(what: str, system: str = "prefill-first") -> float:
        return measured[f"{system}, {what}"] / measured[f"static-split, {what}"]

    gap, rate = "longest gap of a round", ratio("tokens/s")
    return [
        at_least("P99 TBT, prefill-first / static-split", ratio("P99 TBT (ms)"), 3),
        at_least(f"{gap}, prefill-first / static-split", ratio(f"{gap} (ms)"), 5),
        at_least("throughput, static-split / prefill-first", 1 / rate, 0.85),
        at_most("P99 TBT, auto / static-split", ratio("P99 TBT (ms)", "auto"), 1),
        at_least("throughput, auto / static-split", ratio("tokens/s", "auto"), 1),
    ]


async def streams(client: EngineClient, asked: Load, n: int, seed: int) -> float:
    """Output tokens per second of n streams together, first token to last."""
    rng = random.Random(seed)
    running = [Stream(client, asked.tokens(rng, 64), asked.output) for _ in range(n)]
    await asyncio.gather(*(stream.done.wait() for stream in running))
    first = min(s.times[0] for s in running)
    last = max(s.times[-1] for s in running)
    return n * (asked.output - 1) / (last - first)


def llama_cpp(asked: Load, packages: Path) -> Measured:
    """Return what llama.cpp does with the same file, on as many threads."""
    path, cores = resolve(asked.model).path, len(usable_cores())
    script = Path(__file__).with_name("llama_cpp.mjs")
    load = asked.output, asked.seconds, asked.prompt, asked.every
    command = ["node", script, packages, path, cores, *load]
    done = subprocess.run([*map(str, command)], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def pss(pid: int) -> float:
    """Return the MiB of memory that are a process's own, and its share of what others map too."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    return int(re.search(r"^Pss: +(\d+)", rollup, re.MULTILINE)[1]) / 1024


async def alone(client: EngineClient, asked: Load, seed: int) -> Measured:
    """Return what streams and prompts reach alone, by the names that `llama_cpp` has for it."""
    found = {"1 streams, tokens/s": await streams(client, asked, 1, seed)}
    found["memory (MiB)"] = pss(client.process.pid)
    for n in (4, 16):
        found[f"{n} streams, tokens/s"] = await streams(client, asked, n, seed + n)
    for new in (512, 1500):
        new = min(new, client.ready.max_model_len - 2)
        stream = Stream(client, asked.tokens(random.Random(seed + new), new), 1)
        await stream.done.wait()
        found[f"prefill of {new}, tokens/s"] = new / (stream.times[0] - stream.sent)
    return found


async def base(asked: Load, packages: Path | None) -> tuple[Measured, list[Figure]]:
    """Answer the second and third question: throughput, prefix cache, idle CPU."""
    client = await start(asked.model, "static-split")
    await streams(client, asked, 1, 99)
    ours, theirs = [], []
    for seed in range(asked.rounds):
        ours.append(await alone(client, asked, 100 * seed))
        if packages is not None:
            theirs.append(await asyncio.to_thread(llama_cpp, asked, packages))
    cold, warm = await prefix(client, asked, new := min(1024, client.ready.max_model_len - 2))
    idle = await idle_share(client, asked.idle)
    await client.close()
    measured, peer = medians(ours), medians(theirs)
    ratio = measured["16 streams, tokens/s"] / measured["1 streams, tokens/s"]
    figures = [
        at_least("16 streams / one stream", ratio, 4),
        at_least("TTFT, cold / prefix cached", cold / warm, 5),
        at_most("idle engine, share of a core", idle, 0.01),
    ]
    for name in measured.keys() & peer.keys():
        ratio, what = measured[name] / peer[name], f"{name}, ours / llama.cpp"
        least = 0.9 if name.startswith("1 ") else 1.0
        memory = name.startswith("memory")
        figures.append(at_most(what, ratio, 1.3) if memory else at_least(what, ratio, least))
    measured[f"TTFT of {new} tokens (ms)"] = cold * 1e3
    measured[f"TTFT of {new} tokens, all but the last page cached (ms)"] = warm * 1e3
    return measured | {f"llama.cpp, {name}": value for name, value in peer.items()}, figures


def medians(rounds: list[Measured]) -> Measured:
    return {name: statistics.median(each[name] for each in rounds) for name in (rounds or [{}])[0]}


async def prefix(client: EngineClient, asked: Load, new: int) -> tuple[float, float]:
    """TTFT of a prompt the first time and the second time, medians of three, in seconds."""
    cold, warm = [], []
    for seed in range(3):
        prompt = asked.tokens(random.Random(100 + seed), new)
        for kept in (cold, warm):
            stream = Stream(client, prompt, 1)
            await stream.done.wait()
            kept.append(stream.times[0] - stream.sent)
        assert new - PAGE <= stream.cached < new
    return statistics.median(cold), statistics.median(warm)


async def idle_share(client: EngineClient, seconds: float) -> float:
    """CPU time of the engine process over wall time, with nothing to do."""
    await asyncio.sleep(1.0)
    before = cpu_seconds(client.process.pid)
    await asyncio.sleep(seconds)
    return (cpu_seconds(client.process.pid) - before) / seconds


def main() -> None:
    """Measure, print, write the file if asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="smollm2-135m-instruct", help="alias, folder or GGUF file")
    add("--seconds", type=float, default=15.0, help="of each round")
    add("--rounds", type=int, default=4, help="of each system")
    add("--prompt", type=int, default=600, help="tokens of the prompts that come meanwhile")
    add("--every", type=float, default=3.0, help="seconds between two of them")
    add("--output", type=int, default=96, help="output tokens of each stream alone")
    add("--idle", type=float, default=5.0, help="seconds in which an idle engine is watched")
    add("--systems", nargs="+", default=LANE_SYSTEMS, help="of the first question")
    add("--lanes-only", action="store_true", help="leave out the other two questions")
    add("--llama-cpp", type=Path, help="folder with node_modules/node-llama-cpp")
    add("--out", type=Path, help="write the figures here as JSON")
    given = vars(parser.parse_args())
    out, lanes_only, peer = (given.pop(name) for name in ("out", "lanes_only", "llama_cpp"))
    asked = Load(**given | {"systems": tuple(given["systems"])})
    measured, figures = asyncio.run(lanes(asked))
    if not lanes_only:
        of_base, more = asyncio.run(base(asked, peer))
        measured, figures = measured | of_base, figures + more
    if (peer_gap := measured.get("llama.cpp, P99 gap beside prompts (ms)")) is not None:
        gap = peer_gap / measured["static-split, P99 TBT (ms)"]
        figures.append(at_least("P99 gap beside prompts, llama.cpp / static-split", gap, 1))
    for name, value in measured.items():
        print(f"{name:55} {value:8.1f}")
    show(figures)
    if out is not None:
        rounded = {name: round(value, 2) for name, value in measured.items()}
        save(out, provenance(asked), {"measured": rounded, "figures": figures})


if __name__ == "__main__":
    main()
