"""Teams of threads that run compiled passes, one for each thread that asks for some."""

import threading
import weakref
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from twolane.common.files import kept, user_cache
from twolane.kernels.cpu import compiler, formats, instructions, passes
from twolane.kernels.cpu.passes import TeamField

Ints = npt.NDArray[np.int64]
_LINE = 8
"""Numbers of a cache line."""


@lru_cache(1)
def functions() -> compiler.Compiled:
    """Return the compiled functions of this process."""
    sources = [Path(m.__file__ or "") for m in (compiler, formats, instructions, passes)]
    file = user_cache() / "twolane" / "cpu" / f"{compiler.made_of(sources)}.o"
    code = kept(file, lambda: passes.program().object_code())
    compiled = compiler.Compiled(code, passes.EXPORTED)
    compiler.release()
    return compiled


class Team:
    """The calling thread and others, which sleep between passes.

    Args:
        threads: Number of threads, the calling one included; the others inherit its cores.
    """

    def __init__(self, threads: int) -> None:
        memory = np.zeros(TeamField.SIZE + _LINE, np.int64)
        skipped = (-memory.ctypes.data // 8) % _LINE
        self.table = memory.ctypes.data + 8 * skipped
        self.threads = threads
        work = functions()["work"]
        others = [
            threading.Thread(target=work, args=(self.table, i), name=f"team-{i}", daemon=True)
            for i in range(1, threads)
        ]
        for each in others:
            each.start()
        # The others read this memory until they have ended.
        self._close = weakref.finalize(self, _end, self.table, others, memory)

    def run_layers(self, layers: Ints, table: Ints) -> None:
        """Run layers whose tables are rows of `layers` on the pass of a table."""
        at = layers.ctypes.data, len(layers), table.ctypes.data
        functions()["run_layers"](self.table, *at)

    def run_product(self, table: Ints) -> None:
        """Compute the single product of a table."""
        functions()["run_product"](self.table, table.ctypes.data)

    def close(self) -> None:
        """End the other threads, as the end of the team does."""
        self._close()


def _end(table: int, others: Sequence[threading.Thread], memory: Ints) -> None:
    functions()["end"](table)
    for each in others:
        each.join()


_own = threading.local()


def own_team() -> Team:
    """Return the calling thread's team, which is this thread alone if none was set."""
    team: Team | None = getattr(_own, "team", None)
    if team is None:
        team = _own.team = Team(1)
    return team


def set_threads(threads: int) -> None:
    """Give the calling thread a team of so many threads from now on."""
    if getattr(_own, "team", None) is not None:
        _own.team.close()
    _own.team = Team(threads)
