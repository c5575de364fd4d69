"""The papers' tables of docs/results.md, from the rows of `run.py` and the files of results."""

import math
import re
from collections.abc import Iterator

from muxwise import SEARCHED, SYNTHETIC
from run import EXPERIMENTS, MISSING, NEAR, OUT, Saved, Value, read, values

PAPERS = {"muxwise": "MuxWise", "duetserve": "DuetServe", "bullet": "Bullet", "drift": "Drift"}
"""Name of each paper by the beginning of its experiments' names."""
CLAIMS = "where|what is compared|paper|simulated|status|file, commit, date"
CLAIMED = "paper|claims with a number|reproduced|not|open|cannot be"
MISSED = "what|why it is not here"
ONE_GPU = 1.2
"""Ratio of MuxWise §4.3.1, which is not one of the five of the average."""
AVERAGE = 2.20
"""MuxWise's average goodput over chunked prefill: the geometric mean of 2.6, 3.06, 1.9, 1.71, 2."""


def _saved(name: str) -> Saved | None:
    path = OUT / f"{name}.json"
    return read(path) if path.exists() else None


def _values(paper: str) -> Iterator[tuple[str, str, Saved, Value]]:
    """Experiment, place, file and value of each row of a paper."""
    for name, experiment in EXPERIMENTS.items():
        saved = _saved(name) if name.partition("-")[0] == paper else None
        if saved is not None:
            where = experiment.where.replace(PAPERS[paper], "", 1).strip(" ,")
            for value in values(experiment, saved.runs):
                yield name, where, saved, value


def claims(paper: str) -> Iterator[list[str]]:
    """Return one row for each claim of a paper."""
    for name, where, saved, value in _values(paper):
        row = value.row
        unit = "" if row.unit == "times" else f" {row.unit}"
        claimed = "-" if row.paper is None else f"{row.paper:g}{unit}"
        yield [where, row.what, claimed, value.shown, value.status, _made(name, saved)]
    if paper == "muxwise" and (mean := average()):
        near = all(AVERAGE / NEAR <= each <= AVERAGE * NEAR for each in mean)
        shown = " or ".join(f"{each:.3g}" for each in mean)
        what = "goodput over chunked prefill, geometric mean of five workloads"
        status = "**reproduced**" if near else "not: see its parts"
        yield ["abstract", what, f"{AVERAGE:g}", shown, status, "from the rows above"]


def average() -> list[float]:
    """Return the mean of MuxWise's five goodput ratios for each model of the A100."""
    logs: list[list[float]] = []
    for _, _, _, value in _values("muxwise"):
        of = value.row.what.removeprefix("goodput over chunked, ")
        if of in (*SEARCHED, *SYNTHETIC) and value.row.paper != ONE_GPU:
            logs.append([math.log(each) for each in value.medians])
    if len(logs) != len(SEARCHED) + len(SYNTHETIC):
        return []
    return [math.exp(sum(each) / len(each)) for each in zip(*logs, strict=True)]


def claimed() -> Iterator[list[str]]:
    """Return how many claims of each paper are reproduced."""
    for paper, name in PAPERS.items():
        found = [value.status for *_, value in _values(paper) if value.row.paper is not None]
        counts = [
            sum(status.startswith(begin) for status in found)
            for begin in ("**reproduced", "not", "open", "cannot")
        ]
        yield [name, *map(str, (len(found), *counts))]


def missing() -> Iterator[list[str]]:
    """Return what cannot be expressed, and why."""
    for what, reason in MISSING.items():
        yield [what, re.sub(r"\s+", " ", reason)]


def _made(name: str, saved: Saved) -> str:
    """Return a link to a file of results, its commits and its date."""
    commits = sorted({(done.commit or "unknown")[:7] for done in saved.runs})
    day = max(done.date[:10] for done in saved.runs)
    link = f"[{name}](../benchmarks/results/papers/{name}.json)"
    return f"{link}, {' '.join(commits)}, {day}"
