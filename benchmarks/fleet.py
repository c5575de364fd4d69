"""Routers of several replicas, in simulation: `python benchmarks/fleet.py [--replicas 4 16] [...]`.

Each replica is a real engine on a simulated H200 that serves an 8B model; all routers get the same
requests. Searched is the highest rate at which 95 % of the requests have their first token within
1 s and 95 % of the gaps are within 50 ms. Lengths are halved, prompts cut to 16,384 tokens and
replies to 32, so that a run takes a minute and prefill decides. `--decide` measures how long one
decision takes, `--at RATE` serves one rate with each router instead of a search, and `--bars` tries
the others only at our goodput divided by the ratio that it should have to theirs. Runs that the
folder has are not repeated.
"""

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table as Grid

from twolane.bench.goodput import LEAST_REQUESTS, EarlyStop, Search, find
from twolane.engine.config import EngineConfig
from twolane.engine.kv.page_hash import page_hashes
from twolane.engine.kv.prefix_digest import Landmarks, PrefixBook, is_landmark
from twolane.engine.prompt_work import PromptPace, PromptWork, WaitingPrompt
from twolane.results.provenance import provenance, save
from twolane.results.result import BenchConfig, Result
from twolane.router.choose import choose
from twolane.router.policies import POLICIES
from twolane.router.state import ReplicaState, RoutedRequest
from twolane.router.table import Table
from twolane.sim.config import SimulateConfig
from twolane.sim.fleet import simulate_fleet
from twolane.slo import Slo
from twolane.workload.spec import WorkloadSpec

OUT = Path(__file__).parent / "results"
SLOS = {"ttft": 1.0, "tbt": 0.05}
GUESS = {"toolagent": 25.5, "conversation": 12.8}
"""Start rates per replica of the search for our own router, in requests per second."""
BARS = {"round-robin": 1.3, "power-of-two": 1.3, "least-loaded": 1.1, "ray-prefix": 1.05}
"""Least ratio of our goodput to each router's."""
BESIDE = {
    "predicted": 1.0,
    "ray-prefix": 0.93,
    "round-robin": 0.75,
    "power-of-two": 0.74,
    "least-loaded": 0.74,
}
"""Start rates of the searches by router, as a share of ours."""
PER_REPLICA = 150
"""Requests of a run per replica, up to `MAX_REQUESTS`."""
MAX_REQUESTS = 1600
PAGE = 32
"""Tokens in a page for timing decisions."""
QUEUED = 32
"""Prompts queued at each replica for timing decisions."""
PROMPT = 12_000
"""Prompt tokens for timing decisions."""


def searched(dataset: str, replicas: int, requests: int, guess: float, seeds: int = 1) -> Search:
    """Return the search for a router."""
    workload = WorkloadSpec(
        dataset=dataset,
        num_prompts=requests,
        scale_lengths=0.5,
        max_input_len=16_384,
        max_output_len=32,
    )
    return Search(
        target={"simulate": "h200", "model": "llama-3.1-8b", "replicas": replicas},
        workload=workload,
        slos=SLOS,
        attainment=0.95,
        start_rate=guess * replicas,
        tolerance=0.02,
        seeds=seeds,
        least_rate=0.1,
        brief=requests < LEAST_REQUESTS,
    )


def run(replicas: int, search: Search):
    """Return a function for `find` that serves a workload with a router."""

    def serve(router: str, workload: WorkloadSpec, points: Sequence[dict[str, float]]):
        config = SimulateConfig(
            engine=EngineConfig(model="llama-3.1-8b", slo=Slo(**SLOS)),
            bench=BenchConfig(workload=workload, goodput=points[0], percentiles=search.percentiles),
        )
        requests = workload.build()
        watch = EarlyStop(requests, points, search.attainment)
        result: Result = simulate_fleet(
            config, replicas, router, requests, watch, watch.tokens
        ).result
        return result, result.interrupted

    return serve


def compare(dataset: str, replicas: int, options: argparse.Namespace) -> dict[str, object]:
    """Search the goodput of every router; return it with the hit rates."""
    requests = options.requests or min(MAX_REQUESTS, PER_REPLICA * replicas)
    guess = options.guess or GUESS.get(dataset, 10.0)
    search = searched(dataset, replicas, requests, guess, options.seeds)
    folder = options.runs / f"{Path(dataset).name}-{replicas}"
    rates: dict[str, list[float]] = {}
    for router in options.router:
        guesses = [BESIDE[router] * search.start_rate] * options.seeds
        serve = run(replicas, search)
        rates[router] = find(search, [router], serve, folder, guesses=guesses)[0][router]
        found = ", ".join(f"{rate:.2f}" for rate in rates[router])
        print(f"{dataset} {replicas} replicas {router}: {found}/s", flush=True)
    means = {router: statistics.fmean(found) for router, found in rates.items()}
    return {
        "dataset": dataset,
        "replicas": replicas,
        "requests": requests,
        "goodput": rates,
        "mean": means,
        "hit_rate": {router: hit_rate(folder, router, found) for router, found in rates.items()},
        "ratio": {
            router: means["predicted"] / mean
            for router, mean in means.items()
            if "predicted" in means and mean and router != "predicted"
        },
    }


def against_bars(dataset: str, replicas: int, options: argparse.Namespace) -> dict[str, object]:
    """Search our goodput, then check whether each other router holds that rate divided by its bar.

    A router that does not hold it has a goodput that ours exceeds by more than the bar.
    """
    requests = options.requests or min(MAX_REQUESTS, PER_REPLICA * replicas)
    guess = options.guess or GUESS.get(dataset, 10.0)
    search = searched(dataset, replicas, requests, guess, options.seeds)
    folder, serve = options.runs / f"{Path(dataset).name}-{replicas}", run(replicas, search)
    guesses = [search.start_rate] * options.seeds
    ours = find(search, ["predicted"], serve, folder, guesses=guesses)[0]["predicted"]
    print(f"{dataset} {replicas} replicas predicted: {ours}", flush=True)
    others: dict[str, object] = {}
    for router in options.router:
        if (bar := BARS.get(router)) is None:
            continue
        runs = []
        for seed, rate in enumerate(ours):
            _, stopped = serve(router, search.at(rate / bar, seed), [SLOS])
            runs.append({"rate": rate / bar, "holds": not stopped})
        others[router] = {"bar": bar, "runs": runs}
        print(f"{dataset} {replicas} replicas {router}: {others[router]}", flush=True)
    about = {"dataset": dataset, "replicas": replicas, "requests": requests}
    return {**about, "goodput": ours, "others": others}


def at_rate(dataset: str, replicas: int, options: argparse.Namespace) -> dict[str, object]:
    """Serve one rate once with every router."""
    requests = options.requests or min(MAX_REQUESTS, PER_REPLICA * replicas)
    search = searched(dataset, replicas, requests, 1.0)
    workload = msgspec.structs.replace(search.workload, request_rate=options.at)
    served = {}
    for router in options.router:
        config = SimulateConfig(
            engine=EngineConfig(model="llama-3.1-8b", slo=Slo(**SLOS)),
            bench=BenchConfig(workload=workload, goodput=SLOS, percentiles=search.percentiles),
        )
        run = simulate_fleet(config, replicas, router, workload.build())
        firsts = [each.ttft for each in run.result.records if each.ok and each.ttft is not None]
        served[router] = {
            "in_time": sum(ttft <= SLOS["ttft"] for ttft in firsts) / requests,
            "ttft_p95_of_answers": float(np.percentile(firsts, 95)),
            "hit_rate": run.hit_rate,
            "refused": run.refused,
        }
        print(f"{dataset} {replicas} replicas {router}: {served[router]}", flush=True)
    about = {"dataset": dataset, "replicas": replicas, "requests": requests, "rate": options.at}
    return {**about, "routers": served}


def hit_rate(folder: Path, router: str, rates: Sequence[float]) -> float | None:
    """Return the mean share of prompt tokens found in prefix caches, of each seed's run at the
    goodput."""
    paths = [folder / f"{router}-seed{i}-rate{rate:.5f}.json" for i, rate in enumerate(rates)]
    if not all(path.exists() for path in paths):
        return None
    runs = [msgspec.json.decode(path.read_bytes()) for path in paths]
    return statistics.fmean(run["simulated"]["prefix_hit_rate"] for run in runs)


def timed(replicas: int, rounds: int) -> dict[str, float]:
    """Return the CPU seconds of a decision among replicas with full digests, and of hashing the
    prompt."""
    draw, table = random.Random(0), Table()
    prompts = [[draw.randrange(30_000) for _ in range(PROMPT)] for _ in range(16)]
    for i in range(replicas):
        book = PrefixBook(PAGE)
        for prompt in draw.sample(prompts, 4):
            pages = enumerate(page_hashes(prompt, PAGE), 1)
            book.change({each: page for page, each in pages if is_landmark(page, PAGE)})
        book.change({draw.getrandbits(64): 100 for _ in range(4000)})
        waiting = [WaitingPrompt(draw.randrange(2000), 0, draw.random()) for _ in range(QUEUED)]
        state = ReplicaState(
            queued=PromptWork(QUEUED, sum(each.new for each in waiting), 0),
            yielding=waiting,
            prompt_pace=PromptPace(1e-3, 2.5e-5, 1e-9),
            page_size=PAGE,
            pages=20_000,
            pages_free=10_000,
            slo=Slo(ttft=1.0),
            digest=book.digest(),
        )
        table.publish(f"replica-{i:04}", state, 0.0)
    hashing, deciding = [], []
    for i in range(rounds):
        begun = time.thread_time()
        landmarks = Landmarks.of(prompts[i % len(prompts)], PAGE)
        hashed = time.thread_time()
        routed = RoutedRequest(PROMPT, 256, landmarks)
        choose(routed, table.candidates(routed, 0.01))
        hashing.append(hashed - begun)
        deciding.append(time.thread_time() - hashed)
    return {
        "replicas": replicas,
        "decide_p50": sorted(deciding)[rounds // 2],
        "decide_p90": sorted(deciding)[rounds * 9 // 10],
        "hash_p50": sorted(hashing)[rounds // 2],
    }


def show(found: Sequence[dict[str, object]]) -> None:
    """Print a table of all comparisons."""
    grid = Grid("workload", "replicas", "router", "goodput /s", "ours over it", "hit rate")
    for one in found:
        for router, rate in one["mean"].items():
            ratio, hits = one["ratio"].get(router), one["hit_rate"][router]
            cells = [f"{rate:.1f}", "" if ratio is None else f"{ratio:.2f}"]
            hit = "" if hits is None else f"{hits:.2f}"
            grid.add_row(str(one["dataset"]), str(one["replicas"]), router, *cells, hit)
    Console().print(grid)


def main() -> None:
    """Compare, or time decisions; save either."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", nargs="+", default=list(GUESS), help="workloads or traces")
    parser.add_argument("--replicas", nargs="+", type=int, default=[4, 16])
    parser.add_argument("--router", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--requests", type=int, help="of one run")
    parser.add_argument("--seeds", type=int, default=1, help="of requests and arrivals")
    parser.add_argument("--guess", type=float, help="requests a second of one replica")
    parser.add_argument("--runs", type=Path, default=OUT / "fleet-runs", help="folder of runs")
    parser.add_argument("--out", type=Path, help="file of the result")
    parser.add_argument("--at", type=float, help="requests a second of all replicas together")
    parser.add_argument("--bars", action="store_true", help="try others at our goodput over bars")
    parser.add_argument("--decide", action="store_true", help="time decisions instead")
    parser.add_argument("--rounds", type=int, default=200, help="decisions that are timed")
    options = parser.parse_args()
    if options.decide:
        out = options.out or OUT / "fleet-decisions.json"
        times = [timed(replicas, options.rounds) for replicas in options.replicas]
        save(
            out,
            provenance(f"prompts of {PROMPT} tokens, 4,096 landmarks a replica"),
            {"decisions": times},
        )
        for each in times:
            print(
                {
                    name: value if name == "replicas" else f"{value * 1e3:.3f} ms"
                    for name, value in each.items()
                }
            )
        return
    if options.at is not None or options.bars:
        about = provenance({"datasets": options.dataset, "slos": SLOS})
        pairs = [
            (dataset, replicas) for dataset in options.dataset for replicas in options.replicas
        ]
        serve = against_bars if options.bars else at_rate
        runs = [serve(*pair, options) for pair in pairs]
        save(options.out or OUT / "fleet-at-rate.json", about, {"runs": runs})
        return
    found = []
    for dataset in options.dataset:
        for replicas in options.replicas:
            found.append(compare(dataset, replicas, options))
            about = provenance({"datasets": options.dataset, "slos": SLOS, "attainment": 0.95})
            save(options.out or OUT / "fleet.json", about, {"comparisons": found})
    show(found)


if __name__ == "__main__":
    main()
