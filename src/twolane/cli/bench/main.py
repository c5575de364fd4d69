"""`twolane bench`: measurements of a server from outside."""

from typing import ClassVar

import typer

from twolane.cli.lazy import LazyCommands


class BenchCommands(LazyCommands):
    """The commands of `twolane bench`."""

    package = "twolane.cli.bench"
    lines: ClassVar[dict[str, str]] = {
        "estimators": "Print the errors on the samples that were held out, for each estimator and "
        "kind of launch.",
        "workloads": "Draw every workload, and print its lengths beside the published ones.",
        "serve": "Send a workload to an OpenAI-compatible server and measure latency and goodput.",
        "goodput": "Find the highest request rate at which the SLOs hold, on servers or in "
        "simulation.",
        "report": "Draw what came out: one page, its figures as PNG, and a table for a README.",
    }


app = typer.Typer(
    cls=BenchCommands,
    help="Measure an LLM server from outside.",
    no_args_is_help=True,
    add_completion=False,
)


@app.callback()
def bench() -> None:
    """Measure an LLM server from outside."""
