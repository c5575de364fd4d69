"""Reproduce Figure 6 of DuetServe (Azure-Code): TTFT, TBT and throughput over the request rate.

    python paper_figure.py                                    # a minute
    python paper_figure.py figure6.png                        # draws it, too; needs twolane[bench]

Qwen3-8B on a simulated H100, as in §5.2. The budget of 8,192 tokens stands for vLLM and for SGLang
with mixed chunks, prefill before decode for SGLang's default. The paper has 1,000 requests and more
in a run; with fewer, queues stay shorter. docs/notes/papers-simulated.md has the whole study.
"""

import sys
from collections.abc import Iterator
from typing import NamedTuple

from twolane.engine.config import EngineConfig
from twolane.results.result import BenchConfig
from twolane.sim.config import SimulateConfig
from twolane.sim.run import simulate
from twolane.workload.spec import WorkloadSpec

RATES = (4.0, 8.0, 12.0, 16.0)
SYSTEMS: dict[str, tuple[str, dict[str, str]]] = {
    "DuetServe": ("duetserve", {}),
    "chunked 8192": ("chunked", {"token_budget": "8192"}),
    "prefill first": ("prefill-first", {}),
}


class Point(NamedTuple):
    """One run of a system; latencies are means in milliseconds."""

    system: str
    rate: float
    ttft: float
    tbt: float
    throughput: float
    """Requests per second from the first to the last of the run."""


def points(requests: int = 200) -> Iterator[Point]:
    """Yield a point for each system and rate."""
    for name, (system, options) in SYSTEMS.items():
        for rate in RATES:
            workload = WorkloadSpec(dataset="azure-code", num_prompts=requests, request_rate=rate)
            engine = EngineConfig(model="qwen3-8b", system=system, options=options)
            config = SimulateConfig(engine=engine, bench=BenchConfig(workload=workload), gpu="h100")
            found = simulate(config).result.metrics
            ttft, tbt = (one.mean or 0.0 for one in (found.ttft, found.tbt))
            yield Point(name, rate, ttft * 1e3, tbt * 1e3, found.completed / found.duration)


def draw(found: list[Point], file: str) -> None:
    """Write the figure: a panel for each figure, a line for each system."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3), layout="constrained")
    labels = {"ttft": "mean TTFT (ms)", "tbt": "mean TBT (ms)", "throughput": "requests/s"}
    panels = figure.subplots(1, len(labels))
    for panel, (field, label) in zip(panels, labels.items(), strict=True):
        for name in SYSTEMS:
            own = [point for point in found if point.system == name]
            xs, ys = [one.rate for one in own], [getattr(one, field) for one in own]
            panel.plot(xs, ys, marker="o", label=name)
        panel.set(xlabel="requests/s sent", ylabel=label, ylim=(0, None))
    panels[0].legend()
    figure.savefig(file)


def main(file: str | None = None) -> None:
    """Print the points, and draw them if a file is named."""
    print(f"{'system':<16}{'rate':>6}{'TTFT':>9}{'TBT':>8}{'requests/s':>12}   means in ms")
    found = []
    for point in points():
        print("{:<16}{:>6.0f}{:>9.0f}{:>8.1f}{:>12.2f}".format(*point), flush=True)
        found.append(point)
    if file is not None:
        draw(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
