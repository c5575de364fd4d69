"""Bullet: Figures 5, 9 to 11, 15 to 18, 20 to 23."""

import study
from device import ask, chunk_costs, sample_counts
from study import Experiment, Load, Row, beside

IDLE = "in the paper chunked prefill does not keep up and its queue grows; here both keep up"
CHEAP = "small chunks cost the simulated device less than the paper finds"
SLOS = {"azure-code": (0.0015, 0.2), "sharegpt": (0.003, 0.15), "arxiv-sum": (0.0015, 0.175)}
"""TTFT for each prompt token and TPOT in seconds (Table 4)."""
NAMES = {"azure-code": "code", "sharegpt": "ShareGPT", "arxiv-sum": "arXiv"}
COUNTS = (2, 8, 32)
"""Numbers of samples that Bullet's estimator is calibrated with."""
EIGHT = {"model": "llama-3.1-8b"}


def load(dataset: str, rate: float, requests: int, **named: object) -> Load:
    """A workload of Table 4."""
    return Load(dataset=dataset, rate=rate, requests=requests, kept=SLOS[dataset], **named)  # type: ignore[arg-type]


def bullet(dataset: str, settings: str = "") -> str:
    """Bullet under the bounds of Table 4."""
    ttft, tpot = SLOS[dataset]
    return f"bullet:ttft_per_token={ttft},tpot_seconds={tpot}{settings}"


def runs(loads: dict[str, Load], systems: dict[str, str]) -> dict:
    """Every system under every load; Bullet has the load's bounds."""
    found = {}
    for name, one in loads.items():
        own = {
            system: settings if settings.startswith("chunked") else bullet(one.dataset, settings)
            for system, settings in systems.items()
        }
        found |= beside({name: one}, own)
    return found


def over(
    load: str, figure: str, what: str, paper: float | None, why: str, budget: int, more: bool
) -> Row:
    """Bullet's figure over chunked prefill's, or the other way round."""
    return study.over(
        load, figure, what, paper, why, own="Bullet", rival=f"chunked {budget}", more=more
    )


CHUNKED = {f"chunked {n}": f"chunked:token_budget={n}" for n in (1024, 2048)}
NANO = {"NanoFlow": "chunked:token_budget=1024,nano_batches=2"}
INTENSE = {"by intensity": ",by_intensity=true,max_batch_tokens=8192"}
FIG15 = {
    "ShareGPT 20/s": load("sharegpt", 20.0, 300, **EIGHT),
    "code 5/s": load("azure-code", 5.0, 200, **EIGHT),
    "arXiv 1.5/s": load("arxiv-sum", 1.5, 100, **EIGHT),
}
FULL = {
    "ShareGPT, full": load("sharegpt", 40.0, 400, **EIGHT),
    "code, full": load("azure-code", 12.0, 200, **EIGHT),
    "arXiv, full": load("arxiv-sum", 4.0, 100, **EIGHT),
}
SEVENTY = {"model": "llama-3.1-70b", "tp": 8, "link": 20e9}
FIG17 = {
    "ShareGPT 3/s": load("sharegpt", 3.0, 120, **SEVENTY),
    "code 0.5/s": load("azure-code", 0.5, 40, **SEVENTY),
}
FIG18 = {
    "8B on an H100": load("azure-code", 12.0, 200, model="llama-3.1-8b", gpu="h100"),
    "235B in FP8 on 8 H20": load(
        "azure-code",
        4.0,
        120,
        model="qwen3-235b-a22b",
        gpu="h20",
        tp=8,
        link=400e9,
        quantization="fp8",
    ),
}
OVERLAP = (
    "kernels that overlap disturb each other and the host launches twice as many: not simulated"
)
NANO_OVER = (
    ("ShareGPT 20/s", "mean_ttft", "mean TTFT of NanoFlow over Bullet's", 2.37, False),
    ("ShareGPT 20/s", "mean_tpot", "mean TPOT of NanoFlow over Bullet's", 0.86, False),
    ("ShareGPT, full", "throughput", "requests/s over NanoFlow", 1.25, True),
    ("code, full", "throughput", "requests/s over NanoFlow", None, True),
    ("arXiv, full", "throughput", "requests/s over NanoFlow", None, True),
)
"""Load, figure and its name, the paper's ratio, and whether more is better."""
SHEET = "the H20 is simulated from its data sheet, with the H200's kernels"
LESS = "lower than 1 where chunked prefill keeps up"
FIG18_OVER = (
    ("8B on an H100", "mean_e2e_per_token", "latency a token", 1024, None, LESS),
    ("8B on an H100", "mean_e2e_per_token", "latency a token", 2048, None, LESS),
    ("235B in FP8 on 8 H20", "mean_e2e_per_token", "latency a token", 2048, 17.7, IDLE),
    ("235B in FP8 on 8 H20", "mean_ttft", "mean TTFT", 2048, 16.2, IDLE),
    ("235B in FP8 on 8 H20", "mean_tpot", "mean TPOT", 2048, 4.2, IDLE),
)
"""Load, figure and its name, budget of chunked prefill, the paper's ratio to vLLM, and why ours may
differ."""
HALVES = {
    "Bullet": "",
    "Naive": ",partition=false,schedule=false",
    "w/Partition": ",schedule=false",
    "w/Scheduler": ",partition=false",
    # Of the paper's fixed counts those nearest to what is on offer.
    **{f"SM-{units}": f",prefill_units={units}" for units in (108, 96, 80)},
    "chunked 1024": "chunked:token_budget=1024",
}
CASES = ("solo decode", "co-run decode", "co-run prefill")

EXPERIMENTS = {
    "bullet-fig5": Experiment(
        where="Bullet Fig. 5",
        runs={
            f"{n // 1024}K chunks": ask(chunk_costs, "llama-3.1-8b", "a100-80gb", 16_384, n)
            for n in (1024, 2048)
        },
        rows=[
            Row(
                what=f"{what} of 16K tokens, 1K chunks",
                figure=figure,
                of="1K chunks",
                paper=paper,
                why=CHEAP,
            )
            for what, figure, paper in (
                ("last chunk over the first", "last over first", 1.9),
                ("all chunks over the prompt in one pass", "chunked over whole", 1.13),
            )
        ],
    ),
    "bullet-fig9": Experiment(
        where="Bullet Fig. 9 to 11",
        runs={"8B on an A100": ask(sample_counts, "llama-3.1-8b", "a100-80gb", COUNTS)},
        rows=[
            Row(
                what=f"mean error, {case}, {count}",
                figure=f"{case}, {count}",
                of="8B on an A100",
                unit="%",
                scale=100,
                why="the figures have no numbers in the text: two samples suffice for decode alone,"
                " and ignoring contention is far off for decode",
            )
            for case in CASES
            for count in (*(f"{n} samples" for n in COUNTS), "all samples", "contention ignored")
        ],
    ),
    "bullet-fig15": Experiment(
        where="Bullet Fig. 15, 16",
        headline="throughput 1.26 times the baselines' on average, at most 1.55 times",
        runs=runs({**FIG15, **FULL}, {"Bullet": "", **INTENSE, **CHUNKED, **NANO}),
        rows=[
            *(
                over(name, "mean_ttft", "mean TTFT of chunked 1,024 over Bullet's (mean of all)",
                     13.5, IDLE, 1024, more=False)
                for name in FIG15
            ),
            *(
                over(name, "mean_tpot", "mean TPOT of chunked 1,024 over Bullet's (mean of all)",
                     0.94, IDLE, 1024, more=False)
                for name in FIG15
            ),
            over("ShareGPT 20/s", "mean_ttft", "mean TTFT of chunked 2,048 over Bullet's", 4.2,
                 IDLE, 2048, more=False),
            over("ShareGPT 20/s", "mean_tpot", "mean TPOT of chunked 2,048 over Bullet's", 1.20,
                 IDLE, 2048, more=False),
            *(
                over(name, "throughput", "requests/s over chunked 1,024 (mean of all)", 1.09,
                     CHEAP, 1024, more=True)
                for name in FULL
            ),
            *(
                study.over(
                    name, figure, what, paper, OVERLAP, own="Bullet", rival="NanoFlow", more=more
                )
                for name, figure, what, paper, more in NANO_OVER
            ),
            *(
                study.over(
                    name, "throughput", "requests/s of NanoFlow over chunked 1,024", None,
                    "not in the paper's text: each half reads the weights, and overlap hides"
                    " little of a pass of 1,024 tokens",
                    own="NanoFlow", rival="chunked 1024", more=True,
                )
                for name in FULL
            ),
            *(
                study.over(
                    name, figure, f"{what} of Bullet by intensity over by 2,048 tokens", None,
                    "not in the paper, which batches by intensity (line 12 of its algorithm)",
                    own="by intensity", rival="Bullet", more=True,
                )
                for loads, figure, what in (
                    (FIG15, "mean_ttft", "mean TTFT"), (FULL, "throughput", "requests/s"),
                )
                for name in loads
            ),
            *(
                Row(
                    what=f"{what} of Bullet, ShareGPT 20/s",
                    figure=figure,
                    of="ShareGPT 20/s: Bullet",
                    paper=paper,
                    unit="s",
                    why="the paper gives 0.16 s here and 1.8 s for the same rate elsewhere",
                )
                for what, figure, paper in (
                    ("mean TTFT", "mean_ttft", 0.16), ("P90 TTFT", "p90_ttft", 0.31),
                )
            ),
        ],
        shown=("mean_ttft", "p90_ttft", "mean_tpot", "throughput", "attainment"),
        single=True,
    ),
    "bullet-fig17": Experiment(
        where="Bullet Fig. 17",
        runs=runs(FIG17, {"Bullet": "", "chunked 2048": CHUNKED["chunked 2048"]}),
        rows=[
            Row(
                what=f"mean latency a token, {name}, {system}",
                figure="mean_e2e_per_token",
                of=f"{name}: {system}",
                paper=paper,
                unit="ms",
                scale=1e3,
                why="theirs share 20 GB/s (Table 3) in a way that is not described",
            )
            for name, own, rival in (("ShareGPT 3/s", 173, 207), ("code 0.5/s", 203, None))
            for system, paper in (("Bullet", own), ("chunked 2048", rival))
        ],
        shown=("mean_ttft", "mean_tpot", "mean_e2e_per_token"),
    ),
    "bullet-fig18": Experiment(
        where="Bullet Fig. 18",
        runs=runs(FIG18, {"Bullet": "", **CHUNKED}),
        rows=[
            *(
                over(name, figure, f"{what} of chunked {n} over Bullet's", paper, why, n, False)
                for name, figure, what, n, paper, why in FIG18_OVER
            ),
            *study.figures_of("235B in FP8 on 8 H20: Bullet", "235B in FP8 on 8 H20, Bullet", (
                ("mean latency a token", "mean_e2e_per_token", 110, "ms", 1e3, SHEET),
                ("mean TTFT", "mean_ttft", 1.4, "s", 1, SHEET),
                ("mean TPOT", "mean_tpot", 45, "ms", 1e3, SHEET),
            )),
        ],
        shown=("mean_ttft", "mean_tpot", "mean_e2e_per_token"),
    ),
    "bullet-fig20": Experiment(
        where="Bullet Fig. 20",
        runs=runs({"code 5/s": FIG15["code 5/s"]}, {"Bullet": "", **CHUNKED}),
        rows=[
            over("code 5/s", "mean_ttft", "mean TTFT of chunked 2,048 over Bullet's", 9.15, IDLE,
                 2048, more=False),
            over("code 5/s", "mean_tpot", "mean TPOT of chunked 2,048 over Bullet's", 1.33, IDLE,
                 2048, more=False),
            Row(
                what="mean SMs of prefill while it runs",
                figure="prefill_units",
                of="code 5/s: Bullet",
                unit="of 108 SMs",
                why="the figure is a timeline; `twolane bench report` draws a server's",
            ),
        ],
        shown=("mean_ttft", "mean_tpot", "prefill_units", "decode_units"),
        single=True,
    ),
    "bullet-fig21": Experiment(
        where="Bullet Fig. 21",
        runs=runs({"ShareGPT 20/s": FIG15["ShareGPT 20/s"]}, {"Bullet": "", **CHUNKED}),
        rows=[
            Row(
                what="SMs in use, Bullet",
                figure="utilisation",
                of="ShareGPT 20/s: Bullet",
                paper=86.2,
                unit="%",
                scale=100,
                why="SMs count as used while a launch holds them, and twice where lanes overlap",
            ),
            over("ShareGPT 20/s", "utilisation", "SMs in use over chunked 2,048", 1.149,
                 "a hybrid pass holds all SMs, so chunked prefill idles only between passes", 2048,
                 more=True),
            over("ShareGPT 20/s", "mean_e2e", "mean latency of chunked 2,048 over Bullet's", 1.206,
                 IDLE, 2048, more=False),
        ],
        shown=("utilisation", "mean_e2e"),
    ),
    "bullet-fig22": Experiment(
        where="Bullet Fig. 22, 23",
        runs=runs({name: FIG15[name] for name in ("ShareGPT 20/s", "code 5/s")}, HALVES),
        rows=[
            Row(
                what="mean TTFT of SM-108 over Bullet's, code",
                figure="mean_ttft",
                of="code 5/s: SM-108",
                over="code 5/s: Bullet",
                paper=1.2,
                why="lanes that overlap cost prefill far more here",
            ),
            *(
                Row(
                    what=f"attainment, {name}, {system}",
                    figure="attainment",
                    of=f"{name}: {system}",
                    unit="%",
                    scale=100,
                    why="the figures have no numbers in the text: Bullet is best, SM-108 13 % less",
                )
                for name in ("ShareGPT 20/s", "code 5/s")
                for system in HALVES
            ),
        ],
        shown=("mean_ttft", "mean_tpot", "attainment"),
        single=True,
    ),
}  # fmt: skip
MISSING = {
    "Bullet Fig. 15, 16, vLLM": "its budget of 1,024 is `chunked` here",
    "Bullet Fig. 18, 1P1D and 3P1D": "those are over several servers, and simulated is one",
    "Bullet Fig. 19": "its trace is not public",
    "Bullet Tab. 5": "costs of the host: `twolane bench estimators` and benchmarks/engine.py",
}
