"""What the CPU lanes do: `python benchmarks/cpu.py [--seconds 15] [--out results/cpu.json]`.

Three questions, on the embedded model in float32 on all cores of this machine, which should be
doing nothing else:

1. Do lanes help? Four requests decode while a 600-token prompt comes every 3 seconds, under
   `static-split`, `auto` and `prefill-first`, in turn. Time between tokens is taken where
   the API process receives them; throughput is prompt tokens of prompts answered plus
   output tokens.
2. Is the base slow? One stream against `transformers.generate`, 16 streams against one, and a
   prompt whose prefix is cached against the same prompt for the first time.
3. What does an idle engine cost?
"""

import argparse
import asyncio
import itertools
import json
import random
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from origin import origin, output

from twolane import SamplingParams
from twolane.engine.config import EngineConfig
from twolane.engine.messages import Output, Submit
from twolane.frontend.engine_client import EngineClient, Event

MODEL = "smollm2-135m-instruct"
DECODING = 4
PROMPT = 600
EVERY_SECONDS = 3.0
ROUNDS = 4
"""Of each system, in turn. The longest gap is a round's, the median of the rounds: on a shared
machine one hiccup of the host in two minutes says nothing about lanes. The worst is shown, too."""
ANSWER = 8
LANE_SYSTEMS = ("prefill-first", "static-split", "auto")


Measured = dict[str, float]


@dataclass(frozen=True)
class Figure:
    """A measured value, the bar it is held to, and whether it clears it."""

    name: str
    value: float
    bar: str
    holds: bool


class Stream:
    """A request and when its tokens came."""

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


def random_prompt(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(1000, 40_000) for _ in range(n)]


async def start(system: str) -> EngineClient:
    return await EngineClient.start(EngineConfig(model=MODEL, system=system, kv_tokens=60_000))


async def load(system: str, seconds: float, seed: int) -> tuple[list[float], float]:
    """Gaps of the four decoding requests in seconds, and tokens per second."""
    client = await start(system)
    rng = random.Random(seed)
    most = int(seconds * 100)
    decoding = [Stream(client, random_prompt(rng, 50), most) for _ in range(DECODING)]
    while min(len(stream.times) for stream in decoding) < 5:
        await asyncio.sleep(0.01)
    began = time.perf_counter()
    prompts: list[Stream] = []
    while time.perf_counter() - began < seconds:
        prompts.append(Stream(client, random_prompt(rng, PROMPT), ANSWER))
        await asyncio.sleep(EVERY_SECONDS)
    ended = time.perf_counter()
    gaps = [
        gap for s in decoding for gap, at in zip(s.gaps, s.times[1:], strict=True) if at > began
    ]
    answered = sum(PROMPT for s in prompts if s.times)
    output = sum(began < at <= ended for s in (*decoding, *prompts) for at in s.times)
    await client.close()
    return gaps, (answered + output) / (ended - began)


async def lanes(seconds: float) -> tuple[Measured, list[Figure]]:
    gaps: dict[str, list[float]] = {}
    rates: dict[str, list[float]] = {}
    longest: dict[str, list[float]] = {}
    for seed in range(ROUNDS):
        for system in LANE_SYSTEMS:
            some, rate = await load(system, seconds, seed)
            gaps.setdefault(system, []).extend(some)
            longest.setdefault(system, []).append(max(some))
            rates.setdefault(system, []).append(rate)
    measured: Measured = {}
    for system in gaps:
        p50, p99 = map(float, np.percentile(gaps[system], [50, 99]))
        measured[f"{system}, P50 TBT (ms)"] = p50 * 1e3
        measured[f"{system}, P99 TBT (ms)"] = p99 * 1e3
        measured[f"{system}, longest gap of a round (ms)"] = (
            statistics.median(longest[system]) * 1e3
        )
        measured[f"{system}, longest gap of all rounds (ms)"] = max(longest[system]) * 1e3
        measured[f"{system}, tokens/s"] = statistics.mean(rates[system])

    def ratio(what: str, system: str = "prefill-first") -> float:
        return measured[f"{system}, {what}"] / measured[f"static-split, {what}"]

    p99, rate = ratio("P99 TBT (ms)"), 1 / ratio("tokens/s")
    gap = ratio("longest gap of a round (ms)")
    auto_p99, auto_rate = ratio("P99 TBT (ms)", "auto"), ratio("tokens/s", "auto")
    return measured, [
        Figure("P99 TBT, prefill-first / static-split", p99, ">= 3", p99 >= 3),
        Figure("longest gap of a round, prefill-first / static-split", gap, ">= 5", gap >= 5),
        Figure("throughput, static-split / prefill-first", rate, ">= 0.85", rate >= 0.85),
        Figure("P99 TBT, auto / static-split", auto_p99, "<= 1", auto_p99 <= 1),
        Figure("throughput, auto / static-split", auto_rate, ">= 1", auto_rate >= 1),
    ]


async def streams(client: EngineClient, n: int, output: int, seed: int) -> float:
    """Output tokens per second of n streams together, first token to last."""
    rng = random.Random(seed)
    running = [Stream(client, random_prompt(rng, 64), output) for _ in range(n)]
    await asyncio.gather(*(stream.done.wait() for stream in running))
    first = min(s.times[0] for s in running)
    last = max(s.times[-1] for s in running)
    return n * (output - 1) / (last - first)


def generate_speed(output: int, seed: int) -> float:
    """Output tokens per second of transformers.generate on the same weights, after prefill."""
    import torch
    from transformers import AutoModelForCausalLM

    from twolane.model.load.hub import resolve

    path = resolve(MODEL).path
    assert path is not None
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    prompt = torch.tensor([random_prompt(random.Random(seed), 64)])

    def seconds(tokens: int) -> float:
        began = time.perf_counter()
        model.generate(
            prompt, do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens, pad_token_id=0
        )
        return time.perf_counter() - began

    seconds(4)
    runs = [(output - 1) / (seconds(output) - seconds(1)) for _ in range(3)]
    return statistics.median(runs)


async def base() -> tuple[Measured, list[Figure]]:
    client = await start("static-split")
    await streams(client, 1, 16, 99)
    one = statistics.median([await streams(client, 1, 96, seed) for seed in range(3)])
    sixteen = statistics.median([await streams(client, 16, 96, seed) for seed in range(3, 6)])
    cold, warm = await prefix(client)
    idle = await idle_share(client)
    await client.close()
    reference = generate_speed(96, 0)
    measured = {
        "one stream, tokens/s": one,
        "transformers.generate, tokens/s": reference,
        "16 streams, tokens/s": sixteen,
        "TTFT of 1,024 tokens (ms)": cold * 1e3,
        "TTFT of 1,024 tokens, 1,008 of them cached (ms)": warm * 1e3,
    }
    return measured, [
        Figure(
            "one stream / transformers.generate", one / reference, ">= 0.8", one >= 0.8 * reference
        ),
        Figure("16 streams / one stream", sixteen / one, ">= 4", sixteen >= 4 * one),
        Figure("TTFT, cold / prefix cached", cold / warm, ">= 5", cold >= 5 * warm),
        Figure("idle engine, share of a core", idle, "< 0.01", idle < 0.01),
    ]


async def prefix(client: EngineClient) -> tuple[float, float]:
    """TTFT of a prompt the first time and the second time, medians of three, in seconds."""
    cold, warm = [], []
    for seed in range(3):
        prompt = random_prompt(random.Random(100 + seed), 1024)
        for kept in (cold, warm):
            stream = Stream(client, prompt, 1)
            await stream.done.wait()
            kept.append(stream.times[0] - stream.sent)
        assert stream.cached == 1008
    return statistics.median(cold), statistics.median(warm)


async def idle_share(client: EngineClient, seconds: float = 5.0) -> float:
    """CPU time of the engine process over wall time, with nothing to do."""
    await asyncio.sleep(1.0)
    before = cpu_seconds(client.process.pid)
    await asyncio.sleep(seconds)
    return (cpu_seconds(client.process.pid) - before) / seconds


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100


def report(measured: Measured, figures: list[Figure], seconds: float, out: Path | None) -> None:
    for name, value in measured.items():
        print(f"{name:55} {value:8.1f}")
    for figure in figures:
        mark = "holds" if figure.holds else "MISSES"
        print(f"{figure.name:55} {figure.value:8.3f}   bar {figure.bar:8} {mark}")
    if out is None:
        return
    import torch

    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(
        json.dumps(
            {
                **origin(),
                "commit": output("git", "describe", "--always", "--dirty"),
                "hardware": {"cpu": cpu_name(), "cores": torch.get_num_threads()},
                "model": MODEL,
                "dtype": "float32",
                "workload": {
                    "decoding": DECODING,
                    "prompt": PROMPT,
                    "every_seconds": EVERY_SECONDS,
                    "seconds": seconds,
                    "rounds": ROUNDS,
                },
                "measured": {name: round(value, 2) for name, value in measured.items()},
                "figures": [asdict(figure) for figure in figures],
            },
            indent=1,
        )
        + "\n",
        encoding="utf-8",
    )


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=15.0, help="of each round")
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    arguments = parser.parse_args()
    with_lanes, lane_figures = asyncio.run(lanes(arguments.seconds))
    of_base, base_figures = asyncio.run(base())
    measured, figures = with_lanes | of_base, lane_figures + base_figures
    report(measured, figures, arguments.seconds, arguments.out)


if __name__ == "__main__":
    main()
