"""Shows the engine's start in the terminal."""

import contextlib
import logging
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bar

from twolane.engine.messages import Progress

log = logging.getLogger("twolane.server")


@contextlib.contextmanager
def progress_bars() -> Iterator[Callable[[Progress], None]]:
    """Show the engine's start on standard error: a bar for each stage, or a line in a log."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield ProgressLines()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
    )
    with Bar(*columns, console=console, transient=True) as bar:
        yield ProgressBars(bar)


class ProgressLines:
    """Logs each stage as it begins."""

    def __init__(self) -> None:
        self._stages: set[str] = set()

    def __call__(self, progress: Progress) -> None:
        """Show one."""
        if progress.stage not in self._stages:
            self._stages.add(progress.stage)
            log.info("%s ...", progress.stage)


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
