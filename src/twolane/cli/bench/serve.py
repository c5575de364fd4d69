"""`twolane bench serve`: a workload sent to a server over HTTP.

**Examples**

- `twolane bench serve --request-rate 4 --num-prompts 200` — random prompts of 1,024 tokens, 4
  requests a second, against a local server

- `twolane bench serve --dataset azure-conv --request-rate 2 --goodput ttft:1000 tbt:50` — lengths
  like those of Azure's chat service, with SLOs in milliseconds

- `twolane bench serve --dataset mooncake_trace.jsonl.gz --trace-duration 600` — ten minutes of a
  recorded trace, at its own times, prefixes shared as recorded

- `twolane bench serve --config bench.yaml` — options from a file
"""

import asyncio
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from twolane.cli.bench import common
from twolane.cli.configfile import config_option
from twolane.cli.errors import INTERRUPTED, fail
from twolane.cli.helptext import Command
from twolane.cli.lazy import command_app
from twolane.cli.options import takes
from twolane.common import garbage
from twolane.common.files import naming_file
from twolane.common.options import Option
from twolane.results.result import MEASURE, BenchConfig

if TYPE_CHECKING:
    from twolane.bench.client import RunCounts
    from twolane.results.result import Result


app = command_app()

STOPPING = (signal.SIGINT, signal.SIGTERM)
"""Signals that end a run and report its results until then."""


class Saving(msgspec.Struct, frozen=True):
    """Where a result is written."""

    save_result: Annotated[bool, Option(MEASURE)] = False
    """Write the result as JSON into the current folder."""
    result_file: Annotated[Path | None, Option(MEASURE, alias="result_filename")] = None
    """Write the result as JSON to this file."""


@app.command(cls=Command)
@takes(Saving, "saving")
@takes(BenchConfig, "load")
def serve(
    load: dict[str, Any],
    saving: dict[str, Any],
    more_slos: common.MoreSlos = None,
    config_file: Annotated[Path | None, config_option()] = None,
    goodput: common.Goodput = None,
) -> None:
    """Send a workload to an OpenAI-compatible server and measure latency and goodput.

    Requests are sent when they are due, whether or not earlier ones were answered, and every
    request sent counts: one that was refused or failed meets no SLO. Results have the keys of
    `vllm bench serve`. Ctrl-C or SIGTERM ends the run and reports what was measured until then.
    """
    common.need_httptools()
    with common.errors_as_lines():
        config = BenchConfig(**load, goodput=common.slos(goodput, more_slos))
        common.need_folder("--result-file", saving["result_file"])
        result = _run(config)
    _finish(result, **saving)


def _run(config: BenchConfig) -> "Result":
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from twolane.bench.serve import run

    columns = (
        TextColumn("[progress.description]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(
        *columns,
        console=console,
        refresh_per_second=4,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task("preparing", total=None)

        def show(tally: "RunCounts") -> None:
            text = f"{tally.running} running, {tally.failed} failed"
            done = tally.ok + tally.failed
            progress.update(task, description=text, completed=done, total=tally.total)

        async def main() -> "Result":
            stop = asyncio.Event()
            loop = asyncio.get_running_loop()
            for number in STOPPING:
                loop.add_signal_handler(number, _stop_once, loop, stop)
            return await run(config, stop=stop, on_change=show)

        garbage.freeze()  # it would show up as latency
        return asyncio.run(main())


def _stop_once(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """End the run in order at the first signal; the next one kills."""
    stop.set()
    for number in STOPPING:
        loop.remove_signal_handler(number)


def _finish(result: "Result", save_result: bool, result_file: Path | None) -> None:
    """Save, then show; exit with `INTERRUPTED` after Ctrl-C and with 1 if nothing was answered."""
    from rich.console import Console

    from twolane.results.summary import default_name, result_json, summary

    path = result_file or (Path(default_name(result)) if save_result else None)
    try:
        if path is not None:
            with naming_file(path):
                path.write_bytes(result_json(result))
    finally:  # a full disk costs the file, not what was measured
        Console().print(summary(result))
    if path is not None:
        typer.echo(f"Result written to {path}")
    if result.interrupted:
        raise typer.Exit(INTERRUPTED)
    if not result.metrics.completed:
        raise fail("no request was answered")
