"""`twolane pull`: a model into the cache.

**Example:** `twolane pull smollm2-135m-instruct`
"""

from typing import Annotated

import typer

from twolane.cli.complete import aliases
from twolane.cli.errors import one_line_errors
from twolane.cli.helptext import Command
from twolane.cli.lazy import command_app
from twolane.common.printable import printable

DEFAULT_MODEL = "smollm2-135m-instruct"

app = command_app()


@app.command(cls=Command)
def pull(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="An alias or a Hugging Face id: owner/name, or owner/name:QUANT.",
            autocompletion=aliases,
        ),
    ] = DEFAULT_MODEL,
) -> None:
    """Download a model into the cache, to serve it without a network."""
    from twolane.model.load import hub

    if model not in hub.ALIASES and "/" in model:
        typer.echo(f"Fetching {printable(model)} from the Hugging Face hub", err=True)
    with one_line_errors():
        typer.echo(hub.pull(model))
