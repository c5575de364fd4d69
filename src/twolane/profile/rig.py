"""Drives lanes without an engine: makes work of loads, queues it, waits for it."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from twolane.devices import LaneName
from twolane.estimate.profile import Run
from twolane.lanes.base import MachineLanes, Ticket
from twolane.lanes.settings import LaneSizes
from twolane.lanes.slot_table import PendingSlotUpdates
from twolane.lanes.work import (
    DecodeRow,
    PrefillWork,
    PromptChunk,
    PromptRow,
    Sampling,
    SlotUpdate,
    Work,
    pack,
)
from twolane.profile.grid import LaneCapacity
from twolane.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
RANDOM = SamplingParams(temperature=1.0, max_tokens=None, ignore_eos=True)
POLL_SECONDS = 5e-5
"""Seconds between two looks at tickets."""


class PromptBatch(NamedTuple):
    """Prompts that are computed together."""

    rows: tuple[PromptRow, ...]
    chunks: tuple[PromptChunk, ...]


@dataclass
class Rig:
    """Lanes, with pages and slots to measure with."""

    lanes: MachineLanes
    sizes: LaneSizes
    """Sizes that the lanes were made with."""
    layers: int
    vocab_size: int
    batch_tokens: int
    """The largest prefill batch to measure."""
    seed: int = 0
    clocks_settle: bool = True
    """Whether the device's speed follows its load with some delay; in a simulation it does not."""
    own_tokens: bool = False
    """Whether each decode row has a random token before its first step, and samples at random, as a
    model with experts needs: rows that decode the same token read the same experts."""
    _free: list[int] = field(init=False)
    _held: dict[int, list[int]] = field(default_factory=dict)
    """Pages by slot."""
    _pending: PendingSlotUpdates = field(default_factory=PendingSlotUpdates)

    def __post_init__(self) -> None:
        self._free = list(range(self.sizes.pages))
        random.Random(self.seed).shuffle(self._free)  # as scattered as after hours of serving

    @property
    def limits(self) -> LaneCapacity:
        """Limits of the lanes."""
        return LaneCapacity(
            units=self.lanes.units,
            levels=self.lanes.levels,
            pool_tokens=self.sizes.tokens,
            page_size=self.sizes.page_size,
            slots=self.sizes.slots,
            max_model_len=self.sizes.max_model_len,
            batch_tokens=min(self.batch_tokens, self.sizes.max_model_len - 1),
        )

    def launch(self, lane: LaneName, units: int, work: Work) -> Ticket:
        """Queue work at the end of that lane."""
        return self.lanes.launch(lane, units, self._pending.attach(work), ())

    def wait(self, until: Callable[[], bool], tickets: Sequence[Ticket]) -> None:
        """Let the lanes work until a condition holds.

        Raises:
            BaseException: what a lane ran into.
            TimeoutError: a launch does not end.
        """
        begun = time.monotonic()
        while not until():
            for ticket in tickets:
                ticket.check()
            # A launch that takes longer than this counts as one that never ends.
            if time.monotonic() - begun > 120.0:
                raise TimeoutError("a launch does not end")
            self.lanes.rest(POLL_SECONDS)

    def decode_rows(self, runs: Sequence[Run]) -> tuple[DecodeRow, ...]:
        """Return the rows of a decode step after this many tokens in the cache of each request."""
        rows: list[DecodeRow] = []
        for _, context, count in runs:
            for _ in range(count):
                self._take(len(rows), context + 1, context)
                rows.append(DecodeRow(len(rows), context, 1))
        if rows and self.own_tokens:
            self._draw_tokens(rows)
        return tuple(rows)

    def _draw_tokens(self, rows: Sequence[DecodeRow]) -> None:
        """Compute another random token in front of each row's, which then samples its own."""
        draw, rows = random.Random(self.seed), [row for row in rows if row.position]
        tokens = draw.choices(range(self.vocab_size), k=len(rows))
        prompts = tuple(PromptRow(row.slot, row.position - 1, 1, samples=True) for row in rows)
        chunks = tuple(PromptChunk(pack([token])) for token in tokens)
        work = PrefillWork(0, prompts, 0, self.layers, finishes=True, chunks=chunks)
        ticket = self.launch("prefill", max(self.limits.prefill_units), work)
        self.wait(lambda: ticket.done, [ticket])

    def prompts(self, runs: Sequence[Run]) -> PromptBatch:
        """Return prompts of n random tokens after r tokens that are in the cache."""
        draw, rows, chunks = random.Random(self.seed), [], []
        slots = iter(range(self.sizes.slots - 1, -1, -1))  # decode rows have the first ones
        for n, r, count in runs:
            for _ in range(count):
                row = PromptRow(next(slots), r, n, samples=True)
                self._take(row.slot, n + r, n + r)
                rows.append(row)
                chunks.append(PromptChunk(pack(draw.choices(range(self.vocab_size), k=n))))
        return PromptBatch(tuple(rows), tuple(chunks))

    def give_back(self, rows: Sequence[DecodeRow | PromptRow]) -> None:
        """Free the pages of rows whose launches have ended."""
        for row in rows:
            self._free += self._held.pop(row.slot)

    def _take(self, slot: int, tokens: int, prompt_tokens: int) -> None:
        """Take pages for this many tokens, sent with the first launch that names the slot."""
        pages = [self._free.pop() for _ in range(-(-tokens // self.sizes.page_size))]
        self._held[slot] = pages
        params = RANDOM if self.own_tokens else GREEDY
        sampling = Sampling(params, slot, prompt_tokens, ())
        self._pending.add(SlotUpdate(slot, 0, tuple(pages), sampling))
