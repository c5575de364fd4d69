"""The papers' tables of docs/results.md, from the rows of `run.py` and the files of results."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any

from run import EXPERIMENTS, MISSING, OUT, RESULTS, Saved, read, values
from study import Experiment, Run

COMMIT = 7
"""Letters of a commit that the tables show."""
PAPERS = {"muxwise": "MuxWise", "duetserve": "DuetServe", "bullet": "Bullet", "drift": "Drift"}
"""Name of each paper by the beginning of its experiments' names."""
HEAD = "experiment|what is compared|paper|simulated|simulated / paper|measured|why they differ"
EXPERIMENTS_HEAD = (
    "experiment|rows near the paper's|the row that it is about|paper|simulated|measured|patterns|"
    "file, commit, date"
)
NEAR = 1.25
"""Within how many times the paper's figure a row counts as near it."""
HEADLINES = "paper|claims|simulated|measured|why they differ"
RUNS = "experiment|file|runs|requests a run|patterns|commit|date"
WHY = {
    "muxwise": "with reused prompts chunked prefill holds no rate here, with others it does better"
    " than on their testbed, where passes of 256 tokens take 2.5 times as long as simulated",
    "duetserve": "its own engine has costs a pass that the simulated one has not; the third of the"
    " measured ratios had the sweep of serving launches, with which prefill waits for decode",
    "bullet": "their chunked prefill does not keep up at rates that both keep up with here",
    "drift": "as with MuxWise: chunked prefill holds a low rate there, and none here; measured are"
    " prompts without reuse, where one tuned for the bound keeps up",
}
"""Why a paper's headline is not what comes out here."""


def _saved(name: str, card: str = "") -> Saved | None:
    path = OUT / card / f"{name}.json"
    return read(path) if path.exists() else None


def _cards() -> list[str]:
    """Names of the GPUs that have measured results."""
    return sorted(path.name for path in OUT.iterdir() if path.is_dir()) if OUT.exists() else []


def _unit(unit: str) -> str:
    return "" if unit == "times" else f" {unit}"


def _measured(name: str, experiment: Experiment, what: str) -> str:
    """The same row on GPUs; `not run` where one could be measured."""
    found: list[str] = []
    for card in _cards():
        saved = _saved(name, card)
        rows = values(experiment, saved.runs) if saved else []
        found += [f"{value.shown} ({card})" for value in rows if value.row.what == what]
    return ", ".join(found) or _unmeasured(experiment)


def _unmeasured(experiment: Experiment) -> str:
    """Why there is no row measured on a GPU."""
    loads = [run.load for run in experiment.runs.values() if isinstance(run, Run)]
    if not loads:
        return "nothing is served"
    return "needs several GPUs" if any(load.tp > 1 for load in loads) else "not run"


def rows(paper: str) -> Iterator[list[str]]:
    """The rows of one paper's experiments."""
    for name, experiment in _of(paper).items():
        saved = _saved(name)
        where = experiment.where.removeprefix(PAPERS[paper]).removeprefix(",").strip()
        for value in values(experiment, saved.runs) if saved else ():
            row = value.row
            yield [
                where,
                row.what,
                "-" if row.paper is None else f"{row.paper:g}{_unit(row.unit)}",
                value.shown,
                "-" if value.ratio is None else f"{value.ratio:.2f}",
                _measured(name, experiment, row.what),
                row.why,
            ]


def runs(paper: str) -> Iterator[list[str]]:
    """Where the rows of one paper come from."""
    for name, experiment in _of(paper).items():
        if (saved := _saved(name)) is not None:
            link = f"[{name}.json](../benchmarks/results/papers/{name}.json)"
            requests = sorted({done.requests for done in saved.runs})
            commits = sorted({(done.commit or "unknown")[:COMMIT] for done in saved.runs})
            dates = sorted({done.date[:10] for done in saved.runs})
            span = f"{requests[0]} to {requests[-1]}" if len(requests) > 1 else f"{requests[0]}"
            patterns = len({done.seed for done in saved.runs})
            counts = [f"{len(saved.runs)}", span if requests[-1] else "none", f"{patterns}"]
            yield [experiment.where, link, *counts, " ".join(commits), " to ".join(dates)]


def experiments() -> Iterator[list[str]]:
    """One row for each experiment."""
    for name, experiment in EXPERIMENTS.items():
        saved = _saved(name)
        found = values(experiment, saved.runs) if saved else []
        if saved is None or not found:
            continue
        ratios = [value.ratio for value in found if value.ratio is not None]
        other = "lower bounds" if any(value.more for value in found) else "no figures there"
        near = sum(1 / NEAR <= ratio <= NEAR for ratio in ratios)
        about = next((value for value in found if value.row.paper is not None), found[0])
        commits = sorted({(done.commit or "unknown")[:COMMIT] for done in saved.runs})
        latest = max(done.date[:10] for done in saved.runs)
        row = about.row
        yield [
            experiment.where,
            f"{near} of {len(ratios)}" if ratios else other,
            row.what,
            "-" if row.paper is None else f"{row.paper:g}{_unit(row.unit)}",
            about.shown,
            _measured(name, experiment, row.what),
            f"{len({done.seed for done in saved.runs})}",
            f"{_link(name)}, {' '.join(commits)}, {latest}",
        ]


def headlines() -> Iterator[list[str]]:
    """What the abstracts claim, beside what comes out."""
    for name, experiment in EXPERIMENTS.items():
        if not experiment.headline:
            continue
        paper = name.partition("-")[0]
        saved = _saved(name)
        simulated = _claimed(experiment, saved) if saved else "not run"
        if saved:
            simulated += f" ({_link(name)})"
        measured = [
            f"{_claimed(experiment, found)} ({_link(name, card)})"
            for card in _cards()
            if (found := _saved(name, card)) is not None
        ]
        measured += [over] if (over := goodput_over_chunked(paper)) else []
        yield [
            PAPERS[paper],
            experiment.headline,
            simulated,
            "; ".join(measured) or "not run ([ready](notes/next-on-gpus.md))",
            WHY[paper],
        ]


def _claimed(experiment: Experiment, saved: Saved) -> str:
    """The rows that divide two systems' goodput or throughput: what the headline is about."""
    found = values(experiment, saved.runs)
    claimed = [
        v for v in found if v.row.over and v.row.figure in ("goodput", "throughput")
        and not v.row.why.startswith("not in the paper")
    ]  # fmt: skip
    said = []
    if exact := [v for v in claimed if not v.more]:
        of = ", ".join(f"{v.ours:.2f}" for v in exact)
        said.append(f"{mean(v.ours for v in exact):.2f} on average: {of}")
    if none := [f"{v.ours:.1f}" for v in claimed if v.more]:
        said.append(f"more than {', '.join(none)}, since the other held no rate")
    return "; ".join(said) or "not run"


def _link(name: str, card: str = "") -> str:
    """A link to a file of results, named after its card."""
    place = f"{card}/{name}" if card else name
    return f"[{place}](../benchmarks/results/papers/{place}.json)"


def goodput_over_chunked(system: str) -> str:
    """Measured goodput of a paper's system over that of chunked prefill in the same panel; empty
    where no panel has both."""
    ratios, folders = [], set()
    for place, found in _panels().items():
        chunked = [median(found[name]) for name in found if name.startswith("chunked")]
        if system in found and any(chunked):
            ratios.append(median(found[system]) / max(chunked))
            folders.add(place.partition("/")[0])
    if not ratios:
        return _least_over_chunked(system)
    least, most = min(ratios), max(ratios)
    panels = f"{len(ratios)} searches on H200s" if len(ratios) > 1 else "1 search on an H200"
    links = ", ".join(f"[{name}](../benchmarks/results/{name})" for name in sorted(folders))
    return (
        f"goodput {mean(ratios):.2f} of tuned `chunked` on average ({least:.2f} to {most:.2f},"
        f" {panels}, {links})"
    )


def _least_over_chunked(system: str) -> str:
    """The same of a ladder in which the system held every rate that it was asked."""
    for path, found in _ladders():
        rates = {name: _held(steps) for name, steps in found.items()}
        chunked = [rate for name, rate in rates.items() if name.startswith("chunked")]
        if rates.get(system) and any(chunked):
            link = f"[{path.name}](../benchmarks/results/ladder/{path.name})"
            return f"at least {rates[system]:g} requests/s, `chunked` {max(chunked):g} ({link})"
    return ""


def _ladders() -> Iterator[tuple[Path, dict[str, list[dict[str, Any]]]]]:
    """Measured ladders on one H200: path, and steps by system."""
    for path in sorted(RESULTS.glob("ladder/*-1xh200*.json")):
        ladder = json.loads(path.read_text())
        if not ladder["simulated"]:
            yield path, ladder["found"]


def _held(steps: list[dict[str, Any]]) -> float:
    """The highest rate of a ladder that held; 0 where none did."""
    return max((step["rate"] for step in steps if step["holds"]), default=0.0)


def _panels() -> dict[str, dict[str, list[float]]]:
    """Goodput in the searches on H200s by panel and system."""
    panels: dict[str, dict[str, list[float]]] = {}
    for path in sorted(RESULTS.glob("goodput-h200/*/*.json")):
        found = json.loads(path.read_text())
        panels.setdefault(f"goodput-h200/{found['panel']}", {})[found["system"]] = found["goodput"]
    for path in sorted(RESULTS.glob("one-card/h200*/*.json")):
        one = panels.setdefault(str(path.relative_to(RESULTS)), {})
        for found in json.loads(path.read_text())["found"]:
            if found["goodput"]:
                one[found["system"]] = found["goodput"]
    for path, steps in _ladders():
        panels[f"ladder/{path.name}"] = {
            system: [_held(asked)]
            for system, asked in steps.items()
            if not all(step["holds"] for step in asked)
        }
    return panels


def missing() -> Iterator[list[str]]:
    """What cannot be expressed, and why."""
    for what, reason in MISSING.items():
        yield [what, re.sub(r"\s+", " ", reason)]


def _of(paper: str) -> dict[str, Experiment]:
    return {n: e for n, e in EXPERIMENTS.items() if n.partition("-")[0] == paper}
