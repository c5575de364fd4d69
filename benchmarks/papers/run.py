"""The four papers' experiments beside ours: `python benchmarks/papers/run.py [NAME ...]`.

Each experiment is a figure or table of a paper, as data in `muxwise.py`, `duetserve.py`,
`bullet.py` and `drift.py`: `--list` names them, and what cannot be expressed, with the reason. It
prints the paper's claims beside ours and writes `--out/NAME.json`; runs that the file has are not
repeated, so a stopped experiment goes on with the same command. Simulated by default; `--serve
FLAGS` starts a server on this machine's GPU for each system instead. `--traces` (or TWOLANE_TRACES)
names a folder with the public traces; without it workloads are drawn from published statistics.
"""

import argparse
import contextlib
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from statistics import median
from typing import NamedTuple

import bullet
import drift
import duetserve
import msgspec
import muxwise
import switches
from rich.console import Console
from rich.table import Table
from study import MIN_RATE, TWINS, Ask, Bench, Experiment, Figures, Row, Run, traces_from

from twolane.results.provenance import Provenance, provenance, save

PAPERS = (muxwise, duetserve, bullet, drift, switches)
EXPERIMENTS: dict[str, Experiment] = {
    name: experiment for paper in PAPERS for name, experiment in paper.EXPERIMENTS.items()
}
MISSING: dict[str, str] = {
    what: reason for paper in PAPERS for what, reason in paper.MISSING.items()
}
RESULTS = Path(__file__).parents[1] / "results"
OUT = RESULTS / "papers"
REASONS = Path(__file__).with_name("reasons.toml")
WHY = {
    what: one["why"] for one in tomllib.loads(REASONS.read_text())["reasons"] for what in one["of"]
}
"""Why a claim is not reproduced, by what its row compares, if its experiment does not say it."""
NEAR = 1.25
"""Within how many times the paper's figure ours counts as reproduced."""
LEAST_GAIN = 0.5
"""Fraction of a claimed advantage, as a logarithm, that a reproduced ratio has at least."""


class Done(msgspec.Struct):
    """One run of an experiment."""

    run: str
    """Its name in the experiment."""
    seed: int
    requests: int
    """Number of requests; 0 where nothing is served."""
    commit: str | None
    date: str
    figures: Figures
    gpu: str = ""
    """The model of the GPU; empty where there is one alone."""


class Saved(msgspec.Struct):
    """A file of results."""

    provenance: Provenance
    where: str
    """Paper and place."""
    card: str
    """`simulated`, or the GPU that served."""
    runs: list[Done]


class Value(NamedTuple):
    """What a row comes to."""

    row: Row
    ours: Mapping[str, list[float]]
    """In the row's unit by model of the GPU, one for each seed."""
    more: bool
    """Whether a rival held no rate, and `ours` is over the lowest that was tried."""

    @property
    def medians(self) -> list[float]:
        """The median over the seeds for each model of the GPU."""
        return [median(values) for values in self.ours.values()]

    @property
    def shown(self) -> str:
        """Ours, with the spread over the seeds; of two models of a GPU both."""
        unit = "" if self.row.unit == "times" else f" {self.row.unit}"
        least = "more than " if self.more else ""
        return " or ".join(least + _spread(values) for values in self.ours.values()) + unit

    @property
    def status(self) -> str:
        """Whether the claim is reproduced, and if not, why."""
        paper, why = self.row.paper, self.row.why or WHY.get(self.row.what, "")
        if self.row.contradicts:
            return f"cannot be: {self.row.contradicts}"
        if paper is None:
            return f"no claim: {why}"
        ratio = bool(self.row.over) and not self.row.minus
        near = [is_near(ours, paper, ratio=ratio) for ours in self.medians]
        if not self.more and all(near):
            return "**reproduced**"
        low, high = min(self.medians), math.inf if self.more else max(self.medians)
        if len(self.ours) > 1 and (low <= paper <= high or any(near)) and not why:
            return "open: the two models of the A100 differ by more; only a measured one tells"
        return why if why.startswith("open") else f"not: {why}"


def is_near(ours: float, paper: float, *, ratio: bool) -> bool:
    """Return whether a figure reproduces the paper's; a ratio must have half of its advantage."""
    if not paper / NEAR <= ours <= paper * NEAR:
        return False
    return not ratio or math.log(ours) / math.log(paper) >= LEAST_GAIN


def _spread(values: Sequence[float]) -> str:
    middle = f"{median(values):.3g}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):.3g} to {max(values):.3g})"


def values(experiment: Experiment, runs: Sequence[Done]) -> list[Value]:
    """Return the rows whose runs are there."""
    made = [_value(row, runs, experiment.runs) for row in experiment.rows]
    return [value for value in made if value is not None]


def uses(row: Row, run: str) -> bool:
    """Return whether a row needs a run of this name."""
    return any(run.startswith(name) for name in (*row.of, *row.over))


def _value(row: Row, runs: Sequence[Done], known: Mapping[str, Run | Ask]) -> Value | None:
    found: dict[tuple[str, int], dict[str, Figures]] = {}
    used = [done for done in runs if uses(row, done.run)]
    models = {done.gpu for done in used} & {name for names in TWINS.values() for name in names}
    for done in used:  # a row may be of several GPUs, as MuxWise's Figure 16
        model = done.gpu if done.gpu in models else ""
        found.setdefault((model, done.seed), {})[done.run] = done.figures
    ours: dict[str, list[float]] = {}
    more = False
    for (gpu, _), figures in found.items():
        above = [_figure(name, row.figure, figures) for name in row.of]
        below = [_figure(name, row.figure, figures) for name in row.over]
        if None in above or None in below:
            continue
        more |= 0.0 in below
        least = [d or _least(name, known) for name, d in zip(row.over, below, strict=True)]
        ours.setdefault(gpu, []).append(row.scale * _combined(row, above, least))
    return Value(row, ours, more) if ours else None


def _combined(row: Row, above: Sequence[float], below: Sequence[float]) -> float:
    """Return the figure of a row, the difference, or the geometric mean of the ratios."""
    if not below:
        return above[0]
    if row.minus:
        return above[0] - below[0]
    logs = [math.log(a / b) if a else -math.inf for a, b in zip(above, below, strict=True)]
    return math.exp(sum(logs) / len(logs))


def _figure(name: str, figure: str, figures: Mapping[str, Figures]) -> float | None:
    """Return a run's figure, or the largest of the runs that a name stands for."""
    same = [run for run in figures if run == name] or [
        run for run in figures if re.sub(r" \d+$", "", run) == name
    ]
    values = [figures[run][figure] for run in same if figure in figures[run]]
    return max(values, default=None)


def _least(name: str, runs: Mapping[str, Run | Ask]) -> float:
    """Return the lowest rate of a search in which no rate held."""
    run = next(run for known, run in runs.items() if known.startswith(name))
    return MIN_RATE * run.load.rate if isinstance(run, Run) else math.inf


def read(path: Path) -> Saved:
    """Return a file of results."""
    return msgspec.json.decode(path.read_bytes(), type=Saved)


def table(name: str, experiment: Experiment, runs: Sequence[Done]) -> Table:
    """Return the claims beside ours."""
    made = Table(title=f"{name}: {experiment.where}", title_justify="left", show_lines=False)
    for head in ("", "paper", "ours", "status"):
        made.add_column(head)
    for value in values(experiment, runs):
        paper = "" if value.row.paper is None else f"{value.row.paper:g} {value.row.unit}"
        made.add_row(value.row.what, paper, value.shown, value.status)
    return made


def _matches(run: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(run, pattern) for pattern in patterns)


def chosen(
    experiment: Experiment, patterns: Sequence[str], served: bool
) -> list[tuple[str, Run | Ask]]:
    """Return the runs whose names match; on servers system by system, so that each is started
    once."""
    runs = [(name, run) for name, run in experiment.runs.items() if _matches(name, patterns)]
    systems = list(dict.fromkeys(run.system for _, run in runs if isinstance(run, Run)))
    if served:
        runs.sort(key=lambda pair: systems.index(pair[1].system) if isinstance(pair[1], Run) else 0)
    return runs


def work(name: str, bench: Bench, given: argparse.Namespace) -> Saved:
    """Run what is missing of an experiment; the file is written after each run."""
    out = given.out if given.serve is None else given.out / given.card
    experiment, path = EXPERIMENTS[name], out / f"{name}.json"
    about = provenance({"experiment": name, "traces": "public" if bench.traces else "drawn"})
    saved = Saved(about, experiment.where, given.card or "simulated", [])
    if path.exists():
        saved = read(path)
        saved.provenance = about
    if given.fresh:
        saved.runs = [done for done in saved.runs if not _matches(done.run, given.runs)]
    known = {(done.run, done.gpu, done.seed, done.requests) for done in saved.runs}
    for run_name, run in chosen(experiment, given.runs, bench.serve is not None):
        count = bench.count(run)
        seeds = (given.seeds or experiment.seeds) if count else 1
        for gpu in bench.gpus(run):
            for seed in range(seeds):
                if (run_name, gpu, seed, count) in known:
                    continue
                found = bench.figures(run, gpu, seed)
                shown = (f"{n} {found[n]:.4g}" for n in experiment.shown if n in found)
                print(f"{run_name} {gpu} {seed}: {', '.join(shown)}", flush=True)
                day = provenance().date or ""
                done = Done(run_name, seed, count, about.commit, day, found, gpu)
                saved.runs.append(done)
                content = msgspec.to_builtins(saved)
                del content["provenance"]
                save(path, about, content)
    return saved


def show_list(console: Console) -> None:
    """Name every experiment, and what is missing."""
    for name, experiment in EXPERIMENTS.items():
        console.print(f"{name}: {experiment.where}, {len(experiment.runs)} runs")
    console.print("\nNot expressed:")
    for what, reason in MISSING.items():
        console.print(f"{what}: {reason}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="experiments; by default all")
    add("--list", action="store_true", help="name the experiments, and what is not expressed")
    add("--seeds", type=int, help="number of patterns of arrivals; by default the experiment's")
    add("--requests", type=int, help="number of requests in each run")
    add("--runs", nargs="+", default=["*"], metavar="PATTERN", help="only runs of these names")
    add("--traces", type=Path, help="folder of the public traces; by default TWOLANE_TRACES")
    add("--serve", metavar="FLAGS", help="flags of `twolane serve`: measure on this machine")
    add("--model", help="model in place of the experiments' own, for a trial of --serve")
    add("--card", help="name of this machine's GPU in the files, with --serve")
    add("--fresh", action="store_true", help="repeat the runs that the file has, of those chosen")
    add("--work", type=Path, default=Path("papers-work"), help="folder of the servers' logs")
    add("--out", type=Path, default=OUT, help="folder of the results")
    given = parser.parse_args()
    unknown = [name for name in given.names if name not in EXPERIMENTS]
    if unknown:
        parser.error(f"no such experiment: {', '.join(unknown)}; see --list")
    if given.serve is not None and given.card is None:
        parser.error("--serve: name the GPU by --card")
    if given.serve is not None:
        given.names = given.names or [n for n, e in EXPERIMENTS.items() if e.single]
        many = [name for name in given.names if not EXPERIMENTS[name].single]
        if many:
            parser.error(f"--serve: more than one GPU is needed for {', '.join(many)}")
    return given


def main() -> None:
    """Run, save and print."""
    given, console = _options(), Console()
    if given.list:
        show_list(console)
        return
    bench = Bench(
        traces=traces_from(given.traces),
        requests=given.requests,
        serve=given.serve,
        model=given.model,
        logs=given.work,
    )
    with contextlib.closing(bench.servers):
        for name in given.names or EXPERIMENTS:
            saved = work(name, bench, given)
            console.print(table(name, EXPERIMENTS[name], saved.runs))


if __name__ == "__main__":
    main()
