"""What a server holds: memory and open files of its processes."""

import os
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..server.serving import Served, wait_for

MIB = 1 << 20
CLIENT = "connection of a client"


@dataclass(frozen=True)
class Footprint:
    """Memory in bytes and open files of the API process ("front") and of the engine process."""

    front_rss: int
    engine_rss: int
    front_files: Counter[str]
    """How often the API process has each kind of file open."""
    engine_files: Counter[str]

    @classmethod
    def of(cls, served: Served) -> "Footprint":
        """Measure it now."""
        front, engine = served.process.pid, served.engine_pid
        return cls(rss(front), rss(engine), open_files(front), open_files(engine))

    @classmethod
    def at_rest(cls, served: Served) -> "Footprint":
        """Measure it once the server has closed what its clients have left."""
        wait_for(lambda: not open_files(served.process.pid)[CLIENT])
        return cls.of(served)

    def files_beyond(self, before: "Footprint") -> dict[str, Counter[str]]:
        """Return the files that are open now and were not before, by process and kind."""
        more = {
            "API process": self.front_files - before.front_files,
            "engine": self.engine_files - before.engine_files,
        }
        return {process: files for process, files in more.items() if files}


def rss(pid: int) -> int:
    """Return the resident bytes of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def open_files(pid: int) -> Counter[str]:
    """Return how often a process has each kind of file open: a path, or what has none."""
    found = Counter[str]()
    connections, listening = tcp_sockets(pid)
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            kind, _, number = str(file.readlink()).partition(":[")
            if number.rstrip("]") in connections:
                kind = CLIENT
            elif kind == "socket" and number.rstrip("]") not in listening:
                kind = "socket to a process"
            found[kind] += 1
    return found


def tcp_sockets(pid: int) -> tuple[set[str], set[str]]:
    """Return the numbers of the TCP sockets of a process's network: connections, and others."""
    sockets: tuple[set[str], set[str]] = set(), set()
    for table in ("tcp", "tcp6"):
        with suppress(FileNotFoundError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                state, number = line.split()[3], line.split()[9]
                sockets[state == "0A"].add(number)
    return sockets
