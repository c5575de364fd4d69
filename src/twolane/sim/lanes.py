"""Simulated lanes: a virtual clock instead of a device.

A *device* says how long work takes (`sim/device.py`, or fixed durations). Whenever something
starts or stops in any lane, what runs beside it gets a new speed and keeps what it has done so
far. Launches wait for each other as on a GPU: a lane runs in order, the whole device excludes both
lanes, and two launches never decode at a time. Tokens are made up.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from twolane.devices import LaneName
from twolane.lanes.base import OpenTickets, PromptLogprobs, Sampled, Step, Ticket
from twolane.lanes.work import (
    DecodeWork,
    HybridWork,
    PrefillWork,
    PromptChunk,
    PromptRow,
    TokenMask,
    Work,
    unpack,
    used_by,
)
from twolane.sampling import TokenLogprobs

TOKEN = 0
"""Token that every simulated step samples."""


class Demand(NamedTuple):
    """A step's demand on the device, by which its time varies."""

    fixed: float
    """Seconds that do not depend on anything."""
    clocked: float = 0.0
    """Seconds at the top clock with the units to itself, which scale with the clock."""
    streamed: float = 0.0
    """Seconds bound by memory, independent of the clock."""
    waits: float = 0.0
    """Seconds of waiting for reads, which grow with the reads' latency beside another lane."""
    units: int = 0
    draw: float = 0.0
    """Power of its arithmetic at the top clock, in SMs busy with matrix products."""
    traffic: float = 0.0
    """Bytes per second to and from memory, alone at the top clock."""
    reads: float = 0.0
    """Bytes that it keeps in flight, as a share of those that saturate the memory."""
    linked: float = 0.0
    """Seconds of its collectives between GPUs, alone on the link."""


class Device(Protocol):
    """A model of the device's times."""

    def steps(self, work: Work, units: int) -> Sequence[Demand]:
        """Return a demand for each step of the work."""

    def seconds(self, running: Sequence[Demand]) -> Sequence[float]:
        """Return the seconds of each demand if all run concurrently throughout."""

    def host_seconds(self, work: Work) -> tuple[float, float]:
        """Return the host seconds until the device can begin, and until the launch is complete,
        before which the device is not."""


Watts = Callable[[Sequence[Demand], Sequence[float]], float]
"""Returns the power in watts while steps take these seconds."""


@dataclass(slots=True, eq=False)
class _SimTicket(Ticket):
    work: Work | None = None
    """Work of the launch, released with its last step."""
    demands: Sequence[Demand] = ()
    after: Sequence["_SimTicket"] = ()
    """Launches that must end first."""
    ready: float = 0.0
    """Time from which the device can begin."""
    takes: float = 0.0
    """Seconds of the current step at its present speed."""
    ends: float = 0.0
    """End of the current step at that speed."""

    @property
    def over(self) -> float:
        """End of the current step, not before the host has completed the launch."""
        return self.ends if self.ends > self.queued_at else self.queued_at

    @property
    def demand(self) -> Demand:
        """Demand of the current step."""
        return self.demands[len(self.steps)]


class SimLanes:
    """Lanes on a virtual clock that stands still until `advance` is called.

    Args:
        units: Number of units of the device.
        levels: Partitions on offer beside the solo ones.
        device: The model of the times of steps.
        watts: The model of the power; None: the energy is not known.
    """

    def __init__(
        self,
        units: int,
        levels: Sequence[tuple[int, int]],
        device: Device,
        watts: Watts | None = None,
    ) -> None:
        self.units = units
        self.levels: Sequence[tuple[int, int]] = (*levels, (units, 0), (0, units))
        self._device = device
        self._power, self._watts = watts, watts([], []) if watts else 0.0
        self.joules = 0.0
        """Energy until now."""
        self._now = 0.0
        self._host_free = 0.0
        self._last: dict[str, _SimTicket] = {}
        """Last launch that used each lane or shared batch."""
        self._open: OpenTickets[_SimTicket] = OpenTickets()
        self._results = _Results()
        self._queued: list[_SimTicket] = []
        """Launches that have not begun, in launch order."""
        self._running: list[_SimTicket] = []
        self._event: float | None = None
        """Cached time of the next event."""
        self._changed = False
        """Whether launches changed since the next event was computed."""

    def clock(self) -> float:
        """Return the virtual time in seconds."""
        return self._now

    def launch(self, lane: LaneName, units: int, work: Work, after: Sequence[int]) -> Ticket:
        """See `Lanes.launch`."""
        used, last = used_by(lane, work), self._last
        before = [last[name] for name in used if name in last]
        before += self._open.pending(after)
        begun = max(self._now, self._host_free)
        first, all_of_it = self._device.host_seconds(work)
        self._host_free = begun + all_of_it
        ticket = _SimTicket(
            lane,
            units,
            work=work,
            demands=self._device.steps(work, units),
            after=[other for other in before if other.end is None],
            ready=begun + first,
            queued_at=self._host_free,
            host_seconds=all_of_it,
        )
        self._open.add(ticket)
        self._results.take(work)
        last.update(dict.fromkeys(used, ticket))
        self._queued.append(ticket)
        self._changed = True
        if self._begin():
            self._rate()
        return ticket

    def set_masks(self, number: int, masks: Sequence[TokenMask]) -> None:
        """See `Lanes.set_masks`: no grammar is simulated."""

    def drop(self, batch: int) -> None:
        """See `Lanes.drop`."""
        self._results.drop(batch)

    def close(self) -> None:
        """See `MachineLanes.close`: there are no threads to end."""

    def rest(self, seconds: float) -> None:
        """See `MachineLanes.rest`: move the clock to the next event."""
        event = self.next_event()
        assert event is not None, "waits for simulated lanes that have nothing to do"
        self.advance(event)

    def fill_kv(self) -> None:
        """See `MachineLanes.fill_kv`: there is no pool."""

    def load_adapter(self, slot: int, path: str, digest: bytes | None = None) -> None:
        """See `Lanes.load_adapter`.

        Raises:
            ValueError: always.
        """
        raise ValueError("adapters are not served in simulation yet")

    def drop_adapter(self, slot: int) -> None:
        """See `Lanes.drop_adapter`: there are none."""

    def silences(self) -> Sequence[float]:
        """See `Lanes.silences`."""
        return ()

    def check(self) -> None:
        """See `Lanes.check`."""

    def next_event(self) -> float | None:
        """Return the virtual time in seconds of the next step's begin or end, None without one."""
        if self._changed:
            times = [ticket.over for ticket in self._running]
            # What waits for another launch begins when that one ends.
            times += [t.ready for t in self._queued if t.ready > self._now and _free(t)]
            self._event = min(times) if times else None
            self._changed = False
        return self._event

    def advance(self, until: float) -> None:
        """Move the clock forward to `until` and bring the tickets up to date."""
        while (at := self.next_event()) is not None and at <= until:
            self._pass(at)
            self._changed = True
            changed = self._end_steps()
            if self._begin() or changed:
                self._rate()
        self._pass(max(self._now, until))

    def _pass(self, until: float) -> None:
        """Let the time until `until` pass, in which nothing begins or ends."""
        self.joules += self._watts * (until - self._now)
        self._now = until

    def _end_steps(self) -> bool:
        """Complete the steps that end now; return whether there are any."""
        over = [ticket for ticket in self._running if ticket.over <= self._now]
        for ticket in over:
            assert ticket.work is not None
            ticket.add(self._results.of(ticket.work, len(ticket.steps)), self._now)
            ticket.takes = 0.0
            if len(ticket.steps) == len(ticket.demands):
                ticket.end = self._now
                ticket.work = None
                self._running.remove(ticket)
        return bool(over)

    def _begin(self) -> bool:
        """Start the launches that need not wait any more; return whether there were any."""
        if not self._queued:
            return False
        begun = [t for t in self._queued if t.ready <= self._now and _free(t)]
        for ticket in begun:
            self._queued.remove(ticket)
            ticket.start, ticket.after = self._now, ()
            self._running.append(ticket)
        return bool(begun)

    def _rate(self) -> None:
        """Update the speed of every step for the steps beside it; completed work is kept."""
        now = self._now
        running = [ticket.demand for ticket in self._running]
        seconds = self._device.seconds(running)
        if self._power is not None:
            self._watts = self._power(running, seconds)
        for ticket, takes in zip(self._running, seconds, strict=True):
            if not ticket.takes:
                ticket.takes, ticket.ends = takes, now + takes
            elif takes != ticket.takes:
                left = (ticket.ends - now) / ticket.takes
                ticket.takes, ticket.ends = takes, now + left * takes


def _free(ticket: _SimTicket) -> bool:
    """Return whether everything that must end before a launch has ended."""
    for other in ticket.after:  # noqa: SIM110 - a generator costs more than most answers
        if other.end is None:
            return False
    return True


_PLAIN = [Sampled(row, TOKEN) for row in range(1024)]
"""Tokens of the first rows without log-probabilities, created once."""


class _Results:
    """Results of work, from the slots and batches that launches defined."""

    def __init__(self) -> None:
        self._scores: set[int] = set()
        """Slots whose tokens have log-probabilities."""
        self._chunks: dict[int, dict[int, PromptChunk]] = {}
        """Chunks to score, by batch and slot."""

    def take(self, work: Work) -> None:
        """Record the slots and batches that a launch defines."""
        for update in work.slots:
            if update.sampling is not None:
                self._scores.discard(update.slot)
                if update.sampling.params.logprobs is not None:
                    self._scores.add(update.slot)
        if isinstance(work, PrefillWork) and work.chunks:
            rows = zip(work.rows, work.chunks, strict=True)
            self.drop(work.batch)
            if scored := {row.slot: chunk for row, chunk in rows if chunk.scoring is not None}:
                self._chunks[work.batch] = scored

    def drop(self, batch: int) -> None:
        """Forget a batch."""
        self._chunks.pop(batch, None)

    def of(self, work: Work, step: int) -> Step:
        """Return the result of a step of the work."""
        if isinstance(work, DecodeWork):
            rows = enumerate(work.rows)
            return Step([self._sampled(i, row.slot) for i, row in rows if step < row.steps])
        if isinstance(work, HybridWork):
            decoded = [self._sampled(i, row.slot) for i, row in enumerate(work.decode)]
            chunks = {row.slot: each for row, each in zip(work.prompts, work.chunks, strict=False)}
            prompts = self._finished(work.prompts, chunks, len(decoded))
            return Step([*decoded, *prompts.sampled], prompts.prompt_logprobs)
        if not work.finishes:
            return Step()
        return self._finished(work.rows, self._chunks.pop(work.batch, {}), 0)

    def _finished(
        self, prompts: Sequence[PromptRow], chunks: Mapping[int, PromptChunk], first: int
    ) -> Step:
        sampled, scored = [], []
        for i, row in enumerate(prompts, first):
            if row.samples:
                sampled.append(self._sampled(i, row.slot))
            if (chunk := chunks.get(row.slot)) is not None and chunk.scoring is not None:
                targets = unpack(chunk.scoring.targets)
                scored.append(PromptLogprobs(i, [_certain(token) for token in targets]))
        return Step(sampled, scored)

    def _sampled(self, row: int, slot: int) -> Sampled:
        if slot in self._scores:
            return Sampled(row, TOKEN, _certain(TOKEN))
        return _PLAIN[row] if row < len(_PLAIN) else Sampled(row, TOKEN)


def _certain(token: int) -> TokenLogprobs:
    return TokenLogprobs(token, 0.0, 1, [])
