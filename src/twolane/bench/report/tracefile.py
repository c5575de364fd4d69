"""Reads the trace that an engine wrote (`--trace`): launches, gauges, and what ran."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from twolane.common.checked_json import UNREADABLE
from twolane.common.errors import FieldError

PHASES = {"PrefillSlice": "prefill", "DecodeSteps": "decode", "Hybrid": "hybrid"}
"""Names of kinds of work in figures."""
Array = NDArray[np.float64]


class NoLaunches(FieldError):
    """The trace has no launches."""


class _Event(msgspec.Struct):
    """Fields that are read of an event."""

    ph: str
    name: str
    tid: int = 0
    ts: float = 0.0
    dur: float = 0.0
    args: dict[str, Any] = {}


@dataclass(frozen=True)
class Launches:
    """Launches that ended, in order of their start; arrays of one length."""

    start: Array
    """Seconds since the trace began."""
    end: Array
    units: Array
    tokens: Array
    """New tokens of prompts and decode rows."""
    predicted: Array
    """Predicted seconds; NaN without a prediction."""
    launching: Array
    """Seconds of launching on the host."""
    phase: NDArray[np.str_]
    """A value of `PHASES`."""
    lane: NDArray[np.str_]
    name: list[str]

    def __len__(self) -> int:
        return len(self.name)

    @property
    def took(self) -> Array:
        """Duration of each in seconds."""
        return self.end - self.start

    @property
    def span(self) -> tuple[float, float]:
        """First start and last end, in seconds since the trace began."""
        return float(self.start[0]), float(self.end.max())

    def between(self, begin: float, end: float) -> list[int]:
        """Return the indices of the launches that ran in an interval."""
        inside: list[int] = np.flatnonzero((self.end > begin) & (self.start < end)).tolist()
        return inside


@dataclass(frozen=True)
class TraceFile:
    """One trace."""

    name: str
    about: dict[str, Any]
    """Description of the engine; empty in traces of older versions."""
    launches: Launches
    gauges: dict[str, tuple[Array, Array]]
    """(seconds, values) by name: decoding, waiting, pages_used, pages_cached."""
    preempted: Array
    """Times of preemptions, in seconds."""

    @property
    def units(self) -> int:
        """Units of the device, or the most units used if the trace does not state them."""
        return int(self.about.get("units") or self.launches.units.max())

    @property
    def title(self) -> str:
        """Title of the run."""
        if not self.about:
            return self.name
        return f"{self.about['system']}, {self.about['model']} on {self.about['device']}"


def read(path: Path, name: str) -> TraceFile:
    """Read a trace, also of a run that was killed.

    Raises:
        FieldError: it is something else.
        NoLaunches: it has no launch.
    """
    text = path.read_text(encoding="utf-8").rstrip()
    try:
        whole = text if text.endswith("]") else text.rstrip(",") + "]"
        events = msgspec.json.decode(whole, type=list[_Event])
        threads = {e.tid: e.args["name"] for e in events if e.name == "thread_name"}
        ran = sorted((e for e in events if e.ph == "X"), key=lambda event: event.ts)
        launches = _launches(ran, threads)
    except (*UNREADABLE, KeyError) as error:
        raise FieldError("trace_file", f"{path} is no trace of an engine: {error}") from error
    if not ran:
        raise NoLaunches("trace_file", f"{path} has no launches")
    gauges: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        if event.ph == "C":
            gauges.setdefault(event.name, []).append((event.ts / 1e6, event.args[event.name]))
    return TraceFile(
        name=name,
        about=next((e.args for e in events if (e.ph, e.name) == ("M", "twolane")), {}),
        launches=launches,
        gauges={gauge: _columns(values) for gauge, values in gauges.items()},
        preempted=np.array([e.ts / 1e6 for e in events if (e.ph, e.name) == ("n", "preempted")]),
    )


def _columns(values: list[tuple[float, float]]) -> tuple[Array, Array]:
    times, heights = np.array(values).T
    return times, heights


def _launches(events: list[_Event], threads: dict[int, str]) -> Launches:
    start = np.array([event.ts for event in events]) / 1e6
    return Launches(
        start=start,
        end=start + np.array([event.dur for event in events]) / 1e6,
        units=np.array([event.args["units"] for event in events], dtype=float),
        tokens=np.array([event.args["tokens"] for event in events], dtype=float),
        predicted=np.array([event.args["predicted"] for event in events], dtype=float),
        launching=np.array([event.args["launching"] for event in events], dtype=float),
        phase=np.array([PHASES[event.args["work"]] for event in events], dtype=str),
        lane=np.array([threads[event.tid] for event in events], dtype=str),
        name=[event.name for event in events],
    )
