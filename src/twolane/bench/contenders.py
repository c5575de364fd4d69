"""Runs a search for goodput on servers or in simulation, and shows it in the terminal."""

import asyncio
import contextlib
import shlex
import statistics
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from twolane.bench import goodput, serve
from twolane.bench.goodput import EarlyStop, Run, Search, Trial
from twolane.bench.preflight import BenchError
from twolane.bench.server import Server, serving, serving_by
from twolane.bench.target import SERVER
from twolane.common.errors import FieldError
from twolane.common.printable import printable
from twolane.engine.config import TRANSPORT_SECONDS
from twolane.results.metrics import TTFT_PER_1K, bounds_words
from twolane.results.record import CONNECT, DISCONNECT, INTERRUPTED, Record
from twolane.results.result import BenchConfig, Result
from twolane.results.summary import first_errors
from twolane.slo import Slo
from twolane.workload.prompts import TokenRange
from twolane.workload.spec import WorkloadSpec
from twolane.workload.traces import TraceRequest


def find(
    search: Search,
    systems: Sequence[str],
    out: Path,
    load: BenchConfig,
    *,
    guesses: Sequence[float] = (),
    traces: bool = False,
) -> None:
    """Search, print every run as it ends, and then the results.

    Args:
        search: definition of the search.
        systems: Systems to search one after the other.
        out: folder of the runs.
        load: settings of the client; address, workload and SLOs are the search's.
        guesses: see `goodput.find`.
        traces: Whether servers that are started write a trace into the folder.
    """
    from twolane.systems.registry import default_system

    console = Console()

    def tell(trial: Trial, slos: dict[str, float]) -> None:
        typer.echo(printable(_line(trial, slos)))

    with contextlib.ExitStack() as stack:
        run: Run
        if "simulate" in search.target:
            names = list(systems) or [default_system("simulated")]
            run = simulation(search, load.vocab_range)
        elif "serve" in search.target:
            run = own = stack.enter_context(OwnServers(search, load, out, traces))
            names = list(systems) or [own.default_system()]
        elif "command" in search.target:
            run = stack.enter_context(CommandServers(search, load, out, traces))
            names = list(systems)
        else:
            names, run = [SERVER], server(search, load)
        found = goodput.find(search, names, run, out, tell, reads_slos, guesses)
        for point, rates in zip(search.points(out), found, strict=True):
            finished = goodput.sustained(point, rates)
            console.print(_table(point.search, rates, goodput.tuned(names, rates), finished))


def reads_slos(system: str) -> bool:
    """Return whether a system uses its SLOs; a running server is told none."""
    from twolane.systems.registry import system_class

    name = parse_system(system)[0]
    return name != SERVER and system_class(name).reads_slos


def server(search: Search, load: BenchConfig) -> Run:
    """Return a `Run` against the server at the target's address."""
    url, model = search.target["base_url"], search.target["model"]
    load = msgspec.structs.replace(load, base_url=url, model=model)
    return lambda system, workload, points: measure(search, load, workload, points)


class OwnServers:
    """Runs against servers that are started for the search, one system after the other.

    A system's server is started when the first run that is missing needs it, warmed up once, and
    stopped when the next system's turn comes, or that of other SLOs that the system reads, or the
    block ends.

    Args:
        search: The search whose runs these are.
        load: settings of the client; address, workload and SLOs are the search's.
        out: folder of the runs and of the servers' logs.
        traces: Whether the servers write traces into the folder.
    """

    def __init__(self, search: Search, load: BenchConfig, out: Path, traces: bool) -> None:
        self._search, self._load, self._out, self._traces = search, load, out, traces
        self._serves: tuple[str, list[str]] | None = None
        self._warm = False
        self._running = contextlib.ExitStack()

    def __enter__(self) -> "OwnServers":
        return self

    def __exit__(self, *failure: object) -> None:
        self._running.close()

    def default_system(self) -> str:
        """Start a server to find the default system of `twolane serve`.

        Raises:
            BenchError: the server does not start.
        """
        self._out.mkdir(parents=True, exist_ok=True)
        self._start(None, slo_flags(self._search.points(self._out)[0].search.slos))
        return self._server.system

    def __call__(
        self, system: str, workload: WorkloadSpec, points: Sequence[dict[str, float]]
    ) -> tuple[Result, bool]:
        """See `goodput.Run`.

        Raises:
            BenchError: the server does not start, or ended in the middle.
        """
        flags = slo_flags(points[0] if reads_slos(system) else self._search.slos)
        if (system, flags) != self._serves:
            self._start(system, flags)
        warmups = 0 if self._warm else self._load.num_warmups
        self._warm = True
        url = self._server.url
        named = self._search.target.get("model")
        load = msgspec.structs.replace(
            self._load, base_url=url, num_warmups=warmups, model=named or self._load.model
        )
        try:
            result, stopped = measure(self._search, load, workload, points)
        finally:
            self._server.check()
        return msgspec.structs.replace(result, server=self._server.announcement), stopped

    def _start(self, system: str | None, flags: list[str]) -> None:
        """Start a server of this system, or of the default one."""
        self._running.close()
        self._serves, self._warm = None, False
        name = "default" if system is None else goodput.file_name(system)
        if self._search.tbts and (system is None or reads_slos(system)):
            name += flags[-1].removeprefix("--slo")
        log = self._out / f"{name}.log"
        typer.echo(f"{system or 'default system'}: starting a server, log in {log}")
        self._server = self._running.enter_context(self._open(system, flags, log))
        typer.echo(printable(self._server.announcement))
        self._serves = system or self._server.system, flags

    def _open(
        self, system: str | None, flags: list[str], log: Path
    ) -> contextlib.AbstractContextManager[Server]:
        """Return a context manager that runs the server."""
        # Systems are measured as they are published; the user's --refuse-late comes later.
        arguments = ["--no-refuse-late", *shlex.split(str(self._search.target["serve"])), *flags]
        arguments += [] if system is None else system_flags(system)
        if playout := self._search.playout:  # never two buffers
            arguments += ["--tbt-buffer-at", "client", f"--tbt-buffer-ms={playout * 1e3:g}"]
        if self._traces:
            arguments += ["--trace", str(log.with_suffix(".trace.json"))]
        return serving(arguments, log)


class CommandServers(OwnServers):
    """Runs against servers of any kind, started by a command with the flags of a sweep."""

    def _open(
        self, system: str | None, flags: list[str], log: Path
    ) -> contextlib.AbstractContextManager[Server]:
        _, settings = parse_system(system or SERVER)
        swept = [(f"--{name.replace('_', '-')}", value) for name, value in settings.items()]
        command = shlex.split(str(self._search.target["command"]))
        return serving_by([*command, *(word for pair in swept for word in pair)], log)


def system_flags(system: str) -> list[str]:
    """Return `name:key=value,…` as flags of `twolane serve`."""
    name, settings = parse_system(system)
    options = [("--option", f"{key}={value}") for key, value in settings.items()]
    return ["--system", name, *(word for option in options for word in option)]


def slo_flags(slos: dict[str, float]) -> list[str]:
    """Return bounds as flags of `twolane serve`, which has none for E2E; TBT comes last."""
    names = sorted(slos.keys() - {"e2el"}, key=lambda name: name == "tbt")
    return [f"--slo-{name.replace('_', '-')}-ms={slos[name] * 1e3:g}" for name in names]


def measure(
    search: Search, load: BenchConfig, workload: WorkloadSpec, points: Sequence[dict[str, float]]
) -> tuple[Result, bool]:
    """Do one run over HTTP, which ends when no set of SLOs can be attained any more.

    Each rate has prompts of its own, the same for all systems: a server that has seen those of
    the last run would find them in its prefix cache.

    Raises:
        BenchError: the server cannot be reached.
    """
    config = msgspec.structs.replace(
        load,
        workload=workload,
        goodput=points[0],
        percentiles=search.percentiles,
        playout=search.playout,
        engine_gaps=True,
        prompt_seed=zlib.crc32(f"{workload.seed} {workload.request_rate}".encode()),
    )
    watch = early_stop(search, workload.build(), points)

    async def main() -> Result:
        stop = asyncio.Event()

        def ended(record: Record) -> None:
            if not stop.is_set() and watch(record):
                stop.set()

        def begun(index: int, ttft: float) -> None:
            if watch.begun(index, ttft):
                stop.set()

        return await serve.run(config, stop=stop, on_record=ended, on_first=begun)

    result = asyncio.run(main())
    outcomes = {one.outcome for one in result.records}
    if CONNECT in outcomes or {DISCONNECT} <= outcomes <= {DISCONNECT, INTERRUPTED}:
        problem = "; ".join(error for _, error in first_errors(result))
        raise BenchError(f"the server at {config.base_url} is gone: {problem}")
    return result, result.interrupted


def simulation(search: Search, vocab_range: TokenRange = TokenRange()) -> Run:  # noqa: B008
    """Return a `Run` on simulated GPUs, whose systems know the SLOs."""
    from twolane.sim.config import SimulateConfig
    from twolane.sim.run import simulate

    own = {"simulate", *SimulateConfig.__struct_fields__}
    of_engine = {name: value for name, value in search.target.items() if name not in own}
    target = {**search.target, "gpu": search.target["simulate"], "engine": of_engine, "bench": {}}
    where = msgspec.convert(target, SimulateConfig)
    delivery: dict[str, Any] = {"transport": TRANSPORT_SECONDS}  # as a server plans
    if search.playout:  # never two buffers
        delivery |= {"tbt_buffer": search.playout, "tbt_buffer_at": "client"}

    def run(
        system: str, workload: WorkloadSpec, points: Sequence[dict[str, float]]
    ) -> tuple[Result, bool]:
        name, settings = parse_system(system)
        engine = msgspec.structs.replace(
            where.engine, system=name, options=settings, slo=slo_of(points[0]), **delivery
        )
        bench = BenchConfig(
            workload=workload,
            goodput=points[0],
            percentiles=search.percentiles,
            playout=search.playout,
            vocab_range=vocab_range,
        )
        config = msgspec.structs.replace(where, engine=engine, bench=bench)
        requests = workload.build()
        watch = early_stop(search, requests, points)
        result = simulate(config, requests, watch, watch.tokens).result
        return result, result.interrupted

    return run


def early_stop(
    search: Search, requests: Sequence[TraceRequest], points: Sequence[dict[str, float]]
) -> EarlyStop:
    """Return what ends a run of a search when no set of SLOs can be attained any more."""
    playout = search.playout if search.judge == "shown" else 0.0
    return EarlyStop(requests, points, search.attainment, playout)


def slo_of(slos: dict[str, float]) -> Slo:
    """Return bounds as the systems' SLOs."""
    per_token = slos.get(TTFT_PER_1K, 0.0) / 1024
    bounds = {name: slos.get(name) for name in ("ttft", "tbt", "tpot")}
    return Slo(**bounds, ttft_per_token=per_token)


def parse_system(text: str) -> tuple[str, dict[str, str]]:
    """Return `name:key=value,key=value` as a name and settings.

    Raises:
        FieldError: a setting has no value, or two.
    """
    name, _, rest = text.partition(":")
    settings = {}
    for one in filter(None, rest.split(",")):
        key, equals, value = one.partition("=")
        if not equals:
            raise FieldError("system", f"{text!r} is not NAME:KEY=VALUE,…")
        key = key.replace("-", "_")
        if key in settings:
            raise FieldError("system", f"{text!r} has {key} twice")
        settings[key] = value
    return name, settings


def _line(trial: Trial, slos: dict[str, float]) -> str:
    verdict = "holds" if trial.holds else "fails (ended early)" if trial.stopped else "fails"
    if trial.alone and not trial.holds:
        verdict += " although each request was alone, so lower rates are not tried"
    if trial.lasting is False and not trial.stopped:
        verdict += f" (only {trial.sustained or 0.0:.3f} req/s finished)"
    kept = ", ".join(
        f"{name} {'-' if share is None else format(share, '.2%')}"
        for name, share in trial.shares.items()
    )
    tbt = f", tbt {slos['tbt'] * 1e3:g} ms" if "tbt" in slos else ""
    return f"{trial.system}{tbt}, seed {trial.seed}: {trial.rate:.3f} req/s {verdict} ({kept})"


def _table(
    search: Search,
    found: dict[str, list[float]],
    best: dict[str, str],
    finished: Mapping[str, Sequence[float | None]],
) -> Table:
    title = f"Goodput at {search.attainment:.1%}: {bounds_words(search.slos)}"
    if search.playout:
        title += f"; {search.judge}, with a playout buffer of {search.playout * 1e3:g} ms"
    if search.brief:
        title += "; brief runs, so a first look"
    table = Table(title=title, title_justify="left")
    for head in ("System", "Requests/s (median)", "Range", "Finished/s"):
        table.add_column(head, justify="left" if head == "System" else "right")
    for system, rates in found.items():
        middle = statistics.median(rates)
        name = f"{system} (best)" if system in best.values() else system
        ended = [rate for rate in finished[system] if rate is not None]
        sustained = f"{statistics.median(ended):.2f}" if ended else "-"
        table.add_row(name, f"{middle:.2f}", f"{min(rates):.2f} to {max(rates):.2f}", sustained)
    return table
