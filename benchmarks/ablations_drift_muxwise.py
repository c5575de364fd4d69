"""The ablations of Drift and MuxWise in simulation: `python benchmarks/ablations_drift_muxwise.py`.

Each figure is some variants of a system on one workload; what is compared is one number of a run.
The papers name neither rates nor traces exactly, and the device is a model (docs/simulation.md):
what can be compared is who wins and by about how much. Runs that the file has are not repeated.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from twolane.bench.result import BenchConfig
from twolane.engine.config import EngineConfig
from twolane.simulate import SimulateConfig, Simulation, simulate
from twolane.slo import Slo
from twolane.workload.spec import WorkloadSpec
from twolane.workload.traces import TraceRequest

OUT = Path(__file__).parent / "results" / "ablations-drift-muxwise.json"


def tbt_p99(simulation: Simulation) -> float:
    """Milliseconds."""
    gaps = [gap for one in simulation.served for gap in one.record.gaps]
    return float(np.percentile(gaps, 99)) * 1e3


def ttft_per_token_p99(simulation: Simulation) -> float:
    """Milliseconds for each prompt token."""
    records = [one.record for one in simulation.served]
    return float(np.percentile([r.ttft / r.prompt_tokens for r in records], 99)) * 1e3


def mixed(seed: int) -> list[TraceRequest]:
    """ShareGPT and LooGLE, half each (MuxWise §4.4.3), 0.25 a second: at the paper's 0.5 the
    simulated GPUs are full, and the queue decides."""
    short, long = (
        WorkloadSpec(dataset=name, num_prompts=60, request_rate=0.125, seed=seed + i).build()
        for i, name in enumerate(("sharegpt-1k", "loogle"))
    )
    # Blocks are numbered from 0 in both: LooGLE's documents must not pass for ShareGPT's prompts.
    return sorted([*(msgspec.structs.replace(r, hash_ids=()) for r in short), *long], key=_arrival)


def _arrival(request: TraceRequest) -> float:
    assert request.arrival is not None
    return request.arrival


def drawn(dataset: str, rate: float, count: int) -> Callable[[int], list[TraceRequest]]:
    """So many requests of that workload, so many a second."""

    def build(seed: int) -> list[TraceRequest]:
        spec = WorkloadSpec(dataset=dataset, num_prompts=count, request_rate=rate, seed=seed)
        return spec.build()

    return build


@dataclass(frozen=True)
class Figure:
    """One comparison."""

    claim: str
    """What the paper says comes out."""
    measure: Callable[[Simulation], float]
    workload: Callable[[int], list[TraceRequest]]
    variants: dict[str, tuple[str, dict[str, str]]]
    """System and options by name."""
    model: str
    tbt: float
    gpu: str = "a100-80gb"
    tp: int = 8
    levels: tuple[int, ...] | None = None


BUBBLES = {
    "muxwise": ("muxwise", {}),
    "whole batches": ("muxwise", {"layer_wise": "false"}),
    "and blocking": ("muxwise", {"layer_wise": "false", "query_sync": "false"}),
}
GROUPS = {f"{n} groups": ("drift", {"groups": str(n)}) for n in (3, 4, 5)}
FIGURES = {
    "muxwise-fig19-8b": Figure(
        "P99 TBT: about 10 ms more with whole batches, 314 ms more with blocking, too",
        tbt_p99,
        drawn("toolagent", 8.0, 150),
        BUBBLES,
        "llama-3.1-8b",
        0.05,
    ),
    "muxwise-fig19-70b": Figure(
        "P99 TBT: about 10 ms more with whole batches, 672 ms more with blocking, too",
        tbt_p99,
        drawn("toolagent", 1.0, 80),
        BUBBLES,
        "llama-3.1-70b",
        0.1,
    ),
    "muxwise-fig20": Figure(
        "P99 TTFT per token: 1.96 times lower with preemption",
        ttft_per_token_p99,
        mixed,
        {"muxwise": ("muxwise", {}), "no preemption": ("muxwise", {"preemption": "false"})},
        "llama-3.1-70b",
        0.1,
    ),
    "muxwise-guard": Figure(
        "§3.3: without the guard, contention breaks the TBT SLO of 12 ms (here; no figure)",
        tbt_p99,
        drawn("azure-conv", 14.0, 150),
        {"muxwise": ("muxwise", {}), "no guard": ("muxwise", {"guard": "false"})},
        "qwen3-8b",
        0.012,
        gpu="h200",
        tp=1,
    ),
    "drift-fig13": Figure(
        "P99 TBT: 4 and 5 groups alike, 3 groups worse (70B on 8 GPUs there)",
        tbt_p99,
        drawn("azure-conv", 5.0, 80),
        GROUPS,
        "llama-3.1-8b",
        0.02,
        tp=1,
        levels=(24, 28, 36),
    ),
}


def run(figure: Figure, variant: str, seed: int) -> float:
    """The number of one run."""
    system, options = figure.variants[variant]
    engine = EngineConfig(
        model=figure.model,
        system=system,
        options=options,
        slo=Slo(tbt=figure.tbt),
        levels=figure.levels,
    )
    bench = BenchConfig(workload=WorkloadSpec(seed=seed), goodput={})
    asked = SimulateConfig(engine=engine, gpu=figure.gpu, tp=figure.tp, bench=bench)
    return figure.measure(simulate(asked, figure.workload(seed)))


def table(name: str, figure: Figure, results: dict[str, float]) -> Table:
    """The medians, and the range over the seeds."""
    made = Table(title=f"{name}: {figure.claim}", title_justify="left")
    for head in ("variant", "median", "least", "most", "of the first"):
        made.add_column(head)
    first = None
    for variant in figure.variants:
        values = [v for key, v in results.items() if key.startswith(f"{name}/{variant}/")]
        middle = statistics.median(values)
        first = first or middle
        figures = (middle, min(values), max(values), middle / first)
        made.add_row(variant, *(f"{value:.3g}" for value in figures))
    return made


def main() -> None:
    """Run what is missing, save, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(FIGURES))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args()
    results = msgspec.json.decode(asked.out.read_bytes()) if asked.out.exists() else {}
    for name in asked.names:
        figure = FIGURES[name]
        for variant in figure.variants:
            for seed in range(asked.seeds):
                key = f"{name}/{variant}/{seed}"
                if key not in results:
                    results[key] = run(figure, variant, seed)
                    asked.out.write_bytes(msgspec.json.format(msgspec.json.encode(results)))
        Console().print(table(name, figure, results))


if __name__ == "__main__":
    main()
