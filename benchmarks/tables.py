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
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks/papers"))
import page as papers  # noqa: E402 - it lies in the folder of the papers' experiments

from twolane.bench.goodput import LEAST_REQUESTS, least_requests  # noqa: E402

RESULTS = ROOT / "benchmarks/results"
PAGES = (ROOT / "docs/results.md", ROOT / "docs/results-in-full.md")
MODELS = {"qwen3-8b": "8B", "codellama-34b": "34B"}
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
OWN = ("twolane", "auto")
"""How the names of Twolane's own servers begin, beside other engines."""


class Bracket(NamedTuple):
    """Bounds on a goodput in requests/s."""

    low: float
    """Highest rate that held."""
    high: float
    """The same, or the lowest rate that failed if no rate between was completed."""

    @classmethod
    def of(cls, found: dict[str, Any] | None) -> "Bracket":
        """Return the bounds from a search, even an interrupted one."""
        if found and any(found["goodput"]):
            return cls(median(found["goodput"]), median(found["goodput"]))
        runs = (found or {}).get("runs", [])
        held = [run["rate"] for run in runs if run["holds"]]
        failed = [run["rate"] for run in runs if not run["holds"]]
        return cls(max(held, default=0.0), min(failed, default=inf))

    def over(self, other: "Bracket") -> str:
        """Return the ratio to another as text; empty: unknown."""
        least = self.low / other.high if other.high else 0.0
        most = self.high / other.low if other.low else inf
        if least == most:
            return f"{least:.2f}"
        if least and most < inf:
            return f"{least:.2f} to {most:.2f}"
        return f"at least {least:.2f}" if least else ""


def _engines() -> Iterator[tuple[Path, dict[str, Any], dict[str, Any], str]]:
    """Yield path and file of engines that took turns on one card, an engine, and `auto` over it; of
    those whose runs were long enough."""
    for path, found in (*_files("side-by-side/*.json"), *_files("side-by-side/*/*.json")):
        if path.parent.parent.name == "side-by-side" and path.parent.name not in CARDS:
            continue
        own: dict[float, list[Bracket]] = defaultdict(list)
        engines = [engine for engine in _of_rows(found) if engine["found"] is not None]
        for engine in engines:
            engine.setdefault("tbt_ms", found.get("tbt_ms"))  # early files have one for all
            engine.setdefault("prompts", found["provenance"]["workload"].get("prompts"))
        engines = [engine for engine in engines if engine["prompts"] >= LEAST_REQUESTS]
        for engine in engines:
            if engine["name"].startswith(OWN) and (there := Bracket.of(engine["found"])).low:
                own[engine["tbt_ms"]].append(there)
        for engine in engines:
            ratio = ""
            if (autos := own[engine["tbt_ms"]]) and not engine["name"].startswith(OWN):
                auto = Bracket(*map(median, zip(*autos, strict=True)))
                ratio = auto.over(Bracket.of(engine["found"]))
            yield path, found, engine, ratio


def _of_rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the engines of a file: as named there, or of the rows of a recipe."""
    engines: list[dict[str, Any]] = found.get("engines", [])
    if engines:
        return engines
    prompts = found["provenance"]["workload"]["rest"]["num_prompts"]
    return [
        {"name": row["engine"], "tbt_ms": round(1e3 * row["found"]["tbt"], 6), "prompts": prompts,
         "found": row["found"]}
        for row in found["rows"]
    ]  # fmt: skip


def side_by_side() -> Iterator[list[str]]:
    """Rows of engines that took turns on one card, of all files with runs that are long enough."""
    for path, found, engine, ratio in _engines():
        gap = engine["found"]["client_p99_ms"]
        yield [
            f"{engine['name']} on {found['card']}",
            f"{engine['tbt_ms']:g}",
            f"{engine['prompts']}",
            _held(engine["found"]),
            ratio or "-",
            f"{gap:.1f}" if gap else "-",
            _made(path, found),
        ]


def playout() -> Iterator[list[str]]:
    """Rows of systems with and without a playout buffer, simulated at one rate."""
    path = RESULTS / "playout-simulated.json"
    found = json.loads(path.read_text())["found"] if path.exists() else {}
    for name in sorted(name.removesuffix("-0") for name in found if name.endswith("-0")):
        system, _, budget = name.partition("-")
        without, with_one = found[f"{name}-0"], found[f"{name}-20"]
        kept = (
            without["tbt_gap_attainment"],
            with_one["tbt_gap_attainment"],
            with_one["shown_tbt_gap_attainment"],
        )
        yield [
            f"`{system}:token_budget={budget}`" if budget else f"`{system}`",
            *(f"{share:.2%}" for share in kept),
            _made(path, with_one),
        ]


def _held(found: dict[str, Any]) -> str:
    """Return the median goodput; of a search that was cut or in which no rate held, what is
    known."""
    known = Bracket.of(found)
    if known.low == known.high:
        return f"{known.low:.1f}"
    if known.low:
        return f"at least {known.low:.1f}"
    if known.high < inf:
        return f"less than {known.high:.1f}"
    return "0.0" if found["goodput"] else "not reached"


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
    """Rows of `auto` over the best setting of another engine for each card, model and bound, of the
    longest runs."""
    best: dict[tuple[str, str, float], tuple[int, Bracket, list[str]]] = {}
    for path, found, engine, ratio in _engines():
        tbt, there = engine["tbt_ms"], Bracket.of(engine["found"])
        if not ratio:
            continue
        place = found["card"], path.name.partition("-azure")[0], tbt
        requests = engine["prompts"]
        if place not in best or (requests, there) > best[place][:2]:
            what = f"the same over another engine at {tbt:g} ms, which has no playout buffer"
            held = f"**{ratio}** of {engine['name']}, which holds {_held(engine['found'])}"
            best[place] = requests, there, [what, held, _made(path, found).partition(",")[0]]
    for _, _, row in best.values():
        yield row


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
    "side-by-side": (
        "engine and card|TBT bound, ms|requests in a run|holds|`auto` over it|P99 gap there, ms|"
        "file, commit, date",
        side_by_side,
    ),
    "playout": (
        "system|gaps in time without a buffer|the engine plans with one and sends at once|"
        "the same, as a client with one shows it|file, commit, date",
        playout,
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
