"""The log of a process that serves: no line waits for whoever reads them."""

import logging
import os
import select
from collections import deque

MOST_LINES = 1000
"""Number of lines that wait for the log's reader; further ones are counted and lost."""
END_SECONDS = 1.0
"""Seconds that a process waits at its end until its reader takes the next piece of the log."""


def log_to(file: int, level: str, form: str) -> None:
    """Have the log's lines of this level written to an open file, unless there is a log already."""
    handler = LineHandler(file)
    logging.basicConfig(level=level.upper(), format=form, handlers=[handler])


class LineHandler(logging.Handler):
    """Writes lines while their reader takes them, and keeps them while it does not.

    A pipe that nobody reads and a terminal that is stopped (Ctrl-S) would otherwise hold up the
    event loop, and so all requests. What is kept is written with the next line.

    Args:
        file: descriptor of the open file.
    """

    def __init__(self, file: int) -> None:
        super().__init__()
        self._file = file
        self._waiting = deque[bytes]()
        self._lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, or keep it."""
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        self.flush()
        if len(self._waiting) >= MOST_LINES:
            self._lost += 1
            return
        if self._lost:
            self._keep(f"{self._lost} lines of the log were lost: nobody has read it")
            self._lost = 0
        self._keep(line)
        self.flush()

    def flush(self) -> None:
        """Write what the reader takes now."""
        self._write(0.0)

    def close(self) -> None:
        """Write what the reader takes within moments."""
        self._write(END_SECONDS)
        super().close()

    def _keep(self, line: str) -> None:
        self._waiting.append(line.encode(errors="backslashreplace") + b"\n")

    def _write(self, seconds: float) -> None:
        try:
            while self._waiting:
                self._waiting[0] = write_taken(self._file, self._waiting[0], seconds)
                if self._waiting[0]:
                    return
                self._waiting.popleft()
        except OSError:  # a full disk, or the reader is gone: there is no place to say so
            self._waiting.clear()


def write_taken(file: int, data: bytes, seconds: float = 0.0) -> bytes:
    """Write to a file, pipe or terminal what is taken; return the rest.

    Args:
        file: descriptor of the open file.
        data: what to write.
        seconds: how long each piece may wait until it is taken.

    Raises:
        OSError: it cannot be written to.
    """
    room = select.poll()
    room.register(file, select.POLLOUT)
    while data and room.poll(1e3 * seconds):
        data = data[os.write(file, data[: select.PIPE_BUF]) :]  # for which a pipe then has room
    return data
