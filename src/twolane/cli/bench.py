"""`twolane bench`: the command line. What it runs is imported when it runs."""

import asyncio
import contextlib
import importlib.util
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from twolane.bench.estimators import estimators
from twolane.bench.workloads import workloads
from twolane.cli import bench_options as options
from twolane.cli.bench_options import MEASURE, WHAT, WHEN, WHERE
from twolane.cli.configfile import config_option
from twolane.common import garbage
from twolane.common.vocabulary import EstimatorName

if TYPE_CHECKING:
    from twolane.bench.client import Tally
    from twolane.results.result import BenchConfig, Result

app = typer.Typer(help="Measure an LLM server from outside.", no_args_is_help=True)
app.command()(estimators)
app.command()(workloads)

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
_EPILOG_GOODPUT = """**Examples**

- `twolane bench goodput --goodput ttft:1000 tbt:50 --dataset azure-conv --out found` — of the
  server that runs here

- `twolane bench goodput --serve smollm2-135m-instruct --system chunked --system static-split
  --goodput ttft:2000 tbt:100 --attainment 0.9 --dataset azure-conv --num-prompts 60
  --scale-lengths 0.1 --out found` — two systems on servers started in turn, at P90

- `twolane bench goodput --simulate h200 --model llama-3.1-8b --system chunked:token_budget=512
  --system static-split:decode_units=48 --goodput ttft:1000 tbt:50 --dataset azure-conv --seeds 3
  --out found` — two systems on a simulated GPU, three patterns of arrivals each

- `… --system chunked:token_budget=256/512/1024` — the budget with the highest goodput
"""
_EPILOG_REPORT = """**Examples**

- `twolane bench report found` — what `twolane bench goodput --out found` found

- `twolane bench report chunked=a.json ours=b.json --trace-file ours=trace.json --out report` — two
  runs side by side, and the lanes of one
"""


@app.callback()
def bench() -> None:
    """Measure an LLM server from outside."""


@app.command(help=_HELP, epilog=_EPILOG)
@options.takes_workload()
def serve(
    workload: dict[str, Any],
    more_slos: options.MoreSlos = None,
    config_file: Annotated[Path | None, config_option()] = None,
    base_url: Annotated[
        str, typer.Option(help="Where the server listens.", rich_help_panel=WHERE)
    ] = "http://127.0.0.1:8000",
    endpoint: Annotated[
        str,
        typer.Option(
            help="Path of the API: /v1/completions or /v1/chat/completions.",
            rich_help_panel=WHERE,
        ),
    ] = "/v1/completions",
    model: Annotated[
        str | None,
        typer.Option(
            help="The model to name in requests. (default: the first the server lists)",
            rich_help_panel=WHERE,
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="OPENAI_API_KEY", help="Sent as a bearer token.", rich_help_panel=WHERE
        ),
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="A header for each request; may repeat.",
            rich_help_panel=WHERE,
        ),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(
            callback=options.finite,
            help="Seconds that one request may take.",
            rich_help_panel=WHERE,
        ),
    ] = 600.0,
    prompt_format: Annotated[
        Literal["auto", "ids", "text"],
        typer.Option(
            help="Prompts as token ids (exact length) or as words (about one token each); auto: "
            "ids for completions, text for chat.",
            rich_help_panel=WHAT,
        ),
    ] = "auto",
    vocab_range: options.VocabRange = "1000:30000",
    ignore_eos: options.IgnoreEos = True,
    extra_body: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="Fields for each request, as '{\"temperature\": 0}'.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    max_concurrency: Annotated[
        int | None,
        typer.Option(
            help="Most requests in flight; later ones wait in the client.", rich_help_panel=WHEN
        ),
    ] = None,
    num_warmups: Annotated[
        int,
        typer.Option(help="Requests sent before, not measured.", rich_help_panel=MEASURE),
    ] = 0,
    goodput: options.Goodput = None,
    metric_percentiles: options.Percentiles = "90,95,99",
    save_result: Annotated[
        bool,
        typer.Option(
            "--save-result",
            help="Write the result as JSON into this folder.",
            rich_help_panel=MEASURE,
        ),
    ] = False,
    result_file: Annotated[
        Path | None,
        typer.Option(
            "--result-file",
            "--result-filename",
            help="Write the result as JSON to this file.",
            rich_help_panel=MEASURE,
        ),
    ] = None,
) -> None:
    """Parse the options into a `BenchConfig`, run it, and show and save the result."""
    options.need_httptools()
    from twolane.results.result import BenchConfig
    from twolane.workload.spec import WorkloadSpec

    with _errors_as_lines():
        config = BenchConfig(
            base_url=base_url,
            endpoint=endpoint,
            model=model,
            workload=WorkloadSpec(**workload),
            prompt_format=prompt_format,
            vocab_range=options.token_range(vocab_range),
            max_concurrency=max_concurrency,
            num_warmups=num_warmups,
            ignore_eos=ignore_eos,
            extra_body=options.json_object(extra_body),
            api_key=api_key,
            headers=dict(options.pair("--header", one, "=") for one in header or []),
            timeout=timeout,
            goodput=options.slos(goodput, more_slos),
            percentiles=options.percentiles(metric_percentiles),
        )
        options.need_folder("--result-file", result_file)
        result = _run(config)
    _finish(result, save_result, result_file)


@app.command(epilog=_EPILOG_GOODPUT)
@options.takes_workload("request_rate", "scale_rate", "seed")
def goodput(
    workload: dict[str, Any],
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for one JSON a run and summary.json. Runs that it has are not repeated.",
            rich_help_panel=MEASURE,
            show_default=False,
        ),
    ],
    goodput: options.Goodput = None,
    more_slos: options.MoreSlos = None,
    simulate: Annotated[
        str | None,
        typer.Option(
            metavar="GPU",
            help="Search on simulated GPUs (a100-80gb, h100, h200) instead of a server.",
            rich_help_panel=WHERE,
        ),
    ] = None,
    serve: Annotated[
        str | None,
        typer.Option(
            metavar="ARGUMENTS",
            help="Start a server for each system in turn, with this model and these options of "
            '`twolane serve`, as "smollm2-135m-instruct --cores 2".',
            rich_help_panel=WHERE,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="The model to simulate, or to name in requests. (default: the server's first)",
            rich_help_panel=WHERE,
        ),
    ] = None,
    system: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:KEY=VALUE,…]",
            help="A system to serve or simulate, with its settings; may repeat: each is searched "
            "in turn.",
            rich_help_panel=WHERE,
        ),
    ] = None,
    tp: Annotated[
        int, typer.Option(help="Simulated GPUs that share each layer.", rich_help_panel=WHERE)
    ] = 1,
    estimator: Annotated[
        EstimatorName | None,
        typer.Option(
            help="How simulated systems predict. (default: each as it was published)",
            rich_help_panel=WHERE,
        ),
    ] = None,
    base_url: Annotated[
        str, typer.Option(help="Where the server listens.", rich_help_panel=WHERE)
    ] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="OPENAI_API_KEY", help="Sent as a bearer token.", rich_help_panel=WHERE
        ),
    ] = None,
    vocab_range: options.VocabRange = "1000:30000",
    num_warmups: Annotated[
        int,
        typer.Option(
            help="Requests sent before each run, with --serve before a server's first, not"
            " measured.",
            rich_help_panel=MEASURE,
        ),
    ] = 4,
    trace: Annotated[
        bool,
        typer.Option(
            "--trace",
            help="With --serve: write each server's trace into the folder.",
            rich_help_panel=MEASURE,
        ),
    ] = False,
    attainment: Annotated[
        float,
        typer.Option(
            help="Share that must keep each SLO, 0.9 for P90: of requests, for tbt of gaps.",
            rich_help_panel=MEASURE,
        ),
    ] = 0.99,
    seeds: Annotated[
        int, typer.Option(help="Searches, each with arrivals of its own.", rich_help_panel=MEASURE)
    ] = 1,
    seed: Annotated[int, typer.Option(help="The first of them.", rich_help_panel=MEASURE)] = 0,
    start_rate: Annotated[
        float, typer.Option(help="Requests a second to begin with.", rich_help_panel=MEASURE)
    ] = 1.0,
    first_step: Annotated[
        float,
        typer.Option(
            help="Factor from there to the second rate, up or down; 1.2 saves runs where the first "
            "is a good guess.",
            rich_help_panel=MEASURE,
        ),
    ] = 2.0,
    guess: Annotated[
        list[float] | None,
        typer.Option(
            help="Where the answer is thought to be, such as a simulation's; once for each seed. "
            "What the first is off by corrects the next.",
            rich_help_panel=MEASURE,
        ),
    ] = None,
    least_rate: Annotated[
        float,
        typer.Option(help="What holds only below is taken for 0.", rich_help_panel=MEASURE),
    ] = 1e-3,
    tolerance: Annotated[
        float,
        typer.Option(
            help="How close the rates that hold and fail must come.", rich_help_panel=MEASURE
        ),
    ] = 0.02,
) -> None:
    """Find the highest request rate at which the SLOs hold, on servers or in simulation."""
    options.need_httptools()
    from twolane.bench import contenders as goodput_cli
    from twolane.bench.goodput import Search
    from twolane.results.result import BenchConfig
    from twolane.workload.spec import WorkloadSpec

    with _errors_as_lines():
        if simulate is None and serve is None and system:
            raise typer.BadParameter("--system needs --serve or --simulate: a server has its own")
        if serve is None and trace:
            raise typer.BadParameter("--trace needs --serve")
        load = BenchConfig(
            api_key=api_key,
            vocab_range=options.token_range(vocab_range),
            num_warmups=num_warmups,
        )
        slos, tbts = options.slos_and_tbts(goodput, more_slos)
        search = Search(
            target=goodput_cli.target(simulate, serve, model, tp, estimator, base_url),
            workload=WorkloadSpec(**workload),
            slos=slos,
            tbts=tbts,
            attainment=attainment,
            seeds=seeds,
            seed=seed,
            start_rate=start_rate,
            first_step=first_step,
            least_rate=least_rate,
            tolerance=tolerance,
        )
        try:
            goodput_cli.find(search, system or [], out, load, guesses=guess or [], traces=trace)
        except ValueError as error:  # what the simulated engine refuses
            raise typer.BadParameter(str(error)) from error
        except KeyboardInterrupt:
            typer.echo(f"Stopped. {out} has the runs so far; the same command goes on.", err=True)
            raise typer.Exit(130) from None


@app.command(epilog=_EPILOG_REPORT)
def report(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...",
            help="Result files of `bench serve` and `simulate`, folders of `bench goodput`. "
            "NAME=FILE names what served; files of one name are one line of a figure.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for index.html, the PNGs and report.md.")
    ] = Path("report"),
    trace_file: Annotated[
        list[str] | None,
        typer.Option(help="A trace (`--trace` of serve or simulate), or NAME=FILE; may repeat."),
    ] = None,
    trace_from: Annotated[
        float | None,
        typer.Option(
            callback=options.finite,
            help="Seconds into the trace where the timeline begins. (default: where most happens)",
        ),
    ] = None,
    trace_seconds: Annotated[
        float | None,
        typer.Option(min=0.001, callback=options.finite, help="Seconds that the timeline shows."),
    ] = None,
) -> None:
    """Draw what came out: one page, its figures as PNG, and a table for a README."""
    if importlib.util.find_spec("matplotlib") is None:
        typer.echo("twolane bench report needs matplotlib: pip install 'twolane[bench]'", err=True)
        raise typer.Exit(1)
    if not runs and not trace_file:
        raise typer.BadParameter("give a RUN or a --trace-file")
    from twolane.bench.report import page as report
    from twolane.results import saved

    with _errors_as_lines():
        given = saved.read(runs or [], trace_file or [])
        made = report.make(given, trace_from, trace_seconds)
    report.write(made, given, out)
    typer.echo(report.markdown(made, given))
    for title, why in made.lacking:
        typer.echo(f"Not drawn: {title} {why}")
    typer.echo(f"{out / 'index.html'}: {len(made.figures)} figures")


@contextlib.contextmanager
def _errors_as_lines() -> Iterator[None]:
    """Turn the errors that a user can mend into one line each: 2 wrong usage, 1 no run."""
    from twolane.bench.serve import BenchError

    try:
        with options.workload_errors():
            yield
    except (BenchError, MemoryError) as error:
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
    console = Console(stderr=True)
    with Progress(
        *columns,
        console=console,
        refresh_per_second=4,
        transient=True,
        disable=not console.is_terminal,
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

        garbage.leave_out()  # it would show up as latency
        return asyncio.run(main())


def _stop_once(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """First Ctrl-C: end the run in order. The next one kills."""
    stop.set()
    loop.remove_signal_handler(signal.SIGINT)


def _finish(result: "Result", save_result: bool, result_file: Path | None) -> None:
    """Save, then show; exit with 130 after Ctrl-C and with 1 if nothing was answered."""
    from rich.console import Console

    from twolane.results.summary import default_name, result_json, summary

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
