"""DuetServe: Figures 2, 6, 7, 8 and 9, Tables 2 and 3."""

import study
from device import ask, roofline_signs
from study import APART, Experiment, Load, Row, Run, beside

CHEAP = "chunks cost the simulated device less than their engine, whose host time it has not"
H100 = {"model": "qwen3-8b", "gpu": "h100"}
RATES = {"azure-code": (16, 8), "azure-conv": (20, 10), "conversation": (5, 3)}
"""Requests/s of Figure 6 that are tried; the first of each is beyond what is served."""
NAMES = {"azure-code": "code", "azure-conv": "conversations", "conversation": "Mooncake"}
FIG6 = {
    f"{NAMES[dataset]} {rate}/s": Load(
        dataset=dataset,
        rate=float(rate),
        requests=max(60, 14 * rate) if dataset != "conversation" else 80,
        **H100,
    )
    for dataset, rates in RATES.items()
    for rate in rates
}
SYSTEMS = {
    "DuetServe": "duetserve",
    "chunked 8192": "chunked:token_budget=8192",
    "prefill-first": "prefill-first",
}
BOTH = {**SYSTEMS, "auto": "auto"}
TWO = {
    f"code {rate}/s": Load(
        model="qwen3-14b",
        gpu="h100",
        tp=2,
        dataset="azure-code",
        rate=float(rate),
        requests=16 * rate,
    )
    for rate in (10, 16)
}
PLANNED = (
    "its planner moves GPUs between the phases, 40 s each time; here four ranks serve each phase"
)
HALVES = "one half idles whenever the load does not split as the GPUs do, as in the paper"
FIG2 = (4, 7, 10)
"""Requests/s of Figure 2: where TTFT rises with a GPU for each phase, where two replicas are full,
and more than both serve."""
EVEN = {"model": "qwen3-8b", "gpu": "h100", "lengths": (8000, 200)}


def fig2() -> dict[str, Run]:
    """A GPU for each phase, and one of two replicas of chunked prefill with half of the load."""
    runs = {}
    for rate in FIG2:
        apart = Load(tp=2, rate=rate, requests=20 * rate, **EVEN)
        replica = Load(rate=rate / 2, requests=10 * rate, **EVEN)
        runs[f"1P1D at {rate}/s"] = Run(apart, APART)
        runs[f"replica at {rate}/s"] = Run(replica, "chunked:token_budget=8192")
    return runs


LENGTHS = {
    f"4096/{osl}": Load(lengths=(4096, osl), rate=rate, requests=count, whole=400, **H100)
    for osl, rate, count in ((64, 16.0, 200), (1024, 10.0, 200), (2048, 8.0, 160))
}
SPLITS = {
    "DuetServe": "duetserve",
    **{f"Sd{d}-Sp{66 - d}": f"duetserve:decode_units={2 * d}" for d in (22, 33, 44)},
    "chunked 8192": "chunked:token_budget=8192",
}
"""The paper counts pairs of SMs; here the nearest levels are taken."""


def over(
    load: str, figure: str, what: str, paper: float | None, other: str, why: str, more: bool = True
) -> Row:
    """DuetServe's figure over another system's, or the other way round."""
    return study.over(load, figure, what, paper, why, own="DuetServe", rival=other, more=more)


EXPERIMENTS = {
    "duetserve-fig2": Experiment(
        where="DuetServe Fig. 2",
        runs=fig2(),
        rows=[
            *(
                Row(
                    what=f"tokens/s of 1P1D over two replicas, at {rate}/s",
                    figure="tokens",
                    of=f"1P1D at {rate}/s",
                    over=f"replica at {rate}/s",
                    scale=0.5,
                    paper=0.5 if rate == FIG2[-1] else None,
                    why="the paper says less than half; one GPU prefills half as fast as two",
                )
                for rate in FIG2
            ),
            *(
                Row(
                    what=f"mean {name} at {rate}/s, {system}",
                    figure=figure,
                    of=f"{run} at {rate}/s",
                    unit="ms",
                    scale=1e3,
                    why="in the paper TTFT of 1P1D rises above 4/s and two replicas fill at 7/s",
                )
                for rate in FIG2
                for name, figure in (("TTFT", "mean_ttft"), ("TBT", "mean_tbt"))
                for system, run in (("1P1D", "1P1D"), ("two replicas", "replica"))
            ),
        ],
        shown=("mean_ttft", "mean_tbt", "tokens"),
    ),
    "duetserve-fig6": Experiment(
        where="DuetServe Fig. 6",
        headline="request throughput up to 1.3 times the baselines'",
        runs=beside(FIG6, BOTH),
        rows=[
            over(
                "code 16/s", "throughput", "requests/s over prefill-first", 1.09, "prefill-first",
                "the simulated prefill-first waits for no scheduler between its passes",
            ),
            over("code 16/s", "throughput", "requests/s over chunked 8,192", None,
                 "chunked 8192", CHEAP),
            over("Mooncake 5/s", "throughput", "requests/s over chunked 8,192", 1.27,
                 "chunked 8192", CHEAP),
            over("conversations 20/s", "throughput", "requests/s over chunked 8,192", None,
                 "chunked 8192", CHEAP),
            over("code 16/s", "mean_tbt", "mean TBT of chunked 8,192 over its own", 1.33,
                 "chunked 8192", "the paper says above 200 against below 150 ms", more=False),
            Row(
                what="requests/s, code at 16/s",
                figure="throughput",
                of="code 16/s: DuetServe",
                paper=13.57,
                unit="req/s",
                why="prefill waits where decode takes longer than predicted",
            ),
            Row(
                what="requests/s, prefill-first, code at 16/s",
                figure="throughput",
                of="code 16/s: prefill-first",
                paper=12.43,
                unit="req/s",
                why="runs are short, and a queue that has built up is served after the arrivals",
            ),
            Row(
                what="requests/s, Mooncake at 5/s",
                figure="throughput",
                of="Mooncake 5/s: DuetServe",
                paper=2.72,
                unit="req/s",
                why="80 requests are drawn with reuse that the paper's sample may not have",
            ),
            Row(
                what="requests/s, chunked 8,192, Mooncake at 5/s",
                figure="throughput",
                of="Mooncake 5/s: chunked 8192",
                paper=2.14,
                unit="req/s",
                why="the same",
            ),
        ],
        shown=("mean_ttft", "mean_tbt", "p99_tbt", "throughput"),
        single=True,
    ),
    "duetserve-fig7": Experiment(
        where="DuetServe Fig. 7",
        runs=beside(TWO, {**SYSTEMS, "Dynamo 1P1D": APART}),
        rows=[
            over("code 16/s", "throughput", "requests/s over chunked 8,192 (above 1 in the paper)",
                 None, "chunked 8192", CHEAP),
            over("code 16/s", "mean_tbt", "mean TBT of chunked 8,192 over its own", 1.33,
                 "chunked 8192", "the paper says above 200 against below 150 ms", more=False),
            over("code 16/s", "throughput", "requests/s over Dynamo 1P1D (above 1 in the paper)",
                 None, "Dynamo 1P1D", HALVES),
            over("code 16/s", "mean_tbt", "mean TBT of Dynamo 1P1D over its own (below 1 there)",
                 None, "Dynamo 1P1D", HALVES, more=False),
        ],
        shown=("mean_ttft", "mean_tbt", "throughput"),
    ),
    "duetserve-fig8": Experiment(
        where="DuetServe Fig. 8",
        runs={"Qwen3-8B on an H100": ask(roofline_signs, "qwen3-8b", "h100")},
        rows=[
            Row(
                what=f"prediction over truth - 1, {case}",
                figure=case,
                of="Qwen3-8B on an H100",
                unit="%",
                scale=100,
                why="the figure has no numbers in the text: close for prefill, and above 0"
                " (conservative) for decode on few SMs",
            )
            for case in (
                *(f"prefill, {part} SMs" for part in ("few", "half", "all")),
                *(f"decode, {part} SMs" for part in ("few", "half", "all")),
            )
        ],
        single=False,
    ),
    "duetserve-fig9": Experiment(
        where="DuetServe Fig. 9",
        runs=beside(
            {
                NAMES[dataset]: Load(dataset=dataset, rate=24.0, requests=150, **H100)
                for dataset in ("azure-code", "azure-conv")
            },
            SPLITS,
        ),
        rows=[
            Row(
                what=f"requests/s over {split}, {load} (above 1 in the paper)",
                figure="throughput",
                of=f"{load}: DuetServe",
                over=f"{load}: {split}",
                why="a fixed split pays nothing for predictions that are off",
            )
            for load in ("code", "conversations")
            for split in ("Sd22-Sp44", "Sd33-Sp33", "Sd44-Sp22")
        ],
        shown=("throughput", "p99_tbt"),
        single=True,
    ),
    "duetserve-tab2": Experiment(
        where="DuetServe Tab. 2",
        runs=beside(LENGTHS, {name: SYSTEMS[name] for name in ("DuetServe", "chunked 8192")}),
        rows=[
            *(
                over(f"4096/{osl}", "throughput", "requests/s over chunked 8,192", paper,
                     "chunked 8192", CHEAP)
                for osl, paper in ((64, 1.28), (1024, 1.11), (2048, 1.04))
            ),
            *(
                Row(
                    what=f"mean TBT, 4096/{osl}, {system}",
                    figure="mean_tbt",
                    of=f"4096/{osl}: {system}",
                    paper=paper,
                    unit="ms",
                    scale=1e3,
                    why="the paper does not say how many requests are in flight at its capacity",
                )
                for osl, vllm, own in ((64, 170, 105), (1024, 55, 50), (2048, 45, 44))
                for system, paper in (("chunked 8192", vllm), ("DuetServe", own))
            ),
        ],
        shown=("throughput", "mean_tbt", "mean_ttft"),
        single=True,
    ),
    "duetserve-tab3": Experiment(
        where="DuetServe Tab. 3",
        runs=beside(
            {
                "32B on 8 H100": Load(
                    model="qwen3-32b",
                    gpu="h100",
                    tp=8,
                    dataset="azure-conv",
                    rate=24.0,
                    requests=300,
                )
            },
            {
                "DuetServe": "duetserve",
                "chunked 8192": "chunked:token_budget=8192",
                "Dynamo 4P4D": APART,
            },
        ),
        rows=[
            over("32B on 8 H100", "throughput", "requests/s over Dynamo 4P4D", 1.41,
                 "Dynamo 4P4D", PLANNED),
            *study.figures_of("32B on 8 H100: Dynamo 4P4D", "Dynamo 4P4D", (
                ("requests/s", "throughput", 5.69, "req/s", 1.0, PLANNED),
                ("mean TBT", "mean_tbt", 23.1, "ms", 1e3, PLANNED),
            )),
            *study.figures_of("32B on 8 H100: DuetServe", "DuetServe", (
                ("requests/s", "throughput", 8.02, "req/s", 1.0,
                 "the paper serves the whole trace, and its eight ranks share one CPU's launches"),
                ("mean TTFT", "mean_ttft", 58.9, "s", 1.0,
                 "300 requests build no queue as long as the trace's"),
                ("mean TBT", "mean_tbt", 104.7, "ms", 1e3, "fewer requests are in flight"),
                ("GPU utilisation", "utilisation", 93.5, "%", 100.0,
                 "here SMs that a launch holds count as used"),
            )),
        ],
        shown=("throughput", "mean_ttft", "mean_tbt"),
    ),
}  # fmt: skip
MISSING = {
    "DuetServe Fig. 10": "a timeline of one iteration: a server's `--trace` shows it",
}
