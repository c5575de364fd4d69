"""`make demo`: a real model answers over HTTP, then serves a small replay in two lanes.

Starts `twolane serve` as a user would, asks it a question, replays requests with the lengths of
a public trace (scaled to a small model on a CPU), and reads from the server's own trace for how
much of the replay both lanes were busy at once.
"""

import asyncio
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.request import Request, urlopen

import msgspec
from rich.console import Console

from twolane.bench.serve import run
from twolane.model.load.hub import pull
from twolane.results.result import BenchConfig, Result
from twolane.results.summary import summary
from twolane.workload.lengths import TABLES
from twolane.workload.spec import WorkloadSpec

MODEL = "smollm2-135m-instruct"
SYSTEM = "static-split"
QUESTION = "What is the capital of France?"
TRACE = Path("demo-trace.json")
MIN_OVERLAP = 0.2
STOP_SECONDS = 20.0

DATASET = "azure-conv"
REPLAY = WorkloadSpec(dataset=DATASET, scale_lengths=0.25, max_input_len=1024, max_output_len=128)
REPLAY_SECONDS = 45
PROBE_TOKENS = 300
"""About the mean prompt of the replay."""
PROBE_SEED = 1 << 20
"""Seed of the probe's prompts, which the replay must not find in the prefix cache."""
LOAD = 0.28
"""Seconds of solo prefill that the replay asks for in a second, so that it fits the machine."""

Event = dict[str, Any]

console = Console(highlight=False)


def main() -> int:
    """Run the demo; return the exit code."""
    pull(MODEL)
    with served() as address:
        answer = ask(address)
        console.print(f"[bold]Q:[/bold] {QUESTION}\n[bold]A:[/bold] {answer}\n")
        if "Paris" not in answer:
            console.print("The answer should have named Paris.")
            return 1
        result = replay(address)
    console.print(summary(result))
    return 0 if result.metrics.completed == result.metrics.sent and check_overlap(result) else 1


@contextmanager
def served() -> Iterator[str]:
    """Run the server; yield its address."""
    command = [sys.executable, "-m", "twolane", "serve", MODEL, "--port", "0"]
    command += ["--system", SYSTEM, "--trace", str(TRACE)]
    console.print(f"$ twolane {' '.join(command[3:])}")
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        line = server.stdout.readline()
        if not line:
            raise SystemExit(f"the server did not start (exit code {server.wait()})")
        console.print(line)
        yield re.findall(r"http://\S+", line)[0]
    finally:
        server.terminate()
        try:
            server.wait(STOP_SECONDS)
        finally:
            server.kill()
            server.wait()


def ask(address: str) -> str:
    """Ask the question as any client of OpenAI's API would."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    headers = {"Content-Type": "application/json"}
    request = Request(f"{address}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urlopen(request, timeout=120) as response:
        answer: str = json.load(response)["choices"][0]["message"]["content"]
        return answer


def replay(address: str) -> Result:
    """Send requests of realistic lengths as they would arrive, at a rate that fits the machine."""
    rate = round(LOAD / prefill_seconds(address), 2)
    count = max(10, int(rate * REPLAY_SECONDS))
    console.print(
        f"Replaying {count} requests, {rate:g} a second, a quarter as long as those of "
        f"{DATASET}:\n{TABLES[DATASET].source}"
    )
    workload = msgspec.structs.replace(REPLAY, request_rate=rate, num_prompts=count)
    return asyncio.run(run(BenchConfig(base_url=address, model=MODEL, workload=workload)))


def prefill_seconds(address: str) -> float:
    """Return how long this machine takes for a mean prompt when it does nothing else."""
    spec = WorkloadSpec(num_prompts=6, random_input_len=PROBE_TOKENS, random_output_len=1)
    one_by_one = BenchConfig(
        base_url=address,
        model=MODEL,
        workload=spec,
        max_concurrency=1,
        prompt_seed=PROBE_SEED,
    )
    probe = asyncio.run(run(one_by_one))
    return min(record.ttft for record in probe.records if record.ttft is not None)


def check_overlap(result: Result) -> bool:
    """Print how much of the replay both lanes were busy at once; return whether it is enough."""
    share = overlap(json.loads(TRACE.read_text()), len(result.records))
    console.print(
        f"\nBoth lanes were busy at once for {share:.0%} of the replay "
        f"(see {TRACE} in https://ui.perfetto.dev)."
    )
    return share >= MIN_OVERLAP


def overlap(events: list[Event], requests: int) -> float:
    """Return the share of the last `requests` requests' time in which both lanes ran."""
    lanes = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    first: float = sorted(e["ts"] for e in events if e["ph"] == "b")[-requests]
    last: float = max(e["ts"] for e in events if e["ph"] == "e")
    busy = 0.0
    decode = spans(events, lanes["decode"])
    for start, end in spans(events, lanes["prefill"]):
        for other_start, other_end in decode:
            busy += max(0.0, min(end, other_end, last) - max(start, other_start, first))
    return busy / (last - first)


def spans(events: list[Event], thread: int) -> list[tuple[float, float]]:
    """Return when a lane was busy; a lane runs one launch at a time."""
    launches = [e for e in events if e["ph"] == "X" and e["tid"] == thread]
    return [(e["ts"], e["ts"] + e["dur"]) for e in launches]


def interrupt(_number: int, _frame: FrameType | None) -> None:
    """End as on Ctrl-C, so that the server is stopped too."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, interrupt)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
