"""Where work runs: ordered queues of device work, each bound to a share of the units.

Lanes decide nothing. `Lanes.launch` queues work and returns at once; the `Ticket` tells what
became of it.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from twolane.common.vocabulary import LaneName
from twolane.lanes.work import TokenMask, Work
from twolane.sampling import TokenLogprobs


class Sampled(NamedTuple):
    """A token that a step has sampled."""

    row: int
    """Row of the work."""
    token: int
    logprobs: TokenLogprobs | None = None
    """If the row asks for them."""
    embedding: bytes | None = None
    """The hidden state that it was sampled from, behind the last norm, in float32, if the row asks
    for it."""


class PromptLogprobs(NamedTuple):
    """What a step thought of a chunk's targets."""

    row: int
    """Row of the work."""
    logprobs: Sequence[TokenLogprobs]
    """One for each of the row's targets."""


class Step(NamedTuple):
    """What one step came to."""

    sampled: Sequence[Sampled] = ()
    prompt_logprobs: Sequence[PromptLogprobs] = ()
    broken: Sequence[int] = ()
    """Rows of the work for which nothing is sampled: the model gave NaN or plus infinity."""
    woken: float | None = None
    """Mean number of experts of a layer that a decode step has read; None: unknown."""


PATIENCE_SECONDS = 9.0
"""Seconds that a launch may take at least before a rank is held for lost; the server is to say so
within ten."""
UNPREDICTED_SECONDS = 60.0
"""Seconds that a launch may take for which there is no prediction."""
PATIENCE_FACTOR = 5.0
"""How many times its prediction a launch may take, if that is longer."""


def patience(predicted: float | None) -> float:
    """Seconds that a launch may take before a rank is held for lost."""
    if predicted is None:
        return UNPREDICTED_SECONDS
    return max(PATIENCE_SECONDS, PATIENCE_FACTOR * predicted)


@dataclass(slots=True, eq=False)
class Ticket:
    """A launch under way. Written by its lane, read by the engine, which polls it.

    `steps` grows by one entry for every finished step (a prefill slice or hybrid pass is one
    step), each before the lane goes on to the next; `end` is set last.
    """

    lane: LaneName
    units: int
    steps: list[Step] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """When the device was through with each of them: seconds, the lanes' clock."""
    start: float | None = None
    """Seconds, the lanes' clock, when the device began with it."""
    end: float | None = None
    error: BaseException | None = None
    launching: float = 0.0
    """Seconds that the host was busy with launching it; a plan should leave room."""
    launched: float = 0.0
    """Seconds, the lanes' clock, when the host was through with that."""
    number: int = 0
    """Sequence number of the launch, over all lanes of the device."""
    patience: float = UNPREDICTED_SECONDS
    """Seconds without any step's end, over all lanes, after which a rank is held for lost; the
    engine sets it when the launch has returned, which may take seconds the first time."""

    @property
    def waited(self) -> bool:
        """Whether the device began before all of it was queued: it may have waited for the host."""
        return self.start is not None and self.start < self.launched

    def add(self, step: Step, at: float) -> None:
        """A step has ended."""
        self.times.append(at)
        self.steps.append(step)  # last: whoever polls sees that there is one by this

    @property
    def done(self) -> bool:
        """Whether the device is through with it; nothing of it is read or written any more."""
        return self.end is not None

    def check(self) -> None:
        """See that its lane ran into nothing.

        Raises:
            BaseException: what it ran into.
        """
        if self.error is not None:
            raise self.error

    @property
    def seconds(self) -> float:
        """How long the device worked on it; only when done.

        Raises:
            BaseException: what its lane ran into.
        """
        self.check()
        assert self.start is not None
        assert self.end is not None
        return self.end - self.start


T = TypeVar("T", bound=Ticket)


class OpenTickets(Generic[T]):
    """The tickets of all lanes by number, as long as they may not be done."""

    def __init__(self) -> None:
        self._tickets: deque[T] = deque()
        self._first = 0
        """Number of the first one kept."""

    def add(self, ticket: T) -> T:
        """Give the ticket the next number."""
        while self._tickets and self._tickets[0].done:
            self._tickets.popleft()
            self._first += 1
        ticket.number = self._first + len(self._tickets)
        self._tickets.append(ticket)
        return ticket

    def waiting(self) -> list[T]:
        """Those that are not done; also for other threads than the one that adds."""
        while True:
            try:
                return [ticket for ticket in self._tickets if not ticket.done]
            except RuntimeError:  # one was added meanwhile
                continue

    def pending(self, numbers: Iterable[int]) -> list[T]:
        """Those with these numbers that are not done."""
        kept = [self._tickets[n - self._first] for n in numbers if n >= self._first]
        return [ticket for ticket in kept if not ticket.done]


class Lanes(Protocol):
    """The prefill lane, the decode lane and the whole device."""

    units: int
    """Units of the device."""
    levels: Sequence[tuple[int, int]]
    """Partitions (prefill units, decode units) on offer, the solo ones (all, 0), (0, all) too."""

    def launch(self, lane: LaneName, units: int, work: Work, after: Sequence[int]) -> Ticket:
        """Queue work behind what is queued in that lane and in those that exclude it (`EXCLUSIVE`);
        it begins when the launches with the numbers `after` are done.

        Never blocks. The units of the prefill lane are counted from one end of the device, those
        of the decode lane from the other: they overlap only if they add up to more than all.
        """

    def allow(self, number: int, masks: Sequence[TokenMask]) -> None:
        """Tell the masks that a launch waits for (`late`), once, of those of its slots whose
        requests are still there."""

    def drop(self, batch: int) -> None:
        """Forget the hidden states of a batch of which no further slice is launched, when the
        slices that were are done."""

    def load_adapter(self, slot: int, path: str, digest: bytes | None = None) -> None:
        """Read a LoRA adapter into an adapter slot that no launch names; other threads may call
        this while launches go on.

        Args:
            slot: number of the adapter slot.
            path: directory of the adapter.
            digest: of its files, which every rank must find; None: whatever they are.

        Raises:
            ValueError: it cannot be served; the message says why, and the slot is as it was.
        """

    def drop_adapter(self, slot: int) -> None:
        """Empty an adapter slot that no launch names any more."""

    def silences(self) -> Sequence[float]:
        """Seconds since ranks 1 and up last answered or took part in a launch that went on; empty
        where there is one rank."""

    def check(self) -> None:
        """See that the lanes can go on.

        Raises:
            ConnectionError: a part of them is gone; the message says which.
        """

    def clock(self) -> float:
        """Seconds, monotonic; the clock of the tickets."""
