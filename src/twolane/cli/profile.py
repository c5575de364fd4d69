"""What `twolane profile` shows in the terminal."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from twolane.engine.config import EngineConfig
from twolane.profile.run import Progress, take_profile


def run(config: EngineConfig, *, out: Path | None, seconds: float) -> None:
    """Measure, with a bar for every stage; say where the profile is and what is missing.

    Raises:
        ValueError: a setting is wrong, or the file is something else's.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with _bars() as progress:
        outcome = take_profile(config, out=out, seconds=seconds, progress=progress)
    profile, console = outcome.profile, Console()
    console.print(
        f"{len(profile.samples)} samples of {len(profile.done())} points "
        f"({outcome.measured} of them now), {profile.seconds:.0f} s of measuring"
    )
    if outcome.left:
        console.print(f"{outcome.left} points of the plan are left: the same command goes on")
    console.print(str(outcome.path), soft_wrap=True)


@contextmanager
def _bars() -> Iterator[Progress]:
    """A bar for each stage on standard error, or nothing where that is no terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(),
    )
    stages: dict[str, TaskID] = {}
    with Bar(*columns, console=console, disable=not console.is_terminal) as bar:

        def progress(stage: str, fraction: float) -> None:
            if stage not in stages:
                stages[stage] = bar.add_task(stage, total=1.0)
            bar.update(stages[stage], completed=fraction)

        yield progress
