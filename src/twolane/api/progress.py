"""Shows the engine's start in the terminal."""

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bar

from twolane.engine.messages import Progress


@contextlib.contextmanager
def progress_bars() -> Iterator["ProgressBars"]:
    """Show the engine's start on standard error, a bar for each stage."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
    )
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield ProgressBars(bar)


class ProgressBars:
    """Takes the engine's `Progress` messages."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        self._stages: dict[str, TaskID] = {}

    def __call__(self, progress: Progress) -> None:
        """Show one."""
        if progress.stage not in self._stages:
            self._stages[progress.stage] = self._bar.add_task(progress.stage, total=1.0)
        self._bar.update(self._stages[progress.stage], completed=progress.fraction)
