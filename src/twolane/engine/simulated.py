"""The loop's port to a simulation: arrivals on a virtual clock."""

from collections.abc import Iterable, Sequence

from twolane.engine.messages import Outputs, ToEngine
from twolane.lanes.sim import SimLanes


class SimPort:
    """Delivers messages at their virtual times and moves the clock when the engine waits.

    Args:
        lanes: whose clock it is.
        arrivals: (seconds, message), in order of time.
    """

    def __init__(self, lanes: SimLanes, arrivals: Iterable[tuple[float, ToEngine]]) -> None:
        self._lanes = lanes
        self._arrivals = list(arrivals)[::-1]
        self.news: list[tuple[float, Outputs]] = []
        """(seconds, news) as they came."""
        self.stopped = False

    def receive(self) -> Sequence[ToEngine] | None:
        """See `Port.receive`; stops when nothing can happen any more."""
        if self.stopped:
            return None
        due = []
        while self._arrivals and self._arrivals[-1][0] <= self._lanes.clock():
            due.append(self._arrivals.pop()[1])
        return due

    def send(self, news: Outputs) -> None:
        """See `Port.send`."""
        self.news.append((self._lanes.clock(), news))

    def wait(self, wake_at: float | None) -> None:
        """See `Port.wait`: jump to the next event."""
        times = [self._arrivals[-1][0] if self._arrivals else None, self._lanes.next_event()]
        if all(time is None for time in times):
            self.stopped = True  # a wake-up alone changes nothing that a system can see
            return
        times.append(wake_at)
        self._lanes.advance(min(time for time in times if time is not None))
