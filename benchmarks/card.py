"""Searches on an emulated H200: `python benchmarks/card.py --panels '*conv-9ms'`.

The card takes as long as its profile says, and is as uneven as it was seen to be
(`twolane.sim.emulated`). The workloads are those of `goodput.py`. Runs stay in `--work`: the same
command goes on where it was stopped. `--out` gets a file for each system in each panel.
"""

import logging
import multiprocessing
from argparse import ArgumentParser, Namespace, RawTextHelpFormatter
from fnmatch import fnmatch
from pathlib import Path

import goodput
import gpus
import msgspec

from twolane.bench import contenders
from twolane.bench import goodput as searching
from twolane.bench.goodput import Search
from twolane.common.resources import usable_cores
from twolane.results.provenance import provenance, save
from twolane.sim.config import Unevenness
from twolane.workload.spec import WorkloadSpec

RESULTS = Path(__file__).parent / "results"


class Task(msgspec.Struct, frozen=True):
    """One system in one panel."""

    panel: goodput.Panel
    system: str
    """System with its settings, several values of which are tried in turn."""
    uneven: Unevenness
    prompts: int | None
    """Number of requests in a run; None: the panel's own."""
    seeds: int
    work: Path
    out: Path

    def search(self) -> Search:
        """Return the search of a task."""
        panel = self.panel
        slos = {"ttft": panel.ttft_ms / 1e3, "tbt": panel.tbt_ms / 1e3}
        if panel.per_1k_ms:
            slos["ttft_per_1k"] = panel.per_1k_ms / 1e3
        return Search(
            target={
                "simulate": "h200",
                "model": panel.model,
                "profile": gpus.profile(panel.model),
                "uneven": msgspec.to_builtins(self.uneven),
            },
            workload=WorkloadSpec(
                dataset=panel.dataset,
                num_prompts=self.prompts or panel.prompts,
                max_input_len=panel.longest,
            ),
            slos=slos,
            attainment=panel.attainment,
            seeds=self.seeds,
            start_rate=panel.start,
            first_step=goodput.FIRST_STEP,
            least_rate=panel.start / 4,
            tolerance=goodput.TOLERANCE,
            brief=(self.prompts or panel.prompts) < searching.LEAST_REQUESTS,
        )


def searched(task: Task) -> str:
    """Search and write the results' file; return a line of results."""
    logging.disable(logging.WARNING)
    search, name = task.search(), searching.file_name(task.system)
    folder = task.work / task.panel.name / name
    run, reads = contenders.simulation(search), contenders.reads_slos
    [found] = searching.find(search, [task.system], run, folder, reads_slos=reads)
    best = searching.tuned([task.system], found).get(task.system, next(iter(found)))
    workload = {"panel": task.panel, "uneven": task.uneven, "prompts": search.workload.num_prompts}
    figures = {"panel": task.panel.name, "system": best, "goodput": found[best]}
    save(task.out / task.panel.name / f"{name}.json", provenance(workload), figures)
    return f"{task.panel.name}, {best}: {' '.join(f'{rate:.2f}' for rate in found[best])}"


def options() -> Namespace:
    """Parse the command line."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawTextHelpFormatter)
    add, usual = parser.add_argument, Unevenness()
    add("--panels", nargs="+", default=["qwen3-8b-azure-conv-9ms"], help="names, or patterns")
    add("--systems", nargs="+", default=["auto"])
    add("--seeds", type=int, default=3, help="patterns of arrivals")
    add("--prompts", type=int, help="requests in a run; by default the panel's")
    add("--noise", type=float, default=usual.noise, help="of a step or slice; half for a pass")
    add("--outliers", type=float, default=usual.outliers, help="share of the decode steps")
    add("--configurations", type=float, default=usual.configurations, help="how far each is off")
    add("--slower", type=float, default=usual.slower, help="times as long as in the profile")
    add("--moments", type=float, default=usual.moments, help="how much longer launches take then")
    add("--work", type=Path, default=Path("card-work"), help="folder of the runs, of one card")
    add("--out", type=Path, default=RESULTS / "emulated-h200", help="folder of the results")
    return parser.parse_args()


def main() -> None:
    """Search, print, write the files."""
    given = options()
    uneven = msgspec.convert(vars(given), Unevenness)
    panels = [p for p in goodput.PANELS if any(fnmatch(p.name, name) for name in given.panels)]
    tasks = [
        Task(panel, system, uneven, given.prompts, given.seeds, given.work, given.out)
        for panel in panels
        for system in given.systems
    ]
    with multiprocessing.get_context("spawn").Pool(min(len(tasks), len(usable_cores()))) as pool:
        for line in pool.imap(searched, tasks):
            print(line, flush=True)


if __name__ == "__main__":
    main()
