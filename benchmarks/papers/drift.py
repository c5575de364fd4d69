"""Drift: Figures 9 and 10, Table 3; its Figure 12 is MuxWise's Figure 19."""

import math
from dataclasses import replace

import msgspec
from muxwise import CHUNKED, REAL, SEARCHED, SEVENTY
from study import APART, Experiment, Load, Row, beside, names, over

from twolane.workload.spec import WorkloadSpec
from twolane.workload.traces import TraceRequest

PAIR = {"drift": "drift", "chunked 512": CHUNKED[512]}
"""The paper's best budget is 512."""
LARGE = {name: load for name, load in REAL.items() if name.startswith("70B")}
"""Loads for which Dynamo has as many GPUs for each phase; for 8B the paper gives it 2:1."""
QUESTIONS = 8
"""Questions on one document of LooGLE: it has 776 documents and 6,400 questions."""
BLOCK = 512
"""Tokens of a block that questions on one document share."""


def documents(count: int, seed: int, rate: float) -> list[TraceRequest]:
    """Return LooGLE's requests, of which several in a row ask about one document (Drift §5.1)."""
    drawn = WorkloadSpec(dataset="loogle", num_prompts=count, request_rate=rate, seed=seed).build()
    asked = []
    for i, request in enumerate(drawn):
        document = i // QUESTIONS
        tokens = drawn[document * QUESTIONS].prompt_tokens
        blocks = tokens // BLOCK
        own = 10**6 * (document + 1)
        ids = (*range(own, own + blocks), own + blocks + 1 + i)
        asked.append(
            msgspec.structs.replace(
                request, prompt_tokens=blocks * BLOCK + 64, hash_ids=ids, block_tokens=BLOCK
            )
        )
    return asked


SYNTHETIC = {
    "ShareGPT": Load(dataset="sharegpt-1k", rate=6.0, **SEVENTY),
    "LooGLE": Load(draw=documents, rate=0.8, **SEVENTY),
}
AT_ONCE = {name: replace(load, rate=math.inf, tbt=None) for name, load in SYNTHETIC.items()}


def ratio(
    loads: list[str], rival: str, figure: str, what: str, paper: float | None, why: str
) -> Row:
    """Return the row of a rival's latency over Drift's."""
    return over(loads, "drift", rival, figure, what, paper, why, less=True)


EXPERIMENTS = {
    "drift-fig9": Experiment(
        where="Drift Fig. 9",
        runs={**beside(REAL, PAIR), **beside(LARGE, {"Dynamo 1P1D": APART})},
        rows=[
            ratio(list(loads), rival, figure, f"{what} of {rival}", paper, "")
            for loads, rival, what, figure, paper in (
                (REAL, "chunked 512", "P99 TTFT", "p99_ttft", 2.62),
                (REAL, "chunked 512", "P99 TBT", "p99_tbt", 2.59),
                (LARGE, "Dynamo 1P1D", "P99 TTFT", "p99_ttft", 9.88),
                (LARGE, "Dynamo 1P1D", "P99 TBT", "p99_tbt", 2.67),
            )
        ],
        shown=("p99_ttft", "p99_tbt", "finished"),
        seeds=2,
    ),
    "drift-fig10": Experiment(
        where="Drift Fig. 10",
        runs=beside(SEARCHED, PAIR, search=True),
        rows=[
            over(
                [load], "drift", "chunked 512", "goodput",
                f"goodput over chunked 512, {load}", paper, "",
            )
            for load, paper in (("8B toolagent", 6.2), ("70B toolagent", 17.5))
        ],
        shown=("goodput", "finished", "p99_ttft", "p99_tbt"),
    ),
    "drift-tab3": Experiment(
        where="Drift Tab. 3",
        runs=beside(AT_ONCE, {"drift": "drift", "prefill-first": "prefill-first"}),
        rows=[
            *(
                over([load], "drift", "prefill-first", "throughput",
                     f"requests/s over prefill-first without bounds, {load}", paper, "")
                for load, paper in (("ShareGPT", 1.23), ("LooGLE", 1.14))
            ),
            *(
                Row(what=f"requests/s of prefill-first, {load}", figure="throughput",
                    of=names([load], "prefill-first"), paper=paper, unit="req/s")
                for load, paper in (("ShareGPT", 9.05), ("LooGLE", 1.94))
            ),
        ],
        shown=("throughput", "hit_rate"),
        seeds=1,
    ),
}  # fmt: skip
MISSING = {
    "Drift Fig. 11, 13": "the figures have no numbers in the text",
    "Drift Fig. 9 to 11, LoongServe": "elastic sequence parallelism is not built, and LoongServe"
    " keeps no prefixes",
    "Drift Fig. 9 to 11, Dynamo with 8B": "two GPUs of three prefill there, and the two phases have"
    " as many GPUs each in simulations",
}
