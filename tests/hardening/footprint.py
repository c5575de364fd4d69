"""What a server holds: memory and files of its processes, requests and pages of its engine."""

import os
from dataclasses import dataclass
from pathlib import Path

from ..server.serving import Served

MIB = 1 << 20


@dataclass(frozen=True)
class Footprint:
    """Of the front and of the engine, in bytes and in open files."""

    front_rss: int
    engine_rss: int
    front_files: int
    engine_files: int

    @classmethod
    def of(cls, served: Served) -> "Footprint":
        """Measure it now."""
        front, engine = served.process.pid, served.engine_pid
        return cls(rss(front), rss(engine), open_files(front), open_files(engine))


def rss(pid: int) -> int:
    """Return the resident bytes of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def open_files(pid: int) -> int:
    """Return how many file descriptors a process has."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))
