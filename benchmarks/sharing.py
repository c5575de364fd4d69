"""What sharing a device costs: `python benchmarks/sharing.py --simulate h200 | --card h100`.

- *Utilisation*: the SMs that launches held, in SM-seconds, over all of them while the server ran.
- *Bubbles* (MuxWise, section 4.4.2): the fraction of a lane's time in which none of its launches
  runs, mean of the lanes that a system uses; and of those, with the whole device idle while a
  request decodes or waits.
- *Cost of slicing* (MuxWise, section 4.5; Drift, 5.3.3): a prefill batch launched layer by layer,
  the finest granularity, over the same batch in one launch.

The first two come from the trace of an engine under a load: simulated, or of a server on this
machine. The third drives lanes without an engine: simulated ones, a GPU's or a CPU's.
"""

import argparse
import asyncio
import contextlib
import itertools
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from twolane.bench import serve
from twolane.bench.contenders import parse_system, system_flags
from twolane.bench.report.tracefile import TraceFile, read
from twolane.bench.server import serving
from twolane.engine.config import EngineConfig
from twolane.estimate.profile import Run
from twolane.lanes.base import Ticket
from twolane.lanes.load import load
from twolane.lanes.work import PrefillWork
from twolane.profile.rig import Rig
from twolane.profile.run import rig_on
from twolane.results.provenance import provenance, save
from twolane.results.result import BenchConfig
from twolane.sim.config import SimulateConfig
from twolane.sim.gpus import GPUS
from twolane.sim.machine import SimulatedMachine
from twolane.sim.run import shapes_of, simulate
from twolane.slo import Slo
from twolane.workload.prompts import TokenRange
from twolane.workload.spec import WorkloadSpec

SYSTEMS = ("auto", "muxwise", "drift", "bullet", "duetserve", "chunked:token_budget=512")
BATCHES: dict[str, list[Run]] = {
    "1 x 2,048": [(2048, 0, 1)],
    "1 x 8,192": [(8192, 0, 1)],
    "4 x 1,024": [(1024, 0, 4)],
    "1 x 2,048 over 4,096": [(2048, 4096, 1)],
}
"""Prefill batches that are sliced: new tokens, reused tokens and number of prompts."""
WHOLE = "device"
"""Lane of hybrid passes, which exclude the other two."""
REPEATS = 5
WARMUPS = 24
"""Concurrent warm-up requests before a server's runs."""


def sharing(trace: TraceFile) -> dict[str, float]:
    """Return utilisation and bubbles of a traced run, all as fractions."""
    launches = trace.launches
    begin, end = launches.span
    held = float((launches.units * launches.took).sum())
    lanes = sorted(set(launches.lane.tolist()) - {WHOLE}) or [WHOLE]
    idle = {
        lane: 1 - _busy(launches.start[chosen], launches.end[chosen]) / (end - begin)
        for lane in lanes
        for chosen in [(launches.lane == lane) | (launches.lane == WHOLE)]
    }
    return {
        "utilisation": held / (trace.units * (end - begin)),
        "bubbles": statistics.fmean(idle.values()),
        **{f"idle, {lane}": share for lane, share in idle.items()},
        "idle with work": _idle_with_work(trace) / (end - begin),
    }


def _busy(start: np.ndarray, end: np.ndarray) -> float:
    """Return seconds in which at least one of these intervals runs; they are in order of their
    start."""
    latest = np.maximum.accumulate(end)
    gaps = start[1:] - latest[:-1]
    return float(latest[-1] - start[0] - gaps[gaps > 0].sum())


def _idle_with_work(trace: TraceFile) -> float:
    """Return seconds in which no launch runs although a request decodes or waits."""
    launches = trace.launches
    latest = np.maximum.accumulate(launches.end)
    idle = 0.0
    for begin, end in zip(latest[:-1], launches.start[1:], strict=True):
        if end > begin and any(
            _value(trace.gauges.get(gauge), float(begin)) for gauge in ("decoding", "waiting")
        ):
            idle += float(end - begin)
    return idle


def _value(gauge: tuple[np.ndarray, np.ndarray] | None, at: float) -> float:
    """Return the latest value of a gauge."""
    if gauge is None:
        return 0.0
    times, heights = gauge
    place = int(np.searchsorted(times, at, side="right")) - 1
    return float(heights[place]) if place >= 0 else 0.0


def traced(system: str, given: argparse.Namespace, folder: Path) -> TraceFile:
    """Return the trace of one system under the load."""
    path = folder / f"{system.partition(':')[0]}.json"
    workload = WorkloadSpec(
        dataset=given.dataset,
        num_prompts=given.prompts,
        request_rate=given.rate,
        max_input_len=given.longest,
    )
    if given.simulate:
        name, options = parse_system(system)
        engine = EngineConfig(
            model=given.model,
            system=name,
            options=options,
            slo=Slo(tbt=given.tbt / 1e3, ttft=1.0, ttft_per_token=1 / 1024),
            trace=str(path),
        )
        simulate(
            SimulateConfig(engine=engine, gpu=given.simulate, bench=BenchConfig(workload=workload))
        )
    else:
        words = [given.model, *given.flags.split(), *system_flags(system), "--trace", str(path)]
        bounds = {"tbt": given.tbt, "ttft": 1000, "ttft-per-1k": 1000}
        words += [f"--slo-{name}-ms={bound:g}" for name, bound in bounds.items()]
        with serving(words, folder / "server.log") as server:
            config = BenchConfig(
                base_url=server.url,
                workload=workload,
                vocab_range=given.vocab_range,
                num_warmups=min(WARMUPS, given.prompts),
            )
            asyncio.run(serve.run(config))
    return read(path, system)


@contextlib.contextmanager
def rig(given: argparse.Namespace) -> Iterator[Rig]:
    """Return lanes without an engine."""

    def quiet(stage: str, share: float) -> None:
        pass

    config = EngineConfig(
        model=given.model,
        load_format="dummy",
        device="cpu" if given.card == "cpu" else "auto",
        levels=given.levels and tuple(given.levels),
    )
    if given.simulate:
        machine = SimulatedMachine(GPUS[given.simulate], shapes_of(config), config)
    else:
        machine = load(config, quiet)
    with rig_on(config, machine, quiet) as made:
        yield made


def slicing(made: Rig, runs: Sequence[Run]) -> dict[str, float]:
    """Return the median seconds of a batch in one launch and layer by layer, on the whole device.

    Of the slices also: `between`, the seconds in which the device ran none of them; `launching`,
    those of the host; `waited`, how many of them the device waited for.
    """
    batch, layers, units = made.prompts(runs), made.layers, made.lanes.units
    names = ("whole", "sliced", "between", "launching", "waited")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(REPEATS + 1):
        for name, step in (("whole", layers), ("sliced", 1)):
            tickets: list[Ticket] = []
            for first in range(0, layers, step):
                last = first + step
                chunks = batch.chunks if first == 0 else ()
                work = PrefillWork(turn, batch.rows, first, last, last == layers, chunks)
                tickets.append(made.launch("prefill", units, work))
            made.wait(lambda tickets=tickets: tickets[-1].done, tickets)
            times = [(t.start, t.end) for t in tickets if t.start is not None and t.end is not None]
            seconds[name].append(times[-1][1] - times[0][0])
        gaps = [after[0] - before[1] for before, after in itertools.pairwise(times)]
        seconds["between"].append(sum(gaps))
        seconds["launching"].append(sum(t.host_seconds for t in tickets))
        seconds["waited"].append(sum(t.waited for t in tickets))
    made.give_back(batch.rows)
    # The first of each warms up.
    found = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    return {**found, "cost": found["sliced"] / found["whole"] - 1}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--simulate", metavar="GPU", help="a simulated GPU: a100-80gb, h20, h100 or h200")
    add("--card", help="name of this machine's device in the file; cpu for a CPU")
    add("--model", default="qwen3-8b")
    add("--flags", default="--load-format dummy --device cuda --max-model-len 16384",
        help="flags of the servers")  # fmt: skip
    add("--systems", nargs="*", default=SYSTEMS, help="none: only the cost of slicing")
    add("--dataset", default="azure-conv")
    add("--rate", type=float, default=14.0, help="requests/s")
    add("--prompts", type=int, default=300, help="requests of each system")
    add("--longest", type=int, default=12_000, help="tokens to which prompts are cut")
    add("--tbt", type=float, default=12.0, help="TBT SLO in ms")
    add("--levels", type=int, nargs="+",
        help="of the decode lane while slices are measured; few start soon")  # fmt: skip
    add("--batches", nargs="+", default=list(BATCHES), choices=list(BATCHES))
    add("--vocab-range", type=TokenRange.parse, default=TokenRange(), metavar="LOW:HIGH")
    add("--out", type=Path, help="write the figures here as JSON")
    given = parser.parse_args()
    if (given.simulate is None) == (given.card is None):
        parser.error("name the device: either --simulate GPU or --card NAME")
    return given


def main() -> None:
    """Measure, print, write the file after each step if asked for."""
    given = _options()
    costs: dict[str, dict[str, float]] = {}
    shared: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for system in given.systems:
            shared[system] = sharing(traced(system, given, Path(folder)))
            shares = ", ".join(f"{name} {share:.1%}" for name, share in shared[system].items())
            print(f"{system}: {shares}", flush=True)
            _save(given, shared, costs)
    with rig(given) as made:  # it keeps a GPU's memory until this process ends, so it comes last
        for name in given.batches:
            costs[name] = slicing(made, BATCHES[name])
            print(f"layer by layer, {name}: {costs[name]['cost']:+.1%}", flush=True)
            _save(given, shared, costs)


def _save(
    given: argparse.Namespace,
    shared: dict[str, dict[str, float]],
    costs: dict[str, dict[str, float]],
) -> None:
    """Write the results so far, if a file was named."""
    if given.out is None:
        return
    load_of = {"dataset": given.dataset, "rate": given.rate, "prompts": given.prompts}
    about = provenance({"model": given.model, "tbt_ms": given.tbt, **load_of})
    device = f"simulated {given.simulate}" if given.simulate else given.card
    save(given.out, about, {"device": device, "sharing": shared, "slicing": costs})


if __name__ == "__main__":
    main()
