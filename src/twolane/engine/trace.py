"""The trace of a run, in the JSON that Chrome and Perfetto open.

Lanes are threads: one complete event ("X") for every launch, on the thread of its lane, named
by its work, with units, requests, tokens, prediction and the plan's reason as arguments. Every
request is an asynchronous slice; queue and KV use are counters. A metadata event "twolane" has
the settings of the run; viewers ignore it. Times are microseconds since the trace began.
"""

import contextlib
import json
import logging
from pathlib import Path
from typing import Any

from twolane.common.files import naming_file
from twolane.devices import LANES, LaneName

log = logging.getLogger("twolane.trace")

LANE_THREADS: dict[LaneName, int] = {lane: i + 1 for i, lane in enumerate(LANES)}


class Trace:
    """A sink for the engine's events, with times in seconds on the lanes' clock.

    This one writes nothing.
    """

    silent = True
    """Whether launches need not be reported."""

    def about(self, **args: Any) -> None:
        """Record the model, system, device, its units and levels, and the size of the KV pool."""

    def request_begin(self, request: str, at: float, **args: Any) -> None:
        """Record the arrival of a request."""

    def request_event(self, request: str, name: str, at: float, **args: Any) -> None:
        """Record an event of a request."""

    def request_end(self, request: str, at: float, reason: str, tokens: int) -> None:
        """Record the end of a request."""

    def launch(self, lane: LaneName, name: str, start: float, end: float, **args: Any) -> None:
        """Record a launch that ran in a lane."""

    def counters(self, at: float, **values: float) -> None:
        """Record gauges at a moment."""

    def close(self) -> None:
        """End the trace."""


class FileTrace(Trace):
    """Writes events to a file as they come; the file is valid JSON once it is closed.

    The viewers also read the file of a run that was killed. Where an event cannot be written, as on
    a full disk, the trace ends with the one before it, and its run goes on.

    Args:
        path: Path of the file.
        began: the time of the run's start, in seconds on the lanes' clock.

    Raises:
        OSError: on construction, the file cannot be written.
    """

    silent = False

    def __init__(self, path: str | Path, began: float) -> None:
        # Written event by event: what a killed run leaves ends in a whole event.
        self._file = Path(path).open("wb", buffering=0)  # noqa: SIM115
        self._whole = 0
        """Bytes up to the end of the last event."""
        self._began = began
        with naming_file(path):
            self._put("[\n")
        self._write({"ph": "M", "name": "process_name", "args": {"name": "twolane"}}, last="")
        for lane, thread in LANE_THREADS.items():
            self._write({"ph": "M", "name": "thread_name", "tid": thread, "args": {"name": lane}})

    def about(self, **args: Any) -> None:
        """See `Trace`."""
        self._write({"ph": "M", "name": "twolane", "args": args})

    def request_begin(self, request: str, at: float, **args: Any) -> None:
        """See `Trace`."""
        self._event("b", request, at, cat="request", id=request, args=args)

    def request_event(self, request: str, name: str, at: float, **args: Any) -> None:
        """See `Trace`."""
        self._event("n", name, at, cat="request", id=request, args=args)

    def request_end(self, request: str, at: float, reason: str, tokens: int) -> None:
        """See `Trace`."""
        args = {"finish": reason, "output_tokens": tokens}
        self._event("e", request, at, cat="request", id=request, args=args)

    def launch(self, lane: LaneName, name: str, start: float, end: float, **args: Any) -> None:
        """See `Trace`."""
        duration = round((end - start) * 1e6, 1)
        self._event("X", name, start, tid=LANE_THREADS[lane], dur=duration, args=args)

    def counters(self, at: float, **values: float) -> None:
        """See `Trace`."""
        for name, value in values.items():
            self._event("C", name, at, args={name: value})

    def close(self) -> None:
        """See `Trace`."""
        if not self.silent:
            self._end()

    def _event(self, kind: str, name: str, at: float, **more: Any) -> None:
        self._write({"ph": kind, "name": name, "ts": round((at - self._began) * 1e6, 1), **more})

    def _write(self, event: dict[str, Any], last: str = ",\n") -> None:
        if self.silent:
            return
        try:
            self._put(last + json.dumps({"pid": 1, "tid": 0, **event}))
        except OSError as error:
            log.error("--trace %s stops here: %s", self._file.name, error.strerror)
            self._end()

    def _put(self, text: str) -> None:
        data = text.encode()
        while data:
            data = data[self._file.write(data) :]
        self._whole += len(text)

    def _end(self) -> None:
        """Close the list after the last whole event, and the file."""
        self.silent = True
        with self._file, contextlib.suppress(OSError):
            self._file.truncate(self._whole)
            self._file.seek(self._whole)
            self._put("\n]\n")
