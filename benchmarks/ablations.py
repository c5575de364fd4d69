"""Ablations of Bullet and DuetServe, simulated: `python benchmarks/ablations.py [--out FILE]`.

The setups of Bullet's Figures 22 and 23 (Llama-3.1-8B on an A100) and of DuetServe's Figure 9
(Qwen3-8B on an H100), each variant on the same requests. Runs that FILE has already are not
repeated, so a stopped run goes on with the same command; `--requests` and `--seeds` are part of
what FILE is of. `--markdown` prints its tables.
"""

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median

import msgspec
import numpy as np

from twolane import __version__
from twolane.bench.goodput_cli import parse_system
from twolane.bench.result import BenchConfig, Result
from twolane.engine.config import EngineConfig
from twolane.simulate import SimulateConfig, simulate
from twolane.workload.spec import WorkloadSpec

OUT = Path(__file__).parent / "results" / "ablations.json"


class Study(msgspec.Struct, frozen=True):
    """A figure of a paper on one workload."""

    name: str
    gpu: str
    model: str
    dataset: str
    rate: float
    """Requests a second; where the paper measures the most that is served, beyond that."""
    variants: Mapping[str, str]
    """System and settings, by what the paper calls them."""
    ttft_per_token: float
    """Normalised TTFT SLO in seconds a prompt token (Bullet, Table 4)."""
    tpot: float
    """SLO in seconds."""


def bullet(dataset: str, rate: float, ttft_per_token: float, tpot: float) -> Study:
    """Figures 22 and 23; of the paper's fixed counts, those nearest to what is on offer."""
    slo = f"ttft_per_token={ttft_per_token},tpot_seconds={tpot}"
    variants = {
        "Bullet": f"bullet:{slo}",
        "Naive": f"bullet:{slo},partition=false,schedule=false",
        "w/Partition": f"bullet:{slo},schedule=false",
        "w/Scheduler": f"bullet:{slo},partition=false",
        **{f"SM-{units}": f"bullet:{slo},prefill_units={units}" for units in (108, 96, 80)},
        "chunked 1024": "chunked:token_budget=1024",
    }
    name = f"Bullet, {dataset}"
    return Study(name, "a100-80gb", "llama-3.1-8b", dataset, rate, variants, ttft_per_token, tpot)


def duetserve(dataset: str, rate: float) -> Study:
    """Figure 9; the paper counts pairs of SMs, and here the nearest levels on offer are taken."""
    variants = {
        "DuetServe": "duetserve",
        **{f"Sd{d}-Sp{66 - d}": f"duetserve:decode_units={2 * d}" for d in (22, 33, 44)},
        "chunked 8192": "chunked:token_budget=8192",
    }
    return Study(f"DuetServe, {dataset}", "h100", "qwen3-8b", dataset, rate, variants, 0.003, 0.1)


STUDIES = (
    bullet("azure-code", 5.0, 0.0015, 0.200),
    bullet("sharegpt", 20.0, 0.003, 0.150),
    duetserve("azure-code", 24.0),
    duetserve("azure-conv", 24.0),
)


class Figures(msgspec.Struct, frozen=True):
    """Of one run; latencies in seconds."""

    mean_ttft: float
    p90_ttft: float
    mean_tpot: float
    mean_tbt: float
    p99_tbt: float
    throughput: float
    """Requests a second, from the first arrival to the last answer."""
    attainment: float
    """Share of requests that kept the normalised TTFT and the TPOT SLO."""


class Run(msgspec.Struct, frozen=True):
    """One variant with one pattern of arrivals."""

    study: str
    variant: str
    system: str
    seed: int
    figures: Figures


class Saved(msgspec.Struct):
    """The file."""

    version: str
    requests: int
    studies: tuple[Study, ...] = STUDIES
    runs: list[Run] = []


def measure(study: Study, system: str, requests: int, seed: int) -> Figures:
    """Simulate one variant."""
    name, options = parse_system(system)
    workload = WorkloadSpec(
        dataset=study.dataset, num_prompts=requests, request_rate=study.rate, seed=seed
    )
    config = SimulateConfig(
        engine=EngineConfig(model=study.model, system=name, options=options),
        gpu=study.gpu,
        bench=BenchConfig(workload=workload),
    )
    return figures(study, simulate(config).result)


def figures(study: Study, result: Result) -> Figures:
    """All requests of a simulation are answered."""
    ttft = np.array([record.ttft for record in result.records])
    tpot = np.array([record.tpot or 0.0 for record in result.records])
    tbt = np.concatenate([record.gaps for record in result.records])
    prompts = np.array([record.prompt_tokens for record in result.records])
    kept = (ttft <= study.ttft_per_token * prompts) & (tpot <= study.tpot)
    return Figures(
        mean_ttft=float(ttft.mean()),
        p90_ttft=float(np.percentile(ttft, 90)),
        mean_tpot=float(tpot.mean()),
        mean_tbt=float(tbt.mean()),
        p99_tbt=float(np.percentile(tbt, 99)),
        throughput=len(result.records) / result.duration,
        attainment=float(kept.mean()),
    )


def missing(saved: Saved, seeds: int) -> Iterator[tuple[Study, str, str, int]]:
    """The runs that the file lacks."""
    done = {(run.study, run.variant, run.seed) for run in saved.runs}
    for seed in range(seeds):
        for study in STUDIES:
            for variant, system in study.variants.items():
                if (study.name, variant, seed) not in done:
                    yield study, variant, system, seed


def tables(saved: Saved) -> Iterator[str]:
    """A Markdown table a study: medians over the seeds."""
    for study in saved.studies:
        yield f"\n{study.name}, {study.rate:g} req/s ({study.model} on {study.gpu}):\n"
        yield "| | TTFT mean / P90 (s) | TPOT mean (ms) | TBT P99 (ms) | req/s | attainment |"
        yield "|---|---:|---:|---:|---:|---:|"
        for variant in study.variants:
            runs = [r for r in saved.runs if (r.study, r.variant) == (study.name, variant)]
            if runs:
                yield row(variant, [run.figures for run in runs])


def row(variant: str, runs: list[Figures]) -> str:
    """One line of a table."""
    middle = {
        name: median(getattr(run, name) for run in runs) for name in Figures.__struct_fields__
    }
    return (
        f"| {variant} | {middle['mean_ttft']:.2f} / {middle['p90_ttft']:.2f} "
        f"| {middle['mean_tpot'] * 1e3:.1f} | {middle['p99_tbt'] * 1e3:.0f} "
        f"| {middle['throughput']:.2f} | {middle['attainment']:.0%} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--markdown", action="store_true", help="only print the tables")
    asked = parser.parse_args()
    saved = Saved(__version__, asked.requests)
    if asked.out.exists():
        saved = msgspec.json.decode(asked.out.read_bytes(), type=Saved)
        if not asked.markdown and saved.requests != asked.requests:
            parser.error(f"{asked.out} is of {saved.requests} requests")
    for study, variant, system, seed in () if asked.markdown else missing(saved, asked.seeds):
        run = Run(study.name, variant, system, seed, measure(study, system, saved.requests, seed))
        saved.runs.append(run)
        asked.out.write_bytes(msgspec.json.format(msgspec.json.encode(saved), indent=1))
        print(study.name, row(variant, [run.figures]), flush=True)
    print("\n".join(tables(saved)))


if __name__ == "__main__":
    main()
