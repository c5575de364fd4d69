"""What the papers compare, in simulation: `python benchmarks/papers.py [NAME ...]`.

A study is some variants of a system, or several systems, on the same requests. The papers name
neither rates nor traces exactly, and the device is a model (docs/design/simulation.md):
what can be compared is who wins and by about how much. Runs that the file has are not repeated, so
a stopped run goes on with the same command. docs/results.md has what came out.
"""

import argparse
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from twolane.bench.contenders import parse_system
from twolane.engine.config import EngineConfig
from twolane.results.provenance import provenance, save
from twolane.results.result import BenchConfig, Result
from twolane.sim.config import SimulateConfig
from twolane.sim.run import simulate
from twolane.slo import Slo
from twolane.workload.spec import WorkloadSpec
from twolane.workload.traces import TraceRequest

OUT = Path(__file__).parent / "results" / "papers.json"
Figures = dict[str, float]
"""Of one run, by name; latencies in seconds."""


class Claim(NamedTuple):
    """A ratio of one figure of two variants."""

    figure: str
    of: str
    over: str
    paper: str


@dataclass(frozen=True, kw_only=True)
class Study:
    """A comparison of a paper."""

    where: str
    """Paper and place."""
    model: str
    variants: Mapping[str, str]
    """System and settings by name."""
    shown: tuple[str, ...]
    """Figures that the table has."""
    claims: tuple[Claim, ...] = ()
    dataset: str = ""
    rate: float = 0.0
    """Requests a second."""
    requests: int = 150
    draw: Callable[[int], list[TraceRequest]] | None = None
    """From a seed, in place of `dataset`."""
    tbt: float | None = None
    """SLO that the systems are told."""
    kept: tuple[float, float] = (np.inf, np.inf)
    """TTFT a prompt token and TPOT that count as attained (Bullet, Table 4)."""
    gpu: str = "a100-80gb"
    tp: int = 1
    levels: tuple[int, ...] | None = None


def mixed(seed: int) -> list[TraceRequest]:
    """ShareGPT and LooGLE, half each (MuxWise §4.4.3), 0.25 a second: at the paper's 0.5 the
    simulated GPUs are full, and the queue decides."""
    short, long = (
        WorkloadSpec(dataset=name, num_prompts=60, request_rate=0.125, seed=seed + i).build()
        for i, name in enumerate(("sharegpt-1k", "loogle"))
    )
    # Blocks are numbered from 0 in both: LooGLE's documents must not pass for ShareGPT's prompts.
    own = [msgspec.structs.replace(request, hash_ids=()) for request in short]
    return sorted([*own, *long], key=lambda request: request.arrival or 0.0)


LLAMA = {"8b": ("llama-3.1-8b", 0.05), "70b": ("llama-3.1-70b", 0.1)}
"""Model and TBT SLO of MuxWise and Drift."""
BESIDE_CHUNKED = {
    "muxwise": "muxwise",
    "drift": "drift",
    "chunked 256": "chunked:token_budget=256",
    "chunked 512": "chunked:token_budget=512",
}
"""With the budgets that MuxWise and Drift found best."""


def latencies(size: str, dataset: str, rate: float) -> Study:
    """MuxWise, Figure 14, and Drift, Figure 9; the papers' ratios are means over all four."""
    model, tbt = LLAMA[size]
    return Study(
        where="MuxWise Fig. 14, Drift Fig. 9",
        model=model,
        variants=BESIDE_CHUNKED,
        shown=("p99_ttft", "p99_tbt"),
        claims=(
            Claim("p99_ttft", "chunked 256", "muxwise", "MuxWise 3.57"),
            Claim("p99_ttft", "chunked 512", "drift", "Drift 2.62"),
            Claim("p99_tbt", "chunked 512", "drift", "Drift 2.59"),
        ),
        dataset=dataset,
        rate=rate,
        requests=200,
        tbt=tbt,
        tp=8,
    )


SLOS = {"azure-code": (0.0015, 0.2), "sharegpt": (0.003, 0.15), "arxiv-sum": (0.0015, 0.175)}
"""Bullet, Table 4."""


def bullet(
    dataset: str,
    rate: float,
    where: str,
    names: Mapping[str, str],
    claims: tuple[Claim, ...] = (),
    requests: int = 150,
) -> Study:
    """Variants of Bullet, and chunked prefill, on a workload of Table 4."""
    ttft, tpot = SLOS[dataset]
    slo = f"ttft_per_token={ttft},tpot_seconds={tpot}"
    variants = {
        name: settings if settings.startswith("chunked") else f"bullet:{slo}{settings}"
        for name, settings in names.items()
    }
    shown = ("mean_ttft", "mean_tpot", "throughput", "attainment")
    return Study(
        where=where,
        model="llama-3.1-8b",
        variants=variants,
        shown=shown,
        dataset=dataset,
        rate=rate,
        kept=(ttft, tpot),
        claims=claims,
        requests=requests,
    )


CHUNKED = {f"chunked {n}": f"chunked:token_budget={n}" for n in (1024, 2048)}
HALVES = {
    "Bullet": "",
    "Naive": ",partition=false,schedule=false",
    "w/Partition": ",schedule=false",
    "w/Scheduler": ",partition=false",
    # Of the paper's fixed counts those nearest to what is on offer.
    **{f"SM-{units}": f",prefill_units={units}" for units in (108, 96, 80)},
    "chunked 1024": "chunked:token_budget=1024",
}


def against_chunked(dataset: str, rate: float) -> Study:
    """Bullet, Figure 15; the paper's ratios are means over rates and workloads."""
    claims = (
        Claim("mean_ttft", "chunked 1024", "Bullet", "13.5"),
        Claim("mean_tpot", "chunked 1024", "Bullet", "0.94"),
        Claim("throughput", "Bullet", "chunked 1024", "1.09, at most 1.20"),
        Claim("mean_ttft", "chunked 2048", "Bullet", "above 1 (ShareGPT: 4.2)"),
        Claim("mean_tpot", "chunked 2048", "Bullet", "above 1 (ShareGPT: 1.20)"),
    )
    names = {"Bullet": "", **CHUNKED}
    return bullet(dataset, rate, "Bullet Fig. 15", names, claims, requests=300)


def duetserve(
    model: str, tp: int, dataset: str, rate: float, faster: str, over: str, more: str
) -> Study:
    """DuetServe, Figures 6 and 7, against vLLM's budget and SGLang's prefill before decode.

    In the paper `faster` is chunked prefill's mean TBT over its own, and `more` what it serves over
    the variant `over`.
    """
    return Study(
        where="DuetServe Fig. 6, 7",
        model=model,
        variants={
            "DuetServe": "duetserve",
            "chunked 8192": "chunked:token_budget=8192",
            "prefill-first": "prefill-first",
        },
        shown=("mean_ttft", "mean_tbt", "p99_tbt", "throughput"),
        claims=(
            Claim("mean_tbt", "chunked 8192", "DuetServe", faster),
            Claim("throughput", "DuetServe", over, more),
        ),
        dataset=dataset,
        rate=rate,
        requests=300,
        gpu="h100",
        tp=tp,
    )


def splits(dataset: str) -> Study:
    """DuetServe, Figure 9; it counts pairs of SMs, and here the nearest levels are taken."""
    return Study(
        where="DuetServe Fig. 9",
        model="qwen3-8b",
        variants={
            "DuetServe": "duetserve",
            **{f"Sd{d}-Sp{66 - d}": f"duetserve:decode_units={2 * d}" for d in (22, 33, 44)},
            "chunked 8192": "chunked:token_budget=8192",
        },
        shown=("throughput", "p99_tbt"),
        dataset=dataset,
        rate=24.0,
        gpu="h100",
    )


def bubbles(size: str, rate: float, requests: int) -> Study:
    """MuxWise, Figure 19."""
    model, tbt = LLAMA[size]
    variants = {
        "muxwise": "muxwise",
        "whole batches": "muxwise:layer_wise=false",
        "and blocking": "muxwise:layer_wise=false,query_sync=false",
    }
    return Study(
        where="MuxWise Fig. 19",
        model=model,
        variants=variants,
        shown=("p99_tbt",),
        dataset="toolagent",
        rate=rate,
        requests=requests,
        tbt=tbt,
        tp=8,
    )


STUDIES = {
    "latency-8b-conversation": latencies("8b", "conversation", 4.0),
    "latency-8b-toolagent": latencies("8b", "toolagent", 8.0),
    "latency-70b-conversation": latencies("70b", "conversation", 0.5),
    "latency-70b-toolagent": latencies("70b", "toolagent", 1.0),
    "bullet-sharegpt": against_chunked("sharegpt", 20.0),
    "bullet-azure-code": against_chunked("azure-code", 5.0),
    "bullet-arxiv-sum": against_chunked("arxiv-sum", 1.5),
    "duetserve-8b-azure-code": duetserve(
        "qwen3-8b", 1, "azure-code", 16.0, "above 1.33", "prefill-first", "1.09"
    ),
    "duetserve-8b-conversation": duetserve(
        "qwen3-8b", 1, "conversation", 5.0, "above 1", "chunked 8192", "1.27"
    ),
    "duetserve-14b-azure-code": duetserve(
        "qwen3-14b", 2, "azure-code", 16.0, "above 1.33", "chunked 8192", "above 1"
    ),
    "muxwise-fig19-8b": bubbles("8b", 8.0, 150),
    "muxwise-fig19-70b": bubbles("70b", 1.0, 80),
    "muxwise-fig20": Study(
        where="MuxWise Fig. 20",
        model="llama-3.1-70b",
        variants={"muxwise": "muxwise", "no preemption": "muxwise:preemption=false"},
        shown=("p99_ttft_per_token",),
        claims=(Claim("p99_ttft_per_token", "no preemption", "muxwise", "1.96"),),
        draw=mixed,
        tbt=0.1,
        tp=8,
    ),
    "muxwise-guard": Study(
        where="MuxWise §3.3",
        model="qwen3-8b",
        variants={"muxwise": "muxwise", "no guard": "muxwise:guard=false"},
        shown=("p99_tbt",),
        dataset="azure-conv",
        rate=14.0,
        tbt=0.012,
        gpu="h200",
    ),
    "drift-fig13": Study(
        where="Drift Fig. 13",
        model="llama-3.1-8b",
        variants={f"{n} groups": f"drift:groups={n}" for n in (3, 4, 5)},
        shown=("p99_tbt",),
        dataset="azure-conv",
        rate=5.0,
        requests=80,
        tbt=0.02,
        levels=(24, 28, 36),
    ),
    "bullet-fig22-azure-code": bullet("azure-code", 5.0, "Bullet Fig. 22, 23", HALVES),
    "bullet-fig22-sharegpt": bullet("sharegpt", 20.0, "Bullet Fig. 22, 23", HALVES),
    "duetserve-fig9-azure-code": splits("azure-code"),
    "duetserve-fig9-azure-conv": splits("azure-conv"),
}


def run(study: Study, variant: str, seed: int) -> Figures:
    """One run."""
    system, options = parse_system(study.variants[variant])
    workload, requests = WorkloadSpec(seed=seed), None
    if study.draw:
        requests = study.draw(seed)
    else:
        workload = WorkloadSpec(
            dataset=study.dataset, num_prompts=study.requests, request_rate=study.rate, seed=seed
        )
    slo = Slo(tbt=study.tbt)
    asked = SimulateConfig(
        engine=EngineConfig(
            model=study.model,
            system=system,
            options=options,
            slo=slo,
            tbt_buffer=0.0,  # the papers' servers hold no tokens back
            levels=study.levels,
        ),
        gpu=study.gpu,
        tp=study.tp,
        bench=BenchConfig(workload=workload),
    )
    return figures(study, simulate(asked, requests).result)


def figures(study: Study, result: Result) -> Figures:
    """Of those that were answered; a prompt beyond the model's positions is refused."""
    answered = [record for record in result.records if record.ok]
    ttft = np.array([record.ttft for record in answered])
    tpot = np.array([record.tpot or 0.0 for record in answered])
    tbt = np.concatenate([record.gaps for record in answered])
    prompts = np.array([record.prompt_tokens for record in answered])
    each, pace = study.kept
    named = {"ttft": ttft, "ttft_per_token": ttft / prompts, "tpot": tpot, "tbt": tbt}
    return {
        **{f"mean_{name}": float(values.mean()) for name, values in named.items()},
        **{f"p99_{name}": float(np.percentile(values, 99)) for name, values in named.items()},
        "throughput": len(answered) / result.duration,
        "attainment": float(((ttft <= each * prompts) & (tpot <= pace)).mean()),
    }


def table(name: str, study: Study, results: Mapping[str, Figures]) -> Table:
    """Medians over the seeds, and the claims."""
    load = f"{study.dataset or 'mixed'}" + (f", {study.rate:g} req/s" if study.rate else "")
    title = f"{name} ({study.where}): {study.model} on {study.tp} {study.gpu}, {load}"
    made = Table(title=title, title_justify="left", caption_justify="left")
    for head in ("variant", *study.shown, "seeds"):
        made.add_column(head)
    middle: dict[tuple[str, str], float] = {}
    for variant in study.variants:
        runs = [each for key, each in results.items() if key.startswith(f"{name}/{variant}/")]
        for figure in study.shown if runs else ():
            middle[variant, figure] = median(run[figure] for run in runs)
        values = [f"{middle[variant, f]:.4g}" for f in study.shown] if runs else []
        made.add_row(variant, *values, str(len(runs)))
    made.caption = "\n".join(
        f"{c.figure}, {c.of} / {c.over}: {middle[c.of, c.figure] / middle[c.over, c.figure]:.2f}"
        f" (paper: {c.paper})"
        for c in study.claims
        if {(c.of, c.figure), (c.over, c.figure)} <= middle.keys()
    )
    return made


def main() -> None:
    """Run what is missing, save, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(STUDIES), metavar="NAME")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--requests", type=int, help="of each run; by default the study's number")
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args()
    about = provenance({"studies": asked.names, "requests": asked.requests})
    results: dict[str, Figures] = {}
    if asked.out.exists():
        saved = msgspec.json.decode(asked.out.read_bytes())["figures"]
        results = msgspec.convert(saved, dict[str, Figures])
    for name in asked.names:
        study = STUDIES[name]
        study = replace(study, requests=asked.requests or study.requests)
        for seed, variant in itertools.product(range(asked.seeds), study.variants):
            key = f"{name}/{variant}/{seed}"
            if key not in results:
                results[key] = run(study, variant, seed)
                save(asked.out, about, {"figures": results})
        Console().print(table(name, study, results))


if __name__ == "__main__":
    main()
