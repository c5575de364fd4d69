"""Hands outputs on at their time, a steady while after the device made them (a playout delay).

A step's end is found, sent and read within 0.3 ms or within 2, as other threads and requests are in
the way: handed on at once, tokens that were made 8 ms apart come 7 to 10 ms apart.
"""

import asyncio
import heapq
import itertools
import math
from collections.abc import Callable, Iterable

from twolane.engine.messages import Output

TIMER_SECONDS = 0.001
"""The event loop's timers are as coarse: the rest of a wait it only looks what else there is."""
QUIET_SECONDS = 0.0015
"""What a request takes of the event loop, at most: on an H200's host 0.85 ms, 1.4 one time in ten.
"""
PATIENCE_SECONDS = 0.005
"""For which a request waits for that at most."""


class Playout:
    """Outputs that wait for `Output.due`, by that, and those of a time in the order they came.

    Args:
        hand_on: takes an output whose time has come. What it raises keeps nobody else waiting.
    """

    def __init__(self, hand_on: Callable[[Output], None]) -> None:
        self._hand_on = hand_on
        self._loop = asyncio.get_running_loop()
        self._waiting: list[tuple[float, int, Output]] = []
        """A heap."""
        self._order = itertools.count()
        self._next: asyncio.Handle | None = None

    def take(self, outputs: Iterable[Output]) -> None:
        """Hand on what is due of these, and of those that wait; the rest when it is."""
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
        """Hand on everything now."""
        self._go_on(math.inf)

    def _go_on(self, until: float | None = None) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None
        until = self._loop.time() if until is None else until
        try:
            while self._waiting and self._waiting[0][0] <= until:
                self._hand_on(heapq.heappop(self._waiting)[-1])
        finally:
            if self._waiting:
                self._wait(self._waiting[0][0])

    def _wait(self, due: float) -> None:
        if due - self._loop.time() > TIMER_SECONDS:
            self._next = self._loop.call_at(due - TIMER_SECONDS, self._go_on)
        else:
            self._next = self._loop.call_soon(self._go_on)
