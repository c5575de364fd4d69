"""`twolane profile`: what launches take on this machine.

**Examples**

- `twolane profile qwen3-8b --load-format dummy` — eight minutes, into the cache

- `twolane profile qwen3-8b --load-format dummy --seconds 720` — continue where the last run ended

- `twolane bench estimators PROFILE.json` — how well it predicts
"""

import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec

from twolane.cli.errors import one_line_errors
from twolane.cli.helptext import Command
from twolane.cli.lazy import command_app
from twolane.cli.options import ModelArgument, takes, takes_engine_settings
from twolane.common.log_lines import log_to
from twolane.common.options import Option
from twolane.engine.config import UNPROFILED, EngineConfig

app = command_app()


class Measuring(msgspec.Struct, frozen=True):
    """How long is measured, and where to."""

    out: Annotated[Path | None, Option("Options", "FILE")] = None
    """File of the profile; by default in the cache, where `serve` finds it."""
    seconds: Annotated[float, Option("Options", least=0.0)] = 480.0
    """Seconds to measure, without loading; the next run continues from there."""


@app.command(cls=Command)
@takes(Measuring, "measuring")
@takes_engine_settings(*UNPROFILED)
def profile(model: ModelArgument, config: EngineConfig, measuring: dict[str, Any]) -> None:
    """Measure how long launches of a model take here, for predictions."""
    with one_line_errors():
        run(config, **measuring)


def run(config: EngineConfig, *, out: Path | None, seconds: float) -> None:
    """Measure, with a bar for every stage; say where the profile is and what is missing.

    Raises:
        ValueError: a setting is wrong, or the file is something else's.
    """
    from rich.console import Console

    from twolane.engine.messages import Progress
    from twolane.frontend.progress import progress_bars
    from twolane.profile.run import take_profile

    log_to(sys.stderr.fileno(), "info", "%(message)s")
    with progress_bars() as show:
        outcome = take_profile(
            config, out=out, seconds=seconds, progress=lambda *step: show(Progress(*step))
        )
    profile, console = outcome.profile, Console()
    console.print(
        f"{len(profile.samples)} samples of {len(profile.done())} points "
        f"({outcome.measured} of them now), {profile.seconds:.0f} s of measuring"
    )
    if outcome.left:
        console.print(f"{outcome.left} points of the plan are left: the same command continues")
    console.print(str(outcome.path), soft_wrap=True)
