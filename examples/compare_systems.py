"""Compare systems on a simulated H200: the same requests, the same bounds, each system in turn.

    python compare_systems.py                                 # half a minute
    python compare_systems.py auto earliest_deadline.EarliestDeadline

The real engine runs on a virtual clock, so the figures are the same on every machine. A name is one
of `twolane doctor`'s, or the path of a class of your own that Python finds from here.
"""

import sys

from twolane.engine.config import EngineConfig
from twolane.results.result import BenchConfig
from twolane.sim.config import SimulateConfig
from twolane.sim.run import simulate
from twolane.slo import Slo
from twolane.workload.spec import WorkloadSpec

SYSTEMS = ("prefill-first", "chunked", "muxwise", "auto")
BOUNDS = {"ttft": 1.0, "tbt": 0.021}
"""Seconds until the first token, and between two tokens."""
WORKLOAD = WorkloadSpec(dataset="azure-conv", num_prompts=150, request_rate=24.0)


def run(system: str, workload: WorkloadSpec = WORKLOAD) -> str:
    """Return a system's row of the table."""
    engine = EngineConfig(model="qwen3-8b", system=system, slo=Slo(**BOUNDS))
    bench = BenchConfig(workload=workload, goodput=BOUNDS)
    found = simulate(SimulateConfig(engine=engine, bench=bench, gpu="h200")).result.metrics
    ttft, tbt = found.ttft.percentiles[99], found.tbt.percentiles[99]
    met = found.attainment.together
    return f"{system:<38}{ttft * 1e3:>9.0f}{tbt * 1e3:>9.1f}{met:>9.1%}"


def main(*systems: str) -> None:
    """Print a row for each system."""
    print(f"{'system':<38}{'TTFT':>9}{'TBT':>9}{'met':>9}   P99 in ms; requests within both bounds")
    for system in systems or SYSTEMS:
        print(run(system), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
