"""`twolane bench workloads`: the lengths of the built-in workloads beside the published ones."""

from typing import TYPE_CHECKING, Annotated

import typer

from twolane.cli.helptext import Command
from twolane.cli.lazy import command_app

if TYPE_CHECKING:
    from twolane.workload.published import Statistics


app = command_app()


@app.command(cls=Command)
def workloads(
    num_prompts: Annotated[
        int, typer.Option(min=1, help="Number of requests to draw of each workload.")
    ] = 20_000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draws.")] = 0,
) -> None:
    """Draw every workload, and print its lengths beside the published ones.

    The exit code is 1 if a mean, median or P90 is more than 3 % off the published one, or if a
    length is outside the published minimum and maximum.
    """
    from rich.console import Console
    from rich.table import Table

    from twolane.workload.published import PUBLISHED, statistics
    from twolane.workload.spec import WorkloadSpec

    table = Table(title=f"{num_prompts} requests each, drawn / published tokens")
    for column in ("workload", "length", "min", "mean", "median", "P90", "max", "missed"):
        names = column in ("workload", "length")
        table.add_column(column, justify="left" if names else "right", no_wrap=names)
    failed = False
    for name, published in PUBLISHED.items():
        spec = WorkloadSpec(dataset=name, num_prompts=num_prompts, seed=seed)
        drawn = statistics(spec.build())
        for length, wanted in published.items():
            missed = wanted.misses(drawn[length])
            failed |= bool(missed)
            table.add_row(name, length, *_cells(drawn[length], wanted), ", ".join(missed) or "none")
        table.add_section()
    Console().print(table)
    raise typer.Exit(1 if failed else 0)


def _cells(drawn: "Statistics", published: "Statistics") -> list[str]:
    cells = []
    for name in ("minimum", "mean", "median", "p90", "maximum"):
        got, wanted = getattr(drawn, name), getattr(published, name)
        cells.append(f"{got:,.0f}" + ("" if wanted is None else f" / {wanted:,.0f}"))
    return cells
