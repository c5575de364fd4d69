"""`twolane`: its commands, and parsers' errors in one plain line."""

import logging
import os
import sys
from typing import Annotated, Any, ClassVar

import typer

import twolane
from twolane.cli.errors import INTERRUPTED, fail, message_of, options_of
from twolane.cli.lazy import LazyCommands
from twolane.cli.other_servers import SERVERS, instead_of
from twolane.common.log_lines import LineHandler
from twolane.common.nearest import did_you_mean
from twolane.common.resources import open_standard_files

PLAIN = (
    (". Did you mean", "; did you mean"),
    ("Invalid value: ", ""),
    ("Value error, ", ""),
    ("Input should be less than or equal to", "must be at most"),
    ("Input should be greater than or equal to", "must be at least"),
    ("Input should be a valid integer, unable to parse string as an integer", "must be an integer"),
    ("Input should be a valid number, unable to parse string as a number", "must be a number"),
    ("Input should be", "must be"),
)
"""Phrases of the parser's error messages, each with a plain replacement."""

OTHERS = f"docs/guides/from-{{{','.join(SERVERS)}}}.md say what options of other servers are here"
"""Explanation for an unknown option that the guides do not name."""
LINKED = "Kubernetes sets it for a service named twolane: set enableServiceLinks: false"
"""Explanation for a `TWOLANE_…` variable whose value is the address of a service."""


class Commands(LazyCommands):
    """The commands of `twolane`."""

    package = "twolane.cli"
    modules: ClassVar[dict[str, str]] = {"bench": "bench.main", "run-batch": "run_batch"}
    lines: ClassVar[dict[str, str]] = {
        "serve": "Serve a model over HTTP with OpenAI's API.",
        "fleet": "Serve a model with several servers behind one address.",
        "generate": "Answer one prompt in the terminal, without a server.",
        "run-batch": "Answer a file of requests in OpenAI's batch format, without a server.",
        "pull": "Download a model into the cache, to serve it without a network.",
        "simulate": "Serve a workload with the real engine on simulated GPUs, on a virtual clock.",
        "doctor": "Show what this machine can do, or what a model's files say.",
        "profile": "Measure how long launches of a model take here, for predictions.",
        "bench": "Measure LLM servers, and compare what they reach.",
    }


app = typer.Typer(
    name="twolane",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Serve language models with prefill and decode side by side on one device.\n\n"
    "Start here: `twolane generate smollm2-135m-instruct 'What is the capital of France?'`, "
    "then `twolane serve smollm2-135m-instruct`.",
)


def show_version(wanted: bool) -> None:
    """Print the version and end."""
    if wanted:
        typer.echo(f"twolane {twolane.__version__}")
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool,
        typer.Option("--version", callback=show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Handle the options that belong to no command."""


def main() -> None:
    """Run the command line; a user's error is one line and exit code 2."""
    open_standard_files()
    logging.lastResort = LineHandler(2, logging.WARNING)  # if no log is set up
    try:
        code = app(prog_name="twolane", standalone_mode=False)
    except typer.Abort:
        code = INTERRUPTED
    except OSError as error:  # a file or an address that cannot be had, wherever it was asked for
        fail(message_of(error))
        code = 1
    except Exception as error:
        if not hasattr(error, "format_message"):  # the parser's own errors have it
            raise
        code = explain(error)
    sys.exit(code)


def explain(error: Any) -> int:
    """Print a parser's error in one line with the source of the value; return its exit code."""
    context = getattr(error, "ctx", None)
    message = wrong_value(error) or plain(error.format_message())
    if hasattr(error, "option_name"):  # there is no such option
        name = _as_written(error.option_name)
        here = instead_of(name) or instead_of(error.option_name)
        known = {*options_of(context), *(error.possibilities or ())}
        meant = f"; {here}" if here else did_you_mean(name, known) or f"; {OTHERS}"
        message = f"No such option: {name}{meant}"
    if message and context is not None:
        message += f" (see {context.command_path} --help)"
    if message:
        fail(message)
    return int(error.exit_code)


def _as_written(option: str) -> str:
    """Return an unknown option as it stands on the command line: of `-np` the parser names `-n`."""
    if option.startswith("--"):
        return option
    return next(
        (word.partition("=")[0] for word in sys.argv[1:] if word.startswith(option)), option
    )


def plain(text: str) -> str:
    """Return a parser's message in one line and in plain words."""
    line = " ".join(text.split())
    for jargon, words in PLAIN:
        line = line.replace(jargon, words)
    return line.rstrip(".")


def wrong_value(error: Any) -> str | None:
    """Return the error of an option's value with its source; None: the error is not about a
    value."""
    context, param = getattr(error, "ctx", None), getattr(error, "param", None)
    problem = plain(getattr(error, "message", ""))
    if context is None or param is None or not problem:
        return None
    source = context.get_parameter_source(param.name)
    variable = {"ENVIRONMENT": str(param.envvar)}.get(source.name if source else "")
    message = f"{variable or (param.opts or [param.name])[0]} {problem}"
    if variable and os.environ.get(variable, "").startswith("tcp://"):
        message += f", and {LINKED}"
    in_file = source is not None and source.name == "DEFAULT_MAP"
    return f"{context.params['config_file']}: {message}" if in_file else message
