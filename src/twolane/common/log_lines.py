"""Logging that never blocks a serving process on the log's reader."""

import logging
import os
import select
from collections import deque

from twolane.common.printable import printable

MAX_LINES = 1000
"""Most lines that wait for the log's reader; further ones are dropped and counted."""
END_SECONDS = 1.0
"""Seconds that closing the log waits for its reader to take the next piece."""


def log_to(file: int, level: str, form: str) -> None:
    """Log lines of at least this level to an open file, unless logging is configured already."""
    handler = LineHandler(file)
    logging.basicConfig(level=level.upper(), format=form, handlers=[handler])


class LineHandler(logging.Handler):
    """Log handler that writes without blocking and buffers lines that the reader does not take.

    A pipe that nobody reads and a terminal that is stopped (Ctrl-S) would otherwise hold up the
    event loop, and so all requests. What is kept is written with the next line.

    Args:
        file: descriptor of the open file.
        level: lowest level of lines that it writes.
    """

    def __init__(self, file: int, level: int = logging.NOTSET) -> None:
        super().__init__(level)
        self._file = file
        self._waiting = deque[bytes]()
        self._lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, or buffer it."""
        try:
            line = printable(self.format(record))
        except Exception:
            self.handleError(record)
            return
        self.flush()
        if len(self._waiting) >= MAX_LINES:
            self._lost += 1
            return
        if self._lost:
            self._keep(f"{self._lost} lines of the log were lost: nobody has read it")
            self._lost = 0
        self._keep(line)
        self.flush()

    def flush(self) -> None:
        """Write buffered lines that the reader takes now."""
        self._write(0.0)

    def close(self) -> None:
        """Write buffered lines, waiting up to `END_SECONDS` for the reader to take each piece."""
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
    """Write as much as a file, pipe or terminal takes; return the rest.

    Args:
        file: descriptor of the open file.
        data: The bytes to write.
        seconds: Seconds that each piece may wait until it is taken.

    Raises:
        OSError: it cannot be written to.
    """
    room = select.poll()
    room.register(file, select.POLLOUT)
    while data and room.poll(1e3 * seconds):
        data = data[os.write(file, data[: select.PIPE_BUF]) :]  # for which a pipe then has room
    return data
