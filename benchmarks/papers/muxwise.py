"""MuxWise: Figures 6, 11, 14 to 17, 19, 20, section 4.3.1, Tables 3 to 5, and its artifact."""

import msgspec
from device import ask, budgets, contention
from study import APART, Experiment, Load, Row, Run, beside, over

from twolane.workload.spec import WorkloadSpec
from twolane.workload.traces import TraceRequest

A100 = {"gpu": "a100-80gb", "tp": 8}
EIGHT = {"model": "llama-3.1-8b", "tbt": 0.05, **A100}
SEVENTY = {"model": "llama-3.1-70b", "tbt": 0.1, **A100}
CHUNKED = {n: f"chunked:token_budget={n},fused_attention=true" for n in (256, 512)}
"""SGLang with FlashInfer: attention of both phases is one kernel (§4.1)."""
NANO = "chunked:token_budget=256,nano_batches=2"
SYSTEMS = {"muxwise": "muxwise", "chunked 256": CHUNKED[256], "NanoFlow": NANO, "SGLang-PD": APART}
TUNED = {**SYSTEMS, "chunked 512": CHUNKED[512]}
REAL = {
    "8B conversation": Load(dataset="conversation", rate=4.0, bursts=True, **EIGHT),
    "8B toolagent": Load(dataset="toolagent", rate=6.0, **EIGHT),
    "70B conversation": Load(dataset="conversation", rate=0.4, bursts=True, **SEVENTY),
    "70B toolagent": Load(dataset="toolagent", rate=0.8, **SEVENTY),
}
"""The paper names no rates; these are about half of what MuxWise serves. The conversations are the
public trace with its own bursts, Tool&Agent's trace is not public and drawn."""
SEARCHED = {
    "8B toolagent": Load(dataset="toolagent", rate=7.0, **EIGHT),
    "70B toolagent": Load(dataset="toolagent", rate=0.8, **SEVENTY),
}
SYNTHETIC = {
    "ShareGPT": Load(dataset="sharegpt-1k", rate=14.0, requests=3000, **SEVENTY),
    "LooGLE": Load(dataset="loogle", rate=0.3, **SEVENTY),
    "OpenThoughts": Load(dataset="openthoughts", rate=0.6, **SEVENTY),
}
ONE = {
    "ShareGPT": Load(
        model="llama-3.1-8b", tbt=0.05, dataset="sharegpt-1k", rate=18.0, requests=3000
    )
}
"""Enough requests that a backlog shows: the longest take as long as 900 take to arrive."""
FAST = {
    "8B": Load(model="llama-3.1-8b", tbt=0.05, gpu="h100", tp=8, dataset="toolagent", rate=10.0),
    "70B": Load(model="llama-3.1-70b", tbt=0.1, gpu="h100", tp=8, dataset="toolagent", rate=1.8),
    "235B": Load(model="qwen3-235b-a22b", tbt=0.1, gpu="h200", tp=8, dataset="toolagent", rate=2.5),
}
H200 = {"model": "codellama-34b", "gpu": "h200", "tbt": 0.1}
ARTIFACT = {
    "ShareGPT": Load(dataset="sharegpt-1k", rate=8.0, **H200),
    "LooGLE": Load(dataset="loogle", rate=0.3, **H200),
}


def mixed(count: int, seed: int, rate: float) -> list[TraceRequest]:
    """Return requests of ShareGPT and LooGLE, half each (§4.4.3)."""
    short, long = (
        WorkloadSpec(
            dataset=name, num_prompts=count // 2, request_rate=rate / 2, seed=seed + i
        ).build()
        for i, name in enumerate(("sharegpt-1k", "loogle"))
    )
    # Blocks are numbered from 0 in both: LooGLE's documents must not pass for ShareGPT's prompts.
    own = [msgspec.structs.replace(request, hash_ids=()) for request in short]
    return sorted([*own, *long], key=lambda request: request.arrival or 0.0)


def ratio(loads: list[str], rival: str, figure: str, what: str, paper: float, why: str) -> Row:
    """Return the row of a rival's latency over MuxWise's."""
    return over(loads, "muxwise", rival, figure, what, paper, why, less=True)


def goodput(load: str, rival: str, paper: float | None, why: str, contradicts: str = "") -> Row:
    """Return the row of MuxWise's goodput over a rival's."""
    what = f"goodput over {rival}, {load}"
    return over([load], "muxwise", rival, "goodput", what, paper, why, contradicts=contradicts)


EXPERIMENTS = {
    "muxwise-fig6": Experiment(
        where="MuxWise Fig. 6",
        runs={"70B on 8 A100": ask(budgets, "a100-80gb", "llama-3.1-70b", 8)},
        rows=[
            Row(
                what="TBT of a pass of 4,096 tokens, 70B on eight A100s",
                figure="budget 4096",
                of=["70B on 8 A100"],
                paper=505,
                unit="ms",
                scale=1e3,
            )
        ],
        shown=("budget 256", "budget 512", "budget 4096"),
    ),
    "muxwise-fig11": Experiment(
        where="MuxWise Fig. 11, Drift §3.4",
        runs={
            card: ask(contention, gpu, model)
            for card, gpu, model in (
                ("8B on an H100", "", "qwen3-8b-h100"),
                ("34B on an H100", "", "codellama-34b-h100"),
                ("8B on an H200", "", "qwen3-8b-h200"),
                ("34B on an H200", "", "codellama-34b-h200"),
                ("8B on a simulated A100", "a100-80gb", "llama-3.1-8b"),
            )
        },
        rows=[
            *(
                Row(
                    what=f"largest slowdown of decode beside prefill, {card}",
                    figure="largest",
                    of=[card],
                    paper=paper,
                    unit="%",
                    scale=100,
                )
                for card, paper in (
                    ("8B on an H100", 30), ("34B on an H100", 30), ("8B on a simulated A100", 20),
                )
            ),
            Row(
                what="slowdown of decode that 90 % of the co-runs keep (Drift), simulated A100",
                figure="P90",
                of=["8B on a simulated A100"],
                paper=7,
                unit="%",
                scale=100,
            ),
        ],
        shown=("mean", "P90", "largest", "co-runs"),
    ),
    "muxwise-fig14": Experiment(
        where="MuxWise Fig. 14, Tab. 3, 4",
        runs=beside(REAL, SYSTEMS),
        rows=[
            ratio(list(REAL), rival, "p99_ttft", f"P99 TTFT of {rival}", paper, "")
            for rival, paper in (("chunked 256", 3.57), ("NanoFlow", 5.98), ("SGLang-PD", 1.66))
        ]
        + [
            ratio([load], rival, figure, f"{what} of {rival}, {load}", paper, "")
            for load, what, figure, papers in (
                ("70B conversation", "mean TTFT", "mean_ttft", (3.87, 16.6, 2.38)),
                ("70B conversation", "mean TBT", "mean_tbt", (1.5, 3.5, 1.09)),
                ("70B toolagent", "mean TTFT", "mean_ttft", (1.85, 2.15, 1.62)),
                ("70B toolagent", "mean TBT", "mean_tbt", (1.12, 2.16, 1.16)),
            )
            for rival, paper in zip(("chunked 256", "NanoFlow", "SGLang-PD"), papers, strict=True)
        ],
        shown=("mean_ttft", "p99_ttft", "mean_tbt", "p99_tbt", "finished"),
        seeds=2,
    ),
    "muxwise-fig15": Experiment(
        where="MuxWise Fig. 15, Tab. 5",
        runs=beside(SEARCHED, TUNED, search=True),
        rows=[
            goodput("8B toolagent", "chunked", 2.6, ""),
            goodput("8B toolagent", "NanoFlow", 5.2, ""),
            goodput("8B toolagent", "SGLang-PD", 1.3, ""),
            goodput("70B toolagent", "chunked", 3.06, ""),
            goodput("70B toolagent", "SGLang-PD", 1.62, ""),
            *(
                Row(
                    what=f"tokens/s at goodput, {load}, {system}",
                    figure="tokens",
                    of=[f"{load}: {system}"],
                    paper=paper,
                    unit="tokens/s",
                )
                for load, system, paper in (
                    ("8B toolagent", "muxwise", 25397), ("70B toolagent", "muxwise", 7430),
                )
            ),
        ],
        shown=("goodput", "finished", "p99_ttft", "p99_tbt", "tokens"),
    ),
    "muxwise-fig16": Experiment(
        where="MuxWise Fig. 16",
        runs=beside(FAST, {"muxwise": "muxwise", "chunked 512": CHUNKED[512]}),
        rows=[
            ratio(list(FAST), "chunked 512", "p99_ttft", "P99 TTFT of chunked 512", 2.28, ""),
            ratio(list(FAST), "chunked 512", "p99_tbt", "P99 TBT of chunked 512, H100", 1.81, ""),
        ],
        shown=("p99_ttft", "p99_tbt", "finished"),
        seeds=1,
    ),
    "muxwise-fig17": Experiment(
        where="MuxWise Fig. 17",
        runs=beside(SYNTHETIC, TUNED, search=True),
        rows=[
            goodput(load, rival, paper, "")
            for load, papers in (
                ("ShareGPT", (1.9, 1.73, 1.46)),
                ("LooGLE", (1.71, 2.0, 2.0)),
                ("OpenThoughts", (2.0, 2.0, 2.0)),
            )
            for rival, paper in zip(("chunked", "NanoFlow", "SGLang-PD"), papers, strict=True)
        ],
        shown=("goodput", "finished", "p99_ttft", "p99_tbt"),
        seeds=1,
    ),
    "muxwise-4.3.1": Experiment(
        where="MuxWise §4.3.1, §6",
        runs=beside(
            ONE,
            {
                "muxwise": "muxwise",
                "two-stream": "two-stream",
                "temporal": "temporal",
                **{f"chunked {n}": system for n, system in CHUNKED.items()},
            },
            search=True,
        ),
        rows=[
            goodput("ShareGPT", "chunked", 1.2, ""),
            goodput("ShareGPT", "two-stream", 1.61, ""),
            goodput("ShareGPT", "temporal", 1.2, ""),
        ],
        shown=("goodput", "finished", "p99_ttft", "p99_tbt"),
    ),
    "muxwise-fig19": Experiment(
        where="MuxWise Fig. 19, Drift Fig. 12",
        runs=beside(
            {name: load for name, load in REAL.items() if "toolagent" in name},
            {
                "muxwise": "muxwise",
                "whole batches": "muxwise:layer_wise=false",
                "and blocking": "muxwise:layer_wise=false,query_sync=false",
            },
        ),
        rows=[
            Row(
                what=f"P99 TBT that {what} adds, {load}",
                figure="p99_tbt",
                of=[f"{load} toolagent: {of}"],
                over=[f"{load} toolagent: {base}"],
                minus=True,
                paper=paper,
                unit="ms",
                scale=1e3,
            )
            for load, what, of, base, paper in (
                ("8B", "launching whole batches", "whole batches", "muxwise", 10),
                ("8B", "blocking at their ends", "and blocking", "whole batches", 314),
                ("70B", "launching whole batches", "whole batches", "muxwise", 10),
                ("70B", "blocking at their ends", "and blocking", "whole batches", 672),
            )
        ],
        shown=("p99_tbt",),
        seeds=2,
    ),
    "muxwise-fig20": Experiment(
        where="MuxWise Fig. 20",
        runs={
            name: Run(Load(draw=mixed, rate=0.25, requests=400, **SEVENTY), system)
            for name, system in (
                ("muxwise", "muxwise"),
                ("no preemption", "muxwise:preemption=false"),
            )
        },
        rows=[
            Row(
                what="P99 TTFT a token without preemption over with it",
                figure="p99_ttft_per_token",
                of=["no preemption"],
                over=["muxwise"],
                paper=1.96,
            )
        ],
        shown=("p99_ttft_per_token", "finished"),
    ),
    "muxwise-artifact": Experiment(
        where="MuxWise, artifact A",
        runs=beside(
            ARTIFACT,
            {
                "muxwise": "muxwise",
                **{f"chunked {n}": f"chunked:token_budget={n}" for n in (256, 512, 1024)},
            },
        ),
        rows=[
            over(
                ["ShareGPT"], "muxwise", "chunked 512", figure, f"{what} of chunked 512",
                None, "the artifact's figure has no numbers in the text", less=True,
            )
            for what, figure in (("P99 TTFT", "p99_ttft"), ("P99 TBT", "p99_tbt"))
        ],
        shown=("answered", "p99_ttft", "p99_tbt", "finished"),
        seeds=1,
    ),
}  # fmt: skip
MISSING = {
    "MuxWise Fig. 14 to 17, LoongServe": "elastic sequence parallelism is not built: a launch has"
    " one group of ranks for its whole life"
}
