"""`twolane bench`: the command line. What it runs is imported when it runs."""

import asyncio
import contextlib
import gc
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from twolane.configfile import config_option

if TYPE_CHECKING:
    from twolane.bench.client import Tally
    from twolane.bench.serve import BenchConfig, Result
    from twolane.workload.prompts import TokenRange

app = typer.Typer(help="Measure an LLM server from outside.", no_args_is_help=True)

_HELP = """\
Send a workload to an OpenAI-compatible server and measure latency and goodput.

Requests leave when they are due, whether or not earlier ones were answered, and every request \
sent counts: one that was refused or broke off attains no SLO. Results carry the keys of \
`vllm bench serve`. Ctrl-C ends the run and reports what was measured until then.
"""
_EPILOG = """**Examples**

- `twolane bench serve --request-rate 4 --num-prompts 200` — random prompts of 1,024 tokens, 4
  requests a second, against a local server

- `twolane bench serve --dataset azure-conv --request-rate 2 --goodput ttft:1000 tbt:50` — lengths
  like those of Azure's chat service, with promises to keep (ms)

- `twolane bench serve --dataset mooncake_trace.jsonl.gz --trace-duration 600` — ten minutes of a
  recorded trace, at its own times, prefixes shared as recorded

- `twolane bench serve --config bench.yaml` — options from a file
"""

_WHERE, _WHAT, _WHEN, _MEASURE = "Server", "Requests", "Arrivals", "Measurement"


@app.callback()
def bench() -> None:
    """Measure an LLM server from outside."""


@app.command(help=_HELP, epilog=_EPILOG)
def serve(
    more_slos: Annotated[list[str] | None, typer.Argument(metavar="NAME:MS", hidden=True)] = None,
    config_file: Annotated[Path | None, config_option()] = None,
    base_url: Annotated[
        str, typer.Option(help="Where the server listens.", rich_help_panel=_WHERE)
    ] = "http://127.0.0.1:8000",
    endpoint: Annotated[
        str,
        typer.Option(
            help="Path of the API: /v1/completions or /v1/chat/completions.",
            rich_help_panel=_WHERE,
        ),
    ] = "/v1/completions",
    model: Annotated[
        str | None,
        typer.Option(
            help="The model to name in requests. (default: the first the server lists)",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="OPENAI_API_KEY", help="Sent as a bearer token.", rich_help_panel=_WHERE
        ),
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="A header for each request; may repeat.",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds that one request may take.", rich_help_panel=_WHERE)
    ] = 600.0,
    dataset: Annotated[
        str,
        typer.Option(
            help="random (fixed lengths); azure-code, azure-conv or sharegpt (lengths drawn from "
            "a table of quantiles); or a trace file: Azure CSV, Mooncake JSONL, either gzipped.",
            rich_help_panel=_WHAT,
        ),
    ] = "random",
    num_prompts: Annotated[
        int | None,
        typer.Option(
            help="How many requests. (default: all of a trace, else 1000)", rich_help_panel=_WHAT
        ),
    ] = None,
    random_input_len: Annotated[
        int | None,
        typer.Option(help="Prompt tokens of random. (default: 1024)", rich_help_panel=_WHAT),
    ] = None,
    random_output_len: Annotated[
        int | None,
        typer.Option(help="Output tokens of random. (default: 128)", rich_help_panel=_WHAT),
    ] = None,
    scale_lengths: Annotated[
        float | None,
        typer.Option(
            help="Factor on all lengths; shared prefixes scale along.", rich_help_panel=_WHAT
        ),
    ] = None,
    max_input_len: Annotated[
        int | None,
        typer.Option(help="Cut prompts to at most so many tokens.", rich_help_panel=_WHAT),
    ] = None,
    max_output_len: Annotated[
        int | None,
        typer.Option(help="Cut replies to at most so many tokens.", rich_help_panel=_WHAT),
    ] = None,
    prompt_format: Annotated[
        Literal["auto", "ids", "text"],
        typer.Option(
            help="Prompts as token ids (exact length) or as words (about one token each); auto: "
            "ids for completions, text for chat.",
            rich_help_panel=_WHAT,
        ),
    ] = "auto",
    vocab_range: Annotated[
        str,
        typer.Option(
            metavar="LOW:HIGH",
            help="Token ids to draw prompts from, HIGH excluded.",
            rich_help_panel=_WHAT,
        ),
    ] = "1000:30000",
    ignore_eos: Annotated[
        bool,
        typer.Option(
            help="Ask for replies of exactly the length of the workload; without it, of at most.",
            rich_help_panel=_WHAT,
        ),
    ] = True,
    extra_body: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="Fields for each request, as '{\"temperature\": 0}'.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Of lengths, arrivals and prompts.", rich_help_panel=_WHAT)
    ] = 0,
    request_rate: Annotated[
        float | None,
        typer.Option(
            help="Requests a second; inf: all at once. (default: the trace's own times, else inf)",
            rich_help_panel=_WHEN,
        ),
    ] = None,
    burstiness: Annotated[
        float,
        typer.Option(
            help="Shape of the gaps between arrivals: 1 Poisson, less burstier, more smoother, "
            "inf evenly spaced.",
            rich_help_panel=_WHEN,
        ),
    ] = 1.0,
    max_concurrency: Annotated[
        int | None,
        typer.Option(
            help="Most requests in flight; later ones wait in the client.", rich_help_panel=_WHEN
        ),
    ] = None,
    trace_offset: Annotated[
        float | None,
        typer.Option(help="Seconds of the trace to skip.", rich_help_panel=_WHEN),
    ] = None,
    trace_duration: Annotated[
        float | None,
        typer.Option(help="Seconds of the trace to replay.", rich_help_panel=_WHEN),
    ] = None,
    scale_rate: Annotated[
        float | None,
        typer.Option(
            help="Replay the trace's own times so many times as fast.", rich_help_panel=_WHEN
        ),
    ] = None,
    num_warmups: Annotated[
        int,
        typer.Option(help="Requests sent before, not measured.", rich_help_panel=_MEASURE),
    ] = 0,
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:MS",
            help="SLOs in milliseconds: ttft, tbt (every gap), tpot, e2el. Several as "
            "--goodput ttft:500 tbt:50.",
            rich_help_panel=_MEASURE,
        ),
    ] = None,
    metric_percentiles: Annotated[
        str,
        typer.Option(
            "--metric-percentiles",
            "--percentiles",
            help="Percentiles to report, separated by commas.",
            rich_help_panel=_MEASURE,
        ),
    ] = "90,95,99",
    save_result: Annotated[
        bool,
        typer.Option(
            "--save-result",
            help="Write the result as JSON into this folder.",
            rich_help_panel=_MEASURE,
        ),
    ] = False,
    result_file: Annotated[
        Path | None,
        typer.Option(
            "--result-file",
            "--result-filename",
            help="Write the result as JSON to this file.",
            rich_help_panel=_MEASURE,
        ),
    ] = None,
) -> None:
    """Parse the options into a `BenchConfig`, run it, and show and save the result."""
    _need_aiohttp()
    from twolane.bench.serve import BenchConfig
    from twolane.workload.spec import WorkloadSpec

    with _errors_as_lines():
        if more_slos and not goodput:
            raise typer.BadParameter(f"unexpected: {' '.join(more_slos)}")
        config = BenchConfig(
            base_url=base_url,
            endpoint=endpoint,
            model=model,
            workload=WorkloadSpec(
                dataset=dataset,
                num_prompts=num_prompts,
                request_rate=request_rate,
                burstiness=burstiness,
                seed=seed,
                random_input_len=random_input_len,
                random_output_len=random_output_len,
                trace_offset=trace_offset,
                trace_duration=trace_duration,
                scale_rate=scale_rate,
                scale_lengths=scale_lengths,
                max_input_len=max_input_len,
                max_output_len=max_output_len,
            ),
            prompt_format=prompt_format,
            vocab_range=_token_range(vocab_range),
            max_concurrency=max_concurrency,
            num_warmups=num_warmups,
            ignore_eos=ignore_eos,
            extra_body=_json_object(extra_body),
            api_key=api_key,
            headers=dict(_pair("--header", one, "=") for one in header or []),
            timeout=timeout,
            goodput=_slos([*(goodput or []), *(more_slos or [])]),
            percentiles=_percentiles(metric_percentiles),
        )
        if result_file is not None and not result_file.absolute().parent.is_dir():
            raise typer.BadParameter(f"--result-file: no folder {result_file.absolute().parent}")
        result = _run(config)
    _finish(result, save_result, result_file)


def _need_aiohttp() -> None:
    try:
        import aiohttp  # noqa: F401
    except ModuleNotFoundError:
        typer.echo("twolane bench needs aiohttp: pip install 'twolane[bench]'", err=True)
        raise typer.Exit(1) from None


@contextlib.contextmanager
def _errors_as_lines() -> Iterator[None]:
    """Turn the errors that a user can mend into one line each: 2 wrong usage, 1 no run."""
    from twolane.bench.serve import BenchError
    from twolane.workload.spec import OptionError
    from twolane.workload.traces import TraceError

    try:
        yield
    except (OptionError, TraceError) as error:
        raise typer.BadParameter(str(error)) from error
    except BenchError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error


def _run(config: "BenchConfig") -> "Result":
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from twolane.bench.serve import run

    columns = (
        TextColumn("[progress.description]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=Console(stderr=True), refresh_per_second=4, transient=True
    ) as progress:
        task = progress.add_task("preparing", total=None)

        def show(tally: "Tally") -> None:
            text = f"{tally.running} running, {tally.failed} failed"
            done = tally.ok + tally.failed
            progress.update(task, description=text, completed=done, total=tally.total)

        async def main() -> "Result":
            stop = asyncio.Event()
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGINT, _stop_once, loop, stop)
            return await run(config, stop=stop, on_change=show)

        # A collection in the middle of the run would show up as latency.
        gc.collect()
        gc.freeze()
        return asyncio.run(main())


def _stop_once(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """First Ctrl-C: end the run in order. The next one kills."""
    stop.set()
    loop.remove_signal_handler(signal.SIGINT)


def _finish(result: "Result", save_result: bool, result_file: Path | None) -> None:
    """Save, then show; exit with 130 after Ctrl-C and with 1 if nothing was answered."""
    from rich.console import Console

    from twolane.bench.report import default_name, result_json, summary

    path = result_file or (Path(default_name(result)) if save_result else None)
    if path is not None:
        path.write_bytes(result_json(result))
    Console().print(summary(result))
    if path is not None:
        typer.echo(f"Result written to {path}")
    if result.interrupted:
        raise typer.Exit(130)
    if not result.metrics.completed:
        typer.echo("No request was answered.", err=True)
        raise typer.Exit(1)


def _pair(option: str, text: str, separator: str) -> tuple[str, str]:
    name, found, value = text.partition(separator)
    if not found or not name.strip():
        raise typer.BadParameter(f"{option}: {text!r} is not NAME{separator}VALUE")
    return name.strip(), value.strip()


def _number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{option}: {text!r} is not a number") from None


def _slos(texts: list[str]) -> dict[str, float]:
    """`name:ms` texts, each possibly several separated by spaces or commas, as seconds."""
    pairs = [
        _pair("--goodput", one, ":") for text in texts for one in text.replace(",", " ").split()
    ]
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise typer.BadParameter(f"--goodput: given twice: {', '.join(sorted(names))}")
    return {name: _number("--goodput", value) / 1e3 for name, value in pairs}


def _percentiles(text: str) -> tuple[float, ...]:
    return tuple(_number("--metric-percentiles", one) for one in text.split(","))


def _token_range(text: str) -> "TokenRange":
    from twolane.workload.prompts import TokenRange

    low, high = _pair("--vocab-range", text, ":")
    if not (low.isdecimal() and high.isdecimal()):
        raise typer.BadParameter(f"--vocab-range: {text!r} is not LOW:HIGH")
    return TokenRange(int(low), int(high))


def _json_object(text: str | None) -> dict[str, object]:
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise typer.BadParameter(f"--extra-body: {error}") from error
    if not isinstance(value, dict):
        raise typer.BadParameter("--extra-body: not a JSON object")
    return value
