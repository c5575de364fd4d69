"""`bench goodput`: the highest request rate at which the SLOs hold, and could hold for ever.

An SLO holds when at least `attainment` of the requests sent kept it; that of TBT counts gaps, not
requests, unless none is owed. With 0.99 this is "P99 within the bound". A search is one pattern of
arrivals (seed, requests, trace offset), stretched or pressed together to a rate, the same for all
systems. Rates stand on a grid whose neighbours are within the tolerance: all systems are tried at
the same ones. A rate holds only in a long run whose backlog does not grow (`lasting`).

Several bounds on TBT make several searches, loosest first: each begins where the last one ended,
above which a tighter bound is not expected to hold; and a run of a system that does not read the
SLOs answers all of them.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec

from twolane.common.errors import FieldError
from twolane.common.files import write_atomically
from twolane.common.options import MAX_SEED, Option, check_ranges
from twolane.playout import PACE_FRACTION, first_shown, next_shown
from twolane.results.metrics import (
    DEFAULT_PERCENTILES,
    ROUNDING,
    Metrics,
    as_shown,
    bound_for,
    bounded,
    keeps,
)
from twolane.results.provenance import json_bytes, provenance
from twolane.results.record import Record
from twolane.results.result import MEASURE, PLAYOUT, Result
from twolane.results.summary import result_dict, workload_dict
from twolane.workload.spec import WorkloadSpec
from twolane.workload.traces import TraceRequest

REPRODUCED_KEYS = ("generated_texts", "workload", "queue_times")
"""Keys of a result that are not saved with a run, since its seed reproduces them."""
SAMPLE_KEYS = ("itls", "ttfts", "latencies", "start_times")
"""Keys that are not saved with a simulated run, for the same reason."""
MIN_RATE, MAX_RATE = 1e-3, 1e5
"""Bounds of the search in requests per second."""
LEAST_REQUESTS = 600
"""Number of requests that a run needs for a rate to hold."""
SLOW_RATE, SLOW_REQUESTS, SLOW_SECONDS = 8.0, 250, 60.0
"""Below this many requests per second, a run on a server needs only this many requests and
seconds."""
FINISHED_SHARE = 0.95
"""Fraction of the rate, and of what arrives, that has to end while a rate is held."""
Judge = Literal["shown", "raw"]
"""Which times the SLOs bound: those at which a client shows tokens, or those of their arrival."""


class Search(msgspec.Struct, frozen=True, kw_only=True):
    """Definition of a search, saved with its runs, which can only be continued under the same
    one."""

    target: dict[str, object]
    """The server or simulation: everything that results depend on."""
    workload: WorkloadSpec
    """Workload without rate and seed, which each run sets."""
    slos: dict[str, float]
    """Bounds in seconds by name (`metrics.SLO_NAMES`, `TTFT_PER_1K`)."""
    tbts: tuple[float, ...] = ()
    """Bounds on TBT in seconds, each searched in a folder of its own; with several, `slos` has
    none."""
    attainment: Annotated[float, Option(MEASURE, positive=True, most=1)] = 0.99
    """Share of requests (for tbt: of gaps) that must be within each SLO; 0.9 asks for P90."""
    seeds: Annotated[int, Option(MEASURE, least=1)] = 1
    """Number of searches, each with different arrivals."""
    seed: Annotated[int, Option(MEASURE, most=MAX_SEED)] = 0
    """Seed of the first search."""
    start_rate: Annotated[float, Option(MEASURE)] = 1.0
    """Requests per second of the first run."""
    first_step: Annotated[float, Option(MEASURE)] = 2.0
    """Factor between the first rate and the second, up or down; 1.2 saves runs if the first rate is
    a good guess."""
    least_rate: Annotated[float, Option(MEASURE)] = MIN_RATE
    """Requests per second below which a goodput counts as 0."""
    tolerance: Annotated[float, Option(MEASURE)] = 0.02
    """Relative distance between the rate that holds and the rate that fails at which a search
    ends."""
    playout: Annotated[float, PLAYOUT] = 0.0
    """Longest time in seconds for which a client with a playout buffer holds a token back, computed
    from the arrival times for any engine. Our own servers and simulated systems plan with this
    buffer and send tokens at once."""
    judge: Annotated[Judge, Option(MEASURE)] = "shown"
    """Times that the SLOs bound: `shown` those of the playout buffer, `raw` those of arrival; equal
    without --playout-ms."""
    brief: Annotated[bool, Option(MEASURE)] = False
    """Whether a run may be too short to show that a rate could hold for ever, for a first look.
    Otherwise it needs 600 requests (on a server below 8 per second 250, and 60 seconds), and a rate
    whose backlog grows fails."""

    @property
    def octave(self) -> int:
        """Grid steps per doubling of the rate."""
        return math.ceil(1 / math.log2(1 + self.tolerance) - 1e-9)

    @property
    def stride(self) -> int:
        """Grid steps from the first rate to the second."""
        return max(1, round(self.octave * math.log2(self.first_step)))

    @property
    def percentiles(self) -> tuple[float, ...]:
        """Percentiles that runs report: the default ones and the searched one."""
        return tuple(sorted({*DEFAULT_PERCENTILES, 100 * self.attainment}))

    def check(self) -> None:
        """Check the ranges of the settings.

        Raises:
            FieldError: naming the first wrong field.
        """
        check_ranges(self)
        if not bounded(self.slos) and not self.tbts:
            raise FieldError("goodput", "is needed: name the SLOs, such as ttft:1000 tbt:50")
        if self.tbts and ("tbt" in self.slos or not all(0 < tbt < math.inf for tbt in self.tbts)):
            raise FieldError(
                "goodput", "may have several bounds of tbt, each once, above 0, finite"
            )
        if not MIN_RATE <= self.least_rate <= self.start_rate <= MAX_RATE:
            problem = f"must be in [{MIN_RATE}, {MAX_RATE:g}], and --least-rate not above it"
            raise FieldError("start_rate", problem)
        if not 1 < self.first_step <= 1024:
            raise FieldError("first_step", f"must be in (1, 1024], not {self.first_step}")
        if self.playout and not ("tbt" in self.slos or self.tbts):
            raise FieldError("playout", "needs a bound on TBT: --goodput tbt:MS")
        if not 0 < self.tolerance < 1:
            raise FieldError("tolerance", f"must be in (0, 1), not {self.tolerance}")
        self.workload.check()

    def points(self, folder: Path) -> list["BoundSearch"]:
        """Return a search for each TBT bound, loosest first; without bounds, this one."""
        if not self.tbts:
            return [BoundSearch(self, folder)]
        one = {tbt: {**self.slos, "tbt": tbt} for tbt in sorted(set(self.tbts), reverse=True)}
        return [
            BoundSearch(
                msgspec.structs.replace(self, slos=slos, tbts=()), folder / f"tbt{tbt * 1e3:g}ms"
            )
            for tbt, slos in one.items()
        ]

    def at(self, rate: float, seed: int) -> WorkloadSpec:
        """Return the workload of one run."""
        return msgspec.structs.replace(self.workload, request_rate=rate, seed=seed)


class BoundSearch(NamedTuple):
    """A search with one set of SLOs, and the folder of its runs."""

    search: Search
    folder: Path


class Trial(msgspec.Struct, frozen=True):
    """One run of a search."""

    system: str
    seed: int
    rate: float
    holds: bool
    stopped: bool = msgspec.field(name="hopeless")
    """Whether it ended early because too many requests had missed an SLO."""
    shares: dict[str, float | None]
    """Attainment by SLO until its end."""
    lasting: bool | None = None
    """Whether the rate could hold for ever (`lasting`); None in a brief search."""
    sustained: float | None = None
    """Requests answered per second between the end of the warm-up and the last arrival."""
    alone: bool = False
    """Whether no two requests were served concurrently, so that lower rates change nothing."""


class EarlyStop:
    """Detects that a run cannot attain any of several sets of SLOs any more.

    Args:
        workload: All requests that are sent.
        points: Sets of SLOs, bounds in seconds by name, which differ in TBT alone.
        attainment: Share of the requests, or gaps, that must keep each SLO.
        playout: Longest time in seconds for which the client holds a token back; the SLOs bound the
            times at which it shows tokens.
    """

    def __init__(
        self,
        workload: Sequence[TraceRequest],
        points: Sequence[dict[str, float]],
        attainment: float,
        playout: float = 0.0,
    ) -> None:
        self._workload = workload
        self._late: set[int] = set()
        self._budgets = [_Budget(workload, slos, attainment, playout) for slos in points]

    def tokens(self, index: int, times: Sequence[float], new: int) -> bool:
        """Count new tokens of a request; return whether the run is to end.

        Gaps are counted at once, and so is a first token that is late even if all of its prompt was
        new; everything else when the request has ended.

        Args:
            index: The request's place in the workload.
            times: The times of all its tokens so far, in seconds.
            new: How many of them are new.
        """
        if len(times) == new:
            self.begun(index, times[0] - (self._workload[index].arrival or 0.0))
        for budget in self._budgets:
            budget.tokens(index, times, new)
        return self._now

    def begun(self, index: int, ttft: float) -> bool:
        """Count a first token after these seconds; return whether the run is to end."""
        slos, request = self._budgets[0].slos, self._workload[index]
        if "ttft" in slos and ttft > bound_for(request.prompt_tokens, "ttft", slos) + ROUNDING:
            self._late.add(index)
            for budget in self._budgets:
                budget.spare["ttft"] -= 1
        return self._now

    def __call__(self, record: Record) -> bool:
        """Count a request that has ended; return whether the run is to end."""
        for budget in self._budgets:
            budget.ended(record, record.index in self._late)
        return self._now

    @property
    def _now(self) -> bool:
        return all(min(budget.spare.values()) < 0 for budget in self._budgets)


class _Budget:
    """The misses that are left for each SLO of one set.

    Args:
        workload: All requests that are sent.
        slos: Bounds in seconds by name.
        attainment: Share of the requests, or gaps, that must keep each SLO.
        playout: Longest time in seconds for which the client holds a token back.
    """

    def __init__(
        self,
        workload: Sequence[TraceRequest],
        slos: dict[str, float],
        attainment: float,
        playout: float,
    ) -> None:
        gaps = sum(request.output_tokens - 1 for request in workload)
        self.slos = slos
        self.spare = {
            name: _spare(gaps if name == "tbt" else len(workload), attainment)
            for name in bounded(slos)
        }
        """Number of misses left for each SLO."""
        self._workload, self._playout = workload, playout
        self._bound = slos.get("tbt", math.inf)
        self._hold = min(playout, self._bound)
        self._latest: dict[int, float] = {}
        """When the latest counted token of each request is shown."""
        self._gaps: dict[int, int] = {}

    def tokens(self, index: int, times: Sequence[float], new: int) -> None:
        """Count the gaps before new tokens of a request."""
        if self._bound == math.inf:
            return
        latest = self._latest.get(index)
        for at in times[-new:]:
            if latest is None:
                latest = self._first(index, at)
                continue
            due = next_shown(at, latest, PACE_FRACTION * self._bound, self._hold)
            self.spare["tbt"] -= due - latest > self._bound + ROUNDING
            latest = due
        assert latest is not None
        self._latest[index], self._gaps[index] = latest, len(times) - 1

    def _first(self, index: int, at: float) -> float:
        request = self._workload[index]
        if request.output_tokens < 2:
            return at
        deadline = None
        if "ttft" in self.slos:
            bound = bound_for(request.prompt_tokens, "ttft", self.slos)
            deadline = (request.arrival or 0.0) + bound
        return first_shown(at, self._hold, deadline)

    def ended(self, record: Record, late: bool) -> None:
        """Count what was not counted before of a request that has ended."""
        if self._playout:
            record = as_shown(record, self.slos, self._playout)
        gaps = record.gaps[self._gaps.pop(record.index, 0) :]
        for name in self.spare:
            bound = bound_for(record.new_tokens, name, self.slos)
            if name == "ttft" and late:
                continue
            if name != "tbt":
                self.spare[name] -= not keeps(record, name, bound)
            elif record.ok:
                self.spare[name] -= sum(gap > bound + ROUNDING for gap in gaps)
            else:
                self.spare[name] -= max(record.asked_output - 1, 0)


def least_requests(rate: float, simulated: bool) -> int:
    """Return the number of requests that a run needs to show that a rate could hold for ever."""
    if simulated or rate >= SLOW_RATE:
        return LEAST_REQUESTS
    return max(SLOW_REQUESTS, math.ceil(SLOW_SECONDS * rate))


def lasting(result: Result, rate: float | None = None) -> bool:
    """Return whether a run shows that its rate could hold for ever: it has enough requests, and
    from the end of the warm-up to the last arrival they end as fast as they arrive.

    Args:
        result: The run.
        rate: Requests sent per second; by default the request rate of the workload.
    """
    rate = rate or result.config.workload.request_rate or 0.0
    enough = len(result.workload) >= least_requests(rate, result.simulated is not None)
    steady = result.metrics.steady
    if steady is None or not enough:
        return False
    return steady.finished >= FINISHED_SHARE * max(rate, steady.arrived)


def _spare(owed: int, attainment: float) -> int:
    return math.floor(owed * (1 - attainment) + 1e-9)


def shares(
    metrics: Metrics, slos: dict[str, float], judge: Judge = "shown"
) -> dict[str, float | None]:
    """Return the attainment of each SLO: of requests sent, for TBT of the gaps owed; None: none was
    sent."""
    as_judged = metrics if metrics.shown is None or judge == "raw" else metrics.shown
    attained = as_judged.attainment
    by_gap = {} if attained.gaps is None else {"tbt": attained.gaps}
    return {name: by_gap.get(name, attained.requests[name]) for name in bounded(slos)}


def highest(
    holds: Callable[[float], bool | None],
    start: float,
    octave: int,
    near: float | None = None,
    floor: float = MIN_RATE,
    top: float = MAX_RATE,
    stride: int | None = None,
) -> float:
    """Search for the highest rate that holds, 0 if none does: bracketing by growing strides, then
    bisection, on the grid start · 2^(i / octave).

    Args:
        holds: Returns whether a rate holds; None if it fails and lower rates would fail, too.
        start: requests a second to begin with.
        octave: rates of the grid from one to its double.
        near: a rate to begin at instead, rounded to the grid, next to which the answer may be.
        floor, top: the lowest and the highest rate that are tried.
        stride: rates of the grid from the first to the second, unless it begins at `near`; an
            octave if not given.
    """
    least = math.ceil(octave * math.log2(floor / start) - 1e-9)
    most = math.floor(octave * math.log2(top / start) + 1e-9)
    i, stride = 0, stride or octave
    if near:
        i, stride = min(max(round(octave * math.log2(near / start)), least), most), 1
    low: int | None = None
    high: int | None = None
    while low is None or high is None or high - low > 1:
        verdict = holds(start * 2 ** (i / octave))
        if verdict:
            low = i
        elif verdict is None and low is None:
            return 0.0
        else:
            high = i
        if i == (most if verdict else least):
            break
        if low is not None and high is not None:
            i = (low + high) // 2
        else:
            i = min(i + stride, most) if verdict else max(i - stride, least)
            stride *= 2
    return 0.0 if low is None else start * 2 ** (low / octave)


Run = Callable[[str, WorkloadSpec, Sequence[dict[str, float]]], tuple[Result, bool]]
"""Serves a workload with a system that knows the first of these sets of SLOs; returns the result,
and whether it ended early because none of them could be attained any more."""


def find(
    search: Search,
    systems: Sequence[str],
    run: Run,
    folder: Path,
    tell: Callable[[Trial, dict[str, float]], None] = lambda trial, slos: None,
    reads_slos: Callable[[str], bool] = lambda system: True,
    guesses: Sequence[float] = (),
) -> list[dict[str, list[float]]]:
    """Search for each system, point and seed; one file a run, and a summary after each search.

    A system whose settings list several values (`variants`) is searched with each. Runs that the
    folder has already are not repeated.

    Args:
        reads_slos: False for a system that serves the same under any: a run tells of all points.
        guesses: expected goodput of each seed in requests per second, or none.

    Returns:
        For each of `search.points`: goodput in requests a second, by system, seed by seed.

    Raises:
        FieldError: an option is wrong, or the folder holds another search.
    """
    search.check()
    if not all(0 < guess < math.inf for guess in guesses):
        raise FieldError("guess", "must be above 0 and finite")
    if guesses and (len(guesses) != search.seeds or search.tbts):
        raise FieldError("guess", "must be given once for each seed, with one bound on TBT at most")
    points = search.points(folder)
    for point in points:
        _open_folder(point)
    found: list[dict[str, list[float]]] = [{} for _ in points]
    count = len(search.at(search.start_rate, search.seed).build())
    for system in dict.fromkeys(one for listed in systems for one in variants(listed)):
        for i, point in enumerate(points):
            answered = [point] if reads_slos(system) else points[i:]
            for turn in range(search.seeds):
                looser = found[i - 1][system][turn] if i else MAX_RATE
                near = looser if i else _near(guesses, found[i].get(system, []))
                holds = partial(_holds, answered, system, search.seed + turn, run, tell, count)
                bounds = near, search.least_rate, looser, search.stride
                rate = looser and highest(holds, search.start_rate, search.octave, *bounds)
                found[i].setdefault(system, []).append(rate)
                best = tuned(systems, found[i])
                content = summary(point.search, found[i], best, sustained(point, found[i]))
                _save(point.folder / "summary.json", content)
    return found


def _holds(
    points: Sequence[BoundSearch],
    system: str,
    seed: int,
    run: Run,
    tell: Callable[[Trial, dict[str, float]], None],
    count: int,
    rate: float,
) -> bool | None:
    """Return whether a system holds a rate, by `count` requests, at the first of the points that
    one run covers; None: it does not, and lower rates would fail, too.

    Raises:
        FieldError: so few requests do not show that the rate could hold for ever.
    """
    search = points[0].search
    needed = least_requests(rate, "simulate" in search.target)
    if count < needed and not search.brief:
        problem = f"is {count}; a run at {rate:.3g} requests/s needs {needed}, or take --brief"
        raise FieldError("num_prompts", problem)
    trial = _trial(points, system, seed, rate, run)
    tell(trial, points[0].search.slos)
    return None if trial.alone and not trial.holds else trial.holds


def _near(guesses: Sequence[float], found: Sequence[float]) -> float | None:
    """Return the start rate of the next seed's search: its guess, corrected by the previous guess's
    error; without guesses, the previous result."""
    turn = len(found)
    if not guesses:
        return found[-1] if turn else None
    off = found[-1] / guesses[turn - 1] if turn else 1.0
    return guesses[turn] * (off or 1.0)  # a goodput of 0 tells nothing


def variants(system: str) -> list[str]:
    """Return `chunked:token_budget=256/512` as one system for each value, or combination of
    values."""
    name, colon, rest = system.partition(":")
    settings = [setting.partition("=") for setting in rest.split(",")]
    listed = [[key + equals + value for value in row.split("/")] for key, equals, row in settings]
    return [name + colon + ",".join(chosen) for chosen in itertools.product(*listed)]


def tuned(systems: Sequence[str], found: dict[str, list[float]]) -> dict[str, str]:
    """Return the variant with the highest median goodput so far of each system with several; the
    first listed of equals, and none where nothing holds."""
    best = {}
    for system in systems:
        rates = {one: statistics.median(found[one]) for one in variants(system) if one in found}
        if len(variants(system)) > 1 and any(rates.values()):
            best[system] = max(rates, key=rates.__getitem__)
    return best


def sustained(point: BoundSearch, found: dict[str, list[float]]) -> dict[str, list[float | None]]:
    """Return what was sustained at each goodput (`Trial.sustained`), by system, seed by seed; None
    where no rate holds, and in a brief search."""
    return {
        system: [
            trial.sustained if rate and (trial := _kept(point, system, seed, rate)) else None
            for seed, rate in enumerate(rates, point.search.seed)
        ]
        for system, rates in found.items()
    }


def summary(
    search: Search,
    found: dict[str, list[float]],
    best: dict[str, str],
    finished: Mapping[str, Sequence[float | None]],
) -> dict[str, object]:
    """Return the results so far: by system the goodput of each seed, median and range, what was
    sustained (`sustained`), and the best variant of each system."""
    return {
        "provenance": provenance(workload_dict(search.workload)),
        "search": _search_dict(search),
        "goodput": {
            system: {
                "seeds": rates,
                "sustained": finished[system],
                "median": statistics.median(rates),
                "least": min(rates),
                "most": max(rates),
            }
            for system, rates in found.items()
        },
        "tuned": best,
    }


def _search_dict(search: Search) -> dict[str, object]:
    return {**msgspec.structs.asdict(search), "workload": workload_dict(search.workload)}


def _trial(points: Sequence[BoundSearch], system: str, seed: int, rate: float, run: Run) -> Trial:
    """Return the trial at a rate, from the first point's folder if it has one. The other points
    that the run covers get a copy."""
    if (kept := _kept(points[0], system, seed, rate)) is not None:
        return kept
    bounds = [point.search.slos for point in points]
    result, stopped = run(system, points[0].search.at(rate, seed), bounds)
    trials = [_keep(point, system, result, stopped) for point in points]
    return trials[0]


def _kept(point: BoundSearch, system: str, seed: int, rate: float) -> Trial | None:
    """Return the trial at a rate that a folder has; None: it has none that the search can use."""
    path = point.folder / _run_file(system, seed, rate)
    if not path.exists():
        return None
    trial = msgspec.json.decode(path.read_bytes(), type=_SavedRun).trial
    judged = not trial.holds or point.search.brief or trial.lasting is not None
    return trial if judged and trial.system == system else None


def _run_file(system: str, seed: int, rate: float) -> str:
    return f"{file_name(system)}-seed{seed}-rate{rate:.5f}.json"


def _keep(point: BoundSearch, system: str, result: Result, stopped: bool) -> Trial:
    """Save a run in the folder of a point."""
    brief, slos, workload = point.search.brief, point.search.slos, result.config.workload
    config = msgspec.structs.replace(result.config, goodput=slos)
    result = msgspec.structs.replace(result, config=config)
    metrics = result.metrics
    kept = shares(metrics, slos, point.search.judge)
    enough = all((share or 0.0) >= point.search.attainment for share in kept.values())
    lasts = None if brief else lasting(result)
    trial = Trial(
        system=system,
        seed=workload.seed,
        rate=workload.request_rate or 0.0,
        holds=enough and not stopped and lasts is not False,
        stopped=stopped,
        shares=kept,
        lasting=lasts,
        sustained=None if brief or metrics.steady is None else metrics.steady.finished,
        alone=metrics.max_concurrent <= 1,
    )
    known = REPRODUCED_KEYS if result.simulated is None else REPRODUCED_KEYS + SAMPLE_KEYS
    report = {key: value for key, value in result_dict(result).items() if key not in known}
    name = _run_file(system, trial.seed, trial.rate)
    _save(point.folder / name, {"trial": msgspec.to_builtins(trial), **report})
    return trial


def file_name(system: str) -> str:
    """Return a system and its settings as part of a file name."""
    return "".join(c if c.isalnum() or c in "=._-" else "_" for c in system)


class _SavedRun(msgspec.Struct):
    """Fields that are read from a run's file."""

    trial: Trial


def _open_folder(point: BoundSearch) -> None:
    search, folder = point
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "search.json"
    if not any(folder.glob("*-rate*.json")):
        _save(path, _search_dict(search))  # also over that of a search that never ran
    elif msgspec.json.decode(path.read_bytes(), type=Search, strict=False) != search:
        raise FieldError("out", f"{folder} holds runs of another search; take another folder")


def _save(path: Path, content: object) -> None:
    write_atomically(path, json_bytes(content))
