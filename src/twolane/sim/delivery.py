"""The way of a token from the engine to the client on a virtual clock."""

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from twolane.engine.lateness import Lateness
from twolane.engine.messages import DeliveryLateness, Output, Outputs, Stats


class HostCosts:
    """CPU seconds on a fast host (docs/notes/host-h200.md); the client's are assumptions."""

    intake = 0.85e-3
    """The API process reads, checks and tokenises a request."""
    first = 0.3e-3
    """The API process begins an answer."""
    token = 37e-6
    """The API process writes a token when it is due; the tokens of a step at once take 27 µs."""
    client_first = 0.4e-3
    """The client begins to read an answer."""
    client_token = 60e-6
    """The client reads a token."""


@dataclass(eq=False)
class DeliveryModel:
    """The API process and the client's process, each a queue that serves in order of due times."""

    factor: float
    """How many times slower than `HostCosts` the host is."""
    hear: Callable[[float, Outputs], None]
    """Called with (seconds, outputs) as the client reads outputs."""
    report: Callable[[DeliveryLateness], None]
    """Called with the messages that the API process sends to the engine."""

    def __post_init__(self) -> None:
        self._order = itertools.count()
        self._stats = Stats()
        self._waiting: list[tuple[float, int, Output | None]] = []
        """Heap of outputs, and of requests to take in (None), by the time at which they are due."""
        self._server_free = self._client_free = 0.0
        self._begun: set[str] = set()
        self._lateness = Lateness()

    def arrive(self, at: float) -> None:
        """Add the intake of a request that arrives at `at` seconds."""
        heapq.heappush(self._waiting, (at, next(self._order), None))

    def send(self, at: float, news: Outputs) -> None:
        """Add the engine's message of time `at`, and deliver what was due by then."""
        self._stats = news.stats
        for output in news.outputs:
            due = at if output.due is None else max(at, output.due)
            heapq.heappush(self._waiting, (due, next(self._order), output))
        self.hear(at, msgspec.structs.replace(news, outputs=[]))
        self._deliver(at)

    def flush(self) -> None:
        """Deliver all that is left."""
        self._deliver(math.inf)

    def _deliver(self, until: float) -> None:
        while self._waiting and self._waiting[0][0] <= until:
            due, _, output = heapq.heappop(self._waiting)
            if output is None:
                self._write(due, HostCosts.intake)
            else:
                self.hear(self._read(due, output), Outputs([output], [], self._stats))

    def _read(self, due: float, output: Output) -> float:
        """Return when the client has read an output."""
        first = output.id not in self._begun
        self._begun.add(output.id)
        if output.finish is not None:
            self._begun.discard(output.id)
        written = self._write(due, HostCosts.first if first else HostCosts.token)
        if output.due is not None:
            spread = self._lateness.add(due, written)
            if spread is not None:
                self.report(DeliveryLateness(spread))
        takes = HostCosts.client_first if first else HostCosts.client_token
        self._client_free = max(written, self._client_free) + self.factor * takes
        return self._client_free

    def _write(self, due: float, takes: float) -> float:
        """Return when the API process has done work that is due at `due` seconds."""
        self._server_free = max(due, self._server_free) + self.factor * takes
        return self._server_free
