"""Goodput on GPUs: `python benchmarks/goodput.py --gpus 0 1 2 3`, each panel on one of them.

`--simulate` searches on simulated ones first, as many panels at a time as there are numbers.

A panel is a model, a workload and a bound on TBT; its systems are searched as `twolane bench
goodput --serve` does it, with three patterns of arrivals, the same for all; simulated with nine.
Simulated are `auto`, `chunked` with several budgets, and some of the four papers' systems; on a GPU
`auto` and the best of either. The runs stay in `--work`: the same command goes on where `--seconds`
ended it. `--out` gets a file for each system in each panel, with what was found by then.

TTFT may take 1 s and a second more for each 1,024 new tokens; in the panels that end in `-flat` 1 s
(2 s at 34B), whatever the prompt. Bounds are on P99, with `conversation` on P90.
"""

import functools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

import gpus
import msgspec

from twolane.bench import goodput
from twolane.bench.goodput import SAMPLE_KEYS, Trial
from twolane.results.provenance import Provenance, provenance, save

MEASURED, SIMULATED = "goodput-h200", "goodput-simulated"
"""Folders of results: one file for each system in each panel."""
SEEDS, SIMULATED_SEEDS = 3, 9
TOLERANCE, FIRST_STEP = 0.06, 1.2
KEYS = (
    *("median_ttft_ms", "p90_ttft_ms", "p99_ttft_ms", "mean_itl_ms", "p99_itl_ms"),
    *("max_itl_ms", "max_client_loop_lag_ms", "request_throughput", "outcomes"),
)
"""Keys of a run that are kept with its trial."""


class Panel(msgspec.Struct, frozen=True):
    """One model under one workload and one bound on TBT."""

    model: str
    dataset: str
    tbt_ms: float
    start: float
    """Start rate of the searches in requests per second."""
    prompts: int
    """Requests in a run."""
    budgets: str
    """Budgets of `chunked`: the best one of `panels.py`, and its neighbours."""
    four: str
    """Those of the papers' systems that `panels.py` has within a quarter of the best."""
    ttft_ms: float = 1000
    per_1k_ms: float = 1000
    attainment: float = 0.99
    longest: int = 12_000
    """Longest prompt in tokens."""
    seeds: int | None = None
    """Number of arrival patterns; by default `SEEDS`, simulated `SIMULATED_SEEDS`."""

    @property
    def name(self) -> str:
        """Name of its folder."""
        flat = "" if self.per_1k_ms else "-flat"
        return f"{self.model}-{self.dataset}-{self.tbt_ms:g}ms{flat}"

    def systems(self, results: Path | None) -> Sequence[str]:
        """Return the systems to search; `results` is the folder of simulated results, None to
        simulate.

        Raises:
            SystemExit: nothing of this panel was simulated.
        """
        if results is None:
            return "auto", f"chunked:token_budget={self.budgets}", *self.four.split("/")
        found = _found(results / SIMULATED).get(self.name, {})
        chunked = [system for system in found if system.startswith("chunked")]
        four = [system for system in self.four.split("/") if system in found]
        if not chunked or not four:
            raise SystemExit(f"{self.name}: to be simulated first, see --simulate")
        return "auto", *chunked, max(four, key=lambda system: statistics.median(found[system]))

    def command(self, system: str, work: Path, results: Path | None) -> gpus.Command:
        """Return the command that searches one system's goodput, on a simulated GPU without
        results. Otherwise it begins at earlier results on a GPU, or at simulated ones."""
        folder = work / self.name / goodput.file_name(system)
        where = ["--simulate", "h200", "--model", self.model]
        guesses, seeds = [], self.seeds or SIMULATED_SEEDS
        if results is not None:
            serve = (
                f"{self.model} --load-format dummy --device cuda"
                f" --max-model-len {self.longest + 4096}"
                f" --profile {gpus.profile(self.model)}"
            )
            where = ["--serve", serve, "--num-warmups", f"{gpus.WARMUPS}"]
            seeds = self.seeds or SEEDS
            guesses = _guesses(results, self.name, system, seeds)
        slos = [f"ttft:{self.ttft_ms:g}", f"tbt:{self.tbt_ms:g}"]
        if self.per_1k_ms:
            slos.append(f"ttft-per-1k:{self.per_1k_ms:g}")
        arguments = [
            *("-m", "twolane", "bench", "goodput", *where, "--system", system),
            *("--goodput", *slos, "--attainment", f"{self.attainment:g}"),
            *("--dataset", self.dataset, "--num-prompts", f"{self.prompts}"),
            *("--max-input-len", f"{self.longest}", "--seeds", f"{seeds}"),
            *("--start-rate", f"{self.start:g}", "--first-step", f"{FIRST_STEP:g}"),
            *(word for guess in guesses for word in ("--guess", f"{guess:g}")),
            *("--least-rate", f"{self.start / 4:g}", "--tolerance", f"{TOLERANCE:g}"),
            *("--out", str(folder)),
            *(["--brief"] if self.prompts < goodput.SLOW_REQUESTS else []),
        ]
        return gpus.Command(arguments, folder / "search.txt")


def _guesses(results: Path, panel: str, system: str, seeds: int) -> list[float]:
    """Return start rates by seed from earlier measurements, or in proportion from simulated ones;
    none if those held no rate."""
    simulated = _found(results / SIMULATED)[panel][system][:seeds]
    measured = _found(results / MEASURED).get(panel, {}).get(system, [])[:seeds]
    if len(simulated) < seeds or not all(simulated) or not all(measured):
        return []
    pairs = [*zip(measured, simulated, strict=False)]
    off = statistics.fmean(m / s for m, s in pairs) if pairs else 1.0
    return [*measured, *(off * rate for rate in simulated[len(measured) :])]


@functools.cache
def _found(saved: Path) -> Mapping[str, Mapping[str, list[float]]]:
    """Return requests per second by panel and system, for `chunked` with its best budget."""
    panels: dict[str, dict[str, list[float]]] = {}
    for panel in PANELS:
        for path in sorted((saved / panel.name).glob("*.json")):
            one = msgspec.json.decode(path.read_bytes())
            panels.setdefault(panel.name, {})[one["system"]] = one["goodput"]
    return panels


def _conversation(tbt_ms: float) -> Panel:
    budgets, four = "256/512/1024/2048", "muxwise/bullet"
    head = _8B, "conversation", tbt_ms, 2.0, 600, budgets, four
    return Panel(*head, attainment=0.9, longest=32_768)


def _flat(panel: Panel, start: float, prompts: int) -> Panel:
    """Return the panel without an allowance for new tokens, which holds lower rates."""
    own = {"start": start, "prompts": prompts, "per_1k_ms": 0}
    return msgspec.structs.replace(panel, ttft_ms=2000 if panel.model == _34B else 1000, **own)


_8B, _34B, _CONV, _CODE = "qwen3-8b", "codellama-34b", "azure-conv", "azure-code"
_AZURE = (
    (Panel(_8B, _CONV, 9, 16, 600, "64/128/256", "muxwise"), (10, 600)),
    (Panel(_8B, _CONV, 50, 26, 800, "512/1024/2048", "muxwise/drift/bullet"), (24, 750)),
    (Panel(_8B, _CODE, 9, 12, 600, "64/128/256", "muxwise"), (5, 600)),
    (Panel(_8B, _CODE, 50, 20, 600, "512/1024/2048", "muxwise/bullet/drift"), (11, 600)),
    (Panel(_34B, _CONV, 40, 5, 600, "128/256/512", "muxwise/drift"), (3.5, 600)),
    (Panel(_34B, _CONV, 80, 6, 600, "256/512/1024", "muxwise/bullet"), (5, 600)),
    (Panel(_34B, _CODE, 40, 3.5, 600, "128/256/512", "bullet/muxwise"), (2, 600)),
    (Panel(_34B, _CODE, 80, 4, 600, "256/512/1024", "bullet/drift/muxwise"), (2.5, 600)),
    (Panel(_8B, _CONV, 12, 20, 600, "128/256/512", "muxwise/drift/bullet"), (14, 600)),
    (Panel(_8B, _CONV, 21, 24, 700, "256/512/1024", "muxwise/drift/bullet"), (18, 600)),
    (Panel(_8B, _CODE, 12, 14, 600, "128/256/512", "muxwise/drift"), (6.5, 600)),
    (Panel(_8B, _CODE, 21, 18, 600, "256/512/1024", "drift/bullet"), (9, 600)),
)
"""Panels with the start rates and run lengths of searches with a flat bound."""
PANELS = (
    *(panel for panel, _ in _AZURE),
    *map(_conversation, (21, 50)),
    *(_flat(panel, *own) for panel, own in _AZURE),
)


class Run(msgspec.Struct):
    """One run of a search."""

    trial: Trial
    figures: dict[str, object]


class Found(msgspec.Struct):
    """One system's goodput in one panel."""

    panel: str
    system: str
    about: Provenance
    goodput: list[float]
    """Requests per second for each completed seed."""
    sustained: list[float | None]
    """Requests answered per second at each of these rates, between warm-up and last arrival."""
    runs: list[Run]

    @property
    def text(self) -> str:
        """Median and range."""
        rates = self.goodput
        return f"{statistics.median(rates):.1f} ({min(rates):.1f} to {max(rates):.1f})"


def collected(panels: Iterable[Panel], work: Path, results: Path | None) -> list[Found]:
    """Return the results in the folder."""
    found = []
    for panel in panels:
        for system in panel.systems(results):
            command = panel.command(system, work, results)
            folder, words = command.log.parent, ["python", *command.arguments]
            runs = [_run(path) for path in sorted(folder.glob("*-seed*.json"))]
            if runs:
                best, rates, finished = _best(folder / "summary.json", system)
                about = _about(folder / "summary.json", provenance(panel, words))
                found.append(Found(panel.name, best, about, rates, finished, runs))
    return found


def _about(summary: Path, now: Provenance) -> Provenance:
    """Return the record of a search, with date and commit of its last run."""
    if not summary.exists():
        return now
    said = msgspec.json.decode(summary.read_bytes())["provenance"]
    return msgspec.structs.replace(now, date=said["date"], commit=said["commit"])


def _run(path: Path) -> Run:
    """Return a run without its lists of latencies, since hundreds of runs must be transferred."""
    saved = msgspec.json.decode(path.read_bytes())
    if saved.keys() & set(SAMPLE_KEYS):
        saved = {key: value for key, value in saved.items() if key not in SAMPLE_KEYS}
        path.write_bytes(msgspec.json.encode(saved))
    figures = {key: saved[key] for key in KEYS if key in saved}
    return Run(msgspec.convert(saved["trial"], Trial), figures)


def _best(summary: Path, system: str) -> tuple[str, list[float], list[float | None]]:
    """Return the variant of a system with the highest median, its goodput by seed, and what was
    sustained at each."""
    if not summary.exists():
        return system, [], []
    said = msgspec.json.decode(summary.read_bytes())
    best = said["tuned"].get(system, goodput.variants(system)[0])
    found = said["goodput"].get(best, {})
    return best, found.get("seeds", []), found.get("sustained", [])


def table(found: Sequence[Found]) -> str:
    """Return median and range of the seeds, a line for each panel and system."""
    return "\n".join(
        f"| {one.panel} | `{one.system}` | {one.text} | {len(one.goodput)} | {len(one.runs)} |"
        for one in found
        if one.goodput
    )


def main() -> None:
    """Do the missing searches and write the file."""
    parser = gpus.options(__doc__, "goodput-work", MEASURED)
    parser.add_argument("--panels", nargs="+", help="only these, by name, or patterns of such")
    parser.add_argument("--systems", nargs="+", help="only these, by the beginnings of their names")
    parser.add_argument("--simulate", action="store_true", help="simulated GPUs instead")
    parser.add_argument("--prompts", type=int, help="requests in a run; by default the panel's")
    parser.add_argument("--seeds", type=int, help="patterns of arrivals; by default 3, or 9")
    given = parser.parse_args()
    if given.simulate:
        out = parser.get_default("out").with_name(SIMULATED)
        parser.set_defaults(work=Path("goodput-simulated-work"), out=out)
        given = parser.parse_args()
    results = None if given.simulate else given.results
    panels = [
        msgspec.structs.replace(p, prompts=given.prompts or p.prompts, seeds=given.seeds)
        for p in PANELS
    ]
    groups = [
        [
            panel.command(system, given.work, results)
            for system in panel.systems(results)
            if given.systems is None or system.startswith(tuple(given.systems))
        ]
        for panel in panels
        if given.panels is None or any(fnmatch(panel.name, name) for name in given.panels)
    ]
    gpus.run(groups, given.gpus, given.seconds)
    found = collected(panels, given.work, results)
    print(table(found))
    for one in found:
        figures = {"panel": one.panel, "system": one.system, "goodput": one.goodput}
        figures["sustained"] = one.sustained
        # Whoever wants to see single runs of a simulation makes them again.
        runs = [] if given.simulate else one.runs
        path = given.out / one.panel / f"{goodput.file_name(one.system)}.json"
        save(path, one.about, {**figures, "runs": runs})


if __name__ == "__main__":
    main()
