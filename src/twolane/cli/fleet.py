"""`twolane fleet`: several servers behind one address.

Every other option is one of `twolane serve`, for each server. Ctrl-C ends the fleet
when open answers have ended; SIGHUP restarts its servers one after the other.

**Examples**

- `twolane fleet smollm2-135m-instruct --replicas 2` — Ray on this machine, two servers on its CPU

- `twolane fleet qwen3-8b --max-replicas 4 --replica-gpus 1 --ray-address auto --slo-ttft-ms 1000`
  — on a Ray cluster, with as many servers as the load needs
"""

from typing import Any

import typer
from typer.main import get_command

from twolane.cli import serve as single
from twolane.cli.errors import USAGE_ERROR, fail, one_line_errors, options_of
from twolane.cli.helptext import Command
from twolane.cli.lazy import command_app
from twolane.cli.options import takes
from twolane.cli.serve import ServedModelArgument
from twolane.fleet.options import FleetOptions
from twolane.server.options import ServerOptions

AT_THE_ADDRESS = (
    *("max_body_bytes", "max_connections", "arrival_seconds", "stall_seconds"),
    *("refuse_late", "operator_key"),
)
"""Options of `twolane serve` that apply at the fleet's address, besides its keys and origins."""

app = command_app()


class FleetCommand(Command):
    """The fleet command, whose completion includes the options of each server."""

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Return its own options, and those of `twolane serve` that it does not have itself."""
        own = super().shell_complete(ctx, incomplete)
        server = get_command(single.app)
        with server.make_context("serve", [], resilient_parsing=True) as context:
            passed = server.shell_complete(context, incomplete)
        known = {item.value for item in own}
        return own + [item for item in passed if item.value not in known]


@app.command(
    cls=FleetCommand, context_settings={"ignore_unknown_options": True, "allow_extra_args": True}
)
@takes(FleetOptions, "options")
def fleet(ctx: typer.Context, model: ServedModelArgument, options: dict[str, Any]) -> None:
    """Serve a model with several servers behind one address."""
    arguments = [model, *ctx.args]
    server = checked(arguments, ctx)
    single.check_keys(server["api_key"] or ())
    if server["trace"] is not None:
        problem = "--trace is for one server: all of a fleet would write the same file"
        raise fail(problem, USAGE_ERROR)
    with one_line_errors():
        try:
            from twolane.fleet import run
        except ImportError as error:
            raise fail(f"fleet needs an extra: pip install 'twolane[ray]' ({error})") from error
        shared = ServerOptions(
            api_keys=tuple(server["api_key"] or ()),
            cors_origins=tuple(server["cors_origins"] or ()),
            **{name: server[name] for name in AT_THE_ADDRESS},
            allowed_hosts=tuple(server["allowed_hosts"] or ()),
            trusted_proxies=tuple(server["trusted_proxies"] or ()),
        )
        code = run.serve_fleet(arguments, FleetOptions(**options), shared)
    single.leave(code)


def checked(arguments: list[str], fleet: typer.Context) -> dict[str, Any]:
    """Parse and check these words as `twolane serve` would.

    Args:
        arguments: the words that the fleet passes on.
        fleet: the context of the fleet, one of whose options an unknown one may have meant.
    """
    try:
        with get_command(single.app).make_context("twolane serve", list(arguments)) as context:
            return dict(context.params)
    except Exception as error:
        unknown: Any = error
        if hasattr(unknown, "possibilities"):  # there is no such option
            unknown.possibilities, unknown.ctx = options_of(unknown.ctx), fleet
        raise
