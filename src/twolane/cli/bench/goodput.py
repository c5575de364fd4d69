"""`twolane bench goodput`: the highest request rate at which the SLOs hold.

**Examples**

- `twolane bench goodput --goodput ttft:1000 tbt:50 --dataset azure-conv --out found` — the server
  that already runs on this machine

- `twolane bench goodput --serve smollm2-135m-instruct --system chunked --system static-split
  --goodput ttft:2000 tbt:100 --attainment 0.9 --dataset azure-conv --num-prompts 60 --brief
  --scale-lengths 0.1 --out found` — two systems on servers started in turn, at P90

- `twolane bench goodput --simulate h200 --model llama-3.1-8b --system chunked:token_budget=512
  --system static-split:decode_units=48 --goodput ttft:1000 tbt:50 --dataset azure-conv --seeds 3
  --out found` — two systems on a simulated GPU, three patterns of arrivals each

- `… --system chunked:token_budget=256/512/1024` — the budget with the highest goodput

- `twolane bench goodput --serve-command "vllm serve Qwen/Qwen3-8B"
  --sweep max-num-batched-tokens=256,512,1024 --goodput ttft:1000 tbt:21/50 --dataset azure-conv
  --out vllm` — any other server, tuned for each bound
"""

import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from twolane.bench.goodput import Search
from twolane.bench.target import Target
from twolane.cli.bench import common
from twolane.cli.errors import INTERRUPTED
from twolane.cli.helptext import Command
from twolane.cli.lazy import command_app
from twolane.cli.options import takes
from twolane.common.errors import FieldError
from twolane.results.result import MEASURE, BenchConfig
from twolane.workload.spec import WorkloadSpec

app = command_app()


@app.command(cls=Command)
@takes(Target, "target")
@takes(WorkloadSpec, "workload", without=("request_rate", "scale_rate", "seed"))
@takes(Search, "search")
@takes(
    BenchConfig, "load", only=("api_key", "vocab_range", "num_warmups"), defaults={"num_warmups": 4}
)
def goodput(
    target: dict[str, Any],
    workload: dict[str, Any],
    search: dict[str, Any],
    load: dict[str, Any],
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for summary.json and a JSON file of each run; runs that it has are kept.",
            rich_help_panel=MEASURE,
            show_default=False,
        ),
    ],
    goodput: common.Goodput = None,
    more_slos: common.MoreSlos = None,
    trace: Annotated[
        bool,
        typer.Option(
            "--trace",
            help="Write the trace of each server that --serve starts into the folder.",
            rich_help_panel=MEASURE,
        ),
    ] = False,
    guess: Annotated[
        list[float] | None,
        typer.Option(
            help="Requests per second at which a search begins instead of --start-rate, such as a "
            "simulation's goodput; once for each seed. The error of one guess corrects the next.",
            rich_help_panel=MEASURE,
        ),
    ] = None,
) -> None:
    """Find the highest request rate at which the SLOs hold, on servers or in simulation.

    Ctrl-C or SIGTERM ends the search and its servers; the same command continues it.
    """
    common.need_httptools()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with common.errors_as_lines():
        who = Target(**target)
        if who.serve is None and trace:
            raise typer.BadParameter("--trace needs --serve")
        slos, tbts = common.slos_and_tbts(goodput, more_slos)
        asked = Search(
            target=who.words(), workload=WorkloadSpec(**workload), slos=slos, tbts=tbts, **search
        )
        _find(asked, who, out, BenchConfig(**load), guess or [], trace)


def _find(
    search: Search, who: Target, out: Path, load: BenchConfig, guesses: list[float], traces: bool
) -> None:
    from twolane.bench import contenders

    try:
        contenders.find(search, who.contenders, out, load, guesses=guesses, traces=traces)
    except FieldError:
        raise
    except ValueError as error:  # what the simulated engine refuses
        raise typer.BadParameter(str(error)) from error
    except KeyboardInterrupt:
        typer.echo(f"Stopped. {out} has the runs so far; the same command continues.", err=True)
        raise typer.Exit(INTERRUPTED) from None
