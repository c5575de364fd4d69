"""Simulated lanes: a virtual clock instead of a device.

In its simplest form: every layer of a prefill slice and every decode step takes a fixed time,
whatever the units and whatever the other lane does. Tokens are made up.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from twolane.lanes import PromptLogprobs, Sampled, Step, Ticket
from twolane.lanes.work import DecodeWork, HybridWork, PrefillWork, PromptRow, Sampling, Work
from twolane.sampling import TokenLogprobs
from twolane.vocabulary import LaneName

TOKEN = 0
"""What every simulated step samples."""


@dataclass(frozen=True)
class FixedDurations:
    """Seconds, independent of size and units."""

    prefill_layer: float = 0.010
    decode_step: float = 0.020
    hybrid: float = 0.050

    def steps(self, work: Work) -> list[float]:
        """The duration of each step of the work."""
        if isinstance(work, DecodeWork):
            return [self.decode_step] * work.k
        if isinstance(work, PrefillWork):
            return [self.prefill_layer * (work.last - work.first)]
        return [self.hybrid]


@dataclass(slots=True, eq=False)
class _SimTicket(Ticket):
    pending: list[tuple[float, Step]] = field(default_factory=list)
    """(time, result) of the steps to come, in order."""
    starts: float = 0.0
    ends: float = 0.0


class SimLanes:
    """Lanes on a virtual clock that stands still until `advance` is called.

    Args:
        units: of the device.
        levels: partitions on offer beside the solo ones.
        durations: how long steps take.
    """

    def __init__(
        self, units: int, levels: Sequence[tuple[int, int]], durations: FixedDurations
    ) -> None:
        self.units = units
        self.levels: Sequence[tuple[int, int]] = (*levels, (units, 0), (0, units))
        self._durations = durations
        self._now = 0.0
        self._free_at: dict[LaneName, float] = {}
        self._active: list[_SimTicket] = []
        self._events: list[float] = []

    def clock(self) -> float:
        """The virtual time in seconds."""
        return self._now

    def launch(self, lane: LaneName, units: int, work: Work, after: Sequence[Ticket]) -> Ticket:
        """See `Lanes.launch`."""
        ends = [t.ends for t in after if isinstance(t, _SimTicket)]
        at = max(self._now, self._free_at.get(lane, 0.0), *ends)
        ticket = _SimTicket(lane, units, starts=at)
        for step, seconds in enumerate(self._durations.steps(work)):
            at += seconds
            ticket.pending.append((at, _result(work, step)))
            heapq.heappush(self._events, at)
        self._free_at[lane] = ticket.ends = at
        self._active.append(ticket)
        return ticket

    def next_event(self) -> float | None:
        """When the next step ends, in virtual seconds; None when nothing runs."""
        return self._events[0] if self._events else None

    def advance(self, until: float) -> None:
        """Move the clock forward to `until` and bring the tickets up to date."""
        self._now = max(self._now, until)
        while self._events and self._events[0] <= self._now:
            heapq.heappop(self._events)
        for ticket in self._active:
            if ticket.starts <= self._now:
                ticket.start = ticket.starts
            while ticket.pending and ticket.pending[0][0] <= self._now:
                ticket.steps.append(ticket.pending.pop(0)[1])
            if not ticket.pending:
                ticket.end = ticket.ends
        self._active = [ticket for ticket in self._active if not ticket.done]


def _result(work: Work, step: int) -> Step:
    if isinstance(work, DecodeWork):
        rows = enumerate(work.rows)
        return Step([_sampled(i, row.sampling) for i, row in rows if step < row.steps])
    if isinstance(work, HybridWork):
        decoded = [_sampled(i, row.sampling) for i, row in enumerate(work.decode)]
        prompts = _finished(work.prompts, len(decoded))
        return Step([*decoded, *prompts.sampled], prompts.prompt_logprobs)
    return _finished(work.rows, 0) if work.finishes else Step()


def _finished(prompts: Sequence[PromptRow], first: int) -> Step:
    rows = list(enumerate(prompts, first))
    return Step(
        [_sampled(i, row.sampling) for i, row in rows if row.sampling is not None],
        [
            PromptLogprobs(i, [_certain(token) for token in row.scoring.targets])
            for i, row in rows
            if row.scoring is not None
        ],
    )


def _sampled(row: int, sampling: Sampling) -> Sampled:
    return Sampled(row, TOKEN, None if sampling.params.logprobs is None else _certain(TOKEN))


def _certain(token: int) -> TokenLogprobs:
    return TokenLogprobs(token, 0.0, 1, [])
