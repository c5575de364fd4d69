"""Work that a test writes itself, for lanes that do not look inside it."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from twolane.devices import LaneName
from twolane.lanes.base import Sampled, Step, Ticket
from twolane.lanes.cpu.lanes import CpuLanes
from twolane.lanes.cpu.runner import AwaitMasks

PATIENCE = 60.0
"""Seconds for what must happen; waiting so long is a failure."""
GLANCE = 0.2
"""Seconds for what must not happen: a right program waits them out, a wrong one ends them."""


class Gate:
    """Work stands still here until the test lets it pass."""

    def __init__(self) -> None:
        self._reached, self._open = threading.Event(), threading.Event()

    def pass_through(self) -> None:
        """Called by the work."""
        self._reached.set()
        assert self._open.wait(PATIENCE)

    def wait_until_reached(self) -> None:
        assert self._reached.wait(PATIENCE)

    def is_reached(self) -> bool:
        """Whether the work comes here now, or in a moment."""
        return self._reached.wait(GLANCE)

    def open(self) -> None:
        self._open.set()


class ScriptRunner:
    """Runs work that is a generator function of steps."""

    def run(self, work: Callable[[], Iterator[Step]], masks: AwaitMasks) -> Iterator[Step]:
        return work()

    compiled = False

    def bind(self, lane: LaneName) -> None:
        """There is one rank."""


def sampled(i: int) -> Step:
    """A step that samples token i in row i."""
    return Step([Sampled(i, i)])


def gated(*gates: Gate) -> Callable[[], Iterator[Step]]:
    """Work of as many steps as gates; step i ends when gate i is passed and yields `sampled(i)`."""

    def work() -> Iterator[Step]:
        for i, gate in enumerate(gates):
            gate.pass_through()
            yield sampled(i)

    return work


def call(function: Callable[[], Any]) -> Callable[[], Iterator[Step]]:
    """Work of one step that calls the function."""

    def work() -> Iterator[Step]:
        function()
        yield Step()

    return work


def nothing() -> Iterator[Step]:
    """Work of one empty step."""
    yield Step()


@dataclass
class Bench:
    """CPU lanes under test, and how often they had news."""

    cores: tuple[int, ...]
    notified: int = 0
    lanes: CpuLanes = field(init=False)
    _news: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self.lanes = CpuLanes(ScriptRunner(), self.cores, self._notify)

    def _notify(self) -> None:
        with self._news:
            self.notified += 1
            self._news.notify_all()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """As the engine does: look again whenever a lane has news."""
        with self._news:
            assert self._news.wait_for(condition, PATIENCE)

    def wait_done(self, *tickets: Ticket) -> None:
        self.wait_for(lambda: all(ticket.done for ticket in tickets))
