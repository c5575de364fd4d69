"""A rank other than 0 that does not answer as long as a file is there."""

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from twolane.lanes.ranks import cpu_follower, log_reader


def answer(file: int, what: bytes) -> None:
    """Write to a file once the other file is gone."""
    while Path(os.environ["DEAF"]).exists():
        time.sleep(0.05)
    os.write(file, what)


if __name__ == "__main__":
    log_reader.os = SimpleNamespace(**{**vars(os), "write": answer})  # type: ignore[assignment]
    sys.exit(cpu_follower.main())
