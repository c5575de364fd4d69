"""Drift: Figures 9 to 11 and 13, Table 3; its Figure 12 is MuxWise's Figure 19."""

import math
from dataclasses import replace

from muxwise import FIXED, HALVES, REAL, REREAD, SEARCHED
from study import APART, Experiment, Load, Row, beside

PAIR = {"drift": "drift", "chunked 512": "chunked:token_budget=512"}
"""The paper's best budget is 512."""
SEVENTY = {name: load for name, load in REAL.items() if name.startswith("70B")}
"""Loads for which Dynamo has as many GPUs for each phase; for 8B the paper gives it 2:1."""
SYNTHETIC = {name: FIXED[name] for name in ("ShareGPT", "LooGLE")}
ALONE = {
    f"{name}, no sharing": replace(load, prefix_cache=False) for name, load in SYNTHETIC.items()
}
AT_ONCE = {
    name: replace(load, rate=math.inf, tbt=None, requests=2 * load.requests)
    for name, load in SYNTHETIC.items()
}

EXPERIMENTS = {
    "drift-fig9": Experiment(
        where="Drift Fig. 9",
        runs={**beside(REAL, PAIR), **beside(SEVENTY, {"Dynamo 1P1D": APART})},
        rows=[
            Row(
                what=f"{what} over {rival} (mean of all), {load}",
                figure=figure,
                of=f"{load}: {rival}",
                over=f"{load}: drift",
                paper=paper,
                why=why,
            )
            for loads, rival, what, figure, paper, why in (
                (REAL, "chunked 512", "P99 TTFT", "p99_ttft", 2.62, REREAD),
                (REAL, "chunked 512", "P99 TBT", "p99_tbt", 2.59, REREAD),
                (SEVENTY, "Dynamo 1P1D", "P99 TTFT", "p99_ttft", 9.88, HALVES),
                (SEVENTY, "Dynamo 1P1D", "P99 TBT", "p99_tbt", 2.67, HALVES),
            )
            for load in loads
        ],
        shown=("p99_ttft", "p99_tbt", "throughput"),
    ),
    "drift-fig10": Experiment(
        where="Drift Fig. 10",
        headline="peak throughput within the SLO 5.1 times the baselines' on average, at most 17.5",
        runs=beside(SEARCHED, PAIR, search=True),
        rows=[
            Row(
                what=f"goodput over chunked 512, {load}",
                figure="goodput",
                of=f"{load}: drift",
                over=f"{load}: chunked 512",
                paper=paper,
                why=REREAD,
            )
            for load, paper in (("8B toolagent", 6.2), ("70B toolagent", 17.5))
        ],
        shown=("goodput", "p99_ttft", "p99_tbt"),
    ),
    "drift-fig11": Experiment(
        where="Drift Fig. 11",
        runs=beside({**SYNTHETIC, **ALONE}, PAIR),
        rows=[
            Row(
                what=f"{what} of chunked 512 over Drift's, {load}",
                figure=figure,
                of=f"{load}: chunked 512",
                over=f"{load}: drift",
                why="the figure has no numbers in the text: alike on ShareGPT, with and without"
                " sharing",
            )
            for load in (*SYNTHETIC, *ALONE)
            for what, figure in (("P99 TTFT", "p99_ttft"), ("P99 TBT", "p99_tbt"))
        ],
        shown=("p99_ttft", "p99_tbt"),
    ),
    "drift-tab3": Experiment(
        where="Drift Tab. 3",
        runs=beside(AT_ONCE, {"drift": "drift", "prefill-first": "prefill-first"}),
        rows=[
            *(
                Row(
                    what=f"requests/s over prefill-first, no SLO, {load}",
                    figure="throughput",
                    of=f"{load}: drift",
                    over=f"{load}: prefill-first",
                    paper=paper,
                    why="without bounds a device that is full gains nothing from a split, and the"
                    " simulated prefill-first loses no time between passes",
                )
                for load, paper in (("ShareGPT", 1.23), ("LooGLE", 1.14))
            ),
            *(
                Row(
                    what=f"requests/s, {load}, {system}",
                    figure="throughput",
                    of=f"{load}: {system}",
                    paper=paper,
                    unit="req/s",
                    why="all requests are sent at once, and their documents share nothing here",
                )
                for load, own, rival in (("ShareGPT", 11.13, 9.05), ("LooGLE", 2.21, 1.94))
                for system, paper in (("drift", own), ("prefill-first", rival))
            ),
        ],
        shown=("throughput", "mean_ttft", "p99_tbt"),
    ),
    "drift-fig13": Experiment(
        where="Drift Fig. 13",
        runs=beside(
            {
                "8B on an A100": Load(
                    model="llama-3.1-8b",
                    dataset="azure-conv",
                    rate=5.0,
                    requests=80,
                    tbt=0.02,
                    levels=(24, 28, 36),
                )
            },
            {f"{n} groups": f"drift:groups={n}" for n in (3, 4, 5)},
        ),
        rows=[
            Row(
                what=f"P99 TBT, {n} groups",
                figure="p99_tbt",
                of=f"8B on an A100: {n} groups",
                unit="ms",
                scale=1e3,
                why="the figure has no numbers in the text: three are worst, four and five alike",
            )
            for n in (3, 4, 5)
        ],
        shown=("p99_tbt",),
    ),
}
MISSING = {
    "Drift Fig. 9 to 11, LoongServe": "elastic sequence parallelism is not built: a launch has one"
    " group of ranks for its whole life, and LoongServe keeps no prefixes",
    "Drift Fig. 9 to 11, Dynamo with 8B": "two GPUs of three prefill there, and the two phases have"
    " as many GPUs each in simulations",
}
