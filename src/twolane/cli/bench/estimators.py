"""`twolane bench estimators`: each estimator's errors on held-out samples."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from twolane.cli.errors import fail
from twolane.cli.helptext import Command
from twolane.cli.lazy import command_app
from twolane.common.printable import printable

if TYPE_CHECKING:
    from rich.table import Table

    from twolane.estimate.errors import Errors
    from twolane.estimate.profile import Profile


app = command_app()


@app.command(cls=Command)
def estimators(
    profiles: Annotated[
        list[Path], typer.Argument(metavar="PROFILE", help="Files that `twolane profile` wrote.")
    ],
) -> None:
    """Print each estimator's errors on held-out samples of a profile, by kind of launch."""
    from rich.console import Console
    from rich.markup import escape

    from twolane.estimate.errors import prediction_seconds, table
    from twolane.estimate.profile import Profile, ProfileError

    console = Console()
    for path in profiles:
        try:
            profile = Profile.read(path)
            errors = table(profile)
            console.print(_table(escape(printable(_title(path, profile))), errors))
            costs = prediction_seconds(profile)
        except ProfileError as error:
            problem = str(error).removeprefix(str(path)).lstrip(": ")
            raise fail(f"{path}: {problem}") from error
        if not errors:
            console.print("no sample was held out, so there is nothing to compare: measure longer")
        if costs:
            console.print("a prediction of a decode step, one level / all levels at once:")
        for name, (one, every) in costs.items():
            console.print(f"  {name}: {one * 1e6:.0f} µs / {every * 1e6:.0f} µs")


def _title(path: Path, profile: "Profile") -> str:
    held_out = sum(sample.held_out for sample in profile.samples)
    return (
        f"{path.name}: {profile.key.device}, {len(profile.samples)} samples, "
        f"{held_out} held out, {profile.seconds:.0f} s"
    )


def _table(title: str, rows: "list[Errors]") -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, collapse_padding=True, show_edge=False)
    for name in ("estimator", "launches", "count", "mean", "P95", "worst", "bound covers", "over"):
        names = name in ("estimator", "launches")
        table.add_column(name, justify="left" if names else "right", no_wrap=names)
    for row in rows:
        errors = (f"{error:.1%}" for error in (row.mean, row.p95, row.worst))
        bound = ["" if value is None else f"{value:.1%}" for value in (row.covered, row.excess)]
        table.add_row(row.estimator, row.case, str(row.samples), *errors, *bound)
    return table
