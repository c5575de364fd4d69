"""`bench goodput`: the highest request rate at which the SLOs hold.

An SLO holds when at least `attainment` of the requests sent kept it; that of TBT counts gaps, not
requests. With 0.99 this is "P99 within the bound". A search is one pattern of arrivals (seed,
requests, trace offset), stretched or pressed together to a rate, the same for all systems; between
a rate that holds and one that does not, the next one is their geometric mean.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from twolane.bench.metrics import DEFAULT_PERCENTILES, Metrics, keeps
from twolane.bench.record import Record
from twolane.bench.result import Result
from twolane.bench.summary import result_dict
from twolane.workload.spec import OptionError, WorkloadSpec
from twolane.workload.traces import TraceRequest

GIVEN = ("generated_texts", "workload", "queue_times")
"""Keys of a result that are left out of a run's file: the seed gives them again."""
LISTS = ("itls", "ttfts", "latencies", "start_times")
"""Left out too if they were simulated, for the same reason."""
LOWEST, HIGHEST = 1e-3, 1e5
"""Requests a second between which is searched."""


class Search(msgspec.Struct, frozen=True, kw_only=True):
    """What is searched; saved beside the runs, so that they are only continued under the same."""

    target: dict[str, object]
    """Who serves: everything that the answer depends on."""
    workload: WorkloadSpec
    """Without rate and seed, which each run has of its own."""
    slos: dict[str, float]
    """Bounds in seconds by name (`metrics.SLO_NAMES`)."""
    attainment: float = 0.99
    seeds: int = 1
    start_rate: float = 1.0
    tolerance: float = 0.02
    """The search ends when the rate that fails is at most this share above the one that holds."""

    @property
    def percentiles(self) -> tuple[float, ...]:
        """That runs report: the usual ones, and the one that is searched for."""
        return tuple(sorted({*DEFAULT_PERCENTILES, 100 * self.attainment}))

    def check(self) -> None:
        """Refuse what is out of range.

        Raises:
            OptionError: naming the option.
        """
        if not self.slos:
            raise OptionError("--goodput", "name the SLOs, such as ttft:1000 tbt:50")
        if not 0 < self.attainment <= 1:
            raise OptionError("--attainment", f"must be in (0, 1], not {self.attainment}")
        if self.seeds < 1:
            raise OptionError("--seeds", f"must be positive, not {self.seeds}")
        if not LOWEST <= self.start_rate <= HIGHEST:
            raise OptionError("--start-rate", f"must be in [{LOWEST}, {HIGHEST:g}]")
        if not 0 < self.tolerance < 1:
            raise OptionError("--tolerance", f"must be in (0, 1), not {self.tolerance}")

    def at(self, rate: float, seed: int) -> WorkloadSpec:
        """The workload of one run."""
        return msgspec.structs.replace(self.workload, request_rate=rate, seed=seed)


class Trial(msgspec.Struct, frozen=True):
    """One run of a search."""

    system: str
    seed: int
    rate: float
    holds: bool
    hopeless: bool
    """Whether it was ended early: too many had missed an SLO for it to hold."""
    shares: dict[str, float | None]
    """By SLO, of what was measured until the end."""
    alone: bool = False
    """Whether no two requests were served at once: then a lower rate changes nothing."""


class Hopeless:
    """Tells when a run can no longer hold, whatever comes.

    Args:
        workload: all that is sent.
    """

    def __init__(
        self, workload: Sequence[TraceRequest], slos: dict[str, float], attainment: float
    ) -> None:
        gaps = sum(request.output_tokens - 1 for request in workload)
        self._slos = slos
        self._spare = {
            name: _spare(gaps if name == "tbt" else len(workload), attainment) for name in slos
        }
        """Misses that each SLO can still bear."""

    def __call__(self, record: Record) -> bool:
        """Whether it is hopeless now that this request has ended."""
        for name, bound in self._slos.items():
            if name != "tbt":
                self._spare[name] -= not keeps(record, name, bound)
            elif record.ok:
                self._spare[name] -= sum(gap > bound for gap in record.gaps)
            else:
                self._spare[name] -= max(record.asked_output - 1, 0)
        return min(self._spare.values()) < 0


def _spare(owed: int, attainment: float) -> int:
    return math.floor(owed * (1 - attainment) + 1e-9)


def shares(metrics: Metrics, slos: dict[str, float]) -> dict[str, float | None]:
    """The share that kept each SLO: of requests sent, for TBT of the gaps owed."""
    attained = metrics.attainment
    return {name: attained.gaps if name == "tbt" else attained.requests[name] for name in slos}


def highest(holds: Callable[[float], bool | None], start: float, tolerance: float) -> float:
    """The highest rate that holds, 0 if none does: bracketing by doubling, then bisection.

    `holds` says None if the rate fails and lower ones would, too.
    """
    low, high, rate = 0.0, math.inf, start
    while LOWEST <= rate <= HIGHEST and (not low or math.isinf(high)):
        verdict = holds(rate)
        if verdict is None and not low:
            return low
        if verdict:
            low, rate = rate, rate * 2
        else:
            high, rate = rate, rate / 2
    if not low or math.isinf(high):
        return low
    while high > low * (1 + tolerance):
        rate = math.sqrt(low * high)
        if holds(rate):
            low = rate
        else:
            high = rate
    return low


Run = Callable[[str, WorkloadSpec], tuple[Result, bool]]
"""Serves a workload with a system: the result, and whether it was ended as hopeless."""


def find(
    search: Search,
    systems: Sequence[str],
    run: Run,
    folder: Path,
    tell: Callable[[Trial], None] = lambda trial: None,
) -> dict[str, list[float]]:
    """Search for each system and seed; one file a run, and a summary after each search.

    A system whose settings list several values (`variants`) is searched with each. Runs that the
    folder has already are not repeated.

    Returns:
        Goodput in requests a second, by system, seed by seed.

    Raises:
        OptionError: an option is wrong, or the folder holds another search.
    """
    search.check()
    _open_folder(search, folder)
    found: dict[str, list[float]] = {}
    for system in dict.fromkeys(one for asked in systems for one in variants(asked)):
        for seed in range(search.seeds):

            def holds(rate: float, system: str = system, seed: int = seed) -> bool | None:
                trial = _trial(search, system, seed, rate, run, folder)
                tell(trial)
                return None if trial.alone and not trial.holds else trial.holds

            rate = highest(holds, search.start_rate, search.tolerance)
            found.setdefault(system, []).append(rate)
            _save(folder / "summary.json", summary(search, found, tuned(systems, found)))
    return found


def variants(system: str) -> list[str]:
    """`chunked:token_budget=256/512` as one system for each value, or combination of values."""
    name, colon, rest = system.partition(":")
    settings = [setting.partition("=") for setting in rest.split(",")]
    listed = [[key + equals + value for value in row.split("/")] for key, equals, row in settings]
    return [name + colon + ",".join(chosen) for chosen in itertools.product(*listed)]


def tuned(systems: Sequence[str], found: dict[str, list[float]]) -> dict[str, str]:
    """The variant with the highest median goodput so far, of each system that has several; of
    equals the one that is listed first, and none where nothing holds."""
    best = {}
    for asked in systems:
        rates = {one: statistics.median(found[one]) for one in variants(asked) if one in found}
        if len(variants(asked)) > 1 and any(rates.values()):
            best[asked] = max(rates, key=rates.__getitem__)
    return best


def summary(
    search: Search, found: dict[str, list[float]], best: dict[str, str]
) -> dict[str, object]:
    """What was found so far: by system the goodput of each seed, their median and range; and which
    is the best of those that were listed as one."""
    return {
        "search": msgspec.to_builtins(search),
        "goodput": {
            system: {
                "seeds": rates,
                "median": statistics.median(rates),
                "least": min(rates),
                "most": max(rates),
            }
            for system, rates in found.items()
        },
        "tuned": best,
    }


def _trial(search: Search, system: str, seed: int, rate: float, run: Run, folder: Path) -> Trial:
    """Of the run at that rate, which the folder may have already."""
    path = folder / f"{file_name(system)}-seed{seed}-rate{rate:.5f}.json"
    if path.exists():
        saved = msgspec.json.decode(path.read_bytes(), type=_SavedRun)
        if saved.trial.system == system:
            return saved.trial
    result, hopeless = run(system, search.at(rate, seed))
    kept = shares(result.metrics, search.slos)
    holds = not hopeless and all((share or 0.0) >= search.attainment for share in kept.values())
    alone = result.metrics.max_concurrent <= 1
    trial = Trial(system, seed, rate, holds, hopeless, kept, alone)
    known = GIVEN if result.simulated is None else GIVEN + LISTS
    report = {key: value for key, value in result_dict(result).items() if key not in known}
    _save(path, {"trial": msgspec.to_builtins(trial), **report})
    return trial


def file_name(system: str) -> str:
    """A system and its settings as a part of a file's name."""
    return "".join(c if c.isalnum() or c in "=._-" else "_" for c in system)


class _SavedRun(msgspec.Struct):
    """What is read back of a run's file."""

    trial: Trial


def _open_folder(search: Search, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "search.json"
    if not path.exists():
        _save(path, msgspec.to_builtins(search))
    elif msgspec.json.decode(path.read_bytes()) != msgspec.json.decode(msgspec.json.encode(search)):
        raise OptionError("--out", f"{folder} holds runs of another search; take another folder")


def _save(path: Path, content: object) -> None:
    """All or nothing: what is killed while it writes leaves no half file."""
    part = path.with_suffix(".part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1))
    part.replace(path)
