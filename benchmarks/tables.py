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
from statistics import mean, median
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks/papers"))
import page as papers  # noqa: E402 - it lies in the folder of the papers' experiments

RESULTS = ROOT / "benchmarks/results"
PAGES = (ROOT / "docs/results.md", ROOT / "docs/results-in-full.md")
MODELS = {"qwen3-8b": "8B", "codellama-34b": "34B"}
DATASETS = {"azure-conv": "conversations", "azure-code": "code", "conversation": "Mooncake"}
"""Names of the workloads in the tables."""


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


def measured(flat: bool) -> Iterator[list[str]]:
    """Rows of the searches on H200s; `flat`: those whose TTFT bound ignores the prompt's length."""
    panels, searches = _searches()
    for name, panel in panels.items():
        if flat != name.endswith("-flat"):
            continue
        auto, best = _rivals(searches[name])
        yield [
            f"{MODELS[panel['model']]} {DATASETS[panel['dataset']]}",
            str(panel["tbt_ms"]),
            _spread(auto),
            auto.where,
            f"`{best.system}`",
            _spread(best),
            best.where,
            f"**{auto.median / best.median:.2f}**",
        ]


def _searches() -> tuple[dict[str, Any], dict[str, list[Search]]]:
    """Workloads and searches of the panels on H200s, in the order of the tables."""
    searches: dict[str, list[Search]] = defaultdict(list)
    panels = {}
    for _, found in _files("goodput-h200/*/*.json"):
        panels[found["panel"]] = found["provenance"]["workload"]
        searches[found["panel"]].append(_search(found))
    return dict(sorted(panels.items(), key=lambda each: _place(each[1]))), searches


def _rivals(searches: list[Search]) -> tuple[Search, Search]:
    """`auto`, and the best other system of a panel."""
    auto = next(each for each in searches if each.system == "auto")
    others = [each for each in searches if each.system != "auto"]
    return auto, max(others, key=lambda each: each.median)


def one_card() -> Iterator[list[str]]:
    """Rows of the systems on H200s beside `auto`."""
    panels, searches = _searches()
    for name, panel in panels.items():
        if name.endswith("-flat"):
            continue
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
            yield [
                found["device"],
                batch,
                whole,
                sliced,
                f"{cost['cost']:+.1%}",
                _made(path, found),
            ]


def peers() -> Iterator[list[str]]:
    """Rows of other engines, of all files; one that says so where there is none."""
    rows = 0
    for path, found in _files("peers/*.json"):
        for row in found["rows"]:
            rows += 1
            own = [*row["auto_before"]["goodput"], *row["auto_after"]["goodput"]]
            peer, engine = row["peer"], row["peer"].get("engine_itl_ms") or {}
            gaps = f"{peer['client_p99_ms'] or 0:.1f}"
            inside = f"{engine.get('p99_above')} to {engine.get('p99_within')}"
            yield [
                f"{found['peer']} on {found['card']}",
                f"{row['tbt_ms']:g}",
                f"{median(own):.1f} ({min(own):.1f} to {max(own):.1f})",
                f"`{row['best']}`",
                f"{median(peer['goodput']):.1f}",
                "none held" if row["ratio"] is None else f"**{row['ratio']:.2f}**",
                f"{gaps}; {inside if engine else 'not told'}",
                _made(path, found),
            ]
    if not rows:
        yield ["vLLM, SGLang", "9, 12, 21, 50", "not run", "-", "not run", "-", "-", "-"]


SATURATED = "panels-saturated.json"
"""File of the panels in which more arrives than can be served."""
FIGURES = ("step_ms", "first_token_ms")
"""Figures of an engine without load, in ms."""
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
    """Path and file of engines that took turns on one card, an engine, and `auto` over it."""
    for path, found in _files("side-by-side/*.json"):
        own: dict[float, list[Bracket]] = defaultdict(list)
        for engine in found["engines"]:
            engine.setdefault("tbt_ms", found.get("tbt_ms"))  # early files have one for all
            engine.setdefault("prompts", found["provenance"]["workload"].get("prompts"))
            if engine["name"].startswith(OWN) and (there := Bracket.of(engine["found"])).low:
                own[engine["tbt_ms"]].append(there)
        for engine in found["engines"]:
            ratio = ""
            if (autos := own[engine["tbt_ms"]]) and not engine["name"].startswith(OWN):
                auto = Bracket(*map(median, zip(*autos, strict=True)))
                ratio = auto.over(Bracket.of(engine["found"]))
            yield path, found, engine, ratio


def side_by_side() -> Iterator[list[str]]:
    """Rows of engines that took turns on one card, of all files."""
    for path, found, engine, ratio in _engines():
        one = engine["found"] or {"goodput": [], "client_p99_ms": None}
        shown = [f"{engine[key]:.1f}" if engine[key] else "-" for key in FIGURES]
        gap = f"{one['client_p99_ms']:.1f}" if one["client_p99_ms"] else "-"
        held = [f"{engine['tbt_ms']:g}", f"{engine['prompts']}", _held(one)]
        if engine["found"] is None:
            held = ["-"] * len(held)
        place = f"{engine['name']} on {found['card']}"
        yield [place, *shown, *held, ratio or "-", gap, _made(path, found)]


def parts(simulated: bool) -> Iterator[list[str]]:
    """Rows of every system beside `auto` on one card, of all files."""
    for path, found in _files("one-card/*/*.json"):
        if simulated != found["card"].startswith("simulated"):
            continue
        part = found["provenance"]["workload"]["part"]
        place = f"{part['model']} {DATASETS[part['dataset']]}, {found['card']}"
        for each in sorted(found["found"], key=lambda one: -median(one["goodput"] or [0.0])):
            ratio, held = f"{found['ratios'].get(each['system'], 1.0):.2f}", _held(each)
            if not any(each["goodput"]):
                ratio = "-"
            yield [place, f"{part['tbt_ms']:g}", f"`{each['system']}`", held, ratio,
                   _made(path, found)]  # fmt: skip


def ladders() -> Iterator[list[str]]:
    """Rows of systems that took turns over one loaded model, at rates that rise, of all files."""
    steps: dict[tuple[str, str], dict[str, list[tuple[dict[str, Any], str]]]]
    steps = defaultdict(lambda: defaultdict(list))
    for path, found in _files("ladder/*.json"):
        about = found["provenance"]["workload"]
        for name, asked in {} if found["simulated"] else found["found"].items():
            system, _, own = name.partition(" within ")
            card = f"{about['ranks']} x {path.stem.rpartition('x')[2].partition('-')[0]}"
            place = f"{about['model']} {DATASETS[about['dataset']]}, {card}"
            bound = own.removesuffix(" ms") or f"{about['tbt_ms']:g}"
            steps[place, bound][system] += [(step, _made(path, found)) for step in asked]
    for (place, bound), systems in steps.items():
        known = {
            name: Bracket.of({"goodput": [], "runs": agreed([step for step, _ in asked])})
            for name, asked in systems.items()
        }
        for name, asked in sorted(systems.items(), key=lambda pair: -known[pair[0]].low):
            last, made = max(asked, key=lambda pair: pair[0]["rate"])
            rates = ", ".join(f"{rate:g}" for rate in sorted({step["rate"] for step, _ in asked}))
            late = f"{1 - last['first_tokens_in_time']:.0%}; {last['gap_p99_ms']:.1f}"
            others = "auto" in known and name != "auto"
            ratio = known["auto"].over(known[name]) if others else ""
            held = f"{known[name].low:g}" if known[name].low else "none"
            held += " or more" if known[name].high == inf else ""
            yield [place, bound, f"`{name}`", rates, held, ratio or "-", late, made]


def agreed(steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rates that were asked, by one step each; one that failed in any run does not hold."""
    held = {step["rate"]: True for step in steps}
    for step in steps:
        held[step["rate"]] &= step["holds"]
    return [{"rate": rate, "holds": holds} for rate, holds in held.items()]


def lengths() -> Iterator[list[str]]:
    """Rows of one simulated search with runs of several lengths, of all files."""
    found = [(path, content) for path, content in _files("run-lengths/*/*/*.json")]
    for path, content in sorted(found, key=lambda pair: pair[1]["prompts"]):
        auto, other = content["found"]
        best = median(auto["goodput"]), median(other["goodput"])
        yield [
            f"{content['prompts']}",
            f"{best[0]:.1f}",
            f"`{other['system']}` {best[1]:.1f}",
            f"{best[0] / best[1]:.2f}",
            _made(path, content),
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


def simulated() -> Iterator[list[str]]:
    """Rows of the simulated panels: `auto` beside one setting and beside the best at each bound."""
    for panel, points in _panels().items():
        auto, others = points.pop("auto"), points
        single = max(others, key=lambda system: mean(others[system].values()))
        for tbt, goodput in sorted(auto.items()):
            tuned = max(others, key=lambda system: others[system][tbt])
            yield [
                panel,
                f"{tbt * 1e3:.0f}",
                f"{goodput:.1f}",
                f"`{single}` {others[single][tbt]:.1f}",
                f"{goodput / others[single][tbt]:.2f}" if others[single][tbt] else "none held",
                f"`{tuned}` {others[tuned][tbt]:.1f}",
                f"**{goodput / others[tuned][tbt]:.2f}**",
            ]


class Bound(NamedTuple):
    """A bound of a simulated panel: the rates that held, one for each pattern."""

    panel: str
    tbt: float
    auto: list[float]
    rival: str
    """Best other system by its median."""
    best: list[float]
    made: str
    """File, commit and date."""

    @property
    def ratio(self) -> float:
        """Ratio of the medians."""
        return median(self.auto) / median(self.best)

    @property
    def paired(self) -> float:
        """The median of the ratios pattern by pattern; a rival that held nothing counts as lost."""
        each = zip(self.auto, self.best, strict=True)
        return median(own / other if other else inf for own, other in each)


def _bounds() -> Iterator[Bound]:
    """Yield the simulated bounds with three patterns."""
    for path, found in _files("panels-three-seeds/*.json"):
        rates: dict[float, dict[str, list[float]]] = defaultdict(dict)
        for point in found["points"]:
            rates[point["tbt"]][point["system"]] = point["rates"]
        panel = found["points"][0]["panel"]
        for tbt, row in sorted(rates.items()):
            auto = row.pop("auto")
            rival = max(row, key=lambda system: median(row[system]))
            yield Bound(panel, tbt, auto, rival, row[rival], _made(path, found))


def three_seeds() -> Iterator[list[str]]:
    """Rows of the simulated panels with three patterns: `auto` beside the best at each bound."""
    for bound in _bounds():
        spread = (
            f"{median(r):.1f} ({min(r):.1f} to {max(r):.1f})" for r in (bound.auto, bound.best)
        )
        auto, best = spread
        yield [
            bound.panel,
            f"{bound.tbt * 1e3:.0f}",
            auto,
            f"`{bound.rival}`",
            best,
            f"**{bound.ratio:.2f}**",
            f"{bound.paired:.2f}",
            bound.made,
        ]


def means() -> Iterator[list[str]]:
    """Rows of the simulated panels' means over their bounds."""
    for panel, points in _panels().items():
        auto, others = points.pop("auto"), points
        single = max(others, key=lambda system: mean(others[system].values()))
        tuned = [max(each[tbt] for each in others.values()) for tbt in auto]
        yield [
            panel,
            f"{mean(auto.values()):.1f}",
            f"`{single}`",
            f"{mean(auto.values()) / mean(others[single].values()):.2f}",
            f"**{mean(auto.values()) / mean(tuned):.2f}**",
        ]


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


def two_gpus_measured() -> Iterator[list[str]]:
    """Rows of what two GPUs hold in each way, and one of them by itself, beside predictions."""
    for path, found in _files("two-gpus/steps-*.json"):
        about, [steps] = found["provenance"]["workload"], found["found"].values()
        [expected] = read(f"two-gpus/simulated-{path.name}")["found"].values()
        held, predicted = (
            max((step["rate"] for step in ladder if step["holds"]), default=0.0)
            for ladder in (steps, expected)
        )
        late = ", ".join(f"{1 - step['first_tokens_in_time']:.0%}" for step in steps)
        yield [
            f"{about['tbt_ms']:g}",
            path.stem.removeprefix("steps-").rpartition("-")[0].replace("-", " "),
            ", ".join(f"{step['rate']:g}" for step in steps),
            f"{held:g}" if held else "none",
            f"{predicted:g}",
            late,
            _made(path, found),
        ]


def two_gpus() -> Iterator[list[str]]:
    """Rows of what two simulated GPUs hold in each way, of all files."""
    ways: dict[str, dict[str, tuple[float, str]]] = defaultdict(dict)
    for path, found in _files("two-gpus-simulated/*.json"):
        for way, held in found["goodput"].items():
            for tbt, rate in held.items():
                ways[way][tbt] = rate, _made(path, found)
    bounds = sorted({tbt for held in ways.values() for tbt in held}, key=float)
    for tbt in bounds:
        there = {way: held[tbt] for way, held in ways.items() if tbt in held}
        most = max(rate for rate, _ in there.values())
        for way, (rate, made) in sorted(there.items(), key=lambda pair: -pair[1][0]):
            yield [tbt, way, f"{rate:.1f}", f"{rate / most:.2f}", made]


def _panels() -> dict[str, dict[str, dict[float, float]]]:
    """Goodput of the simulated panels by panel, system and TBT bound."""
    panels: dict[str, dict[str, dict[float, float]]] = defaultdict(lambda: defaultdict(dict))
    for point in read("panels.json")["points"]:
        panels[point["panel"]][point["system"]][point["tbt"]] = point["goodput"]
    return panels


def summary() -> Iterator[list[str]]:
    """Rows that say in a line what each section has."""
    panels, searches = _searches()
    pairs = [_rivals(searches[name]) for name in panels if not name.endswith("-flat")]
    ratios = [auto.median / best.median for auto, best in pairs]
    yield ["goodput over the best other system, tuned", _range(ratios, "bounds"), "H200s, measured"]
    alike = [auto.median / best.median for auto, best in pairs if auto.where == best.where]
    yield [
        "of these, both sides on one card at one commit",
        _range(alike, "bounds"),
        "H200s, measured",
    ]
    bounds = list(_bounds())
    yield [
        "the same, simulated, three patterns",
        _range([bound.ratio for bound in bounds], "bounds"),
        "simulated H200 and A100s",
    ]
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
            what = f"goodput over another engine at {tbt:g} ms, runs of {requests} requests"
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
        lambda: measured(flat=False),
    ),
    "measured-flat": (
        "workload|TBT bound, ms|`auto`|card, commit, date|best competitor|it holds|"
        "card, commit, date|ratio",
        lambda: measured(flat=True),
    ),
    "simulated": (
        "workload|TBT bound, ms|`auto`|best single setting|ratio|best tuned for this bound|ratio",
        simulated,
    ),
    "means": (
        "workload|`auto`, mean|best single setting|ratio to it|ratio to the best at each bound",
        means,
    ),
    "one-card": (
        "workload|TBT bound, ms|system|holds|patterns|of `auto`|card, commit, date",
        one_card,
    ),
    **{
        name: (
            "workload and card|TBT bound, ms|system|holds|of `auto`|file, commit, date",
            partial(parts, simulated),
        )
        for name, simulated in (("one-card-parts", False), ("one-card-simulated", True))
    },
    "ladders": (
        "model, workload, GPUs|TBT bound, ms|system|asked, requests/s|holds|`auto` over it|"
        "at the highest rate: first tokens late; P99 gap, ms|file, commit, date",
        ladders,
    ),
    "three-seeds": (
        "workload|TBT bound, ms|`auto`|best other system|it holds|ratio of the medians|"
        "median ratio of the patterns|file, commit, date",
        three_seeds,
    ),
    "side-by-side": (
        "engine and card|step of 64 rows at 2K, ms|first token of 8K, ms|TBT bound, ms|"
        "requests in a run|holds|`auto` over it|P99 gap there, ms|file, commit, date",
        side_by_side,
    ),
    "lengths": (
        "requests in a run|`auto`|the other|ratio|file, commit, date",
        lengths,
    ),
    "peers": (
        "engine and card|TBT bound, ms|`auto`, before and after|best setting|it holds|ratio|"
        "P99 gap at the client; in its engine, ms|file, commit, date",
        peers,
    ),
    **{
        name: (
            "setting|TBT bound, ms|system|served, requests/s|`auto` over it|file, commit, date",
            partial(saturated, shown),
        )
        for name, shown in (("saturated", 3), ("saturated-all", None))
    },
    "two-gpus": (
        "TBT bound, ms|two GPUs as|requests/s|of the best|file, commit, date",
        two_gpus,
    ),
    "two-gpus-measured": (
        "TBT bound, ms|GPUs as|asked, requests/s|holds|simulated|first tokens late|"
        "file, commit, date",
        two_gpus_measured,
    ),
    "sharing": (
        "device|system|SMs held|lanes idle|device idle with work|file, commit, date",
        sharing,
    ),
    "slicing": (
        "device|prefill batch|one launch|layer by layer|cost|file, commit, date",
        slicing,
    ),
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
