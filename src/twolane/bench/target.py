"""The options of `bench goodput` that name what is measured: servers or a simulation."""

import shlex
from collections.abc import Iterator
from typing import Annotated

import msgspec

from twolane.common.errors import FieldError
from twolane.common.options import Option
from twolane.estimate.names import EstimatorName
from twolane.results.result import BASE_URL, WHERE

SERVER = "server"
"""Name of the only system of a running server, or of a server's command."""
OWN_FLAGS = (
    *("--system", "--option", "--port", "--trace", "--config"),
    *("--slo-ttft-ms", "--slo-ttft-per-1k-ms", "--slo-tbt-ms", "--slo-tpot-ms"),
)
"""Options of `twolane serve` that a search sets itself."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `twolane bench goodput` that name the server or the simulation."""

    simulate: Annotated[str | None, Option(WHERE, "GPU")] = None
    """GPU to simulate (a100-80gb, h20, h100, h200) instead of asking a server."""
    serve: Annotated[str | None, Option(WHERE, "ARGUMENTS")] = None
    """Model and options of `twolane serve`, such as "smollm2-135m-instruct --cores 2": a server is
    started for each system in turn."""
    serve_command: Annotated[str | None, Option(WHERE, "COMMAND")] = None
    """Command that starts any server with OpenAI's API, such as "vllm serve Qwen/Qwen3-8B"; a free
    port is passed as --port, or replaces {port} in the command."""
    sweep: Annotated[tuple[str, ...], Option(WHERE, "FLAG=VALUES")] = ()
    """Flag of the command and the values to try, such as max-num-batched-tokens=128,256; may be
    repeated. The summary names the values with the highest goodput."""
    model: Annotated[str | None, Option(WHERE)] = None
    """Model to simulate, or to name in requests; by default the server's first."""
    systems: Annotated[tuple[str, ...], Option(WHERE, "NAME[:KEY=VALUE,…]", name="system")] = ()
    """System to serve or simulate, with its settings; may be repeated, and each is searched in
    turn. By default the default system of `serve` or `simulate`."""
    tp: Annotated[int, Option(WHERE, name="tensor_parallel_size", alias="tp")] = 1
    """Number of simulated GPUs that share each layer."""
    estimator: Annotated[EstimatorName | None, Option(WHERE)] = None
    """Estimator of simulated systems; by default the one that each was published with."""
    base_url: Annotated[str, Option(WHERE)] = BASE_URL
    """Address at which the server listens."""

    def words(self) -> dict[str, object]:
        """Return the target's settings that a search's result depends on, as saved with the runs.

        Raises:
            FieldError: a simulation lacks its model, or options contradict each other.
        """
        ways = (self.simulate, self.serve, self.serve_command)
        named = sum(one is not None for one in ways)
        if named > 1:
            raise FieldError("serve", "and --serve-command and --simulate exclude each other")
        if named and self.base_url != BASE_URL:
            raise FieldError("base_url", "excludes --serve, --serve-command and --simulate")
        if self.serve_command is None and self.sweep:
            raise FieldError("sweep", "needs --serve-command")
        if self.simulate is not None:
            return self._simulation()
        if self.tp != 1:
            raise FieldError("tp", "needs --simulate")
        if self.estimator is not None:
            raise FieldError("estimator", "needs --simulate")
        if self.serve is not None:
            return self._own_servers(self.serve)
        if self.serve_command is not None:
            return self._command(self.serve_command)
        if self.systems:
            raise FieldError("system", "needs --serve or --simulate: a server has its own")
        return {"base_url": self.base_url, "model": self.model}

    def _simulation(self) -> dict[str, object]:
        if self.model is None:
            raise FieldError("model", "is needed to simulate")
        named = {} if self.estimator is None else {"estimator": self.estimator}
        return {"simulate": self.simulate, "model": self.model, "tp": self.tp, **named}

    @property
    def contenders(self) -> tuple[str, ...]:
        """Return the systems to search, or the command's variants of the sweep."""
        if self.serve_command is None:
            return self.systems
        swept = [f"{flag}={values.replace(',', '/')}" for flag, values in self._swept()]
        return (":".join(filter(None, (SERVER, ",".join(swept)))),)

    def _swept(self) -> Iterator[tuple[str, str]]:
        for text in self.sweep:
            flag, equals, values = text.partition("=")
            flag = flag.removeprefix("--")
            if not equals or not flag or not all(values.split(",")) or "/" in values:
                raise FieldError("sweep", f"is FLAG=VALUE,VALUE without slashes, not {text!r}")
            yield flag, values

    def _command(self, command: str) -> dict[str, object]:
        if self.systems:
            raise FieldError("system", "needs --serve or --simulate: a command has its own")
        if not shlex.split(command):
            raise FieldError("serve_command", "is empty")
        return {"command": command, "sweep": [*self._swept()], "model": self.model}

    def _own_servers(self, serve: str) -> dict[str, object]:
        if self.model is not None:
            raise FieldError("model", "is the first word of --serve")
        for word in shlex.split(serve):
            if (flag := word.partition("=")[0]) in OWN_FLAGS:
                raise FieldError("serve", f"may not have {flag}, which the search sets")
        return {"serve": serve}
