"""Goodput against the TBT SLO, every system, simulated: `python benchmarks/panels.py [--quick]`.

Six panels: four workloads on Qwen3-8B shapes and two on CodeLlama-34B, one H200 each, five TBT
SLOs; Llama-70B on eight A100s at one; and MuxWise's setting, Llama-8B and 70B on eight A100s with a
bound on TBT alone and more requests than can be served, whose points are requests served a second.
Other points are a search as `twolane bench goodput` makes it,
and the runs stay in `--work`: the same command goes on where it was stopped. The file that comes
out has every point, and how `auto` compares: it should be at least 0.95 of the best at each, and
1.10 times the best single system of its panel (settings included, mean over SLOs) in half of them.
"""

import argparse
import multiprocessing
import resource
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from twolane.bench import contenders as goodput_cli
from twolane.bench import goodput
from twolane.bench.goodput import Search
from twolane.results.provenance import provenance, save
from twolane.workload.spec import WorkloadSpec

SYSTEMS = (
    "prefill-first",
    "chunked:token_budget=128/256/512/1024",
    "static-split:decode_units=32/48",
    *("two-stream", "temporal", "drift", "muxwise", "bullet", "duetserve", "auto"),
)
TIGHT, SLOW = (0.009, 0.012, 0.021, 0.035, 0.050), (0.030, 0.040, 0.055, 0.080, 0.120)
MAX_PROMPT_TOKENS = 32_768
"""New tokens of a prompt; longer ones of ShareGPT, which no model here takes, are clipped."""


class Panel(msgspec.Struct, frozen=True):
    """One model under one workload."""

    name: str
    model: str
    dataset: str
    tbts: tuple[float, ...]
    """TBT SLOs in seconds."""
    start: float
    """Start rate of the first search in requests per second."""
    prompts: int = 600
    """Requests in a run."""
    ttft: float = 1.0
    """TTFT SLO in seconds; short against a run, or a run is one burst, and whoever serves the short
    prompts of a burst first holds at any rate."""
    per_1k: float = 0.0
    """Seconds more for each 1,024 new tokens."""
    gpu: str = "h200"
    tp: int = 1
    seeds: int = 2
    """Number of arrival patterns, of which a point is the median: in half a minute there is
    luck."""
    saturated: bool = False
    """Whether the rate is far above what can be served and TTFT has no bound: a point is the number
    of requests served a second, the median of three seeds, or 0 where TBT was not kept."""

    def search(self, seed: int, quick: bool) -> Search:
        """Return the search for all TBT SLOs, or with `quick` for two of them, with short runs."""
        return Search(
            target={"simulate": self.gpu, "model": self.model, "tp": self.tp},
            workload=WorkloadSpec(
                dataset=self.dataset,
                num_prompts=min(self.prompts, 100) if quick else self.prompts,
                max_input_len=MAX_PROMPT_TOKENS,
            ),
            slos={} if self.saturated else self._ttft(),
            tbts=self.tbts[1::2] if quick else self.tbts,
            seeds=1 if quick else self.seeds,
            seed=seed,
            start_rate=self.start,
            least_rate=self.start / 4,
            tolerance=0.09 if quick else 0.045,
            brief=quick or self.prompts < goodput.LEAST_REQUESTS,
        )

    def _ttft(self) -> dict[str, float]:
        return {"ttft": self.ttft, **({"ttft_per_1k": self.per_1k} if self.per_1k else {})}


PANELS = (
    Panel("8b-conversation", "qwen3-8b", "conversation", TIGHT, 1.0, per_1k=0.25),
    Panel("8b-sharegpt", "qwen3-8b", "sharegpt", TIGHT, 48.0, ttft=0.25),
    Panel("8b-azure-conv", "qwen3-8b", "azure-conv", TIGHT, 16.0),
    Panel("34b-azure-conv", "codellama-34b", "azure-conv", SLOW, 4.0, ttft=2.0),
    Panel("8b-azure-code", "qwen3-8b", "azure-code", TIGHT, 8.0),
    Panel("34b-azure-code", "codellama-34b", "azure-code", SLOW, 2.0, ttft=2.0),
    Panel(
        name="70b-azure-conv",
        model="llama-3.1-70b",
        dataset="azure-conv",
        tbts=(0.06,),
        start=4.0,
        ttft=2.0,
        gpu="a100-80gb",
        tp=8,
    ),
    *(
        Panel(
            name=f"{size}-toolagent-saturated",
            model=f"llama-3.1-{size}",
            dataset="toolagent",
            tbts=(tbt,),
            start=rate,
            prompts=prompts,
            gpu="a100-80gb",
            tp=8,
            saturated=True,
        )
        for size, tbt, rate, prompts in (("8b", 0.05, 30.0, 400), ("70b", 0.1, 4.0, 200))
    ),
)
"""Panels, those with the longest runs first."""
QUICK = ("8b-azure-conv", "8b-azure-code")


class Point(msgspec.Struct, frozen=True):
    """Result of one system, with its settings, at one SLO."""

    panel: str
    system: str
    tbt: float
    rates: list[float]
    """Requests per second for each arrival pattern."""
    goodput: float
    """Median of the rates."""


def searched(task: tuple[Panel, str, int, bool, Path]) -> list[Point]:
    """Return one system's points."""
    panel, system, seed, quick, work = task
    if panel.saturated:
        return [served(panel, system, seed)]
    search, folder = panel.search(seed, quick), work / panel.name / goodput.file_name(system)
    run, reads = goodput_cli.simulation(search), goodput_cli.reads_slos
    found = goodput.find(search, [system], run, folder, reads_slos=reads)
    tbts = [point.search.slos["tbt"] for point in search.points(folder)]
    return [
        Point(panel.name, system, tbt, rates[system], statistics.median(rates[system]))
        for tbt, rates in zip(tbts, found, strict=True)
    ]


def served(panel: Panel, system: str, seed: int) -> Point:
    """Return the throughput of a saturated system."""
    search, (tbt,), rates = panel.search(seed, quick=False), panel.tbts, []
    run = goodput_cli.simulation(search)
    for each in range(seed, seed + 3):
        result, hopeless = run(system, search.at(panel.start, each), [{"tbt": tbt}])
        rates.append(0.0 if hopeless else len(result.records) / result.duration)
    return Point(panel.name, system, tbt, rates, statistics.median(rates))


class Verdict(NamedTuple):
    """Comparison of `auto` with the best systems."""

    shares: dict[str, float]
    """Shares of the best goodput, at each point where any system holds."""
    gains: dict[str, tuple[str, float]]
    """Best single other system (mean over SLOs) by panel, and the ratio to it."""


Rates = dict[float, dict[str, float]]
"""Requests a second by TBT SLO and system."""


def by_panel(points: Iterable[Point]) -> dict[str, Rates]:
    """Return the results of each panel; settings count as systems of their own."""
    rates: dict[str, Rates] = {}
    for point in points:
        row = rates.setdefault(point.panel, {}).setdefault(point.tbt, {})
        row[point.system] = point.goodput
    return rates


def verdict(points: Iterable[Point]) -> Verdict:
    """Return the verdict over all panels."""
    shares, gains = {}, {}
    for panel, rates in by_panel(points).items():
        rows = list(rates.values())
        for tbt, row in rates.items():
            if (most := max(row.values())) > 0:
                shares[f"{panel} at {tbt * 1e3:g} ms"] = row["auto"] / most
        means = {system: statistics.fmean(row[system] for row in rows) for system in rows[0]}
        best = max((s for s in means if s != "auto"), key=means.__getitem__)
        if means[best]:
            gains[panel] = best, means["auto"] / means[best]
    return Verdict(shares, gains)


def table(points: Sequence[Point]) -> str:
    """Return a table by panel, tightest TBT first: `auto`, the best other system at each SLO, and
    the verdict."""
    judged, lines = verdict(points), []
    for panel, rates in by_panel(points).items():
        ordered = [rates[tbt] for tbt in sorted(rates)]
        own = " ".join(f"{row['auto']:.1f}" for row in ordered)
        others = [max(rate for name, rate in row.items() if name != "auto") for row in ordered]
        best = " ".join(f"{rate:.1f}" for rate in others)
        shares = [share for place, share in judged.shares.items() if place.startswith(panel)]
        system, gain = judged.gains[panel]
        bounds = " ".join(f"{tbt * 1e3:g}" for tbt in sorted(rates))
        lines.append(
            f"| {panel} | {bounds} | {own} | {best} | {min(shares):.2f} | {gain:.2f}, `{system}` |"
        )
    return "\n".join(lines)


def draw(
    panels: Sequence[Panel], systems: Sequence[str], points: Sequence[Point], path: Path
) -> None:
    """Draw a figure with a panel in each axes; of a system with several settings the best at each
    SLO."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    colours = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
    figure, axes = pyplot.subplots(
        -(-len(panels) // 2), 2, squeeze=False, figsize=(10, 3.4 * -(-len(panels) // 2))
    )
    for panel, ax in zip(panels, axes.flat, strict=False):
        for i, asked in enumerate(systems):
            names, name = goodput.variants(asked), asked.partition(":")[0]
            best: dict[float, float] = {}
            for point in points:
                if point.panel == panel.name and point.system in names:
                    best[point.tbt] = max(best.get(point.tbt, 0.0), point.goodput)
            own = name == "auto"
            ax.plot(
                [tbt * 1e3 for tbt in best],
                list(best.values()),
                marker="os^vD<>Px*"[i % 10],
                label=name,
                color="black" if own else colours[i % len(colours)],
                linewidth=2.5 if own else 1.2,
                linestyle="--" if i >= len(colours) and not own else "-",
            )
        ax.set(title=panel.name, xlabel="P99 TBT SLO (ms)", ylabel="requests/s")
        ax.set_ylim(bottom=0)
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    lines, names = axes.flat[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="lower center", ncols=5)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=110)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few panels and SLOs, short runs")
    parser.add_argument("--seed", type=int, default=0, help="of lengths and arrivals")
    parser.add_argument(
        "--panels", nargs="+", choices=[p.name for p in PANELS], help="only these, in this order"
    )
    parser.add_argument("--systems", nargs="+", default=SYSTEMS, help="these instead; auto, too")
    parser.add_argument("--work", type=Path, default=Path("panels-work"), help="folder of the runs")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/panels.json"))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--prompts", type=int, help="requests in a run; by default the panel's")
    parser.add_argument("--seeds", type=int, help="patterns of arrivals; by default the panel's")
    parser.add_argument("--bounds", type=float, nargs="+", help="only these TBT SLOs, in ms")
    given = parser.parse_args()
    if {*given.systems} == {"auto"}:
        parser.error("--systems: one at least to compare auto with")
    return given


def _changed(panel: Panel, given: argparse.Namespace) -> Panel:
    """Return the panel with the options applied."""
    tbts = panel.tbts
    if given.bounds:
        tbts = tuple(tbt for tbt in tbts if round(tbt * 1e3, 6) in given.bounds)
    return msgspec.structs.replace(
        panel,
        tbts=tbts,
        prompts=given.prompts or panel.prompts,
        seeds=given.seeds or panel.seeds,
    )


def main() -> None:
    """Search what is missing, write the file and the figure."""
    given = _options()
    names = given.panels or (QUICK if given.quick else [p.name for p in PANELS])
    panels = [_changed(panel, given) for name in names for panel in PANELS if panel.name == name]
    asked = dict.fromkeys((*given.systems, "auto"))
    systems = [variant for one in asked for variant in goodput.variants(one)]
    systems.sort(key=goodput_cli.reads_slos, reverse=True)  # these take longest
    tasks = [
        (panel, one, given.seed, given.quick, given.work) for panel in panels for one in systems
    ]
    points: list[Point] = []
    with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
        for found in pool.imap(searched, tasks):
            points += found
            for p in found:
                print(f"{p.panel}, {p.system}, {p.tbt * 1e3:g} ms: {p.goodput:.2f}", flush=True)
        pool.close()
        pool.join()
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{spent.ru_utime + spent.ru_stime:.0f} s of CPU", flush=True)
    searches = {panel.name: panel.search(given.seed, given.quick) for panel in panels}
    figures = {"simulated": True, "points": points, "verdict": verdict(points)._asdict()}
    save(given.out, provenance(searches), figures)
    print(table(points))
    draw(panels, list(asked), points, given.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
