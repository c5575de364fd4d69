"""Bound on the memory of output that clients have not read."""

import logging
import time
from collections.abc import Callable, Iterator
from typing import Literal, Protocol

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

log = logging.getLogger("twolane.server")

UNSENT_BYTES = 512 << 20
"""Most bytes of unsent output of all connections."""
CHECKS_PER_BOUND = 64
"""Checks per `UNSENT_BYTES` of new output: one takes the loop about a microsecond a connection."""
LOG_SECONDS = 60.0
"""Seconds between two log lines of one kind."""
Fault = Literal["slow", "stalled"]
"""Reason of a disconnection: too much unsent output in total, or a client that read nothing for
long."""
FAULTS: dict[Fault, str] = {
    "slow": "too much output waits for slow clients: the slowest was disconnected",
    "stalled": "a client that did not read its answer was disconnected",
}


class HeldOutput(Protocol):
    """Part of an answer held before it is written to its connection, such as a `Backlog`."""

    on_growth: Callable[[int], None]
    """Called with the number of bytes added, as far as that is noticed."""

    @property
    def held(self) -> int:
        """Number of bytes held."""

    @property
    def empty(self) -> bool:
        """Whether no bytes are held."""


class OutputSink(Protocol):
    """The part of a connection that `UnsentOutput` uses."""

    @property
    def unsent(self) -> int:
        """Number of bytes that wait for the client."""

    @property
    def seconds_behind(self) -> float:
        """Seconds for which the client has been behind."""

    def drop(self, fault: Fault) -> None:
        """Disconnect the client and drop its output."""


class UnsentOutput:
    """Bounds the unsent output of all connections.

    Where it is too much, the connection with the most unsent bytes times seconds behind is dropped:
    one that has just been given a long answer reads it meanwhile.

    Args:
        most: bytes that may wait together.
        clock: returns the time in seconds.
    """

    def __init__(
        self, most: int = UNSENT_BYTES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.readers: set[OutputSink] = set()
        """All open connections."""
        self.dropped: dict[Fault, int] = dict.fromkeys(FAULTS, 0)
        """Number of disconnected clients by reason."""
        self._most = most
        self._clock = clock
        self._grown = 0
        """Bytes of output since the last check."""
        self._logged: dict[Fault, float] = {}
        """Time of the last log line of each kind."""

    @property
    def together(self) -> int:
        """Unsent bytes of all connections."""
        return sum(reader.unsent for reader in self.readers)

    def grew(self, count: int) -> None:
        """Count new output, and check the total now and then."""
        self._grown += count
        if self._grown * CHECKS_PER_BOUND >= self._most:
            self._grown = 0
            self._check()

    def note_drop(self, fault: Fault, client: object) -> None:
        """Count and log a client that is disconnected."""
        self.dropped[fault] += 1
        now = self._clock()
        if now - self._logged.get(fault, -LOG_SECONDS) >= LOG_SECONDS:
            self._logged[fault] = now
            log.warning("%s (%s)", FAULTS[fault], client)

    def _check(self) -> None:
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
    """Collects metrics of unsent output.

    Args:
        unsent: has them.
        prefix: the prefix of the metrics' names.
    """

    def __init__(self, unsent: UnsentOutput, prefix: str) -> None:
        self._unsent, self._prefix = unsent, prefix

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
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
