"""`twolane bench report`: figures and tables of runs.

**Examples**

- `twolane bench report found` — a search by `twolane bench goodput --out found`

- `twolane bench report chunked=a.json ours=b.json --trace-file ours=trace.json --out report` — two
  runs side by side, and the lanes of one
"""

import importlib.util
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from twolane.cli.bench import common
from twolane.cli.errors import fail
from twolane.cli.helptext import Command
from twolane.cli.lazy import command_app
from twolane.cli.options import takes
from twolane.common.options import Option
from twolane.common.printable import shown_on

app = command_app()


class Drawing(msgspec.Struct, frozen=True):
    """What is drawn, and where to."""

    out: Annotated[Path, Option("Options")] = Path("report")
    """Folder for index.html, the PNGs and report.md."""
    trace_file: Annotated[tuple[str, ...], Option("Options", "FILE")] = ()
    """Trace of `serve` or `simulate`, as FILE or NAME=FILE; may be repeated."""
    trace_from: Annotated[float | None, Option("Options")] = None
    """Seconds into the trace where the timeline begins; by default the busiest part."""
    trace_seconds: Annotated[float | None, Option("Options", least=0.001)] = None
    """Length of the timeline in seconds; by default chosen by the number of launches."""


@app.command(cls=Command)
@takes(Drawing, "drawing")
def report(
    drawing: dict[str, Any],
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN",
            help="Result files of `bench serve` and `simulate`, folders of `bench goodput`. "
            "NAME=FILE names the system; files of one name form one line of a figure.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Draw the results of runs: one page, its figures as PNGs, and tables for a README."""
    if importlib.util.find_spec("matplotlib") is None:
        raise fail("bench report needs matplotlib: pip install 'twolane[bench]'")
    out, traces = drawing["out"], drawing["trace_file"]
    if not runs and not traces:
        raise typer.BadParameter("give a RUN or a --trace-file")
    from twolane.bench.report import page as report
    from twolane.results import saved

    with common.errors_as_lines():
        inputs = saved.read(runs or [], traces)
        drawn = report.make(inputs, drawing["trace_from"], drawing["trace_seconds"])
    report.write(drawn, inputs, out)
    typer.echo(shown_on(sys.stdout, report.markdown(drawn, inputs)))
    for title, why in drawn.lacking:
        typer.echo(shown_on(sys.stdout, f"Not drawn: {title} {why}"))
    typer.echo(f"{out / 'index.html'}: {len(drawn.figures)} figures")
