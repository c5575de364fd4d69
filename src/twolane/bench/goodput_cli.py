"""Who serves in `bench goodput`, a server or a simulation, and what the terminal shows."""

import asyncio
import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from twolane.bench import goodput
from twolane.bench.goodput import Hopeless, Run, Search, Trial
from twolane.bench.record import Record
from twolane.bench.result import BenchConfig, Result
from twolane.workload.spec import OptionError, WorkloadSpec

SERVER = "server"
"""What the one system of a running server is called."""
DEFAULT_SYSTEM = "static-split"


def target(simulate: str | None, model: str | None, tp: int, base_url: str) -> dict[str, object]:
    """Who serves, in words.

    Raises:
        OptionError: a simulation lacks its model.
    """
    if simulate is None:
        return {"base_url": base_url, "model": model}
    if model is None:
        raise OptionError("--model", "is needed to simulate")
    return {"simulate": simulate, "model": model, "tp": tp}


def find(search: Search, systems: Sequence[str], out: Path, api_key: str | None) -> None:
    """Search, tell every run as it ends, and print what was found."""
    console = Console()
    simulated = "simulate" in search.target
    run = simulation(search) if simulated else server(search, api_key)
    names = (systems or [DEFAULT_SYSTEM]) if simulated else [SERVER]

    def tell(trial: Trial) -> None:
        console.print(_line(trial), highlight=False)

    console.print(_table(search, goodput.find(search, names, run, out, tell)))


def server(search: Search, api_key: str | None) -> Run:
    """Runs against the server that listens at the target's address."""
    from twolane.bench import serve

    def run(system: str, workload: WorkloadSpec) -> tuple[Result, bool]:
        config = BenchConfig(
            base_url=str(search.target["base_url"]),
            model=search.target["model"],  # type: ignore[arg-type]
            api_key=api_key,
            workload=workload,
            goodput=search.slos,
        )
        hopeless = Hopeless(workload.build(), search.slos, search.attainment)

        async def main() -> Result:
            stop = asyncio.Event()

            def watch(record: Record) -> None:
                if not stop.is_set() and hopeless(record):
                    stop.set()

            return await serve.run(config, stop=stop, on_record=watch)

        result = asyncio.run(main())
        return result, result.interrupted

    return run


def simulation(search: Search) -> Run:
    """Runs on simulated GPUs; the systems know the SLOs."""
    from twolane.engine.config import EngineConfig
    from twolane.simulate import SimulateConfig, simulate
    from twolane.slo import Slo

    slo = Slo(**{name: bound for name, bound in search.slos.items() if name != "e2el"})
    where = msgspec.convert(search.target, _Simulated)

    def run(system: str, workload: WorkloadSpec) -> tuple[Result, bool]:
        name, settings = parse_system(system)
        asked = SimulateConfig(
            engine=EngineConfig(model=where.model, system=name, options=settings, slo=slo),
            gpu=where.simulate,
            tp=where.tp,
            bench=BenchConfig(workload=workload, goodput=search.slos),
        )
        requests = workload.build()
        hopeless = Hopeless(requests, search.slos, search.attainment)
        result = simulate(asked, requests, hopeless).result
        return result, result.interrupted

    return run


class _Simulated(msgspec.Struct):
    """The target of a simulation."""

    simulate: str
    model: str
    tp: int


def parse_system(text: str) -> tuple[str, dict[str, str]]:
    """`name:key=value,key=value` as a name and its settings.

    Raises:
        OptionError: a setting has no value.
    """
    name, _, rest = text.partition(":")
    settings = {}
    for one in filter(None, rest.split(",")):
        key, equals, value = one.partition("=")
        if not equals:
            raise OptionError("--system", f"{text!r}: write NAME:KEY=VALUE,…")
        settings[key.replace("-", "_")] = value
    return name, settings


def _line(trial: Trial) -> str:
    verdict = "holds" if trial.holds else "fails (ended early)" if trial.hopeless else "fails"
    kept = ", ".join(
        f"{name} {'-' if share is None else format(share, '.2%')}"
        for name, share in trial.shares.items()
    )
    return f"{trial.system}, seed {trial.seed}: {trial.rate:.3f} req/s {verdict} ({kept})"


def _table(search: Search, found: dict[str, list[float]]) -> Table:
    bounds = ", ".join(f"{name} {bound * 1e3:g} ms" for name, bound in search.slos.items())
    table = Table(title=f"Goodput at {search.attainment:.1%}: {bounds}", title_justify="left")
    for head in ("System", "Requests/s (median)", "Range"):
        table.add_column(head, justify="left" if head == "System" else "right")
    for system, rates in found.items():
        middle = statistics.median(rates)
        table.add_row(system, f"{middle:.2f}", f"{min(rates):.2f} to {max(rates):.2f}")
    return table
