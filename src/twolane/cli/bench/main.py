"""`twolane bench`: measures servers over HTTP, and compares and draws the results."""

from typing import ClassVar

import typer

from twolane.cli.lazy import LazyCommands


class BenchCommands(LazyCommands):
    """The commands of `twolane bench`."""

    package = "twolane.cli.bench"
    lines: ClassVar[dict[str, str]] = {
        "serve": "Send a workload to an OpenAI-compatible server and measure latency and goodput.",
        "goodput": "Find the highest request rate at which the SLOs hold, on servers or in "
        "simulation.",
        "report": "Draw the results of runs: one page, its figures as PNGs, and tables for a "
        "README.",
        "workloads": "Draw every workload, and print its lengths beside the published ones.",
        "estimators": "Print each estimator's errors on held-out samples of a profile, by kind of "
        "launch.",
    }


app = typer.Typer(
    cls=BenchCommands,
    help="Measure LLM servers, and compare what they reach.",
    no_args_is_help=True,
    add_completion=False,
)


@app.callback()
def bench() -> None:
    """Measure LLM servers, and compare what they reach."""
