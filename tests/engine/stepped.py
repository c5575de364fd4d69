"""Lanes whose every step runs when the test says: real work in any order that lanes allow.

A lane that is held back while the other goes on is a device with a delay injected on one stream.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from twolane.common.vocabulary import LANES, LaneName
from twolane.lanes.base import Step, Ticket
from twolane.lanes.cpu.runner import Runner
from twolane.lanes.work import Work


class SteppedTicket(Ticket):
    """Lanes run on while they are polled: reading `done` may let them take a step first."""

    def __init__(self, lane: LaneName, units: int, run_on: Callable[[], None]) -> None:
        super().__init__(lane, units)
        self._run_on = run_on

    @property
    def done(self) -> bool:
        before = self.end is not None
        self._run_on()
        return before

    @property
    def ended(self) -> bool:
        return self.end is not None


@dataclass
class _Job:
    ticket: SteppedTicket
    steps: Iterator[Step]
    after: Sequence[SteppedTicket]


class SteppedLanes:
    """Time advances by one with every step; `run_on` is called whenever a ticket is polled."""

    def __init__(self, runner: Runner, run_on: Callable[[], None], units: int = 4) -> None:
        self.units = units
        shared = [(units - d, d) for d in range(1, units)]
        self.levels: Sequence[tuple[int, int]] = (*shared, (units, 0), (0, units))
        self.time = 0.0
        self._runner = runner
        self._run_on = run_on
        self._queues: dict[LaneName, deque[_Job]] = {lane: deque() for lane in LANES}

    def clock(self) -> float:
        return self.time

    def launch(self, lane: LaneName, units: int, work: Work, after: Sequence[Ticket]) -> Ticket:
        ticket = SteppedTicket(lane, units, self._run_on)
        before = [t for t in after if isinstance(t, SteppedTicket)]
        self._queues[lane].append(_Job(ticket, self._runner.run(work), before))
        return ticket

    def runnable(self) -> list[LaneName]:
        """Lanes whose first launch may go on."""
        return [
            lane
            for lane, queue in self._queues.items()
            if queue and all(ticket.ended for ticket in queue[0].after)
        ]

    def step(self, lane: LaneName) -> None:
        """Run one step of the lane's first launch, or end it."""
        self.time += 1.0
        job = self._queues[lane][0]
        if job.ticket.start is None:
            job.ticket.start = self.time
        try:
            job.ticket.add(next(job.steps), self.clock())
        except StopIteration:
            job.ticket.end = self.time
            self._queues[lane].popleft()
