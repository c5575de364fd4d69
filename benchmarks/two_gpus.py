"""Goodput of two simulated GPUs in four setups: `python benchmarks/two_gpus.py`.

Two replicas of lanes, lanes over two ranks, two replicas of chunked prefill, and prefill and decode
on a GPU each (1P1D), under several TBT bounds. Each replica gets half of the requests at random, so
two hold twice what one does: none of these prompts have a prefix in common.
"""

import argparse
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from twolane.bench import contenders, goodput
from twolane.bench.goodput import Search
from twolane.results.provenance import provenance, save
from twolane.workload.spec import WorkloadSpec

OUT = Path(__file__).parent / "results" / "two-gpus-simulated.json"
BUDGETS = "chunked:token_budget=128/256/512/1024"


class Way(NamedTuple):
    """A setup of two GPUs."""

    systems: str
    """Systems with settings, of which the best at each bound counts."""
    target: Mapping[str, object]
    """Settings of the target that differ from one simulated GPU."""
    replicas: int = 1


WAYS = {
    "two replicas of auto": Way("auto", {}, 2),
    "auto over two ranks": Way("auto", {"tp": 2}),
    "two replicas of chunked, tuned": Way(BUDGETS, {}, 2),
    "1P1D": Way("two-stream", {"disaggregated": True}),
    "1P1D, 20 GB/s": Way("two-stream", {"disaggregated": True, "link_bandwidth": 20e9}),
}


def search(asked: argparse.Namespace, way: Way) -> Search:
    """Return the search of one setup, for one replica."""
    return Search(
        target={"simulate": asked.gpu, "model": asked.model, **way.target},
        workload=WorkloadSpec(dataset=asked.dataset, num_prompts=asked.prompts),
        slos={"ttft": 1.0, "ttft_per_1k": 1.0},
        tbts=tuple(bound / 1e3 for bound in asked.tbt_ms),
        seeds=asked.seeds,
        start_rate=asked.start,
        first_step=1.12,
        least_rate=0.5,
        tolerance=0.06,
        brief=asked.prompts < goodput.LEAST_REQUESTS,
    )


def held(asked: argparse.Namespace, name: str, way: Way) -> dict[str, float]:
    """Return requests a second by bound in milliseconds, of all replicas together."""
    wanted = search(asked, way)
    run, names = contenders.simulation(wanted), goodput.variants(way.systems)
    folder = asked.work / name.replace(" ", "-").replace("/", "")
    found = goodput.find(wanted, names, run, folder, reads_slos=contenders.reads_slos)
    points = zip(wanted.points(folder), found, strict=True)
    return {
        f"{point.search.slos['tbt'] * 1e3:g}": way.replicas
        * max(statistics.median(each) for each in rates.values())
        for point, rates in points
    }


def main() -> None:
    """Search, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--dataset", default="azure-conv")
    parser.add_argument("--tbt-ms", type=float, nargs="+", default=[9.0, 12.0, 21.0])
    parser.add_argument("--prompts", type=int, default=600, help="requests in a run")
    parser.add_argument("--start", type=float, default=16.0, help="rate where searches begin")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--work", type=Path, default=Path("two-gpus-work"))
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args()
    about = provenance({name: search(asked, WAYS[name]) for name in asked.ways})
    found: dict[str, dict[str, float]] = {}
    for name in asked.ways:
        found[name] = held(asked, name, WAYS[name])
        print(f"{name}: {found[name]}", flush=True)
        save(asked.out, about, {"simulated": True, "goodput": found})


if __name__ == "__main__":
    main()
