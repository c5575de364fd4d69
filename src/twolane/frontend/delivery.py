"""Delivers each token at the time that the engine's pacer sets (`engine.pacing`).

A step's end is found, sent and read within 0.3 ms or within 2 ms, because other threads and
requests are in the way: delivered at once, tokens that were made 8 ms apart come 7 to 10 ms apart.
"""

import asyncio
import heapq
import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from twolane.common.timer import PreciseTimer
from twolane.engine.lateness import Lateness
from twolane.engine.messages import Output

GROUP_SECONDS = 0.00025
"""Outputs that are due within the same interval of this many seconds are delivered together, at its
end: at thousands of tokens a second, waking up takes as long as delivering. A gap becomes longer by
at most as much, of which a bound of 9 ms leaves room for twice."""
MANY_OUTPUTS = 512
"""Waiting outputs beyond which those of two intervals are delivered together: so many streams keep
the process busy, and waking up for two or three tokens takes a quarter of its time."""
QUIET_SECONDS = 0.0015
"""Most seconds for which a new HTTP request occupies the event loop."""
PATIENCE_SECONDS = 0.005
"""Most seconds that a new HTTP request waits for a gap in deliveries. Where thousands of tokens a
second leave none, it only lets those go first that are due next."""


class DeliveryQueue:
    """Holds outputs until they are due; outputs of one interval keep their order.

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
        self._timer = PreciseTimer(self._loop, self._go_on)
        self._groups: dict[int, list[Output]] = {}
        """Waiting outputs by the end of their interval, counted in `GROUP_SECONDS`."""
        self._waiting = 0
        """Number of waiting outputs."""
        self._ends: list[int] = []
        """Heap of the keys of `_groups`."""
        self._awaited: dict[float, list[asyncio.Future[None]]] = {}
        """Futures that are done when the group of a key has been delivered."""

    def add(self, outputs: Sequence[Output]) -> None:
        """Add outputs, and deliver all that are due."""
        self._waiting += len(outputs)
        many = self._waiting > MANY_OUTPUTS
        at_once = int(self._loop.time() / GROUP_SECONDS)
        for output in outputs:
            due = output.due
            end = at_once if due is None else math.ceil(due / GROUP_SECONDS)
            if many and due is not None:
                end += end % 2
            group = self._groups.get(end)
            if group is None:
                self._groups[end] = [output]
                heapq.heappush(self._ends, end)
            else:
                group.append(output)
        self._go_on()

    async def wait_for_gap(self) -> None:
        """Wait until nothing is due for `QUIET_SECONDS`, if that begins within `PATIENCE_SECONDS`;
        or else until what is due next has been delivered, if that is due as soon."""
        now, ends = self._loop.time(), sorted(self._ends)
        if not ends or ends[0] * GROUP_SECONDS - now >= QUIET_SECONDS:
            return
        for end, following in pairwise((*ends, math.inf)):
            if end * GROUP_SECONDS > now + PATIENCE_SECONDS:
                end = ends[0]
                break
            if (following - end) * GROUP_SECONDS >= QUIET_SECONDS:
                break
        delivered = self._loop.create_future()
        self._awaited.setdefault(end, []).append(delivered)
        await delivered

    def flush(self) -> None:
        """Deliver all outputs now."""
        self._go_on(math.inf)

    def close(self) -> None:
        """Deliver nothing more."""
        self._timer.close()
        for end in list(self._awaited):
            self._tell(end)

    def _go_on(self, until: float | None = None) -> None:
        until = self._loop.time() if until is None else until
        try:
            while self._ends and self._ends[0] * GROUP_SECONDS <= until:
                self._deliver_group()
        finally:
            if self._ends:
                self._timer.set(self._ends[0] * GROUP_SECONDS)

    def _deliver_group(self) -> None:
        outputs = iter(self._groups[self._ends[0]])
        try:
            for output in outputs:
                self._waiting -= 1
                self._deliver(output)
                if output.due is not None:
                    self._note(output.due)
        finally:
            if rest := list(outputs):  # one could not be delivered
                self._groups[self._ends[0]] = rest
            else:
                end = heapq.heappop(self._ends)
                del self._groups[end]
                self._tell(end)

    def _tell(self, end: float) -> None:
        for waiting in self._awaited.pop(end, ()):
            if not waiting.done():
                waiting.set_result(None)

    def _note(self, due: float) -> None:
        spread = self.lateness.add(due, self._loop.time())
        if spread is not None:
            self._report(spread)
