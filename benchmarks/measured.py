"""What benchmarks share: figures held to a bar, steps of a start, CPU time of a process."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Figure:
    """A measured value, the bar it is held to, and whether it clears it."""

    name: str
    value: float
    bar: str
    holds: bool
    unit: str = ""


def at_most(name: str, value: float, bar: float, unit: str = "") -> Figure:
    """Return a figure that should not be above its bar."""
    return Figure(name, value, f"<= {bar:g}", value <= bar, unit)


def at_least(name: str, value: float, bar: float, unit: str = "") -> Figure:
    """Return a figure that should not be below its bar."""
    return Figure(name, value, f">= {bar:g}", value >= bar, unit)


def show(figures: Sequence[Figure]) -> None:
    """Print a line for each figure."""
    for one in figures:
        mark = "ok  " if one.holds else "MISS"
        print(f"{mark} {one.name}: {one.value:.4g} {one.unit} ({one.bar})", flush=True)


class StartProgress:
    """Prints the steps of a start, four lines a stage, with the seconds since it was made."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._told: set[tuple[str, int]] = set()

    @property
    def seconds(self) -> float:
        """Seconds since it was made."""
        return time.monotonic() - self._begun

    def __call__(self, stage: str, share: float) -> None:
        if (stage, int(share * 4)) not in self._told:
            self._told.add((stage, int(share * 4)))
            print(f"{self.seconds:.1f} s: {stage} {share:.2f}", flush=True)


def cpu_seconds(pid: int) -> float:
    """Return the seconds of CPU time that a process has taken."""
    return time.clock_gettime(~pid << 3 | 2)  # CPUCLOCK_SCHED of the process, as libc makes it


def api_cpu_seconds(pid: int, *engine: str) -> tuple[float, float]:
    """Return the CPU seconds of a server's main process, and of it and all below it but those that
    have one of `engine` among their arguments."""
    own, among = cpu_seconds(pid), 0.0
    for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()):
        words = Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0")
        among += 0.0 if {*engine} & {*words} else api_cpu_seconds(child, *engine)[1]
    return own, own + among
