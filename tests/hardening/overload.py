"""Goodput beyond saturation: every system offered 1, 3 and 10 times what it can serve.

    python -m tests.hardening.overload --out FILE [--only SYSTEM/KIND ...]

Each combination of a system and a server or a fleet of one has `SERVER_CORES` cores of its own, and
its clients have `--client-cores` more. All that the machine has cores for run at once.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from queue import Queue
from statistics import mean
from typing import Any

from ..server.serving import children, end, write_tiny_model

SERVER_CORES = 2
SYSTEMS = ("static-split", "chunked", "auto", "auto-profiled")
KINDS = ("serve", "fleet")
BOUND = 0.5
"""Seconds within which a first token is wanted."""
PROMPT, OUTPUT = 900, 8
"""Tokens of a prompt and of an answer."""
LOADS = (1, 3, 10)
REST_SECONDS = 2.0
MODEL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
MODEL |= {"num_attention_heads": 4, "vocab_size": 1024, "max_position_embeddings": 4096}
ARGUMENTS = ("--load-format", "dummy", "--kv-tokens", "131072", "--device", "cpu")
"""Also those of the profile: one of a GPU predicts nothing of a server on CPU cores."""
SERVED = ("--slo-ttft-ms", str(1e3 * BOUND))
FLEET = ("--hosts", "local", "--replicas", "1")
LOOPS, LOOP_LENGTH = 200, 20_000
"""Size of the work by which the pace of a core is measured: about 0.1 s."""
TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Answer:
    """What a client saw of a request."""

    status: int
    """HTTP status; 0: no answer, or an answer that broke off."""
    first: float
    """Seconds to the first token, or to the refusal."""
    retry: bool
    """Whether the answer says when to try again."""


async def ask(address: tuple[str, int], bound: float) -> Answer:
    """Send one request with a prompt that no other has."""
    fields = {"prompt": random.choices(range(3, 1000), k=PROMPT), "max_tokens": OUTPUT}
    body = json.dumps({**fields, "ignore_eos": True, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nx-slo-ttft-ms: {1e3 * bound}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    begun, status, first, retry = time.monotonic(), 0, None, False
    try:
        async with asyncio.timeout(60):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)
            told = await reader.readuntil(b"\r\n\r\n")
            first, data = time.monotonic(), b""
            while part := await reader.read(65536):
                if b"data: {" in part and b"data: {" not in data:
                    first = time.monotonic()
                data += part
            writer.close()
        whole = b"[DONE]" in data or not told.startswith(b"HTTP/1.1 200")
        status, retry = int(told.split()[1]) if whole else 0, b"retry-after" in told.lower()
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        pass
    return Answer(status, (first or time.monotonic()) - begun, retry)


async def closed(address: tuple[str, int], clients: int, seconds: float) -> float:
    """Return the requests that are answered a second when so many clients ask without a pause."""
    latest = time.monotonic() + seconds
    answered = 0

    async def client() -> None:
        nonlocal answered
        while time.monotonic() < latest:
            answer = await ask(address, 600.0)  # another client may count meanwhile
            answered += answer.status == 200

    await asyncio.gather(*(client() for _ in range(clients)))
    return answered / (time.monotonic() - latest + seconds)


async def offered(address: tuple[str, int], rate: float, seconds: float) -> list[Answer]:
    """Send so many requests a second, whatever becomes of them."""
    begun, asked = time.monotonic(), []
    while (now := time.monotonic() - begun) < seconds:
        asked.append(asyncio.create_task(ask(address, BOUND)))
        await asyncio.sleep(max(0.0, len(asked) / rate - now))
    return await asyncio.gather(*asked)


def in_a_process(cores: Sequence[int], *of_offered: object) -> list[Answer]:
    """Run `offered` on one of the client's cores."""
    os.sched_setaffinity(0, {cores[os.getpid() % len(cores)]})
    return asyncio.run(offered(*of_offered))


def pace_of(core: int) -> float:
    """Return how often a core runs a fixed loop in a second now."""
    os.sched_setaffinity(0, {core})
    begun = time.monotonic()
    for _ in range(LOOPS):
        sum(range(LOOP_LENGTH))
    return LOOPS / (time.monotonic() - begun)


def seconds_of(pid: int) -> float:
    """Return the CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def quantile(values: Sequence[float], share: float) -> float | None:
    ranked = sorted(values)
    return round(ranked[int(share * (len(ranked) - 1))], 3) if ranked else None


def figures(load: float, rate: float, seconds: float, answers: Sequence[Answer]) -> dict:
    """Return a row of the table."""
    served = [each.first for each in answers if each.status == 200]
    refused = [each for each in answers if each.status == 429]
    return {
        "load": load,
        "offered": round(rate, 2),
        "sent": len(answers),
        "statuses": dict(Counter(str(each.status) for each in answers)),
        "goodput": round(sum(first <= BOUND for first in served) / seconds, 2),
        "late": sum(first > BOUND for first in served),
        "ttft_p50": quantile(served, 0.5),
        "ttft_p99": quantile(served, 0.99),
        "refused_p50": quantile([each.first for each in refused], 0.5),
        "refused_p99": quantile([each.first for each in refused], 0.99),
        "retry_after": all(each.retry for each in refused),
    }


@contextmanager
def running(
    kind: str, words: Sequence[str], cores: Sequence[int], log: Path
) -> Iterator[tuple[str, int]]:
    """Run a server or a fleet on these cores; yield its announcement and process id."""
    command = [sys.executable, "-m", "twolane", kind, *words, "--port", "0"]
    pinned = partial(os.sched_setaffinity, 0, set(cores))
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, preexec_fn=pinned
        )
    try:
        line = process.stdout.readline().strip()
        if not line:
            code, told = process.wait(), log.read_text(errors="replace")
            raise RuntimeError(f"{kind} ended with {code}: {told[-2000:]}")
        yield line, process.pid
    finally:
        end(process)
        process.stdout.close()


def profiled(folder: Path, cores: Sequence[int], seconds: float) -> Path:
    """Measure a profile of a folder's model on the server's of these cores; return its file."""
    out, model = folder / "profile.json", str(folder / "model")
    command = [sys.executable, "-m", "twolane", "profile", model, *ARGUMENTS]
    command += ["--out", str(out), "--seconds", str(seconds)]
    pinned = partial(os.sched_setaffinity, 0, set(cores[:SERVER_CORES]))
    run = subprocess.run(command, capture_output=True, text=True, preexec_fn=pinned)
    if run.returncode:
        raise RuntimeError(f"profile ended with {run.returncode}: {run.stderr[-2000:]}")
    return out


def measured(
    name: str,
    cores: Sequence[int],
    options: argparse.Namespace,
    folder: Path,
    profile: Future[Path],
) -> dict:
    """Measure one combination on these cores, the server's first.

    Args:
        name: A system and a kind.
        cores: The cores.
        options: Those of the command line.
        folder: Has the model, and takes the log.
        profile: The file of its profile.
    """
    system, kind = name.split("/")
    own, theirs = cores[:SERVER_CORES], cores[SERVER_CORES:] or cores
    words = [str(folder / "model"), *ARGUMENTS, *SERVED]
    words += ["--system", system.removesuffix("-profiled")]
    if system.endswith("-profiled"):
        words += ["--profile", str(profile.result())]
    words += FLEET if kind == "fleet" else ()
    with (
        running(kind, words, own, folder / f"{system}-{kind}.log") as (announcement, pid),
        ProcessPoolExecutor(len(theirs)) as pool,
    ):
        host, port = announcement.split(" | ")[1].removeprefix("http://").split(":")
        address = host, int(port)
        asyncio.run(closed(address, 2, options.seconds / 2))  # warms up
        capacity = asyncio.run(closed(address, 16, options.seconds))
        rows = []
        for load in LOADS * options.rounds:
            time.sleep(REST_SECONDS)
            paces = [round(pace) for pace in pool.map(pace_of, own)]
            pids = [pid, *(each for child in children(pid) for each in (child, *children(child)))]
            before, rate = {each: seconds_of(each) for each in pids}, load * capacity
            each = partial(in_a_process, theirs, address, rate / len(theirs))
            begun = time.monotonic()
            found = list(chain(*pool.map(each, [options.seconds] * len(theirs))))
            cpu = [round(seconds_of(p) - s, 2) for p, s in before.items()]
            rows.append(
                figures(load, rate, options.seconds, found) | {"cpu_seconds": cpu, "paces": paces}
            )
            rows[-1]["wall_seconds"] = round(time.monotonic() - begun, 2)
            print(json.dumps({"name": name, **rows[-1]}), flush=True)
    told = {"announcement": announcement, "capacity": round(capacity, 2)}
    return {"name": name, **told, **shares_of_best(rows), "rows": rows}


def shares_of_best(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the worst share of the best goodput, by load over all rounds and by single run.

    The runs of one load are alike. What differs between them is how fast the machine was, which
    `paces` tells in part: the worst of single runs compares a slow moment with a fast one.
    """
    by_load = {load: mean(row["goodput"] for row in rows if row["load"] == load) for load in LOADS}
    offered = {row["load"]: row["offered"] for row in rows}
    best, best_run = max(by_load.values()) or 1.0, max(row["goodput"] for row in rows) or 1.0
    # Nobody can serve more than is offered.
    ratio = min(found / min(best, offered[load]) for load, found in by_load.items())
    worst = min(row["goodput"] / min(best_run, row["offered"]) for row in rows)
    goodput = {str(load): round(found, 2) for load, found in by_load.items()}
    return {"goodput": goodput, "ratio": round(ratio, 3), "worst_ratio": round(worst, 3)}


def main() -> None:
    names = [f"{system}/{kind}" for system in SYSTEMS for kind in KINDS]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=names, default=names)
    parser.add_argument("--seconds", type=float, default=12.0, help="of each load")
    parser.add_argument("--client-cores", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile-seconds", type=float, default=150.0)
    options = parser.parse_args()
    allowed = sorted(os.sched_getaffinity(0))
    places: Queue[Sequence[int]] = Queue()
    whole = SERVER_CORES + options.client_cores
    for first in range(0, max(1, len(allowed) - whole + 1), whole):
        places.put(allowed[first : first + whole])

    def placed(work: Callable[[Sequence[int]], Any]) -> Any:
        cores = places.get()
        try:
            return work(cores)
        finally:
            places.put(cores)

    folder, profile = Path(tempfile.mkdtemp()), Future[Path]()
    write_tiny_model(folder / "model", **MODEL)
    # Those that wait for the profile come last, so that it has a place.
    names = sorted(options.only, key=lambda name: "-profiled/" in name)
    with ThreadPoolExecutor(places.qsize()) as pool:
        if "-profiled/" in names[-1]:
            take = partial(profiled, folder, seconds=options.profile_seconds)
            profile = pool.submit(placed, take)
        measure = partial(measured, options=options, folder=folder, profile=profile)
        runs = {pool.submit(placed, partial(measure, name)): name for name in names}
        results = []
        for done in as_completed(runs):
            error = done.exception()  # the others are worth having
            results.append({"name": runs[done], "error": repr(error)} if error else done.result())
            told = {key: value for key, value in results[-1].items() if key != "rows"}
            print(json.dumps(told), flush=True)
            options.out.write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(any("error" in result for result in results))


if __name__ == "__main__":
    main()
