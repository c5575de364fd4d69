"""Shared parts of comparisons on one GPU: a coarse search around a guess, with any kind of
server."""

import contextlib
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from twolane.bench import contenders, goodput
from twolane.bench.goodput import Search, Trial
from twolane.results.result import BenchConfig
from twolane.workload.spec import WorkloadSpec

WARMUPS = 24
"""Concurrent warm-up requests before a server's first run: its first memory is slow."""


class Bounds(msgspec.Struct, frozen=True):
    """Latency bounds in seconds."""

    tbts: tuple[float, ...]
    ttft: float = 1.0
    per_1k: float = 1.0
    """Seconds more for each 1,024 new tokens."""

    @property
    def slos(self) -> dict[str, float]:
        """Bounds but TBT, by their names in a search."""
        return {"ttft": self.ttft, **({"ttft_per_1k": self.per_1k} if self.per_1k else {})}


class Found(msgspec.Struct):
    """Result of a search for one system at one bound."""

    system: str
    tbt: float
    goodput: list[float]
    """Requests/s, one for each pattern of arrivals; 0 where no rate held. Empty if the search was
    interrupted: then `runs` say how far it came."""
    sustained: list[float | None] = []
    """Requests answered per second at each of these rates, between warm-up and last arrival."""
    server: str | None = None
    """Program, version and flags of the server."""
    client_p99_ms: float | None = None
    """P99 of the gaps that the client saw, in the run at the highest rate that held."""
    engine_itl_ms: dict[str, Any] | None = None
    """Gaps that the server counted itself in that run."""
    runs: list[dict[str, Any]] = []
    """Every run of the search, in order of its rate: seed, rate, whether it held, P99 in ms, and
    requests answered a second over the whole run, which tells a backlog."""

    @property
    def median(self) -> float:
        """Median goodput in requests/s; 0 of an interrupted search."""
        return statistics.median(self.goodput or [0.0])

    @property
    def interrupted(self) -> bool:
        return not self.goodput


def search(
    target: Mapping[str, object],
    workload: WorkloadSpec,
    bounds: Bounds,
    guess: float,
    seeds: int,
    tolerance: float,
) -> Search:
    """Return a search that begins at a guess: two runs a pattern if the guess is right."""
    several = len(bounds.tbts) > 1
    return Search(
        target=dict(target),
        workload=workload,
        slos=bounds.slos if several else {**bounds.slos, "tbt": bounds.tbts[0]},
        tbts=bounds.tbts if several else (),
        seeds=seeds,
        start_rate=guess,
        first_step=1 + tolerance,
        least_rate=guess / 8,
        tolerance=tolerance,
        brief=(workload.num_prompts or 0) < goodput.SLOW_REQUESTS,
    )


def searched(
    asked: Search, systems: Sequence[str], folder: Path, load: BenchConfig, *, keep: bool = False
) -> list[Found]:
    """Search each system, without repeating runs in the folder; print every run.

    With `keep`, Ctrl-C ends the search with the runs that it has; the caller asks
    `Found.interrupted` and stops.
    """

    def tell(trial: Trial, slos: dict[str, float]) -> None:
        verdict = "holds" if trial.holds else "fails"
        bound = slos.get("tbt", 0.0) * 1e3
        print(f"{trial.system} at {bound:g} ms: {trial.rate:.2f} req/s {verdict}", flush=True)

    with contextlib.ExitStack() as stack:
        run: goodput.Run
        if "simulate" in asked.target:
            run = contenders.simulation(asked)
        elif "base_url" in asked.target:
            run = contenders.server(asked, load)
        elif "command" in asked.target:
            run = stack.enter_context(contenders.CommandServers(asked, load, folder, False))
        else:
            run = stack.enter_context(contenders.OwnServers(asked, load, folder, False))
        reads = contenders.reads_slos
        try:
            rates = goodput.find(asked, systems, run, folder, tell, reads_slos=reads)
        except KeyboardInterrupt:
            if not keep:
                raise
            rates = [{system: [] for system in systems} for _ in asked.points(folder)]
    return [
        _found(system, point, values)
        for point, found in zip(asked.points(folder), rates, strict=True)
        for system, values in found.items()
    ]


def _found(system: str, point: goodput.BoundSearch, rates: list[float]) -> Found:
    """Return the search's answer, with the gaps of the run at the highest rate that held."""
    finished = goodput.sustained(point, {system: rates})[system]
    found = Found(system, point.search.slos["tbt"], rates, finished)
    held: list[tuple[float, dict[str, Any]]] = []
    runs: list[dict[str, Any]] = []
    for path in point.folder.glob(f"{goodput.file_name(system)}-seed*.json"):
        saved = msgspec.json.decode(path.read_bytes())
        found.server = saved.get("server", found.server)
        trial = saved["trial"]
        if trial["system"] != system:
            continue
        keys = ("p99_itl_ms", "p99_ttft_ms", "request_throughput", "energy")
        keys += ("tbt_gap_attainment", "shown_tbt_gap_attainment")  # raw, and as a client shows it
        shown = {key: saved.get(key) for key in keys}
        runs.append({**{key: trial[key] for key in ("seed", "rate", "holds")}, **shown})
        if trial["holds"]:
            held.append((trial["rate"], saved))
    found.runs = sorted(runs, key=lambda run: (run["seed"], run["rate"]))
    if held:
        _, best = max(held, key=lambda pair: pair[0])
        found.client_p99_ms = best.get("p99_itl_ms")
        found.engine_itl_ms = best.get("engine_itl_ms")
    return found
