"""The tables of docs/results.md and results-in-full.md, from the files under benchmarks/results.

    python benchmarks/tables.py

It replaces what stands between `<!-- NAME -->` and `<!-- end -->` in a page by the table of that
name. Where a file has no date, the row has that of its commit, which needs the history of the
repository.
"""

import argparse
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from math import inf
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks/papers"))
import page as papers  # noqa: E402 - it lies in the folder of the papers' experiments

from twolane.bench.goodput import least_requests  # noqa: E402

RESULTS = ROOT / "benchmarks/results"
PAGES = (ROOT / "docs/results.md", ROOT / "docs/results-in-full.md")
MODELS = {"qwen3-8b": "8B", "codellama-34b": "34B"}
SHAPES = {**MODELS, "qwen3-30b-a3b": "30B-A3B"}
DATASETS = {"azure-conv": "conversations", "azure-code": "code", "conversation": "Mooncake"}
"""Names of the workloads in the tables."""
CARDS = ("h100", "h200")
"""Folders of a recipe's results that are of cards; the others are simulated or emulated."""


class Search(NamedTuple):
    """One measured search for goodput: a system at one bound on one workload."""

    system: str
    goodput: list[float]
    """Requests/s that held for each arrival pattern."""
    where: str
    """Card, commit and date."""

    @property
    def median(self) -> float:
        return median(self.goodput)


def measured() -> Iterator[list[str]]:
    """Rows of the searches on H200s."""
    panels, searches = _searches()
    for name, panel in panels.items():
        auto, best = _rivals(searches[name])
        place = f"{MODELS[panel['model']]} {DATASETS[panel['dataset']]}"
        held = (_spread(auto), auto.where, f"`{best.system}`", _spread(best), best.where)
        yield [place, str(panel["tbt_ms"]), *held, f"**{auto.median / best.median:.2f}**"]


def _searches() -> tuple[dict[str, Any], dict[str, list[Search]]]:
    """Return workloads and searches of the panels on H200s whose runs were long enough, in the
    order of the tables; those with one bound for every first token are left out."""
    searches: dict[str, list[Search]] = defaultdict(list)
    panels = {}
    for _, found in _files("goodput-h200/*/*.json"):
        workload = found["provenance"]["workload"]
        if not found["panel"].endswith("-flat") and _long(workload["prompts"], found["goodput"]):
            panels[found["panel"]] = workload
            searches[found["panel"]].append(_search(found))
    for path, found in _files("one-card/*/*.json"):
        part = found["provenance"]["workload"]
        for row in found.get("rows", ()) if path.parent.name in CARDS else ():
            rates, rest = row["found"]["goodput"], part["rest"]
            if rates and part["model"] in MODELS and _long(rest["num_prompts"], rates):
                where = ", ".join(_made(path, found).split(", ")[1:])
                each = Search(row["found"]["system"], rates, f"{found['card']}, {where}")
                tbt = round(1e3 * row["found"]["tbt"], 6)
                name = f"{found['part']} {tbt:g} {found['card']}"
                panels[name] = {"model": part["model"], "dataset": rest["dataset"], "tbt_ms": tbt}
                searches[name].append(each)
    panels = {name: panels[name] for name in panels if _compared(searches[name])}
    return dict(sorted(panels.items(), key=lambda each: _place(each[1]))), searches


def _long(requests: int, rates: Sequence[float]) -> bool:
    """Return whether runs of that many requests show that the rates could hold for ever."""
    return all(requests >= least_requests(rate, simulated=False) for rate in rates)


def _compared(searches: list[Search]) -> bool:
    systems = {each.system for each in searches}
    return "auto" in systems and len(systems) > 1


def _rivals(searches: list[Search]) -> tuple[Search, Search]:
    """`auto`, and the best other system of a panel."""
    auto = next(each for each in searches if each.system == "auto")
    others = [each for each in searches if each.system != "auto"]
    return auto, max(others, key=lambda each: each.median)


def one_card() -> Iterator[list[str]]:
    """Rows of the systems on H200s beside `auto`."""
    panels, searches = _searches()
    for name, panel in panels.items():
        place = f"{MODELS[panel['model']]} {DATASETS[panel['dataset']]}"
        auto = next(each for each in searches[name] if each.system == "auto")
        for each in sorted(searches[name], key=lambda one: -one.median):
            ratio = f"{each.median / auto.median:.2f}"
            patterns = f"{len(each.goodput)}"
            shown = (f"`{each.system}`", _spread(each), patterns, ratio, each.where)
            yield [place, str(panel["tbt_ms"]), *shown]


def sharing() -> Iterator[list[str]]:
    """Rows of how systems share a device, of all files."""
    for path, found in _files("sharing*.json"):
        for system, shares in found["sharing"].items():
            cells = [shares["utilisation"], shares["bubbles"], shares["idle with work"]]
            shown = [f"{share:.1%}" for share in cells]
            yield [found["device"], f"`{system}`", *shown, _made(path, found)]


def slicing() -> Iterator[list[str]]:
    """Rows of what prefill layer by layer costs, of all files."""
    for path, found in _files("sharing*.json"):
        for batch, cost in found["slicing"].items():
            whole, sliced = (f"{cost[name] * 1e3:.1f} ms" for name in ("whole", "sliced"))
            shown = (whole, sliced, f"{cost['cost']:+.1%}")
            yield [found["device"], batch, *shown, _made(path, found)]


SATURATED = "panels-saturated.json"
"""File of the panels in which more arrives than can be served."""


class Bracket(NamedTuple):
    """Bounds on a goodput in requests/s."""

    low: float
    """Highest rate that held."""
    high: float
    """The same, or the lowest rate that failed if no rate between was completed."""

    @classmethod
    def of(cls, runs: Sequence[dict[str, Any]]) -> "Bracket":
        """Return the bounds from the runs of one pattern."""
        low = max((run["rate"] for run in runs if run["holds"]), default=0.0)
        failed = [run["rate"] for run in runs if not run["holds"] and run["rate"] > low]
        return cls(low, min(failed, default=inf))


WAYS = ("as it is", "none", "client")
"""Playout buffers with which engines are compared: each engine's own, none, the same for all at the
client."""


RIVALS = ("vllm", "sglang")
"""Beginnings of the names of engines that have no buffer."""
GRID = 1.03
"""Ratio of two rates next to each other."""
JUDGED_SECONDS = 8.0
"""Least time in which a backlog is judged: in a shorter one it grows or not by chance."""


def _ways(name: str) -> tuple[str, Sequence[str]]:
    """Return an engine without the buffer in its name, and the ways in which its runs count: an
    engine that does not plan for a buffer is the same in all."""
    engine, _, buffer = name.rpartition(" ")
    if buffer in WAYS:
        return engine, [buffer]
    if name.startswith(RIVALS):
        return name, WAYS
    return name, WAYS[1:] if name.startswith("chunked") else WAYS[:1]


def _treated() -> dict[tuple[str, float, str], dict[str, dict[int, list[Any]]]]:
    """Return the runs in which all engines were judged alike, by model and workload, bound and
    engine, then way and pattern."""
    held: dict[Any, Any] = defaultdict(lambda: {way: defaultdict(list) for way in WAYS})
    for path, found in _files("equal-treatment/*.json"):
        given = found["provenance"]["workload"]
        model = SHAPES[given.get("model", "qwen3-8b")] + " FP8" * ("quantization" in given)
        for run in found["runs"]:
            if run.get("judged_seconds", JUDGED_SECONDS) < JUDGED_SECONDS:
                continue
            engine, ways = _ways(run["engine"])
            for way in ways:
                holds = run["shown_holds" if way == "client" else "raw_holds"]
                one = {"rate": run["rate"], "holds": holds, "made": _made(path, found)}
                place = f"{model} {DATASETS[run['dataset']]}"
                held[place, run["bound_ms"], engine][way][run["seed"]].append(one)
    return held


def equal() -> Iterator[list[str]]:
    """Rows of engines that were judged alike: as each is, all without a playout buffer, and all
    with the same one at the client."""
    found = _treated()
    for (place, bound, engine), ways in sorted(found.items()):
        seeds = {seed for key in found if key[:2] == (place, bound)
                 for each in found[key].values() for seed in each}  # fmt: skip
        cells = [
            ", ".join(_between(each.get(seed, ())) for seed in sorted(seeds)) if each else "-"
            for each in ways.values()
        ]
        made = {run["made"] for each in ways.values() for runs in each.values() for run in runs}
        yield [place, f"{bound:g}", f"`{engine}`", *cells, "; ".join(sorted(made))]


def _between(runs: Sequence[Any]) -> str:
    """Return the rate that held of one pattern, with a mark where no higher one was tried."""
    if not runs:
        return "-"
    there = Bracket.of(runs)
    if not there.low:
        return f"< {there.high:.1f}"
    return f"{there.low:.1f}" if there.high < inf else f">= {there.low:.1f}"


def _files(pattern: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in sorted(RESULTS.glob(pattern)):
        yield path, json.loads(path.read_text())


def _made(path: Path, found: dict[str, Any]) -> str:
    """File, commit and date of a row."""
    name, about = path.relative_to(RESULTS), found["provenance"]
    link = f"[{name}](../benchmarks/results/{name})"
    return f"{link}, {about['commit'][:7]}, {about['date'][:10]}"


def _place(panel: dict[str, Any]) -> tuple[int, int, int]:
    """Order of the rows: by model, workload and bound."""
    model, dataset = list(MODELS), list(DATASETS)
    return model.index(panel["model"]), dataset.index(panel["dataset"]), panel["tbt_ms"]


def _search(found: dict[str, Any]) -> Search:
    about = found["provenance"]
    commit = about["commit"][:7]
    day = about["date"][:10] if about["date"] else date(commit)
    cards = " ".join(found.get("cards") or ["not named"])
    return Search(found["system"], found["goodput"], f"{cards}, {commit}, {day}")


def _spread(search: Search) -> str:
    low, high = min(search.goodput), max(search.goodput)
    return f"{search.median:.1f} ({low:.1f} to {high:.1f})"


def _saturated() -> dict[tuple[str, float], dict[str, float]]:
    """Return requests served a second by panel and bound, where more arrives than can be served."""
    panels: dict[tuple[str, float], dict[str, float]] = defaultdict(dict)
    for point in read(SATURATED)["points"]:
        panels[point["panel"], point["tbt"]][point["system"]] = point["goodput"]
    return panels


def saturated(shown: int | None) -> Iterator[list[str]]:
    """Rows of the panels in which more arrives than can be served, best system first.

    `shown`: as many other systems of a panel; None: all.
    """
    found = read(SATURATED)
    for (panel, tbt), served in _saturated().items():
        ranked = sorted(served.items(), key=lambda pair: -pair[1])
        others = [pair for pair in ranked if pair[0] != "auto"][:shown]
        for system, rate in (pair for pair in ranked if pair[0] == "auto" or pair in others):
            over = f"{served['auto'] / rate:.2f}" if rate else "-"
            held = f"{rate:.2f}" if rate else "bound not kept"
            yield [panel.removesuffix("-saturated"), f"{tbt * 1e3:.0f}", f"`{system}`", held, over,
                   _made(RESULTS / SATURATED, found)]  # fmt: skip


def two_gpus() -> Iterator[list[str]]:
    """Rows of what two simulated GPUs hold in each way, of all files."""
    ways: dict[str, dict[str, tuple[float, str]]] = defaultdict(dict)
    for path, found in (
        *_files("two-gpus-simulated/*.json"),
        *_files("two-gpus/simulated*/*.json"),
    ):
        for way, held in found.get("goodput", {}).items():
            for tbt, rate in held.items():
                ways[way][tbt] = rate, _made(path, found)
        for row in found.get("rows", ()):  # best system first
            tbt = f"{1e3 * row['found']['tbt']:g}"
            ways[row["engine"]].setdefault(tbt, (row["rate"], _made(path, found)))
    bounds = sorted({tbt for held in ways.values() for tbt in held}, key=float)
    for tbt in bounds:
        there = {way: held[tbt] for way, held in ways.items() if tbt in held}
        most = max(rate for rate, _ in there.values())
        for way, (rate, made) in sorted(there.items(), key=lambda pair: -pair[1][0]):
            yield [tbt, way, f"{rate:.1f}", f"{rate / most:.2f}", made]


def summary() -> Iterator[list[str]]:
    """Rows that say in a line what each section has."""
    panels, searches = _searches()
    pairs = [_rivals(searches[name]) for name in panels]
    ratios = [auto.median / best.median for auto, best in pairs]
    yield ["goodput over the best other system, tuned", _range(ratios, "bounds"), "H200s, measured"]
    yield from _beside()
    for (panel, _), served in _saturated().items():
        auto = served.pop("auto")
        best = max(served, key=served.__getitem__)
        name = panel.removesuffix("-saturated")
        yield [
            f"requests served when too many arrive, {name}",
            f"{auto / served[best]:.2f} of `{best}`",
            "eight simulated A100s",
        ]
    for path, found in _files("sharing-h200.json"):
        auto = found["sharing"]["auto"]
        costs = [cost["cost"] for cost in found["slicing"].values()]
        shares = f"{auto['utilisation']:.1%}; {auto['idle with work']:.1%}"
        on = _made(path, found).partition(",")[0]
        yield ["SMs held under load; time idle with work", shares, on]
        cost = f"{min(costs):+.1%} to {max(costs):+.1%}"
        yield ["cost of one launch a layer instead of one for all", cost, on]


def _beside() -> Iterator[list[str]]:
    """Rows of `auto` over the budget of vLLM that held most of each pattern, if both have no buffer
    and if both have the same; of the patterns in which both held a rate, and in which the budget
    ran that held most in any."""
    found = _treated()
    for place, bound in sorted({(key[0], key[1]) for key in found if key[2] == "auto"}):
        rivals = {key[2]: ways for key, ways in found.items() if key[:2] == (place, bound)
                  and key[2].startswith("vllm")}  # fmt: skip
        own, names = found[place, bound, "auto"], " and ".join(f"`{name}`" for name in rivals)
        for way, words in (("none", "both without a buffer"), ("client", "both with the same")):
            if ratios := _ratios(own[way], [ways[way] for ways in rivals.values()]):
                shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
                what = f"the same over {names}, {place} at {bound:g} ms, {words}"
                yield [what, f"**{fmean(ratios):.2f}** ({shown})", "H200s, measured"]


def _ratios(own: dict[int, list[Any]], rivals: list[dict[int, list[Any]]]) -> list[float]:
    """Return the ratios of what holds, by pattern; none where no rate of the rival failed, which
    may hold every rate of the grid below the one that did."""
    found = [{seed: Bracket.of(runs) for seed, runs in one.items()} for one in rivals]
    first = max(found, key=lambda one: max(one.values(), default=(0.0,)), default={})
    ratios = []
    for seed, runs in sorted(own.items()):
        held = Bracket.of(runs).low
        best = max((one[seed] for one in found if seed in one), default=Bracket(0.0, inf))
        if held and best.low and best.high < inf and seed in first:
            ratios.append(held / max(best.low, best.high / GRID))
    return ratios


def _range(ratios: list[float], of: str) -> str:
    """Return median and range."""
    return f"**{median(ratios):.2f}** ({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} {of})"


TABLES = {
    "measured": (
        "workload|TBT bound, ms|`auto`|card, commit, date|best competitor|it holds|"
        "card, commit, date|ratio",
        measured,
    ),
    "one-card": (
        "workload|TBT bound, ms|system|holds|patterns|of `auto`|card, commit, date",
        one_card,
    ),
    "equal-treatment": (
        "workload|TBT bound, ms|engine|as it is|all without a buffer|all with the same|"
        "file, commit, date",
        equal,
    ),
    **{
        name: (
            "setting|TBT bound, ms|system|served, requests/s|`auto` over it|file, commit, date",
            partial(saturated, shown),
        )
        for name, shown in (("saturated", 3), ("saturated-all", None))
    },
    "two-gpus": ("TBT bound, ms|two GPUs as|requests/s|of the best|file, commit, date", two_gpus),
    "sharing": (
        "device|system|SMs held|lanes idle|device idle with work|file, commit, date",
        sharing,
    ),
    "slicing": ("device|prefill batch|one launch|layer by layer|cost|file, commit, date", slicing),
    "summary": ("what|result|on", summary),
    "claimed": (papers.CLAIMED, papers.claimed),
    "missing": (papers.MISSED, papers.missing),
    **{f"claims-{name}": (papers.CLAIMS, partial(papers.claims, name)) for name in papers.PAPERS},
}
"""Header and rows of each table of the page, by its name there."""


def read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def date(commit: str) -> str:
    """Return the day of a commit, YYYY-MM-DD."""
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%cs", commit, "--"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def table(name: str) -> str:
    """Return one table as Markdown; columns of figures are aligned to the right."""
    header, rows = TABLES[name]
    columns = header.count("|")
    body = list(rows()) or [["not run", *["-"] * columns]]
    rule = ["---", *("---:" if re.match(r"[*\d]", cell) else "---" for cell in body[0][1:])]
    return "\n".join(f"| {' | '.join(row)} |" for row in [header.split("|"), rule, *body])


def page(text: str) -> str:
    """Return the page with every table made anew."""

    def made(match: re.Match[str]) -> str:
        return f"<!-- {match[1]} -->\n{table(match[1])}\n<!-- end -->"

    return re.sub(r"<!-- ([a-z-]+) -->\n.*?<!-- end -->", made, text, flags=re.DOTALL)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    for path in PAGES:
        path.write_text(page(path.read_text()))
