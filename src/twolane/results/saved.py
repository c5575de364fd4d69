"""Reads saved results of `bench serve` and `simulate`, and folders of `bench goodput`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from twolane.common.checked_json import UNREADABLE
from twolane.common.errors import FieldError
from twolane.common.files import is_file, is_folder
from twolane.results.metrics import TTFT_PER_1K, bounded

TRACE = "a trace: give it with --trace-file"
"""Error of a file that is a list, or the beginning of one, as a killed engine leaves."""


@dataclass(frozen=True)
class Run:
    """A result file; figures work without fields that it lacks."""

    label: str
    """Name of what served, which is a line or bar of a figure."""
    data: dict[str, Any]
    """Content with the keys of `summary.result_dict`."""

    @property
    def rate(self) -> float | None:
        """Request rate per second; None: all at once, or a trace's own times."""
        rate = self.data.get("request_rate")
        return float(rate) if isinstance(rate, int | float) else None

    @property
    def about(self) -> dict[str, Any]:
        """The record of its provenance; empty in a file that has none."""
        about: dict[str, Any] = self.data.get("provenance") or {}
        return about

    @property
    def whole(self) -> bool:
        """Whether the run is complete: neither interrupted nor ended early by a search."""
        return not self.data.get("interrupted", False)

    def ms(self, metric: str, statistic: str) -> float | None:
        """Return a latency in milliseconds, such as ("ttft", "p99") or ("itl", "median")."""
        value = self.data.get(f"{statistic}_{metric}_ms")
        return None if value is None else float(value)

    def latencies(self, metric: str) -> list[float]:
        """Return all values of `ttft`, `itl` (each gap) or `e2el` in ms; empty: not saved."""
        key = {"ttft": "ttfts", "itl": "itls", "e2el": "latencies"}[metric]
        answered = [bool(n) for n in self.data.get("output_lens", ())]
        values = [v for v, ok in zip(self.data.get(key, ()), answered, strict=False) if ok]
        if metric == "itl":
            return [gap * 1e3 for gaps in values for gap in gaps]
        return [value * 1e3 for value in values if value is not None]

    @property
    def kept(self) -> dict[str, float]:
        """Attainment by SLO; for TBT of gaps, as in a search."""
        kept = dict(self.data.get("attainment") or {})
        if "tbt" in kept:
            kept["tbt"] = self.data["tbt_gap_attainment"]
        return {name: share for name, share in kept.items() if share is not None}

    @property
    def where(self) -> str:
        """Description of what served."""
        simulated = self.data.get("simulated")
        if simulated:
            return f"simulation: {self.data.get('model_id')} on {simulated['device']}"
        server = self.data.get("server")
        if server:
            parts = server.split(" | ")  # the address says nothing any more
            return " | ".join([parts[0], *parts[2:]])
        return f"{self.data.get('model_id')} at {self.data.get('arguments', {}).get('base_url')}"


@dataclass(frozen=True)
class SearchResult:
    """The result of a search."""

    search: dict[str, Any]
    goodput: dict[str, dict[str, Any]]
    """Goodput by system in requests per second: `seeds`, `median`, `least`, `most`."""
    about: dict[str, Any] = field(default_factory=dict)
    """The record of its provenance; empty in a file that has none."""


@dataclass
class Saved:
    """All inputs of a report."""

    runs: list[Run] = field(default_factory=list)
    found: list[SearchResult] = field(default_factory=list)
    traces: dict[str, Path] = field(default_factory=dict)
    beside: set[str] = field(default_factory=set)
    """Traces from a search's folder, which were not named explicitly."""

    @property
    def attainment(self) -> float:
        """Required attainment of the search; else 0.99."""
        return float(self.found[0].search["attainment"]) if self.found else 0.99

    @property
    def slos(self) -> dict[str, float]:
        """Bounds in ms by name; empty if runs differ."""
        every: dict[str, set[float]] = {}
        for run in self.runs:
            for name, bound in (run.data.get("slos_ms") or {}).items():
                every.setdefault(name, set()).add(bound)
        return {name: min(bounds) for name, bounds in every.items() if len(bounds) == 1}

    @property
    def flat(self) -> dict[str, float]:
        """Bounds that are the same for all requests."""
        slos = self.slos
        return {n: slos[n] for n in bounded(slos) if (n, TTFT_PER_1K in slos) != ("ttft", True)}

    @property
    def labels(self) -> list[str]:
        """Labels in the order given."""
        systems = [system for one in self.found for system in one.goodput]
        return list(dict.fromkeys([*(run.label for run in self.runs), *systems]))


def read(inputs: list[str], traces: list[str]) -> Saved:
    """Read files and folders, each `PATH` or `NAME=PATH`.

    Raises:
        FieldError: one is not there or is something else.
    """
    saved = Saved()
    for text in inputs:
        name, path = _named(text)
        if is_folder(path):
            _read_search(saved, path, name)
        else:
            saved.runs.append(_read_run(path, name))
    for text in traces:
        name, path = _named(text)
        if not is_file(path):
            raise FieldError("trace_file", f"{path} is no file")
        _add_trace(saved, name or _stem(path), path)
    return saved


def _named(text: str) -> tuple[str | None, Path]:
    """Return name and path of an argument; a path that contains an equals sign needs no name."""
    name, equals, rest = text.partition("=")
    if equals and not (is_file(Path(text)) or is_folder(Path(text))):
        return name, Path(rest)
    return None, Path(text)


def _stem(path: Path) -> str:
    return path.name.removesuffix(".json").removesuffix(".trace")


def _read_search(saved: Saved, folder: Path, name: str | None) -> None:
    """Read a search's folder; its systems are named NAME: SYSTEM if it has a name."""
    if not (folder / "search.json").is_file():
        raise FieldError("RUN", f"{folder} is not a folder of `twolane bench goodput`")
    before = "" if name is None else f"{name}: "
    runs = [_read_run(path, None) for path in sorted(folder.glob("*-rate*.json"))]
    runs = [Run(before + run.label, run.data) for run in runs]
    if both := {run.label for run in runs} & set(saved.labels):
        raise FieldError("RUN", f"{min(both)} was there before {folder}; name it: NAME={folder}")
    saved.runs += runs
    if (folder / "summary.json").is_file():  # the first search may still be on its way
        summary = _decode(folder / "summary.json")
        goodput = {before + system: one for system, one in summary["goodput"].items()}
        about = summary.get("provenance") or {}
        saved.found.append(SearchResult(summary["search"], goodput, about))
        for key in ("slos", "attainment"):
            if saved.found[0].search[key] != summary["search"][key]:
                raise FieldError(
                    "RUN", f"{folder} was searched with other {key}: report it by itself"
                )
    for path in sorted(folder.glob("*.trace.json")):
        _add_trace(saved, before + _stem(path), path)
        saved.beside.add(before + _stem(path))


def _add_trace(saved: Saved, name: str, path: Path) -> None:
    if name in saved.traces:
        raise FieldError("trace_file", f"has two traces called {name}: write NAME={path}")
    saved.traces[name] = path


def _read_run(path: Path, name: str | None) -> Run:
    data = _decode(path)
    if not isinstance(data, dict) or "request_rate" not in data or "duration" not in data:
        raise FieldError("RUN", f"{path} is {TRACE if isinstance(data, list) else 'no result'}")
    if "trial" in data:
        name = name or data["trial"]["system"]
    return Run(name or path.stem, data)


def _decode(path: Path) -> Any:
    data = b""
    try:
        data = path.read_bytes()
        return msgspec.json.decode(data)
    except (OSError, *UNREADABLE) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        what = f" is {TRACE}" if data.startswith(b"[") else f": {reason}"
        raise FieldError("RUN", f"{path}{what}") from error
