"""Delivers each token at the time that the engine's pacer sets (`engine.pacing`).

A step's end is found, sent and read within 0.3 ms or within 2 ms, because other threads and
requests are in the way: delivered at once, tokens that were made 8 ms apart come 7 to 10 ms apart.
"""

import asyncio
import heapq
import itertools
import math
from collections.abc import Callable, Iterable

from twolane.engine.lateness import Lateness
from twolane.engine.messages import Output

TIMER_SECONDS = 0.001
"""Resolution of the event loop's timers in seconds; the rest of a wait is spent polling."""
QUIET_SECONDS = 0.0015
"""Most seconds for which a new HTTP request occupies the event loop."""
PATIENCE_SECONDS = 0.005
"""Most seconds that a new HTTP request waits for a gap in deliveries."""


class DeliveryQueue:
    """Holds outputs until they are due; outputs due at the same time keep their order.

    Args:
        deliver: takes an output whose time has come. An exception of it keeps nobody else waiting.
        report: told the `spread` of late deliveries once a second.
    """

    def __init__(self, deliver: Callable[[Output], None], report: Callable[[float], None]) -> None:
        self.lateness = Lateness()
        """By how much outputs with a due time were written late."""
        self._deliver = deliver
        self._report = report
        self._loop = asyncio.get_running_loop()
        self._waiting: list[tuple[float, int, Output]] = []
        """Heap of outputs by due time and order of arrival."""
        self._order = itertools.count()
        self._next: asyncio.Handle | None = None

    def add(self, outputs: Iterable[Output]) -> None:
        """Add outputs, and deliver all that are due."""
        now = self._loop.time()
        for output in outputs:
            due = now if output.due is None else output.due
            heapq.heappush(self._waiting, (due, next(self._order), output))
        self._go_on()

    async def wait_for_gap(self) -> None:
        """Wait until nothing is due for `QUIET_SECONDS`, but no longer than `PATIENCE_SECONDS`."""
        latest = self._loop.time() + PATIENCE_SECONDS
        while self._waiting:
            due = self._waiting[0][0]
            if not due - QUIET_SECONDS < self._loop.time() < latest:
                break
            await asyncio.sleep(min(due, latest) - self._loop.time())

    def flush(self) -> None:
        """Deliver all outputs now."""
        self._go_on(math.inf)

    def _go_on(self, until: float | None = None) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None
        until = self._loop.time() if until is None else until
        try:
            while self._waiting and self._waiting[0][0] <= until:
                output = heapq.heappop(self._waiting)[-1]
                self._deliver(output)
                if output.due is not None:
                    self._note(output.due)
        finally:
            if self._waiting:
                self._wait(self._waiting[0][0])

    def _note(self, due: float) -> None:
        spread = self.lateness.add(due, self._loop.time())
        if spread is not None:
            self._report(spread)

    def _wait(self, due: float) -> None:
        if due - self._loop.time() > TIMER_SECONDS:
            self._next = self._loop.call_at(due - TIMER_SECONDS, self._go_on)
        else:
            self._next = self._loop.call_soon(self._go_on)
