"""The engine loop's port on a virtual clock."""

from collections.abc import Callable, Iterable, Sequence

from twolane.engine.messages import Outputs, ToEngine
from twolane.sim.delivery import DeliveryModel
from twolane.sim.lanes import SimLanes


class SimPort:
    """Delivers messages at their virtual times and moves the clock when the engine waits.

    Args:
        lanes: The lanes that own the clock.
        arrivals: (seconds, message), in order of time; read one message ahead.
        hear: called with (seconds, outputs) as outputs come.
        host_factor: see `DeliveryModel`; 0: outputs reach the client when they are due.
    """

    def __init__(
        self,
        lanes: SimLanes,
        arrivals: Iterable[tuple[float, ToEngine]],
        hear: Callable[[float, Outputs], None],
        host_factor: float = 0.0,
    ) -> None:
        self._lanes = lanes
        self._arrivals = iter(arrivals)
        self._next = next(self._arrivals, None)
        self._hear = hear
        self._reports: list[ToEngine] = []
        self._delivery = (
            DeliveryModel(host_factor, hear, self._reports.append) if host_factor else None
        )
        self.stopped = False

    def receive(self) -> Sequence[ToEngine] | None:
        """See `Port.receive`; stops when nothing can happen any more."""
        if self.stopped:
            return None
        due, self._reports[:] = list(self._reports), []
        while self._next is not None and self._next[0] <= self._lanes.clock():
            due.append(self._next[1])
            if self._delivery is not None:
                self._delivery.arrive(self._next[0])
            self._next = next(self._arrivals, None)
        return due

    def send(self, outputs: Outputs) -> None:
        """See `Port.send`."""
        if self._delivery is None:
            self._hear(self._lanes.clock(), outputs)
        else:
            self._delivery.send(self._lanes.clock(), outputs)

    def wait(self, wake_at: float | None) -> None:
        """See `Port.wait`: jump to the next event."""
        arrival, event = self._next[0] if self._next else None, self._lanes.next_event()
        if arrival is None and event is None:
            self.stopped = True  # a wake-up alone changes nothing that a system can see
            if self._delivery is not None:
                self._delivery.flush()
            return
        self._lanes.advance(min([at for at in (arrival, event, wake_at) if at is not None]))
