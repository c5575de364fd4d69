"""Drives lanes without an engine: makes work of loads, queues it, waits for it."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from twolane.common.vocabulary import LaneName
from twolane.estimate.profile import Run
from twolane.lanes.base import Lanes, Ticket
from twolane.lanes.work import DecodeRow, PromptRow, Sampling, Work
from twolane.profile.grid import Limits
from twolane.sampling import SamplingParams
from twolane.sim.lanes import SimLanes

GREEDY = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
POLL_SECONDS = 5e-5
HANGS_SECONDS = 120.0
"""A launch that takes longer than this is taken for one that never ends."""


@dataclass
class Rig:
    """Lanes, with pages and slots for whoever measures."""

    lanes: Lanes
    layers: int
    vocab_size: int
    pages: int
    page_size: int
    slots: int
    max_model_len: int
    batch_tokens: int
    """The largest prefill batch to measure."""
    seed: int = 0
    clocks_settle: bool = True
    """Whether the device's speed follows its load with some delay; in a simulation it does not."""
    _free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._free = list(range(self.pages))
        random.Random(self.seed).shuffle(self._free)  # as scattered as after hours of serving

    @property
    def limits(self) -> Limits:
        """What fits."""
        return Limits(
            units=self.lanes.units,
            levels=self.lanes.levels,
            pool_tokens=self.pages * self.page_size,
            page_size=self.page_size,
            slots=self.slots,
            max_model_len=self.max_model_len,
            batch_tokens=min(self.batch_tokens, self.max_model_len - 1),
        )

    def launch(self, lane: LaneName, units: int, work: Work) -> Ticket:
        """Queue work behind what is queued in that lane."""
        return self.lanes.launch(lane, units, work, ())

    def wait(self, until: Callable[[], bool], tickets: Sequence[Ticket]) -> None:
        """Let the lanes work until something holds.

        Raises:
            BaseException: what a lane ran into.
            TimeoutError: a launch does not end.
        """
        begun = time.monotonic()
        while not until():
            for ticket in tickets:
                ticket.check()
            if isinstance(self.lanes, SimLanes):
                event = self.lanes.next_event()
                assert event is not None, "waits for simulated lanes that have nothing to do"
                self.lanes.advance(event)
                continue
            if time.monotonic() - begun > HANGS_SECONDS:
                raise TimeoutError("a launch does not end")
            time.sleep(POLL_SECONDS)

    def decode_rows(self, runs: Sequence[Run]) -> tuple[DecodeRow, ...]:
        """A step for requests whose caches hold so many tokens before it."""
        rows: list[DecodeRow] = []
        for _, context, count in runs:
            for _ in range(count):
                sampling = Sampling(GREEDY, 0, context, (), [])
                pages = self._take(context + 1)
                rows.append(DecodeRow(len(rows), context, 1, pages, sampling))
        return tuple(rows)

    def prompt_rows(self, runs: Sequence[Run]) -> tuple[PromptRow, ...]:
        """Prompts of n random tokens behind r that are in the cache."""
        draw, rows = random.Random(self.seed), []
        slots = iter(range(self.slots - 1, -1, -1))  # decode rows have the first ones
        for n, r, count in runs:
            for _ in range(count):
                tokens = draw.choices(range(self.vocab_size), k=n)
                sampling = Sampling(GREEDY, 0, n + r, (), [])
                rows.append(PromptRow(next(slots), r, tokens, self._take(n + r), sampling))
        return tuple(rows)

    def give_back(self, rows: Sequence[DecodeRow | PromptRow]) -> None:
        """The rows' launches have ended: their pages are free again."""
        for row in rows:
            self._free += row.pages

    def _take(self, tokens: int) -> list[int]:
        return [self._free.pop() for _ in range(-(-tokens // self.page_size))]
