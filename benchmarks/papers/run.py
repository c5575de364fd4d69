"""The four papers' experiments beside ours: `python benchmarks/papers/run.py [NAME ...]`.

Each experiment is a figure or table of a paper, as data in `muxwise.py`, `duetserve.py`,
`bullet.py` and `drift.py`: `--list` names them, and what cannot be expressed, with the reason. It
prints the paper's rows beside ours and writes `--out/NAME.json`; runs that the file has are not
repeated, so a stopped experiment goes on with the same command. Simulated by default; `--serve
FLAGS` starts a server on this machine's GPU for each system instead. The short form takes minutes
an experiment, `--whole` hours. `--traces` (or TWOLANE_TRACES) names a folder with the public
traces; without it workloads are drawn from published statistics.
"""

import argparse
import contextlib
import math
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
from rich.console import Console
from rich.table import Table
from study import MIN_RATE, Ask, Bench, Experiment, Figures, Row, Run, traces_from

from twolane.results.provenance import Provenance, provenance, save

PAPERS = (muxwise, duetserve, bullet, drift)
EXPERIMENTS: dict[str, Experiment] = {
    name: experiment for paper in PAPERS for name, experiment in paper.EXPERIMENTS.items()
}
MISSING: dict[str, str] = {
    what: reason for paper in PAPERS for what, reason in paper.MISSING.items()
}
RESULTS = Path(__file__).parents[1] / "results"
OUT = RESULTS / "papers"


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
    ours: float
    """In the row's unit; the median of the seeds."""
    low: float
    high: float
    seeds: int
    more: bool
    """Whether the other system held no rate, and `ours` is over the lowest that was tried."""

    @property
    def ratio(self) -> float | None:
        """Ours over the paper's."""
        if self.row.paper is None or self.more:
            return None
        return self.ours / self.row.paper

    @property
    def shown(self) -> str:
        """Ours, with the spread over the seeds."""
        if self.more:
            return f"more than {self.ours:.3g}"
        spread = f" ({self.low:.3g} to {self.high:.3g})" if self.seeds > 1 else ""
        unit = "" if self.row.unit == "times" else f" {self.row.unit}"
        return f"{self.ours:.3g}{spread}{unit}"


def values(experiment: Experiment, runs: Sequence[Done]) -> list[Value]:
    """The rows whose runs are there."""
    by_run: dict[str, dict[int, Figures]] = {}
    for done in runs:
        by_run.setdefault(done.run, {})[done.seed] = done.figures
    made = [_value(row, by_run, experiment.runs) for row in experiment.rows]
    return [value for value in made if value is not None]


def _value(
    row: Row, by_run: Mapping[str, Mapping[int, Figures]], runs: Mapping[str, Run | Ask]
) -> Value | None:
    above, below = by_run.get(row.of, {}), by_run.get(row.over, {})
    over = runs.get(row.over)
    least = MIN_RATE * over.load.rate if isinstance(over, Run) else math.inf
    found, more = [], False
    for seed, figures in above.items():
        if row.figure not in figures or (row.over and row.figure not in below.get(seed, {})):
            continue
        divisor = below[seed][row.figure] if row.over else 1.0
        more = more or not divisor
        found.append(row.scale * figures[row.figure] / (divisor or least))
    if not found:
        return None
    return Value(row, median(found), min(found), max(found), len(found), more)


def read(path: Path) -> Saved:
    """A file of results."""
    return msgspec.json.decode(path.read_bytes(), type=Saved)


def table(name: str, experiment: Experiment, runs: Sequence[Done]) -> Table:
    """The rows, and below them the figures of the runs."""
    made = Table(title=f"{name}: {experiment.where}", title_justify="left", show_lines=False)
    for head in ("", "paper", "ours", "ours / paper", "why they differ"):
        made.add_column(head)
    for value in values(experiment, runs):
        row = value.row
        paper = "" if row.paper is None else f"{row.paper:g} {row.unit}"
        ratio = "" if value.ratio is None else f"{value.ratio:.2f}"
        made.add_row(row.what, paper, value.shown, ratio, row.why)
    return made


def figures_table(experiment: Experiment, runs: Sequence[Done]) -> Table:
    """The figures that an experiment shows, run by run."""
    made = Table("run", "seed", *experiment.shown)
    for done in runs:
        shown = [done.figures.get(figure) for figure in experiment.shown]
        made.add_row(done.run, str(done.seed), *("" if v is None else f"{v:.4g}" for v in shown))
    return made


def chosen(
    experiment: Experiment, patterns: Sequence[str], served: bool
) -> list[tuple[str, Run | Ask]]:
    """The runs whose names match; on servers system by system, so that each is started once."""
    runs = [(name, run) for name, run in experiment.runs.items() if _matches(name, patterns)]
    systems = list(dict.fromkeys(run.system for _, run in runs if isinstance(run, Run)))
    if served:
        runs.sort(key=lambda pair: systems.index(pair[1].system) if isinstance(pair[1], Run) else 0)
    return runs


def _matches(run: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(run, pattern) for pattern in patterns)


def work(name: str, bench: Bench, given: argparse.Namespace) -> Saved:
    """Run what is missing of an experiment; the file is written after each run."""
    out = given.out if given.serve is None else given.out / given.card
    seeds, card = given.seeds or (3 if given.whole else 1), given.card or "simulated"
    experiment, path = EXPERIMENTS[name], out / f"{name}.json"
    about = provenance({"experiment": name, "traces": "public" if bench.traces else "drawn"})
    saved = Saved(about, experiment.where, card, [])
    if path.exists():
        saved = read(path)
        saved.provenance = about
    if given.fresh:
        saved.runs = [done for done in saved.runs if not _matches(done.run, given.runs)]
    known = {(done.run, done.seed, done.requests) for done in saved.runs}
    for run_name, run in chosen(experiment, given.runs, bench.serve is not None):
        served = isinstance(run, Run)
        count = bench.count(run) if isinstance(run, Run) else 0
        for seed in range(seeds if served else 1):
            if (run_name, seed, count) in known:
                continue
            found = bench.figures(run, seed)
            if bench.serve is not None:
                shown = (f"{n} {found[n]:.4g}" for n in experiment.shown if n in found)
                print(f"{run_name}: {', '.join(shown)}", flush=True)
            day = provenance().date or ""
            saved.runs.append(Done(run_name, seed, count, about.commit, day, found))
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
    add("--whole", action="store_true", help="long runs and three seeds")
    add("--seeds", type=int, help="number of patterns of arrivals; by default 1, whole 3")
    add("--requests", type=int, help="number of requests in each run")
    add("--runs", nargs="+", default=["*"], metavar="PATTERN", help="only runs of these names")
    add("--traces", type=Path, help="folder of the public traces")
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
        whole=given.whole,
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
            if EXPERIMENTS[name].shown:
                console.print(figures_table(EXPERIMENTS[name], saved.runs))


if __name__ == "__main__":
    main()
