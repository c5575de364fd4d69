"""DuetServe: Figures 2, 6 and 7, Tables 2 and 3."""

from study import APART, Experiment, Load, Row, Run, beside, over

H100 = {"model": "qwen3-8b", "gpu": "h100"}
CHUNKED = "chunked:token_budget=8192"
SYSTEMS = {"DuetServe": "duetserve", "chunked 8192": CHUNKED, "prefill-first": "prefill-first"}
FIG6 = {
    "code 16/s": Load(dataset="azure-code", rate=16.0, **H100),
    "conversations 20/s": Load(dataset="azure-conv", rate=20.0, **H100),
    "Mooncake 5/s": Load(dataset="conversation", rate=5.0, **H100),
}
TWO = {
    "code 16/s": Load(
        model="qwen3-14b", gpu="h100", tp=2, dataset="azure-code", rate=16.0, requests=1000
    )
}
LENGTHS = {
    f"4096/{osl}": Load(lengths=(4096, osl), rate=rate, **H100)
    for osl, rate in ((64, 16.0), (1024, 12.0), (2048, 10.0))
}
"""More than is served, so that what is finished a second is the capacity."""
EVEN = {"model": "qwen3-8b", "gpu": "h100", "lengths": (8000, 200)}
EIGHT = {
    "32B on 8 H100": Load(
        model="qwen3-32b", gpu="h100", tp=8, dataset="azure-conv", rate=24.0, requests=1400
    )
}


def served(load: str, rival: str, paper: float | None, why: str, contradicts: str = "") -> Row:
    """Return the row of the requests/s that DuetServe serves over a rival's."""
    what = f"requests/s over {rival}, {load}"
    return over([load], "DuetServe", rival, "throughput", what, paper, why, contradicts=contradicts)


EXPERIMENTS = {
    "duetserve-fig2": Experiment(
        where="DuetServe Fig. 2",
        runs={
            "1P1D": Run(Load(tp=2, rate=10.0, **EVEN), APART),
            "replica": Run(Load(rate=5.0, **EVEN), CHUNKED),
        },
        rows=[
            Row(
                what="tokens/s of 1P1D over those of two replicas, beyond what is served",
                figure="tokens",
                of=["1P1D"],
                over=["replica"],
                scale=0.5,
                paper=0.5,
            )
        ],
    ),
    "duetserve-fig6": Experiment(
        where="DuetServe Fig. 6",
        runs=beside(FIG6, SYSTEMS),
        rows=[
            served("code 16/s", "prefill-first", 1.09, ""),
            served("Mooncake 5/s", "chunked 8192", 1.27, ""),
            over(
                ["code 16/s"], "DuetServe", "chunked 8192", "mean_tbt",
                "mean TBT of chunked 8192, code 16/s", 1.33, "", less=True,
            ),
            *(
                Row(
                    what=f"requests/s of {system}, {load}",
                    figure="throughput",
                    of=[f"{load}: {system}"],
                    paper=paper,
                    unit="req/s",
                )
                for load, system, paper in (
                    ("code 16/s", "DuetServe", 13.57),
                    ("code 16/s", "prefill-first", 12.43),
                    ("Mooncake 5/s", "DuetServe", 2.72),
                    ("Mooncake 5/s", "chunked 8192", 2.14),
                )
            ),
        ],
        shown=("mean_ttft", "mean_tbt", "p99_tbt", "throughput", "decode_units"),
    ),
    "duetserve-fig7": Experiment(
        where="DuetServe Fig. 7",
        runs=beside(TWO, {**SYSTEMS, "Dynamo 1P1D": APART}),
        rows=[
            served("code 16/s", "chunked 8192", None, "the paper says above 1"),
            served("code 16/s", "Dynamo 1P1D", None, "the paper says above 1"),
            over(
                ["code 16/s"], "DuetServe", "chunked 8192", "mean_tbt",
                "mean TBT of chunked 8192, 14B on two", 1.33, "", less=True,
            ),
        ],
        seeds=1,
    ),
    "duetserve-tab2": Experiment(
        where="DuetServe Tab. 2",
        runs=beside(LENGTHS, {name: SYSTEMS[name] for name in ("DuetServe", "chunked 8192")}),
        rows=[
            served(f"4096/{osl}", "chunked 8192", paper, "", contradicts)
            for osl, paper, contradicts in (
                (64, 1.28, "12.8 prompts of 4,096 tokens a second are 790 TFLOP/s of prefill"
                 " alone, 80 % of an H100's peak; no engine that computes the prompts serves them"),
                (1024, 1.11, "8.8 requests/s of 1,024 tokens at 55 ms are 496 in flight, whose KV"
                 " cache takes at least 299 GB on a GPU of 80 GB"),
                (2048, 1.04, "6.9 requests/s of 2,048 tokens at 45 ms are 636 in flight, whose KV"
                 " cache takes at least 384 GB on a GPU of 80 GB"),
            )
        ],
        shown=("throughput", "mean_tbt", "mean_ttft"),
        seeds=1,
    ),
    "duetserve-tab3": Experiment(
        where="DuetServe Tab. 3",
        runs=beside(
            EIGHT, {"DuetServe": "duetserve", "chunked 8192": CHUNKED, "Dynamo 4P4D": APART}
        ),
        rows=[
            served("32B on 8 H100", "Dynamo 4P4D", 1.41, ""),
            Row(
                what="requests/s of DuetServe, 32B on 8 H100",
                figure="throughput",
                of=["32B on 8 H100: DuetServe"],
                paper=8.02,
                unit="req/s",
            ),
        ],
        seeds=1,
    ),
}  # fmt: skip
MISSING = {
    "DuetServe Fig. 9": "the figure has no numbers in the text",
    "DuetServe Fig. 8": "the figure has no numbers: `twolane bench estimators` has the errors",
    "DuetServe Fig. 10": "a timeline of one iteration: a server's `--trace` shows it",
}
