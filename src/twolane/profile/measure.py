"""Times one point of the plan: samples of one lane alone, of both at once, of hybrid passes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from statistics import fmean

from msgspec.structs import replace

from twolane.devices import LaneName
from twolane.estimate.profile import Neighbour, Run, Sample
from twolane.estimate.query import Kind
from twolane.lanes.base import Ticket
from twolane.lanes.work import DecodeWork, HybridWork, PrefillWork, Work
from twolane.profile.clocks import Clocks
from twolane.profile.grid import Point
from twolane.profile.rig import PromptBatch, Rig

WARM_SECONDS = 0.15
"""Seconds of each point that are not counted, because clocks follow the load with a delay."""
ALONE_SECONDS = 0.1
"""Least seconds of a solo point, which also has at least `REPEATS` launches."""
BOTH_SECONDS = 0.25
"""Seconds of measuring with both lanes at work, with at least `REPEATS` launches in each lane."""
REPEATS = 3
"""Number of launches that a point has at least."""
MAX_SECONDS = 2.0
"""Most seconds of a point once that many launches were counted."""
SLICE_SECONDS = 0.012
"""Layers are measured in slices of about this, as they are served."""
QUEUED_LAUNCHES = 2
"""Launches queued in a lane, at least."""
QUEUED_SECONDS = 0.01
"""Least seconds of work queued after the launch that runs, as when serving, so that the device does
not wait for the host."""


@dataclass
class _Feed:
    """Keeps one lane busy with the same work over and over.

    Args:
        rig: the lanes.
        lane: which.
        units: Number of units of the lane.
        works: the launches, in order; repeated for ever.
        took: seconds of each of them when it ran last, or is expected to take.
    """

    rig: Rig
    lane: LaneName
    units: int
    works: Sequence[Work]
    took: dict[int, float] = field(default_factory=dict)
    done: list[tuple[int, Ticket]] = field(default_factory=list)
    """(which of the works, its ticket), ended, in order."""
    queued: list[tuple[int, Ticket]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._next = cycle(range(len(self.works)))

    def feed(self) -> None:
        """Take what has ended, queue more."""
        self.reap()
        while len(self.queued) < QUEUED_LAUNCHES or self._ahead < QUEUED_SECONDS:
            which = next(self._next)
            ticket = self.rig.launch(self.lane, self.units, self.works[which])
            self.queued.append((which, ticket))

    @property
    def _ahead(self) -> float:
        """Seconds of queued work after the launch that runs; one that never ran is enough."""
        return sum(self.took.get(which, QUEUED_SECONDS) for which, _ in self.queued[1:])

    def reap(self) -> None:
        """Take what has ended."""
        while self.queued and self.queued[0][1].done:
            which, ticket = self.queued.pop(0)
            self.done.append((which, ticket))
            self.took[which] = ticket.seconds

    @property
    def tickets(self) -> list[Ticket]:
        """Tickets that are not reaped yet."""
        return [ticket for _, ticket in self.queued]

    def counted(self, start: float, end: float = float("inf")) -> list[tuple[int, Ticket]]:
        """Return the launches between two times, with the index of each one's work."""
        return [
            (which, ticket)
            for which, ticket in self.done
            if ticket.start is not None and ticket.start >= start
            if ticket.end is not None and ticket.end <= end
        ]


def measure(rig: Rig, point: Point, clocks: Clocks) -> list[Sample]:
    """Measure a point; return a sample for each work alone, or for each lane with both at work."""
    prompts, rows = rig.prompts(point.prompts), rig.decode_rows(point.contexts)
    try:
        if point.kind == "hybrid":
            feeds = [_Feed(rig, "device", point.prefill_units, [HybridWork(rows, *prompts)])]
        else:
            feeds = []
            if rows:
                feeds.append(_Feed(rig, "decode", point.decode_units, [DecodeWork(rows, 1)]))
            if prompts.rows:
                slices, took = _slices(rig, point, prompts)
                feeds.append(_Feed(rig, "prefill", point.prefill_units, slices, took))
        start, end = _run(rig, feeds)
    finally:
        rig.give_back(prompts.rows)
        rig.give_back(rows)
    reading = clocks.between(start, end)
    clocks.forget(end)
    template = Sample(
        point=point.name,
        kind="decode",
        runs=[],
        units=0,
        layers=rig.layers,
        finishes=True,
        seconds=[],
        sm_hz=reading and reading.sm_hz,
        memory_hz=reading and reading.memory_hz,
        watts=reading and reading.watts,
        held_out=point.held_out,
    )
    return [s for feed in feeds for s in _samples(point, feed, template, start, end)]


def _slices(
    rig: Rig, point: Point, prompts: PromptBatch
) -> tuple[list[PrefillWork], dict[int, float]]:
    """Return a whole pass in slices of about `SLICE_SECONDS`, by one layer's seconds alone; and the
    predicted seconds of each.

    The last slice, which samples, may be shorter. The layer is the second one: before the first
    one the device waits until the host has laid out the batch, and has what that needs compiled.
    """
    probes = _cut(prompts, range(min(2, rig.layers) + 1), rig.layers)
    tickets = [rig.launch("prefill", point.prefill_units, work) for work in probes]
    rig.wait(lambda: tickets[-1].done, tickets)
    layer = max(tickets[-1].seconds, 1e-6)
    layers = min(rig.layers, max(1, round(SLICE_SECONDS / layer)))
    slices = _cut(prompts, [*range(0, rig.layers, layers), rig.layers], rig.layers)
    return slices, {i: layer * (part.last - part.first) for i, part in enumerate(slices)}


def _cut(prompts: PromptBatch, cuts: Sequence[int], layers: int) -> list[PrefillWork]:
    """Return the slices of a pass between these layers."""
    rows, chunks = prompts
    return [
        PrefillWork(0, rows, first, last, last == layers, () if first else chunks)
        for first, last in pairwise(cuts)
    ]


def _run(rig: Rig, feeds: Sequence[_Feed]) -> tuple[float, float]:
    """Keep the lanes busy for a while; what is counted starts and ends between the times."""
    clock = rig.lanes.clock
    begun, warmth, seconds = clock(), WARM_SECONDS, ALONE_SECONDS
    if len(feeds) > 1:
        seconds = BOTH_SECONDS
    if not rig.clocks_settle:
        warmth = seconds = 0.0
    for feed in feeds:
        feed.feed()
    _wait(rig, feeds, lambda: all(feed.done for feed in feeds))
    warm = max(begun + warmth, clock())
    _wait(rig, feeds, lambda: clock() >= warm)
    start = clock()

    def enough() -> bool:
        counts = [len(feed.counted(start)) for feed in feeds]
        spent = clock() - start
        return (spent >= seconds and min(counts) >= REPEATS) or (
            spent >= MAX_SECONDS and min(counts) >= 1
        )

    _wait(rig, feeds, enough)
    end = clock()
    for feed in feeds:
        rig.wait(lambda feed=feed: all(t.done for t in feed.tickets), feed.tickets)  # type: ignore[misc]
        feed.reap()
    return start, end


def _wait(rig: Rig, feeds: Sequence[_Feed], until: Callable[[], bool]) -> None:
    """Feed the lanes until something holds."""
    while not until():
        for feed in feeds:
            feed.feed()
        tickets = [ticket for feed in feeds for ticket in feed.tickets]
        rig.wait(lambda: any(feed.queued[0][1].done for feed in feeds), tickets)
        for feed in feeds:
            feed.reap()


def _samples(point: Point, feed: _Feed, template: Sample, start: float, end: float) -> list[Sample]:
    """Return a sample for slices that finish the pass and one for those that do not; for decode, a
    step.

    Where the device waited for the host it did not show what it takes: those launches are left out,
    unless there are no others.
    """
    counted = feed.counted(start, end)
    fed = [(which, ticket) for which, ticket in counted if not ticket.waited]
    groups: dict[tuple[int, bool], list[float]] = {}
    for which, ticket in fed or counted:
        layers, finishes = template.layers, True
        work = feed.works[which]
        if isinstance(work, PrefillWork):
            layers, finishes = work.last - work.first, work.finishes
        groups.setdefault((layers, finishes), []).append(ticket.seconds)
    neighbour, kind, runs = _roles(point, feed)
    experts_read = [
        step.experts_read
        for _, ticket in counted
        for step in ticket.steps
        if step.experts_read is not None
    ]
    same = replace(
        template,
        kind=kind,
        runs=runs,
        units=feed.units,
        beside=neighbour,
        experts_read=fmean(experts_read) if experts_read else None,
    )
    return [
        replace(same, layers=layers, finishes=finishes, seconds=seconds)
        for (layers, finishes), seconds in groups.items()
    ]


def _roles(point: Point, feed: _Feed) -> tuple[Neighbour | None, Kind, list[Run]]:
    """Return the kinds of the feed's launches, and the work beside them."""
    if point.kind == "hybrid":
        return None, "hybrid", [*point.contexts, *point.prompts]
    if feed.lane == "decode":
        beside = Neighbour(list(point.prompts), point.prefill_units) if point.prompts else None
        return beside, "decode", list(point.contexts)
    beside = Neighbour(list(point.contexts), point.decode_units) if point.contexts else None
    return beside, "prefill", list(point.prompts)
