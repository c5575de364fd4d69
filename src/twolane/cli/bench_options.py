"""Options that several commands share: the workload, and what is measured."""

import contextlib
import functools
import inspect
import json
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from twolane.workload.prompts import TokenRange

WHERE, WHAT, WHEN, MEASURE = "Server", "Requests", "Arrivals", "Measurement"
"""Panels of options in the help."""

WORKLOAD_OPTIONS: dict[str, tuple[Any, Any]] = {
    "dataset": (
        Annotated[
            str,
            typer.Option(
                help="random (fixed lengths); azure-code, azure-conv, sharegpt, sharegpt-1k, "
                "loogle, openthoughts, conversation, toolagent or arxiv-sum (drawn; see "
                "`twolane bench workloads`); or a trace file: Azure CSV, Mooncake JSONL, either "
                "gzipped.",
                rich_help_panel=WHAT,
            ),
        ],
        "random",
    ),
    "num_prompts": (
        Annotated[
            int | None,
            typer.Option(
                help="How many requests. (default: all of a trace, else 1000)",
                rich_help_panel=WHAT,
            ),
        ],
        None,
    ),
    "random_input_len": (
        Annotated[
            int | None,
            typer.Option(help="Prompt tokens of random. (default: 1024)", rich_help_panel=WHAT),
        ],
        None,
    ),
    "random_output_len": (
        Annotated[
            int | None,
            typer.Option(help="Output tokens of random. (default: 128)", rich_help_panel=WHAT),
        ],
        None,
    ),
    "scale_lengths": (
        Annotated[
            float | None,
            typer.Option(
                help="Factor on all lengths; shared prefixes scale along.", rich_help_panel=WHAT
            ),
        ],
        None,
    ),
    "max_input_len": (
        Annotated[
            int | None,
            typer.Option(help="Cut prompts to at most so many tokens.", rich_help_panel=WHAT),
        ],
        None,
    ),
    "max_output_len": (
        Annotated[
            int | None,
            typer.Option(help="Cut replies to at most so many tokens.", rich_help_panel=WHAT),
        ],
        None,
    ),
    "seed": (
        Annotated[
            int, typer.Option(help="Of lengths, arrivals and prompts.", rich_help_panel=WHAT)
        ],
        0,
    ),
    "request_rate": (
        Annotated[
            float | None,
            typer.Option(
                help="Requests a second; inf: all at once. (default: the trace's own times, else "
                "inf)",
                rich_help_panel=WHEN,
            ),
        ],
        None,
    ),
    "burstiness": (
        Annotated[
            float,
            typer.Option(
                help="Shape of the gaps between arrivals: 1 Poisson, less burstier, more smoother, "
                "inf evenly spaced.",
                rich_help_panel=WHEN,
            ),
        ],
        1.0,
    ),
    "trace_offset": (
        Annotated[
            float | None,
            typer.Option(help="Seconds of the trace to skip.", rich_help_panel=WHEN),
        ],
        None,
    ),
    "trace_duration": (
        Annotated[
            float | None,
            typer.Option(help="Seconds of the trace to replay.", rich_help_panel=WHEN),
        ],
        None,
    ),
    "scale_rate": (
        Annotated[
            float | None,
            typer.Option(
                help="Replay the trace's own times so many times as fast.", rich_help_panel=WHEN
            ),
        ],
        None,
    ),
}
"""How each field of `WorkloadSpec` is given on the command line, and its default."""

IgnoreEos = Annotated[
    bool,
    typer.Option(
        help="Ask for replies of exactly the length of the workload; without it, of at most.",
        rich_help_panel=WHAT,
    ),
]
VocabRange = Annotated[
    str,
    typer.Option(
        metavar="LOW:HIGH",
        help="Token ids to draw prompts from, HIGH excluded.",
        rich_help_panel=WHAT,
    ),
]
Goodput = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME:MS",
        help="SLOs in milliseconds: ttft, tbt (every gap), tpot, e2el. Several as "
        "--goodput ttft:500 tbt:50. ttft-per-1k is added to ttft for each 1,024 new prompt tokens.",
        rich_help_panel=MEASURE,
    ),
]
MoreSlos = Annotated[list[str] | None, typer.Argument(metavar="NAME:MS", hidden=True)]
"""What follows the first SLO on the command line."""
Percentiles = Annotated[
    str,
    typer.Option(
        "--metric-percentiles",
        "--percentiles",
        help="Percentiles to report, separated by commas.",
        rich_help_panel=MEASURE,
    ),
]


def takes_workload(
    *without: str,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's `workload` parameter by an option for each field but those named.

    The command then gets the fields as a dictionary.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        offered = {n: one for n, one in WORKLOAD_OPTIONS.items() if n not in without}
        signature = inspect.signature(command)
        parameters = [p for p in signature.parameters.values() if p.name != "workload"]
        parameters += [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
            )
            for name, (annotation, default) in offered.items()
        ]

        @functools.wraps(command)
        def run(**given: Any) -> None:
            workload = {name: given.pop(name) for name in offered}
            command(**given, workload=workload)

        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def need_httptools() -> None:
    """End with a hint if the client's library is missing."""
    try:
        import httptools  # noqa: F401
    except ModuleNotFoundError:
        typer.echo("twolane bench needs httptools: pip install 'twolane[bench]'", err=True)
        raise typer.Exit(1) from None


@contextlib.contextmanager
def workload_errors() -> Iterator[None]:
    """Turn what is wrong with a workload into wrong usage."""
    from twolane.workload.spec import OptionError
    from twolane.workload.traces import TraceError

    try:
        yield
    except (OptionError, TraceError) as error:
        raise typer.BadParameter(str(error)) from error


def pair(option: str, text: str, separator: str) -> tuple[str, str]:
    """The two halves of NAME=VALUE."""
    name, found, value = text.partition(separator)
    if not found or not name.strip():
        raise typer.BadParameter(f"{option}: {text!r} is not NAME{separator}VALUE")
    return name.strip(), value.strip()


def number(option: str, text: str) -> float:
    """A number."""
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{option}: {text!r} is not a number") from None


def finite(value: float | None) -> float | None:
    """Check an option as its callback: refuse what is infinite or no number."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"must be finite, not {value}")
    return value


def slos(texts: list[str] | None, more: list[str] | None) -> dict[str, float]:
    """`name:ms` texts, each possibly several separated by spaces or commas, as seconds."""
    given = [pair("--goodput", one, ":") for one in _words(texts, more)]
    pairs = [(name.replace("-", "_"), value) for name, value in given]
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise typer.BadParameter(f"--goodput: given twice: {', '.join(sorted(names))}")
    return {name: number("--goodput", value) / 1e3 for name, value in pairs}


def _words(texts: list[str] | None, more: list[str] | None) -> list[str]:
    if more and not texts:
        raise typer.BadParameter(f"unexpected: {' '.join(more)}")
    return " ".join([*(texts or []), *(more or [])]).replace(",", " ").split()


def slos_and_tbts(
    texts: list[str] | None, more: list[str] | None
) -> tuple[dict[str, float], tuple[float, ...]]:
    """As `slos`, where `tbt:9/12/21` lists several bounds: they are the second value."""
    words = _words(texts, more)
    several = [word for word in words if word.startswith("tbt:") and "/" in word]
    rest = slos([word for word in words if word not in several], None)
    if several and ("tbt" in rest or len(several) > 1):
        raise typer.BadParameter("--goodput: given twice: tbt")
    listed = several[0].removeprefix("tbt:").split("/") if several else []
    return rest, tuple(number("--goodput", one) / 1e3 for one in listed)


def percentiles(text: str) -> tuple[float, ...]:
    """Numbers with commas between them."""
    return tuple(number("--metric-percentiles", one) for one in text.split(","))


def token_range(text: str) -> "TokenRange":
    """LOW:HIGH."""
    from twolane.workload.prompts import TokenRange

    low, high = pair("--vocab-range", text, ":")
    if not (low.isdecimal() and high.isdecimal()):
        raise typer.BadParameter(f"--vocab-range: {text!r} is not LOW:HIGH")
    return TokenRange(int(low), int(high))


def json_object(text: str | None) -> dict[str, object]:
    """A JSON object, empty for no text."""
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise typer.BadParameter(f"--extra-body: {error}") from error
    if not isinstance(value, dict):
        raise typer.BadParameter("--extra-body: not a JSON object")
    return value


def need_folder(option: str, path: Any) -> None:
    """Refuse a file whose folder is not there, or that is a folder itself."""
    if path is not None and path.is_dir():
        raise typer.BadParameter(f"{option}: {path} is a folder")
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"{option}: no folder {path.absolute().parent}")
