"""Lanes whose every step runs when the test says: real work in any order that lanes allow.

A lane that is held back while the other goes on is a device with a delay injected on one stream.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from twolane.devices import LANES, LaneName
from twolane.engine.engine import Engine
from twolane.engine.intake import ServedModel
from twolane.engine.kv.manager import KVCacheManager
from twolane.engine.state import State
from twolane.estimate.online import OnlineEstimator
from twolane.lanes.base import Step, Ticket
from twolane.lanes.cpu.runner import Runner
from twolane.lanes.work import (
    AdapterRecord,
    DropRecord,
    LaunchRecord,
    Record,
    TokenMask,
    Work,
    decode,
    encode,
)
from twolane.model.attention import KVCache
from twolane.model.decoder import Decoder
from twolane.systems.base import System


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
    masks: list[Sequence[TokenMask]] | None
    """Those that follow the launch, once they are set; None: none follow."""


class SteppedLanes:
    """Time advances by one with every step; `run_on` is called whenever a ticket is polled.

    All that the lanes are told goes through its encoded form.
    """

    def __init__(self, runner: Runner, run_on: Callable[[], None], units: int = 4) -> None:
        self.units = units
        shared = [(units - d, d) for d in range(1, units)]
        self.levels: Sequence[tuple[int, int]] = (*shared, (units, 0), (0, units))
        self.time = 0.0
        self._runner = runner
        self._run_on = run_on
        self._queues: dict[LaneName, deque[_Job]] = {lane: deque() for lane in LANES}
        self._tickets: list[SteppedTicket] = []
        self._masks: dict[int, list[Sequence[TokenMask]] | None] = {}
        self._drops: list[tuple[int, list[SteppedTicket]]] = []
        """Batches, and what was queued when they were dropped."""

    def clock(self) -> float:
        return self.time

    def launch(self, lane: LaneName, units: int, work: Work, after: Sequence[int]) -> Ticket:
        record = sent(LaunchRecord(lane, units, work, tuple(after)))
        assert isinstance(record, LaunchRecord)
        ticket = SteppedTicket(lane, units, self._run_on)
        ticket.number = len(self._tickets)
        self._tickets.append(ticket)
        before = [self._tickets[number] for number in record.after]
        masks: list[Sequence[TokenMask]] | None = [] if record.work.late else None
        self._masks[ticket.number] = masks
        steps = self._runner.run(record.work, lambda: masks[0] if masks else ())
        self._queues[lane].append(_Job(ticket, steps, before, masks))
        return ticket

    def set_masks(self, number: int, masks: Sequence[TokenMask]) -> None:
        waiting = self._masks[number]
        assert waiting == [], "masks are set once, for a launch that waits for them"
        waiting.append(masks)

    def drop(self, batch: int) -> None:
        """Behind the batch's slices, which may be in any lane."""
        record = sent(DropRecord(batch))
        assert isinstance(record, DropRecord)
        queued = [job.ticket for queue in self._queues.values() for job in queue]
        self._drops.append((record.batch, queued))
        self._drop_idle()

    def load_adapter(self, slot: int, path: str, digest: bytes | None = None) -> None:
        record = sent(AdapterRecord(slot, path, digest))
        assert isinstance(record, AdapterRecord)
        self._runner.load_adapter(record.slot, record.path, record.digest)

    def drop_adapter(self, slot: int) -> None:
        self._runner.drop_adapter(slot)

    def silences(self) -> Sequence[float]:
        """There is one rank."""
        return ()

    def check(self) -> None:
        """Nothing is ever gone."""

    def runnable(self) -> list[LaneName]:
        """Lanes whose first launch may go on, and does not wait for masks."""
        return [
            lane
            for lane, queue in self._queues.items()
            if queue and queue[0].masks != [] and all(ticket.ended for ticket in queue[0].after)
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
            self._drop_idle()

    def _drop_idle(self) -> None:
        """Drop the batches of which no slice can be queued any more."""
        for batch, queued in list(self._drops):
            if all(ticket.ended for ticket in queued):
                self._runner.drop(batch)
                self._drops.remove((batch, queued))


def sent(record: Record) -> Record:
    """As it arrives in another process."""
    arrived = decode(encode(record))
    assert arrived == record
    return arrived


def stepped_engine(
    system: System, decoder: Decoder, model: ServedModel, pages: int, page_size: int, slots: int
) -> tuple[Engine, SteppedLanes]:
    """An engine with a prefix cache on stepped lanes over a pool in float64."""
    kv = KVCache(decoder.spec, pages, page_size, torch.float64)
    lanes = SteppedLanes(Runner(decoder, kv, slots), lambda: None)
    books = KVCacheManager(pages, page_size, slots, prefix_cache=True)
    state = State(books, lanes, decoder.spec.layers, OnlineEstimator())
    return Engine(system, state, model), lanes
