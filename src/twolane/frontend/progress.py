"""Progress in the terminal: of the engine's start, and of answered prompts."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from twolane.engine.messages import Progress

log = logging.getLogger("twolane.server")

STAGES = {
    "weights": "loading the weights",
    "pool": "allocating the KV cache",
    "kernels": "compiling and timing kernels",
    "graphs": "recording CUDA graphs",
    "warm-up": "trying every kernel",
    "predictions": "reading the profile",
}
"""Descriptions of the stages of the engine's start."""


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
        """Show a progress message."""
        if progress.stage not in self._stages:
            self._stages.add(progress.stage)
            log.info("%s", STAGES[progress.stage])


class ProgressBars:
    """Shows a bar for each stage."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        self._stages: dict[str, TaskID] = {}

    def __call__(self, progress: Progress) -> None:
        """Show a progress message."""
        if progress.stage not in self._stages:
            self._stages[progress.stage] = self._bar.add_task(STAGES[progress.stage], total=1.0)
        self._bar.update(self._stages[progress.stage], completed=progress.fraction)


class AnswerBar:
    """Shows the number of answered prompts and the token rates on standard error.

    Args:
        total: prompts.
        shown: true if there is a bar at all.
    """

    def __init__(self, total: int, *, shown: bool) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[rates]}"),
        )
        self._bar = Bar(*columns, console=Console(stderr=True), disable=not shown)
        self._task = self._bar.add_task("prompts", total=total, rates="")
        self._began = time.monotonic()
        self._read = self._written = 0

    def __enter__(self) -> "AnswerBar":
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def add(self, read: int, written: int) -> None:
        """Count an answered prompt with its tokens and those of its answers."""
        self._read += read
        self._written += written
        seconds = max(time.monotonic() - self._began, 1e-9)
        read_rate, rate = self._read / seconds, self._written / seconds
        rates = f"{read_rate:,.0f} prompt tokens/s, {rate:,.0f} output tokens/s"
        self._bar.update(self._task, advance=1, rates=rates)
