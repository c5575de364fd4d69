"""The tests. Of several processes that run them, the first one compiles what all of them import.

In a fresh clone nothing is compiled. Processes that begin at once would all compile the same half a
minute's worth of modules, so the others wait until the first one has collected its tests.
"""

import os
import tempfile
import time
from pathlib import Path

FIRST = "gw0"
PATIENCE = 120.0
"""Seconds that a process waits for the first one."""
_worker = os.environ.get("PYTEST_XDIST_WORKER", FIRST)
_collected = Path(tempfile.gettempdir(), f"{os.environ.get('PYTEST_XDIST_TESTRUNUID')}.collected")


def wait_for_the_first() -> None:
    """Wait until the first process has compiled what is imported, if that is to be done."""
    compiled = any(Path(__file__).parent.glob("__pycache__/conftest.*pytest*"))
    end = time.monotonic() + (0.0 if compiled or _worker == FIRST else PATIENCE)
    while time.monotonic() < end and not _collected.exists():
        time.sleep(0.1)


def collected() -> None:
    """Let the other processes go on, if this is the first one."""
    if _worker == FIRST and "PYTEST_XDIST_TESTRUNUID" in os.environ:
        _collected.touch()


def ended() -> None:
    """Leave nothing of this behind."""
    if _worker == FIRST:
        _collected.unlink(missing_ok=True)


wait_for_the_first()
