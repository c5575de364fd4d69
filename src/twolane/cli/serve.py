"""`twolane serve`: a model over HTTP.

**Examples**

- `twolane serve smollm2-135m-instruct` — a small model, fetched on the first start

- `twolane serve ./my-model --system chunked --option token_budget=512 --port 9000`

- `twolane serve --config serve.yaml` — options from a file: `model: ./my-model`, `max-queue: 64`, …

- `twolane serve qwen3-8b --load-format dummy --max-model-len 4096` — random weights, no files

- `curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json'
  -d '{"messages": [{"role": "user", "content": "Hello"}]}'` — ask it
"""

import contextlib
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.main import get_command

from twolane.cli.complete import models
from twolane.cli.configfile import config_option
from twolane.cli.errors import USAGE_ERROR, fail, one_line_errors
from twolane.cli.helptext import Command
from twolane.cli.lazy import command_app
from twolane.cli.options import MODEL_HELP, takes, takes_engine_settings
from twolane.common.nearest import did_you_mean
from twolane.engine.config import EngineConfig
from twolane.server.options import ServerOptions

KEYS = "TWOLANE_API_KEY"
"""Environment variable with the API keys."""
NO_OPTIONS = frozenset(
    {
        *("TWOLANE_CACHE", "TWOLANE_COMMIT", "TWOLANE_TRACES"),
        *("TWOLANE_TEST_SERVE", "TWOLANE_TEST_SOAK_SECONDS"),
    }
)
"""Variables that other parts of this software read, including its benchmarks and tests."""

app = command_app()

ServedModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        autocompletion=models,
        envvar="TWOLANE_MODEL",
        help=MODEL_HELP,
        show_default=False,
    ),
]


@app.command(cls=Command)
@takes_engine_settings()
@takes(ServerOptions, "server", variables=True)
def serve(
    model: ServedModelArgument,
    config: EngineConfig,
    server: dict[str, Any],
    config_file: Annotated[Path | None, config_option(envvar="TWOLANE_CONFIG")] = None,
) -> None:
    """Serve a model over HTTP with OpenAI's API."""
    from twolane.server import run

    with one_line_errors():
        options = ServerOptions(**server)
        check_keys(options.api_keys)
        warn_of_unknown_variables()
        code = run.serve(config, options)
    leave(code)


def leave(code: int) -> NoReturn:
    """Exit the process after everything was closed.

    Taking the interpreter down in order would take seconds, and supervisors wait for the exit code
    to start the next server.
    """
    with contextlib.suppress(OSError):  # a full disk, which the start has told of
        sys.stdout.flush()
        logging.shutdown()
    os._exit(code)


def check_keys(keys: Sequence[str]) -> None:
    """Refuse to serve without keys where a key was meant to be set."""
    if not keys and KEYS in os.environ:
        raise fail(f"{KEYS} is empty; to serve without a key, do not set it", USAGE_ERROR)


def warn_of_unknown_variables() -> None:
    """Warn of TWOLANE_* variables that no option reads, such as mistyped ones."""
    known = NO_OPTIONS | {str(param.envvar) for param in get_command(app).params}
    for name in sorted(os.environ):
        if name.startswith("TWOLANE_") and name not in known:
            meant = did_you_mean(name, known)
            typer.echo(f"twolane: the variable {name} is not one of mine{meant}", err=True)
