"""`twolane run-batch`: a file of requests in OpenAI's batch format.

**Example:** `twolane run-batch smollm2-135m-instruct requests.jsonl answers.jsonl`
"""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from twolane.cli.errors import one_line_errors
from twolane.cli.helptext import Command
from twolane.cli.lazy import command_app
from twolane.cli.options import ModelArgument, takes, takes_engine_settings
from twolane.cli.signals import run_until_terminated
from twolane.common.log_lines import log_to
from twolane.engine.config import EngineConfig
from twolane.server.options import ServerOptions

OFFERED = (
    *("served_model_name", "any_model_name", "sampling_defaults", "unknown_fields"),
    *("tool_call_parser", "reasoning_parser", "reasoning_field", "log_level"),
    "disable_additional_properties",
)
"""Options of the server that concern requests and answers."""
MANY_OPEN = 1 << 16
"""Most requests that may be open at a time."""

app = command_app()


@app.command(cls=Command)
@takes_engine_settings("lora_endpoints")
@takes(ServerOptions, "server", only=OFFERED)
def run_batch(
    model: ModelArgument,
    source: Annotated[Path, typer.Argument(metavar="INPUT", help="File with one request a line.")],
    target: Annotated[Path, typer.Argument(metavar="OUTPUT", help="File to write the answers to.")],
    config: EngineConfig,
    server: dict[str, Any],
    concurrency: Annotated[
        int, typer.Option(min=1, max=MANY_OPEN, help="Largest number of requests open at a time.")
    ] = 256,
    restart: Annotated[
        bool,
        typer.Option("--restart", help="Answer all requests anew, also those answered in OUTPUT."),
    ] = False,
) -> None:
    """Answer a file of requests in OpenAI's batch format, without a server."""
    from twolane.server import batch

    with one_line_errors():
        # Priorities are between the lines of one file: nobody else waits.
        # Bound of the queue, in requests: a batch file waits in its own order.
        options = ServerOptions(**server, max_queue=1 << 30, allow_priority=True)
        log_to(sys.stderr.fileno(), options.log_level, "%(levelname)s %(message)s")
        answering = batch.run_batch(config, options, source, target, concurrency, restart=restart)
        done = run_until_terminated(answering)
    typer.echo(f"{done.completed} completed, {done.failed} failed: {target}", err=True)
