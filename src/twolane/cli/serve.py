"""`twolane serve`: a model over HTTP."""

import contextlib
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.main import get_command

from twolane.cli.complete import models
from twolane.cli.configfile import config_option
from twolane.cli.errors import USAGE_ERROR, fail, one_line_errors
from twolane.cli.helptext import Command
from twolane.cli.lazy import command_app
from twolane.cli.options import MODEL_HELP, takes, takes_engine_settings
from twolane.engine.config import EngineConfig
from twolane.server.options import ServerOptions, is_http_url

EPILOG = """**Examples**

- `twolane serve smollm2-135m-instruct` — a small model, fetched on the first start

- `twolane serve ./my-model --system chunked --option token_budget=512 --port 9000`

- `twolane serve --config serve.yaml` — options from a file: `model: ./my-model`, `max-queue: 64`, …

- `twolane serve qwen3-8b --load-format dummy --max-model-len 4096` — random weights, no files

- `curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json'
  -d '{"messages": [{"role": "user", "content": "Hello"}]}'` — ask it
"""

KEYS = "TWOLANE_API_KEY"
"""The environment variable that has API keys."""

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


@app.command(cls=Command, epilog=EPILOG)
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

    options = ServerOptions(**server)
    check(options)
    warn_of_unknown_variables()
    with one_line_errors():
        code = run.serve(config, options)
    # Everything is closed. Taking the interpreter down in order would take seconds: supervisors
    # wait for the exit code to start the next server.
    with contextlib.suppress(OSError):  # a full disk, which the start has told of
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def check(options: ServerOptions) -> None:
    """Refuse what can be seen to be wrong before a model is loaded."""
    if not options.host.strip():
        raise fail("--host must not be empty", USAGE_ERROR)
    check_keys(options.api_keys)
    if options.max_queued_per_key is not None and not options.api_keys:
        raise fail("--max-queued-per-key needs --api-key", USAGE_ERROR)
    endpoint = options.otlp_endpoint
    if endpoint is not None and not is_http_url(endpoint):
        problem = f"must be an http:// or https:// URL, not {endpoint!r}"
        raise fail(f"--otlp-endpoint {problem}", USAGE_ERROR)
    if not (options.served_model_name or "x").isprintable():
        problem = f"must be one line of printable characters, not {options.served_model_name!r}"
        raise fail(f"--served-model-name {problem}", USAGE_ERROR)


def check_keys(keys: Sequence[str]) -> None:
    """Refuse to serve everybody where a key was meant to be given, and none was."""
    if not keys and KEYS in os.environ:
        raise fail(f"{KEYS} is empty; to serve without a key, do not set it", USAGE_ERROR)


def warn_of_unknown_variables() -> None:
    """Say which TWOLANE_* variables no option reads: mistyped ones should not go unseen."""
    known = [param.envvar for param in get_command(app).params if param.envvar]
    known.append("TWOLANE_CACHE")
    for name in sorted(os.environ):
        if name.startswith("TWOLANE_") and name not in known:
            near = get_close_matches(name, map(str, known), 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            typer.echo(f"twolane: the variable {name} is not one of mine{hint}", err=True)
