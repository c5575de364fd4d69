"""Output that waits for its readers: how much memory all of it may take."""

import logging
import time
from collections.abc import Callable, Iterator
from typing import Literal, Protocol

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

log = logging.getLogger("twolane.server")

UNSENT_BYTES = 512 << 20
"""Output that waits for its readers may have this many bytes together."""
LOOKS = 64
"""What waits is added up after each this fraction of the bytes that may wait was made: that takes
the loop about a microsecond a connection."""
LOG_SECONDS = 60.0
"""One line a kind is written into the log in this many seconds."""
Fault = Literal["slow", "stalled"]
"""Why a reader is disconnected: all output together is too much, or it took nothing for long."""
FAULTS: dict[Fault, str] = {
    "slow": "too much output waits for slow clients: the slowest was disconnected",
    "stalled": "a client that did not read its answer was disconnected",
}


class HeldOutput(Protocol):
    """What is held of an answer before it is written to its connection, such as a `Backlog`."""

    on_growth: Callable[[int], None]
    """Is told how many bytes have been added, as far as that is noticed."""

    @property
    def held(self) -> int:
        """Bytes that are held."""
        ...

    @property
    def empty(self) -> bool:
        """Whether nothing is."""
        ...


class OutputSink(Protocol):
    """A connection, as far as output waits for it."""

    @property
    def unsent(self) -> int:
        """Bytes that wait for it."""
        ...

    @property
    def seconds_behind(self) -> float:
        """Seconds for which it has not taken all that there was."""
        ...

    def drop(self, fault: Fault) -> None:
        """Disconnect it; nothing waits for it any more."""
        ...


class UnsentOutput:
    """How many bytes wait for the readers of all connections, and who is disconnected for it.

    Where it is too much, the reader goes for which most has waited for longest, in bytes times
    seconds: one that has just been given a long answer reads it meanwhile.

    Args:
        most: bytes that may wait together.
        clock: returns the time in seconds.
    """

    def __init__(
        self, most: int = UNSENT_BYTES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.readers: set[OutputSink] = set()
        """Every open connection."""
        self.dropped: dict[Fault, int] = dict.fromkeys(FAULTS, 0)
        """Number of readers that were disconnected."""
        self._most = most
        self._clock = clock
        self._grown = 0
        """Bytes that were made since the last look."""
        self._told: dict[Fault, float] = {}
        """When the log was last told of each."""

    @property
    def together(self) -> int:
        """Bytes that wait for all readers."""
        return sum(reader.unsent for reader in self.readers)

    def grew(self, count: int) -> None:
        """Note output that may have to wait, and look whether it is too much."""
        self._grown += count
        if self._grown * LOOKS >= self._most:
            self._grown = 0
            self._look()

    def note_drop(self, fault: Fault, client: object) -> None:
        """Count a reader that is disconnected, and tell the log."""
        self.dropped[fault] += 1
        now = self._clock()
        if now - self._told.get(fault, -LOG_SECONDS) >= LOG_SECONDS:
            self._told[fault] = now
            log.warning("%s (%s)", FAULTS[fault], client)

    def _look(self) -> None:
        unsent = {reader: reader.unsent for reader in self.readers}
        together = sum(unsent.values())
        if together <= self._most:
            return
        burden = {one: (size * one.seconds_behind, size) for one, size in unsent.items()}
        for worst in sorted(burden, key=lambda one: burden[one], reverse=True):
            worst.drop("slow")
            together -= unsent[worst]
            if together <= self._most:
                return


class UnsentCollector(Collector):
    """The figures of what waits for readers.

    Args:
        unsent: has them.
        prefix: of their names.
    """

    def __init__(self, unsent: UnsentOutput, prefix: str) -> None:
        self._unsent, self._prefix = unsent, prefix

    def collect(self) -> Iterator[Metric]:
        """Yield them."""
        yield GaugeMetricFamily(
            f"{self._prefix}unsent_bytes",
            "Bytes of output that wait for their readers",
            value=self._unsent.together,
        )
        dropped = CounterMetricFamily(
            f"{self._prefix}readers_dropped",
            "Connections closed because their clients read too slowly (slow) or nothing (stalled)",
            labels=["reason"],
        )
        for fault, count in self._unsent.dropped.items():
            dropped.add_metric([fault], count)
        yield dropped
