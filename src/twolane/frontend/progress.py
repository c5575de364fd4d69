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
    "probes": "measuring the device",
    "contention": "measuring how lanes slow each other",
    "measure": "measuring launches",
}
"""Descriptions of the stages of the engine's start, and of a profile."""


@contextlib.contextmanager
def progress_bars() -> Iterator[Callable[[Progress], None]]:
    """Show progress on standard error: a bar for each stage, or a line in a log if that is no
    terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(),
    )
    stages: dict[str, TaskID] = {}
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:

        def show(progress: Progress) -> None:
            stage = progress.stage
            if stage not in stages:
                stages[stage] = bar.add_task(STAGES[stage], total=1.0)
                if not console.is_terminal:
                    log.info("%s", STAGES[stage])
            bar.update(stages[stage], completed=progress.fraction)

        yield show


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
