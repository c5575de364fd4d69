"""Engines in turn on one card, over HTTP, in minutes: `python benchmarks/side_by_side.py`.

`--engine NAME=COMMAND`, once for each, is the command of a server with OpenAI's API, `auto` among
them. Each is started once and measured by the same client: the decode step of `--rows` requests,
the first token of long prompts that come one at a time, and goodput at its bound, searched from
its `--guess`. Flags are taken as they are, where `peers.py` tunes them. Give all the same model
folder. The file is written after each figure.
"""

import argparse
import asyncio
import shlex
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from searches import WARMUPS, Bounds, Found, search, searched

from twolane.bench import serve
from twolane.bench.server import Server, serving_by
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
"""Output tokens of the requests that warm a server up where no step is measured."""
PROMPTS = 5
"""Number of long prompts."""


class Engine(msgspec.Struct):
    """What was measured of one engine; None: not yet."""

    name: str
    server: str
    """Program, version, address and flags."""
    start_seconds: float
    tbt_ms: float
    """Bound on gaps of its search."""
    step_ms: float | None = None
    """Mean gap between tokens while all rows decode."""
    first_token_ms: float | None = None
    """Median time to the first token of a long prompt on an idle server."""
    prefill_tokens_s: float | None = None
    """Tokens of that prompt over that time."""
    found: Found | None = None


def measured(
    server: Server, engine: Engine, guess: float, given: argparse.Namespace
) -> Iterator[Engine]:
    """The engine after each figure."""
    load = BenchConfig(base_url=server.url, vocab_range=given.vocab_range)
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
    if not guess:
        return
    workload = WorkloadSpec(
        dataset=given.dataset, num_prompts=given.prompts, max_input_len=given.longest
    )
    target = {"base_url": server.url, "model": None}
    bounds = Bounds((engine.tbt_ms / 1e3,))
    asked = search(target, workload, bounds, guess, given.seeds, given.tolerance)
    folder = given.work / engine.name.replace(" ", "-")
    [engine.found] = searched(asked, [SERVER], folder, load, keep=True)
    yield engine
    if engine.found.interrupted:
        raise KeyboardInterrupt


def sent(load: BenchConfig, count: int, prompt: int, output: int, at_once: int) -> list[Record]:
    """Send requests of one length, so many at once; their records.

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
    """Mean gap, in seconds, between the last first token and the first end; None: there is none."""
    begin = max(one.token_times[0] for one in records)
    end = min(one.token_times[-1] for one in records)
    gaps = [
        after - before
        for one in records
        for before, after in zip(one.token_times, one.token_times[1:], strict=False)
        if begin <= before and after <= end
    ]
    return statistics.fmean(gaps) if gaps else None


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--engine", action="append", required=True, metavar="NAME=COMMAND")
    add("--guess", type=float, nargs="+", required=True,
        help="requests/s where the search of each engine begins; 0: there is none")  # fmt: skip
    add("--card", required=True, help="name of the GPU in the file")
    add("--tbt", type=float, nargs="+", required=True,
        help="bound on gaps in ms: one for all engines, or one for each")  # fmt: skip
    add("--rows", type=int, default=64, help="requests that decode at once; 0: no step is measured")
    add("--context", type=int, default=2048, help="their prompt tokens")
    add("--prompt", type=int, default=8192, help="tokens of the long prompts; 0: none is sent")
    add("--dataset", default="azure-conv")
    add("--prompts", type=int, default=300, help="requests in a run of the search")
    add("--longest", type=int, default=12_000, help="tokens to which prompts are cut")
    add("--seeds", type=int, default=1, help="patterns of arrivals")
    add("--tolerance", type=float, default=0.1,
        help="share by which the rate that fails may be above the one that holds")  # fmt: skip
    add("--vocab-range", type=TokenRange.parse, default=TokenRange(), metavar="LOW:HIGH",
        help="token ids to draw prompts from")  # fmt: skip
    add("--work", type=Path, default=Path("side-by-side-work"), help="folder of the runs")
    add("--out", type=Path, required=True, help="write the figures here as JSON")
    given = parser.parse_args()
    if len(given.guess) != len(given.engine):
        parser.error("give each engine its guess")
    if len(given.tbt) == 1:
        given.tbt *= len(given.engine)
    if len(given.tbt) != len(given.engine):
        parser.error("give one bound, or each engine its own")
    return given


def main() -> None:
    """Measure each engine, write the file after each figure."""
    given = _options()
    given.work.mkdir(parents=True, exist_ok=True)
    engines: list[Engine] = []
    for asked, tbt, guess in zip(given.engine, given.tbt, given.guess, strict=True):
        name, _, command = asked.partition("=")
        try:
            for _ in served(name, command, tbt, guess, engines, given):
                _save(engines, given)
        except serve.BenchError as error:
            print(f"{name}: {error}", flush=True)


def served(
    name: str,
    command: str,
    tbt_ms: float,
    guess: float,
    engines: list[Engine],
    given: argparse.Namespace,
) -> Iterator[Engine]:
    """Start an engine and measure it; it joins the others once it is up.

    Raises:
        BenchError: it does not start, or ended in the middle.
    """
    begun = time.monotonic()
    with serving_by(shlex.split(command), given.work / f"{name}.log") as server:
        engine = Engine(name, server.announcement, time.monotonic() - begun, tbt_ms)
        engines.append(engine)
        print(f"{name}: up after {engine.start_seconds:.0f} s", flush=True)
        for so_far in measured(server, engine, guess, given):
            print(so_far, flush=True)
            yield so_far


def _save(engines: list[Engine], given: argparse.Namespace) -> None:
    """Write what was measured so far."""
    workload = {"dataset": given.dataset, "prompts": given.prompts, "seeds": given.seeds}
    shape = {"rows": given.rows, "context": given.context, "prompt": given.prompt}
    content = {"card": given.card, "tolerance": given.tolerance, **shape}
    save(given.out, provenance(workload), {**content, "engines": engines})


if __name__ == "__main__":
    main()
