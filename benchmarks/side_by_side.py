"""Engines in turn on one card, over HTTP, in minutes: `python benchmarks/side_by_side.py`.

`--engine NAME=COMMAND`, once for each, is the command of a server with OpenAI's API, `auto` among
them. Each is started once and measured by the same client: the decode step of `--rows` requests,
the first token of long prompts that come one at a time, and goodput at each of its bounds, searched
from its `--guess`. Every request of a search carries its bound as a header, so one server of
Twolane's serves several. Flags are taken as they are, where `peers.py` tunes them. Give all the
same model folder. The file is written after each figure.

Servers start one after the other, or with `--together` at once: they are measured in turn all the
same, idle beside each other once the last one is up. Then the flags must divide the memory.
"""

import argparse
import asyncio
import contextlib
import shlex
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
from searches import WARMUPS, Bounds, Found, search, searched

from twolane.bench import serve
from twolane.bench.server import Server, starting
from twolane.bench.target import SERVER
from twolane.results.provenance import provenance, save
from twolane.results.record import Record
from twolane.results.result import BenchConfig
from twolane.workload.prompts import TokenRange
from twolane.workload.spec import WorkloadSpec

STEPS = 640
"""Output tokens of the requests whose decode step is measured: the first still decodes when the
last prompt has been prefilled."""
WARM_STEPS = 32
"""Output tokens of warm-up requests where no step is measured."""
PROMPTS = 5
"""Number of long prompts."""


Rates = tuple[float, ...]
"""A figure for each bound of an engine."""


class Asked:
    """One engine and its searches."""

    def __init__(
        self, engine: str, tbts_ms: Rates, guesses: Rates, prompts: Rates, work: Path
    ) -> None:
        self.name, _, command = engine.partition("=")
        self.command = shlex.split(command)
        self.log = work / f"{self.name}.log"
        self.tbts_ms = tbts_ms
        """Bounds on gaps in ms, each with a search of its own."""
        self.guesses = guesses
        """Requests/s where each search begins; 0: there is none."""
        self.prompts = prompts if len(prompts) > 1 else prompts * len(tbts_ms)
        """Requests in a run of each search."""


class Engine(msgspec.Struct):
    """Results of one engine at one bound; None: not yet, or at its first bound."""

    name: str
    server: str
    """Program, version, address and flags."""
    start_seconds: float
    tbt_ms: float
    """Bound on gaps of its search."""
    prompts: int
    """Requests in a run of its search."""
    step_ms: float | None = None
    """Mean gap between tokens while all rows decode."""
    first_token_ms: float | None = None
    """Median time to the first token of a long prompt on an idle server."""
    prefill_tokens_s: float | None = None
    """Tokens of that prompt over that time."""
    found: Found | None = None


def measured(
    server: Server, asked: Asked, start_seconds: float, given: argparse.Namespace
) -> Iterator[Engine]:
    """Yield the engine after each figure, then the same with each further bound."""
    load = BenchConfig(base_url=server.url, vocab_range=given.vocab_range)
    engine = Engine(
        asked.name, server.announcement, start_seconds, asked.tbts_ms[0], int(asked.prompts[0])
    )
    yield engine
    if given.rows:
        records = sent(load, given.rows, given.context, STEPS, given.rows)
        seconds = step(records)
        engine.step_ms = None if seconds is None else seconds * 1e3
        yield engine
    else:
        sent(load, WARMUPS, given.context, WARM_STEPS, WARMUPS)
    if given.prompt:
        records = sent(load, PROMPTS, given.prompt, 1, 1)
        first = statistics.median(one.ttft for one in records if one.ttft is not None)
        engine.first_token_ms, engine.prefill_tokens_s = first * 1e3, given.prompt / first
        yield engine
    for place, guess in enumerate(asked.guesses):
        if place:
            bound, prompts = asked.tbts_ms[place], int(asked.prompts[place])
            engine = Engine(asked.name, engine.server, start_seconds, bound, prompts)
        if guess:
            begun = time.monotonic()
            engine.found = held(server, engine, guess, given)
            yield engine
            if engine.found.interrupted and not passed(begun, given.within):
                raise KeyboardInterrupt


def held(server: Server, engine: Engine, guess: float, given: argparse.Namespace) -> Found:
    """Search at the engine's bound; return the result."""
    workload = WorkloadSpec(
        dataset=given.dataset, num_prompts=engine.prompts, max_input_len=given.longest
    )
    load = BenchConfig(
        base_url=server.url,
        vocab_range=given.vocab_range,
        headers={"x-slo-tbt-ms": f"{engine.tbt_ms:g}"},
    )
    target = {"base_url": server.url, "model": None}
    bounds = Bounds((engine.tbt_ms / 1e3,))
    asked = search(target, workload, bounds, guess, given.seeds, given.tolerance)
    folder = given.work / f"{engine.name.replace(' ', '-')}-{engine.tbt_ms:g}ms"
    with cut_after(given.within):
        [found] = searched(asked, [SERVER], folder, load, keep=True)
    return found


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


def passed(begun: float, within: float) -> bool:
    """Return whether an interrupted search had used its time."""
    return bool(within) and time.monotonic() - begun >= within


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


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--engine", action="append", required=True, metavar="NAME=COMMAND")
    add("--guess", type=numbers, nargs="+", required=True,
        help="requests/s where the search of each engine begins; 0: there is none")  # fmt: skip
    add("--card", required=True, help="name of the GPU in the file")
    add("--tbt", type=numbers, nargs="+", required=True,
        help="bound on gaps in ms: for all engines, or for each; 12,9 are two bounds of one engine,"
        " which then has two guesses")  # fmt: skip
    add("--rows", type=int, default=64, help="requests that decode at once; 0: no step is measured")
    add("--context", type=int, default=2048, help="their prompt tokens")
    add("--prompt", type=int, default=8192, help="tokens of the long prompts; 0: none is sent")
    add("--dataset", default="azure-conv")
    add("--prompts", type=numbers, nargs="+", default=[(600.0,)],
        help="requests in a run: of all engines, of each, or as 500,400 of each bound")  # fmt: skip
    add("--longest", type=int, default=12_000, help="tokens to which prompts are cut")
    add("--seeds", type=int, default=1, help="patterns of arrivals")
    add("--tolerance", type=float, default=0.1,
        help="share by which the rate that fails may be above the one that holds")  # fmt: skip
    add("--vocab-range", type=TokenRange.parse, default=TokenRange(), metavar="LOW:HIGH",
        help="token ids to draw prompts from")  # fmt: skip
    add("--together", action="store_true", help="start all engines at once")
    add("--within", type=float, default=0,
        help="seconds after which a search is cut, keeping what it found; 0: never")  # fmt: skip
    add("--work", type=Path, default=Path("side-by-side-work"), help="folder of the runs")
    add("--out", type=Path, required=True, help="write the figures here as JSON")
    given = parser.parse_args()
    engines = len(given.engine)
    if len(given.guess) != engines:
        parser.error("give each engine its guess")
    for name in ("tbt", "prompts"):
        if len(values := getattr(given, name)) == 1:
            setattr(given, name, values * engines)
        elif len(values) != engines:
            parser.error(f"--{name}: give it once, or for each engine")
    given.asked = [
        Asked(*parts, given.work)
        for parts in zip(given.engine, given.tbt, given.guess, given.prompts, strict=True)
    ]
    if any(not len(a.tbts_ms) == len(a.guesses) == len(a.prompts) for a in given.asked):
        parser.error("give an engine with several bounds as many guesses")
    return given


def numbers(text: str) -> Rates:
    """Parse `12,9` as two numbers.

    Raises:
        ValueError: it is something else.
    """
    return tuple(float(word) for word in text.split(","))


def main() -> None:
    """Measure each engine, write the file after each figure."""
    given = _options()
    given.work.mkdir(parents=True, exist_ok=True)
    engines: list[Engine] = []
    for group in [given.asked] if given.together else [[one] for one in given.asked]:
        begun = time.monotonic()
        with starting([(asked.command, asked.log) for asked in group]) as waits:
            up = [one for one in map(waited, group, waits, [begun] * len(group)) if one]
            for asked, server, seconds in up:
                measure(server, asked, seconds, engines, given)


def waited(
    asked: Asked, ready: Callable[[], Server], begun: float
) -> tuple[Asked, Server, float] | None:
    """Return an engine once it is up, after how many seconds; None: it does not start."""
    try:
        server = ready()
    except serve.BenchError as error:
        print(f"{asked.name}: {error}", flush=True)
        return None
    seconds = time.monotonic() - begun
    print(f"{asked.name}: up after {seconds:.0f} s", flush=True)
    return asked, server, seconds


def measure(
    server: Server,
    asked: Asked,
    start_seconds: float,
    engines: list[Engine],
    given: argparse.Namespace,
) -> None:
    """Measure an engine that is up and add it to the others; print its failure if it ends."""
    try:
        for engine in measured(server, asked, start_seconds, given):
            if not any(engine is one for one in engines):
                engines.append(engine)
            print(engine, flush=True)
            _save(engines, given)
    except serve.BenchError as error:
        print(f"{asked.name}: {error}", flush=True)


def _save(engines: list[Engine], given: argparse.Namespace) -> None:
    """Write the results so far."""
    workload = {"dataset": given.dataset, "seeds": given.seeds}
    shape = {"rows": given.rows, "context": given.context, "prompt": given.prompt}
    content = {"card": given.card, "tolerance": given.tolerance, **shape}
    content["together"] = given.together
    save(given.out, provenance(workload), {**content, "engines": engines})


if __name__ == "__main__":
    main()
