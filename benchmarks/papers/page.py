"""The papers' tables of docs/results.md, from the rows of `run.py` and the files of results."""

import math
import re
from collections.abc import Iterable, Iterator
from functools import cache

import msgspec
from muxwise import SEARCHED, SYNTHETIC
from run import EXPERIMENTS, MISSING, OUT, Done, Saved, Value, is_near, read, uses, values
from study import Experiment, Row, Run

PAPERS = {"muxwise": "MuxWise", "duetserve": "DuetServe", "bullet": "Bullet", "drift": "Drift"}
"""Name of each paper by the beginning of its experiments' names."""
CLAIMS = "where|what is compared|paper|simulated|status|file, commit, date"
CLAIMED = "paper|claims with a number|reproduced|not|open|cannot be|not run anew"
MISSED = "what|why it is not here"
ONE_GPU = 1.2
"""Ratio of MuxWise §4.3.1, which is not one of the five of the average."""
AVERAGE = 2.20
"""MuxWise's average goodput over chunked prefill: the geometric mean of 2.6, 3.06, 1.9, 1.71, 2."""


@cache
def _saved(name: str) -> Saved | None:
    path = OUT / f"{name}.json"
    return read(path) if path.exists() else None


WITHDRAWN = "not run anew, the old figure is withdrawn"


def _runs(experiment: Experiment) -> list[Done]:
    """Return the runs of an experiment that are on file, in its own file or in another's."""
    names = {run: name for name, run in experiment.runs.items() if isinstance(run, Run)}
    found: dict[tuple[str, str, int], Done] = {}
    for name, other in EXPERIMENTS.items():
        for done in saved.runs if (saved := _saved(name)) else ():
            own = done.run if other is experiment else names.get(other.runs.get(done.run))
            if own is not None:
                done = msgspec.structs.replace(done, run=own)
                found.setdefault((own, done.gpu, done.seed), done)
    return list(found.values())


def _values(paper: str) -> Iterator[tuple[str, str, Row, Value | None, list[Done]]]:
    """Yield experiment, place, value and runs of each row; no value where runs are missing."""
    for name, experiment in EXPERIMENTS.items():
        if name.partition("-")[0] != paper:
            continue
        where = experiment.where.replace(PAPERS[paper], "", 1).strip(" ,")
        runs = _runs(experiment)
        known = {value.row.what: value for value in values(experiment, runs)}
        for row in experiment.rows:
            used = [done for done in runs if uses(row, done.run)]
            yield name, where, row, known.get(row.what), used


def claims(paper: str) -> Iterator[list[str]]:
    """Return one row for each claim of a paper."""
    for name, where, row, value, runs in _values(paper):
        unit = "" if row.unit == "times" else f" {row.unit}"
        claimed = "-" if row.paper is None else f"{row.paper:g}{unit}"
        contradicted = f"cannot be: {row.contradicts}" if row.contradicts else WITHDRAWN
        if value is None and row.paper is None:
            continue
        ours, status = (value.shown, value.status) if value else ("-", contradicted)
        yield [where, row.what, claimed, ours, status, _made(name, runs) if value else "-"]
    if paper == "muxwise" and (mean := average()):
        near = all(is_near(each, AVERAGE, ratio=True) for each in mean)
        shown = " or ".join(f"{each:.3g}" for each in mean)
        what = "goodput over chunked prefill, geometric mean of five workloads"
        status = "**reproduced**" if near else "open: see its parts"
        yield ["abstract", what, f"{AVERAGE:g}", shown, status, "from the rows above"]


def average() -> list[float]:
    """Return the mean of MuxWise's five goodput ratios for each model of the A100."""
    logs: list[list[float]] = []
    for _, _, row, value, _ in _values("muxwise"):
        of = row.what.removeprefix("goodput over chunked, ")
        if value and of in (*SEARCHED, *SYNTHETIC) and row.paper != ONE_GPU:
            logs.append([math.log(each) for each in value.medians])
    if len(logs) != len(SEARCHED) + len(SYNTHETIC):
        return []
    return [math.exp(sum(each) / len(each)) for each in zip(*logs, strict=True)]


def claimed() -> Iterator[list[str]]:
    """Return how many claims of each paper are reproduced."""
    for paper, name in PAPERS.items():
        found = [row[4] for row in claims(paper) if row[2] != "-"]
        counts = [
            sum(status.startswith(begin) for status in found)
            for begin in ("**reproduced", "not:", "open", "cannot", "not run")
        ]
        yield [name, *map(str, (len(found), *counts))]


def missing() -> Iterator[list[str]]:
    """Return what cannot be expressed, and why."""
    for what, reason in MISSING.items():
        yield [what, re.sub(r"\s+", " ", reason)]


def _made(place: str, runs: Iterable[Done]) -> str:
    """Return a link to the files of these runs, their commits and their last day."""
    files = {name for name in EXPERIMENTS for done in runs if _has(name, done)}
    file = place if place in files else min(files)
    link = f"[{file}](../benchmarks/results/papers/{file}.json)"
    commits = " ".join(sorted({(done.commit or "unknown")[:7] for done in runs}))
    return f"{link}, {commits}, {max(done.date[:10] for done in runs)}"


def _has(name: str, done: Done) -> bool:
    saved = _saved(name)
    return saved is not None and any(done.figures == other.figures for other in saved.runs)
