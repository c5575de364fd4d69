"""Options and checks that `twolane simulate` and the commands of `twolane bench` share."""

import contextlib
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from twolane.cli.errors import fail, wrong_setting
from twolane.cli.options import number
from twolane.common.errors import FieldError
from twolane.common.options import settings_of
from twolane.results.result import MEASURE
from twolane.workload.spec import WorkloadSpec

WORKLOAD = frozenset(one.name for one in settings_of(WorkloadSpec))
"""Names of the options of a workload."""

Goodput = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME:MS",
        help="SLOs in milliseconds: ttft, tbt (every gap), tpot, e2el, such as "
        "--goodput ttft:500 tbt:50. ttft-per-1k is added to ttft for each 1,024 new prompt tokens.",
        rich_help_panel=MEASURE,
    ),
]
MoreSlos = Annotated[list[str] | None, typer.Argument(metavar="NAME:MS", hidden=True)]
"""SLOs after the first one on the command line."""


def need_httptools() -> None:
    """End with a hint if the client's library is missing."""
    try:
        import httptools  # noqa: F401
    except ModuleNotFoundError:
        raise fail("bench needs httptools: pip install 'twolane[bench]'") from None


@contextlib.contextmanager
def workload_errors() -> Iterator[None]:
    """Convert errors of a workload to usage errors."""
    from twolane.workload.traces import TraceError

    try:
        yield
    except FieldError as error:
        raise wrong_setting(error) from error
    except TraceError as error:
        raise typer.BadParameter(str(error)) from error


@contextlib.contextmanager
def errors_as_lines() -> Iterator[None]:
    """Print errors that a user can fix in one line; exit with 2 for wrong usage, 1 for a failed
    run."""
    from twolane.bench.preflight import BenchError

    try:
        with workload_errors():
            yield
    except (BenchError, MemoryError) as error:
        raise fail(str(error)) from error


def _pair(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise typer.BadParameter(f"--goodput: {text!r} is not NAME:MS")
    return name.strip(), value.strip()


def _milliseconds(text: str) -> float:
    try:
        return number(text)
    except ValueError as error:
        raise typer.BadParameter(f"--goodput: {error}") from None


def slos(texts: list[str] | None, more: list[str] | None) -> dict[str, float]:
    """Parse `name:ms` texts, each possibly several separated by spaces or commas; return
    seconds."""
    given = [_pair(one) for one in _words(texts, more)]
    pairs = [(name.replace("-", "_"), value) for name, value in given]
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise typer.BadParameter(f"--goodput: given twice: {', '.join(sorted(names))}")
    return {name: _milliseconds(value) / 1e3 for name, value in pairs}


def _words(texts: list[str] | None, more: list[str] | None) -> list[str]:
    return " ".join([*(texts or []), *(more or [])]).replace(",", " ").split()


def slos_and_tbts(
    texts: list[str] | None, more: list[str] | None
) -> tuple[dict[str, float], tuple[float, ...]]:
    """Parse SLOs like `slos`, where `tbt:9/12/21` lists several bounds, which are the second
    value."""
    words = _words(texts, more)
    several = [word for word in words if word.startswith("tbt:") and "/" in word]
    rest = slos([word for word in words if word not in several], None)
    if several and ("tbt" in rest or len(several) > 1):
        raise typer.BadParameter("--goodput: given twice: tbt")
    listed = several[0].removeprefix("tbt:").split("/") if several else []
    return rest, tuple(_milliseconds(one) / 1e3 for one in listed)


def need_folder(option: str, path: Any) -> None:
    """Refuse an output file that is a folder, or whose folder does not exist."""
    if path is None:
        return
    try:
        if path.is_dir():
            raise typer.BadParameter(f"{option}: {path} is a folder")
    except OSError as error:
        raise typer.BadParameter(f"{option}: {error}") from error
    if not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"{option}: no folder {path.absolute().parent}")
