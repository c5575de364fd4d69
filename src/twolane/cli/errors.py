"""Users' errors in one line: exit code 2 for options, 1 for what is unavailable."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import typer

from twolane.common.errors import FieldError
from twolane.common.options import settings_of
from twolane.common.printable import printable
from twolane.engine.config import EngineConfig

USAGE_ERROR = 2
"""Exit code after a wrong setting."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells."""


def fail(message: str, code: int = 1) -> typer.Exit:
    """Print one line on standard error; raise the result."""
    typer.echo(f"twolane: {printable(message)}", err=True)
    return typer.Exit(code)


def message_of(error: BaseException) -> str:
    """Return an error's message; of a file, its name and the system's reason."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def flag(field: str) -> str:
    """Return a field's name on the command line: its option, or an argument in capitals."""
    if field.isupper():
        return field
    return _flags().get(field) or _bench_flags().get(field, "--" + field.replace("_", "-"))


def options_of(context: Any) -> list[str]:
    """Return the options of a command as they are written, given the context of its parser."""
    words = (word for one in context.command.params for word in (*one.opts, *one.secondary_opts))
    return [word for word in words if word.startswith("-")]


def with_flags(text: str) -> str:
    """Return an error of the engine with its settings named as their flags are."""
    names = "|".join(field for field in _flags() if "_" in field)
    alone = rf"(?<![\w./'\"-])({names})(?![\w./'\"-])"
    return re.sub(alone, lambda match: flag(match[0]), text)


def _flags() -> dict[str, str]:
    """Flags of the engine's settings by the names of their fields; `slo_tbt` is `slo.tbt`."""
    return {one.field: one.flag for one in settings_of(EngineConfig)}


def _bench_flags() -> dict[str, str]:
    """Flags of the settings of benchmarks and simulations, by the names of their fields."""
    from twolane.bench.goodput import Search
    from twolane.bench.target import Target
    from twolane.results.result import BenchConfig
    from twolane.sim.config import SimulateConfig
    from twolane.workload.spec import WorkloadSpec

    structs = (Search, Target, BenchConfig, SimulateConfig, WorkloadSpec)
    return {one.field: one.flag for struct in structs for one in settings_of(struct)}


def wrong_setting(error: FieldError) -> typer.Exit:
    """Print an error of an option; raise the exit."""
    return fail(with_flags(f"{flag(error.field)} {error.problem}"), USAGE_ERROR)


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Convert errors that a user can fix to one line and an exit code."""
    from twolane.frontend.engine_client import EngineError
    from twolane.frontend.generation import GenerationFailed
    from twolane.model.load.hub import PullError

    try:
        yield
    except FieldError as error:
        raise wrong_setting(error) from error
    except (PullError, EngineError, GenerationFailed, ValueError, OSError, MemoryError) as error:
        raise fail(with_flags(message_of(error)) or type(error).__name__) from error
