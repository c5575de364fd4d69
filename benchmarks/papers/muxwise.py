"""MuxWise: Figures 3, 5, 6, 14 to 20, section 4.3.1, Tables 3 to 5, and its artifact."""

import msgspec
from device import ask, budgets, demand, hit_rates
from study import APART, Experiment, Load, Row, Run, beside

from twolane.workload.spec import WorkloadSpec
from twolane.workload.traces import TraceRequest

SMALL_CHUNKS = (
    "passes of 256 tokens over short contexts are simulated 2.5 times cheaper than theirs"
)
REREAD = (
    "every chunk attends again to the tens of thousands of tokens that a prompt reuses, so chunked"
    " prefill keeps up at none of the rates tried"
)
HALVED = (
    "chunked prefill keeps up neither with whole passes nor with halves here; what these lose since"
    " they read the weights twice, they gain by overlap, whose own costs are not simulated"
)
TWICE = (
    "halves of passes of 256 tokens and of decode steps read the weights twice, here as there; what"
    " kernels that overlap lose is not simulated"
)
BURSTS = "the paper replays a bursty trace that it scaled down; here arrivals are Poisson"
HALVES = "both halves keep every page here, so none is sent back, and the link is theirs alone"
FASTER = "the paper names neither rates nor its budget on these GPUs"

REUSED = (0, 8192, 16_384, 32_768)
"""Reused tokens of Figure 3 that are tried."""
A100 = {"gpu": "a100-80gb", "tp": 8}
EIGHT = {"model": "llama-3.1-8b", "tbt": 0.05, **A100}
SEVENTY = {"model": "llama-3.1-70b", "tbt": 0.1, **A100}
REAL = {
    "8B conversation": Load(dataset="conversation", rate=4.0, requests=120, **EIGHT),
    "8B toolagent": Load(dataset="toolagent", rate=8.0, requests=160, **EIGHT),
    "70B conversation": Load(dataset="conversation", rate=0.5, requests=60, **SEVENTY),
    "70B toolagent": Load(dataset="toolagent", rate=1.0, requests=80, **SEVENTY),
}
CHUNKED = "chunked:token_budget=256"
PAIR = {"muxwise": "muxwise", "chunked 256": CHUNKED}
TUNED = {"muxwise": "muxwise", **{f"chunked {n}": f"chunked:token_budget={n}" for n in (256, 512)}}
CHUNKS = ("chunked 256", "chunked 512")
PD = {"SGLang-PD": APART}
NANO = {"NanoFlow": "chunked:token_budget=256,nano_batches=2"}


def ratios(
    loads: dict[str, Load],
    paper: float | None,
    figure: str,
    what: str,
    why: str,
    rival: str = "chunked 256",
) -> list[Row]:
    """One row a load: another system's latency over MuxWise's."""
    return [
        Row(
            what=f"{what}, {load}",
            figure=figure,
            of=f"{load}: {rival}",
            over=f"{load}: muxwise",
            paper=paper,
            why=why,
        )
        for load in loads
    ]


WHY = {"chunked 256": REREAD, "NanoFlow": HALVED, "SGLang-PD": HALVES}
"""Why a baseline's figures differ from the paper's."""


def others(load: str, figures: dict[str, tuple[float, float, float, float, float]]) -> list[Row]:
    """Tables 3 and 4: figure name, scale, and the paper's values."""
    return [
        Row(
            what=f"{figure.replace('_', ' ')}, {system}",
            figure=figure,
            of=f"{load}: {system}",
            paper=value,
            unit="s" if scale == 1 else "ms",
            scale=scale,
            why=WHY.get(system, BURSTS),
        )
        for figure, (scale, *papers) in figures.items()
        for system, value in zip(("muxwise", "chunked 256", *NANO, *PD), papers, strict=True)
    ]


def goodput(load: str, rivals: tuple[str, ...], paper: float | None, why: str) -> list[Row]:
    """The highest rate over those of other systems."""
    return [
        Row(
            what=f"goodput over {rival}, {load}",
            figure="goodput",
            of=f"{load}: muxwise",
            over=f"{load}: {rival}",
            paper=paper,
            why=why,
        )
        for rival in rivals
    ]


def mixed(count: int, seed: int) -> list[TraceRequest]:
    """ShareGPT and LooGLE, half each (§4.4.3), 0.25 a second: at the paper's 0.5 the simulated GPUs
    are full, and the queue decides."""
    short, long = (
        WorkloadSpec(
            dataset=name, num_prompts=count // 2, request_rate=0.125, seed=seed + i
        ).build()
        for i, name in enumerate(("sharegpt-1k", "loogle"))
    )
    # Blocks are numbered from 0 in both: LooGLE's documents must not pass for ShareGPT's prompts.
    own = [msgspec.structs.replace(request, hash_ids=()) for request in short]
    return sorted([*own, *long], key=lambda request: request.arrival or 0.0)


SEARCHED = {
    "8B toolagent": Load(dataset="toolagent", rate=9.0, requests=300, **EIGHT),
    "70B toolagent": Load(dataset="toolagent", rate=0.9, requests=80, whole=600, **SEVENTY),
}
SYNTHETIC = {
    "ShareGPT": Load(dataset="sharegpt-1k", rate=12.0, requests=300, **SEVENTY),
    "LooGLE": Load(dataset="loogle", rate=0.35, requests=40, whole=300, **SEVENTY),
    "OpenThoughts": Load(dataset="openthoughts", rate=1.5, requests=60, whole=300, **SEVENTY),
}
FIXED = {
    "ShareGPT": Load(dataset="sharegpt-1k", rate=6.0, requests=150, **SEVENTY),
    "LooGLE": Load(dataset="loogle", rate=0.2, requests=30, **SEVENTY),
    "OpenThoughts": Load(dataset="openthoughts", rate=0.5, requests=40, **SEVENTY),
}
H100S = {
    "8B on 8 H100": Load(
        model="llama-3.1-8b",
        tbt=0.05,
        gpu="h100",
        tp=8,
        dataset="toolagent",
        rate=16.0,
        requests=200,
    ),
    "70B on 8 H100": Load(
        model="llama-3.1-70b",
        tbt=0.1,
        gpu="h100",
        tp=8,
        dataset="toolagent",
        rate=2.5,
        requests=120,
    ),
    "235B on 8 H200": Load(
        model="qwen3-235b-a22b",
        tbt=0.1,
        gpu="h200",
        tp=8,
        dataset="toolagent",
        rate=3.0,
        requests=120,
    ),
}
H200 = {"model": "codellama-34b", "gpu": "h200", "tbt": 0.1}
ARTIFACT = {
    "ShareGPT": Load(dataset="sharegpt-1k", rate=8.0, requests=240, **H200),
    "LooGLE": Load(dataset="loogle", rate=0.3, requests=40, whole=200, **H200),
}

EXPERIMENTS = {
    "muxwise-fig3": Experiment(
        where="MuxWise Fig. 3",
        runs={"70B on 8 A100": ask(demand, "llama-3.1-70b", "a100-80gb", 8, REUSED)},
        rows=[
            Row(
                what=f"GPUs that {phase} needs over {reused // 1024}K reused tokens",
                figure=f"{phase} {reused}",
                of="70B on 8 A100",
                unit="GPUs",
                why="the figure has no numbers in the text; both say that prefill's need grows with"
                " reuse and decode's hardly does",
            )
            for phase in ("prefill", "decode")
            for reused in REUSED
        ],
    ),
    "muxwise-fig5": Experiment(
        where="MuxWise Fig. 5",
        runs={"conversation": ask(hit_rates, "conversation", 6000, "llama-3.1-70b", (0.2, 0.4, 1))},
        rows=[
            Row(
                what="hit rate with all that the cache can use",
                figure="best",
                of="conversation",
                paper=36.6,
                unit="%",
                scale=100,
                why="requests are drawn with the trace's mean reuse, half as many as it has",
            ),
            Row(
                what="hit rate of a pool of 0.2 TB",
                figure="0.2 TB",
                of="conversation",
                paper=4.2,
                unit="%",
                scale=100,
                why="the paper does not name the size behind its lowest value; here most"
                " turns follow within minutes",
            ),
            Row(
                what="memory for the best hit rate",
                figure="enough_tb",
                of="conversation",
                paper=3.3,
                unit="TB",
                why="the draw's turns of one conversation lie further apart than the trace's",
            ),
        ],
    ),
    "muxwise-fig6": Experiment(
        where="MuxWise Fig. 6",
        runs={"70B on 8 A100": ask(budgets, "llama-3.1-70b", "a100-80gb", 8)},
        rows=[
            Row(
                what=f"TBT at a budget of {n}",
                figure=f"budget {n}",
                of="70B on 8 A100",
                paper=paper,
                unit="ms",
                scale=1e3,
                why=why,
            )
            for n, paper, why in (
                (4096, 505, "all-reduces and host time of eight ranks are only in part modelled"),
                (512, None, "in the paper above 100 ms: " + SMALL_CHUNKS),
                (256, None, "in the paper the largest budget within 100 ms"),
            )
        ],
    ),
    "muxwise-fig14": Experiment(
        where="MuxWise Fig. 14",
        runs=beside(REAL, {**PAIR, **NANO, **PD}),
        rows=[
            *ratios(REAL, 3.57, "p99_ttft", "P99 TTFT over chunked 256 (mean of all)", REREAD),
            *ratios(
                REAL,
                5.98,
                "p99_ttft",
                "P99 TTFT over NanoFlow (mean of all)",
                HALVED,
                "NanoFlow",
            ),
            *ratios(
                REAL, 1.66, "p99_ttft", "P99 TTFT over SGLang-PD (mean of all)", HALVES, "SGLang-PD"
            ),
            *ratios(REAL, None, "p99_tbt", "P99 TBT over chunked 256", REREAD),
        ],
        shown=("p99_ttft", "p99_tbt", "throughput"),
    ),
    "muxwise-tab3": Experiment(
        where="MuxWise Tab. 3",
        runs=beside({"70B conversation": REAL["70B conversation"]}, {**PAIR, **NANO, **PD}),
        rows=others(
            "70B conversation",
            {
                "mean_ttft": (1, 3.1, 12.0, 51.4, 7.38),
                "p50_ttft": (1, 1.4, 7.2, 52.3, 3.95),
                "mean_tbt": (1e3, 30.2, 45.3, 105.6, 32.9),
                "mean_e2e": (1, 13.1, 27.0, 83.4, 18.4),
                "mean_tpot": (1e3, 31.1, 46.9, 120.2, 33.5),
            },
        ),
    ),
    "muxwise-tab4": Experiment(
        where="MuxWise Tab. 4",
        runs=beside({"70B toolagent": REAL["70B toolagent"]}, {**PAIR, **NANO, **PD}),
        rows=others(
            "70B toolagent",
            {
                "mean_ttft": (1, 1.3, 2.4, 2.8, 2.1),
                "p50_ttft": (1, 1.0, 1.1, 1.2, 1.5),
                "mean_tbt": (1e3, 27.2, 30.5, 58.8, 31.6),
                "mean_e2e": (1, 4.0, 5.5, 7.4, 5.2),
                "mean_tpot": (1e3, 33.1, 45.9, 70.3, 37.1),
            },
        ),
    ),
    "muxwise-fig15": Experiment(
        where="MuxWise Fig. 15",
        headline="goodput 2.20 times the baselines' on average, at most 3.06 times",
        runs={
            **beside(SEARCHED, {**TUNED, **NANO, **PD, "auto": "auto"}, search=True),
            **{
                f"{load}: {system}, told": Run(SEARCHED[load], system, search=True, told=True)
                for load in SEARCHED
                for system in ("muxwise", "auto")
            },
        },
        rows=[
            *goodput("8B toolagent", CHUNKS, 2.6, REREAD),
            *goodput("70B toolagent", CHUNKS, 3.06, REREAD),
            *goodput("8B toolagent", ("NanoFlow",), 5.2, REREAD),
            *goodput("70B toolagent", ("NanoFlow",), None, "in the paper it holds no rate, either"),
            *goodput("8B toolagent", ("SGLang-PD",), 1.3, HALVES),
            *goodput("70B toolagent", ("SGLang-PD",), 1.62, HALVES),
            *(
                Row(
                    what=f"goodput of auto over muxwise, {load}{told}",
                    figure="goodput",
                    of=f"{load}: auto{told}",
                    over=f"{load}: muxwise{told}",
                    why=why,
                )
                for load in SEARCHED
                for told, why in (
                    (
                        "",
                        "not in the paper; told no bound on TTFT, both order prompts as if it were"
                        " 1 s for each 1,024 tokens, 1 s more with auto",
                    ),
                    (
                        ", told",
                        "not in the paper: both know the bound on TTFT of the search, beside which"
                        " a run is short, so serving by deadline holds more than would last",
                    ),
                )
            ),
        ],
        shown=("goodput", "p99_tbt", "utilisation"),
    ),
    "muxwise-tab5": Experiment(
        where="MuxWise Tab. 5",
        runs=beside(SEARCHED, TUNED, search=True),
        rows=[
            Row(
                what=f"{what}, {load}, {system}",
                figure=figure,
                of=f"{load}: {system}",
                paper=paper,
                unit=unit,
                scale=scale,
                why=why,
            )
            for load, system, tokens, share in (
                ("8B toolagent", "muxwise", 25397, 88.1),
                ("8B toolagent", "chunked 256", 9768, 63.8),
                ("70B toolagent", "muxwise", 7430, 84.0),
                ("70B toolagent", "chunked 256", 2269, 66.1),
            )
            for what, figure, paper, unit, scale, why in (
                (
                    "tokens/s at goodput",
                    "tokens",
                    tokens,
                    "tokens/s",
                    1.0,
                    "here reused prompt tokens count, too",
                ),
                (
                    "GPU utilisation",
                    "utilisation",
                    share,
                    "%",
                    100.0,
                    "here SMs that a launch holds count as used, whatever their pipes do",
                ),
            )
        ],
    ),
    "muxwise-fig16": Experiment(
        where="MuxWise Fig. 16",
        runs=beside(H100S, {"muxwise": "muxwise", "chunked 512": "chunked:token_budget=512"}),
        rows=[
            *ratios(
                H100S,
                2.28,
                "p99_ttft",
                "P99 TTFT over chunked 512 (mean of all)",
                FASTER,
                "chunked 512",
            ),
            *ratios(
                H100S,
                1.81,
                "p99_tbt",
                "P99 TBT over chunked 512 (mean of all)",
                FASTER,
                "chunked 512",
            ),
        ],
        shown=("p99_ttft", "p99_tbt", "throughput"),
    ),
    "muxwise-fig17": Experiment(
        where="MuxWise Fig. 17",
        runs=beside(SYNTHETIC, {**TUNED, **NANO, **PD}, search=True),
        rows=[
            row
            for load, paper, nano, halves in (
                ("ShareGPT", 1.9, 1.73, 1.46),
                ("LooGLE", 1.71, 2.0, 2.0),
                ("OpenThoughts", 2.0, 2.0, 2.0),
            )
            for row in (
                *goodput(load, CHUNKS, paper, SMALL_CHUNKS),
                *goodput(load, ("NanoFlow",), nano, TWICE),
                *goodput(load, ("SGLang-PD",), halves, HALVES),
            )
        ],
        shown=("goodput", "p99_ttft", "p99_tbt"),
    ),
    "muxwise-4.3.1": Experiment(
        where="MuxWise §4.3.1",
        runs=beside(
            {
                "ShareGPT": Load(
                    model="llama-3.1-8b",
                    tbt=0.05,
                    dataset="sharegpt-1k",
                    rate=14.0,
                    requests=400,
                    whole=1500,
                )
            },
            {"muxwise": "muxwise", "two-stream": "two-stream", "temporal": "temporal"}
            | {f"chunked {n}": f"chunked:token_budget={n}" for n in (256, 512)},
            search=True,
        ),
        rows=[
            *goodput("ShareGPT", CHUNKS, 1.2, "the paper's budget is not named"),
            Row(
                what="goodput over two streams (WindServe, §6)",
                figure="goodput",
                of="ShareGPT: muxwise",
                over="ShareGPT: two-stream",
                paper=1.61,
                why="the paper's own prototype of WindServe also left bubbles that ours has not",
            ),
            Row(
                what="goodput over temporal sharing (Tropical, §6)",
                figure="goodput",
                of="ShareGPT: muxwise",
                over="ShareGPT: temporal",
                paper=1.2,
                why="the paper says at least 20 %, without a workload",
            ),
        ],
        shown=("goodput", "p99_ttft", "p99_tbt"),
        single=True,
    ),
    "muxwise-fig18": Experiment(
        where="MuxWise Fig. 18",
        runs=beside(FIXED, {"muxwise": "muxwise"}),
        rows=[
            Row(
                what=f"mean SMs of {lane} while it runs, {load}",
                figure=f"{lane}_units",
                of=f"{load}: muxwise",
                unit="of 108 SMs",
                why="the figure has no numbers in the text: most SMs for prefill on LooGLE, most"
                " for decode on OpenThoughts, ShareGPT between",
            )
            for load in FIXED
            for lane in ("prefill", "decode")
        ],
        shown=("prefill_units", "decode_units", "p99_tbt"),
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
                what=f"P99 TBT, {load}, {system}",
                figure="p99_tbt",
                of=f"{load}: {system}",
                unit="ms",
                scale=1e3,
                why=why,
            )
            for load in ("8B toolagent", "70B toolagent")
            for system, why in (
                ("muxwise", "the figure's base has no number in the text"),
                ("whole batches", "10 ms more in the paper: passes launched as graphs cost less"),
                ("and blocking", "314 ms (8B) and 672 ms (70B) more in the paper"),
            )
        ],
        shown=("p99_tbt",),
    ),
    "muxwise-fig20": Experiment(
        where="MuxWise Fig. 20",
        runs={
            name: Run(Load(draw=mixed, requests=120, **SEVENTY), system)
            for name, system in (
                ("muxwise", "muxwise"),
                ("no preemption", "muxwise:preemption=false"),
            )
        },
        rows=[
            Row(
                what="P99 TTFT a token without preemption",
                figure="p99_ttft_per_token",
                of="no preemption",
                over="muxwise",
                paper=1.96,
                why="at half of the paper's rate, at which the simulated GPUs would be full",
            )
        ],
    ),
    "muxwise-guard": Experiment(
        where="MuxWise §3.3",
        runs=beside(
            {
                "8B on an H200": Load(
                    model="qwen3-8b",
                    dataset="azure-conv",
                    rate=14.0,
                    tbt=0.012,
                    gpu="h200",
                )
            },
            {"muxwise": "muxwise", "no guard": "muxwise:guard=false"},
        ),
        rows=[
            Row(
                what=f"P99 TBT at a bound of 12 ms, {system}",
                figure="p99_tbt",
                of=f"8B on an H200: {system}",
                unit="ms",
                scale=1e3,
                why="the paper has no such figure",
            )
            for system in ("muxwise", "no guard")
        ],
        single=True,
    ),
    "muxwise-artifact": Experiment(
        where="MuxWise, artifact A",
        runs=beside(
            ARTIFACT,
            {
                "muxwise": "muxwise",
                **{f"chunked {n}": f"chunked:token_budget={n}" for n in (256, 512, 1024)},
                "auto": "auto",
            },
        ),
        rows=[
            Row(
                what=f"{what}, {load}, {system}",
                figure=figure,
                of=f"{load}: {system}",
                unit=unit,
                scale=scale,
                why="the artifact's figure has no numbers in the text",
            )
            for load in ARTIFACT
            for system in ("muxwise", "chunked 256", "chunked 512", "chunked 1024", "auto")
            for what, figure, unit, scale in (
                ("P99 TTFT", "p99_ttft", "s", 1.0),
                ("P99 TBT", "p99_tbt", "ms", 1e3),
            )
        ],
        shown=("p99_ttft", "p99_tbt", "throughput"),
        single=True,
    ),
}
MISSING = {
    "MuxWise Fig. 14 to 17, LoongServe": "elastic sequence parallelism is not built: it needs"
    " attention over several GPUs' caches, which no system here has a use for",
    "MuxWise §4.1, Bullet §2.3.3, POD": "attention of both phases in one kernel is not built: it"
    " gains over long contexts, where `auto` turns to lanes (docs/design/simulation.md)",
    "MuxWise Fig. 11, Tab. 2": "the grid of contention is the profile's: docs/notes has its errors",
}
