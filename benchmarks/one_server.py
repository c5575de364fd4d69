"""Servers that each serve every bound of a search, and the speeds of each on an idle device.

Every request carries its bound on TBT as a header, which Twolane plans for and others ignore, so
one start serves several bounds. `recipe.py` uses this for recipes with `one_server`.
"""

import asyncio
import contextlib
import shlex
import signal
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec
from searches import WARMUPS, Found, searched

from twolane.bench import serve
from twolane.bench.goodput import Search
from twolane.bench.server import Server, starting
from twolane.bench.target import SERVER
from twolane.results.record import Record
from twolane.results.result import BenchConfig
from twolane.workload.spec import WorkloadSpec

STEPS = 640
"""Output tokens of the requests whose decode step is measured: the first still decodes when the
last prompt has been prefilled."""
WARM_STEPS = 32
"""Output tokens of warm-up requests where no step is measured."""
PROMPTS = 5
"""Number of long prompts."""


class Probe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The speeds to measure before the searches."""

    rows: int = 64
    """Number of requests that decode at a time; 0: no step is measured."""
    context: int = 2048
    """Number of their prompt tokens."""
    prompt: int = 8192
    """Number of tokens of long prompts that come one at a time; 0: none is sent."""
    together: bool = False
    """Whether all servers start at once and are idle beside each other; their flags must then
    divide the memory."""


class Contender(NamedTuple):
    """One server and its searches."""

    name: str
    command: str
    own: Sequence[str]
    """Further words of the command."""
    searches: Mapping[float, Search]
    """A search for each bound on TBT in milliseconds."""
    folder: Path
    load: BenchConfig


class Measured(NamedTuple):
    """What is known of a contender."""

    found: list[Found]
    speeds: dict[str, float]
    """`start_seconds`; `step_ms`, the mean gap between tokens while all rows decode;
    `first_token_ms`, the median time to the first token of a long prompt; `prefill_tokens_s`."""


def measure(
    contenders: Sequence[Contender], probe: Probe, within: float
) -> Iterator[tuple[int, Measured]]:
    """Start servers, one after the other or together; yield the number of a contender with its
    results after each figure. A server that does not start or ends is named and passed over.

    Args:
        contenders: the servers.
        probe: the speeds to measure.
        within: seconds after which a search is cut, keeping what it found; 0: never.
    """
    numbered = [*enumerate(contenders)]
    for group in [numbered] if probe.together else [[one] for one in numbered]:
        begun = time.monotonic()
        commands = []
        for _, one in group:
            one.folder.mkdir(parents=True, exist_ok=True)
            words = [*shlex.split(one.command), *one.own]
            commands.append((words, one.folder / "server.log"))
        with starting(commands) as waits:
            for (turn, one), ready in zip(group, waits, strict=True):
                try:
                    server = ready()
                    seconds = time.monotonic() - begun
                    print(f"{one.name}: up after {seconds:.0f} s", flush=True)
                    for found in _measured(server, one, probe, within):
                        found.speeds["start_seconds"] = seconds
                        yield turn, found
                except serve.BenchError as error:
                    print(f"{one.name}: {error}", flush=True)


def _measured(
    server: Server, contender: Contender, probe: Probe, within: float
) -> Iterator[Measured]:
    """Yield the results after the probe, and after the search at each bound."""
    measured = Measured([], _speeds(server, contender.load, probe))
    yield measured
    for tbt, search in contender.searches.items():
        begun = time.monotonic()
        target = {"base_url": server.url, "model": None}
        asked = msgspec.structs.replace(search, target=target)
        headers = {"x-slo-tbt-ms": f"{tbt:g}"}
        load = msgspec.structs.replace(contender.load, base_url=server.url, headers=headers)
        with cut_after(within):
            [found] = searched(asked, [SERVER], contender.folder / f"{tbt:g}ms", load, keep=True)
        found.server = server.announcement
        measured.found.append(found)
        yield measured
        if found.interrupted and not (within and time.monotonic() - begun >= within):
            raise KeyboardInterrupt


def _speeds(server: Server, load: BenchConfig, probe: Probe) -> dict[str, float]:
    """Measure the speeds of an idle server, which warms it up."""
    speeds: dict[str, float] = {}
    load = msgspec.structs.replace(load, base_url=server.url, num_warmups=0)
    if probe.rows:
        records = sent(load, probe.rows, probe.context, STEPS, probe.rows)
        if (seconds := step(records)) is not None:
            speeds["step_ms"] = seconds * 1e3
    else:
        sent(load, WARMUPS, probe.context, WARM_STEPS, WARMUPS)
    if probe.prompt:
        records = sent(load, PROMPTS, probe.prompt, 1, 1)
        first = statistics.median(one.ttft for one in records if one.ttft is not None)
        speeds |= {"first_token_ms": first * 1e3, "prefill_tokens_s": probe.prompt / first}
    print(speeds, flush=True)
    return speeds


@contextlib.contextmanager
def cut_after(seconds: float) -> Iterator[None]:
    """Interrupt the block, as Ctrl-C does, if it takes longer; 0: never."""
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def sent(load: BenchConfig, count: int, prompt: int, output: int, at_once: int) -> list[Record]:
    """Send requests of one length, this many concurrently; return their records.

    Raises:
        BenchError: one was not answered.
    """
    workload = WorkloadSpec(
        num_prompts=count, random_input_len=prompt, random_output_len=output, request_rate=None
    )
    # Prompts of two lengths from one seed would begin alike, and hit the prefix cache.
    config = msgspec.structs.replace(
        load, workload=workload, max_concurrency=at_once, prompt_seed=prompt
    )
    records = asyncio.run(serve.run(config)).records
    if failed := [one.error for one in records if not one.ok]:
        raise serve.BenchError(f"{len(failed)} of {count} requests failed: {failed[0]}")
    return records


def step(records: list[Record]) -> float | None:
    """Return the mean gap, in seconds, between the last first token and the first end; None: there
    is none."""
    begin = max(one.token_times[0] for one in records)
    end = min(one.token_times[-1] for one in records)
    gaps = [
        after - before
        for one in records
        for before, after in pairwise(one.token_times)
        if begin <= before and after <= end
    ]
    return statistics.fmean(gaps) if gaps else None
