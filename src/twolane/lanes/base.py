"""Lanes: ordered queues of device work, each bound to a share of the units; and their machines.

Lanes decide nothing. `Lanes.launch` queues work and returns at once; the engine polls the `Ticket`
for the results.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from twolane.devices import LaneName, MachineKind, OnProgress
from twolane.lanes.settings import LaneSizes
from twolane.lanes.work import Record, TokenMask, Work
from twolane.model.page_layout import PageLayout
from twolane.model.spec import ModelSpec
from twolane.sampling import TokenLogprobs


class Sampled(NamedTuple):
    """A token that a step has sampled."""

    row: int
    """Row of the work."""
    token: int
    logprobs: TokenLogprobs | None = None
    """Log-probabilities of the token, if the row asks for them."""
    embedding: bytes | None = None
    """Hidden state after the last norm, from which the token was sampled, in float32, if the row
    asks for it."""


class PromptLogprobs(NamedTuple):
    """Log-probabilities of the targets of a prompt chunk."""

    row: int
    """Row of the work."""
    logprobs: Sequence[TokenLogprobs]
    """Log-probabilities, one for each of the row's targets."""


class Step(NamedTuple):
    """The results of one step."""

    sampled: Sequence[Sampled] = ()
    prompt_logprobs: Sequence[PromptLogprobs] = ()
    broken: Sequence[int] = ()
    """Rows of the work without a sampled token, because the logits are NaN or plus infinity."""
    experts_read: float | None = None
    """Mean number of experts of a layer that a decode step has read; None: unknown."""


LAUNCH_TIMEOUT_SECONDS = 9.0
"""Shortest time in seconds after which an unfinished launch means a lost rank; the server reports
it within ten."""
UNPREDICTED_SECONDS = 60.0
"""Seconds after which an unfinished launch without a prediction means a lost rank."""
TIMEOUT_FACTOR = 5.0
"""Multiple of its prediction that a launch may take, if that is longer."""


def launch_timeout(predicted: float | None) -> float:
    """Return the seconds that a launch may take before a rank counts as lost."""
    if predicted is None:
        return UNPREDICTED_SECONDS
    return max(LAUNCH_TIMEOUT_SECONDS, TIMEOUT_FACTOR * predicted)


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
    """Seconds on the lanes' clock at which the device finished each step."""
    start: float | None = None
    """Seconds on the lanes' clock at which the device began the launch."""
    end: float | None = None
    error: BaseException | None = None
    host_seconds: float = 0.0
    """Seconds that the host was busy with launching it, which plans leave room for."""
    queued_at: float = 0.0
    """Seconds on the lanes' clock at which the host had queued all of it."""
    number: int = 0
    """Sequence number of the launch, over all lanes of the device."""
    timeout: float = UNPREDICTED_SECONDS
    """Seconds without the end of any step, over all lanes, after which a rank counts as lost; the
    engine sets it when the launch has returned, which may take seconds the first time."""

    @property
    def waited(self) -> bool:
        """Whether the device began before all of it was queued, so that it may have waited for the
        host."""
        return self.start is not None and self.start < self.queued_at

    def add(self, step: Step, at: float) -> None:
        """Add the results of a step that ended at `at` seconds."""
        self.times.append(at)
        self.steps.append(step)  # last, because pollers look at its length

    @property
    def done(self) -> bool:
        """Whether the device has finished it and no longer reads or writes its memory."""
        return self.end is not None

    def check(self) -> None:
        """Raise the error of the launch, if there was one.

        Raises:
            BaseException: the error of its lane.
        """
        if self.error is not None:
            raise self.error

    @property
    def seconds(self) -> float:
        """Seconds that the device worked on it; only when done.

        Raises:
            BaseException: the error of its lane.
        """
        self.check()
        assert self.start is not None
        assert self.end is not None
        return self.end - self.start


T = TypeVar("T", bound=Ticket)


class OpenTickets(Generic[T]):
    """The tickets of all lanes that may not be done yet, by number."""

    def __init__(self) -> None:
        self._tickets: deque[T] = deque()
        self._first = 0
        """Number of the first ticket kept."""

    def add(self, ticket: T) -> T:
        """Give the ticket the next number."""
        while self._tickets and self._tickets[0].done:
            self._tickets.popleft()
            self._first += 1
        ticket.number = self._first + len(self._tickets)
        self._tickets.append(ticket)
        return ticket

    def waiting(self) -> list[T]:
        """Return the tickets that are not done; any thread may call this."""
        while True:
            try:
                return [ticket for ticket in self._tickets if not ticket.done]
            except RuntimeError:  # one was added meanwhile
                continue

    def pending(self, numbers: Iterable[int]) -> list[T]:
        """Return the tickets with these numbers that are not done."""
        kept = [self._tickets[n - self._first] for n in numbers if n >= self._first]
        return [ticket for ticket in kept if not ticket.done]


class Lanes(Protocol):
    """The prefill lane, the decode lane and the whole device."""

    units: int
    """Number of units of the whole device."""
    levels: Sequence[tuple[int, int]]
    """Partitions (prefill units, decode units) on offer, including (all, 0) and (0, all)."""

    def launch(self, lane: LaneName, units: int, work: Work, after: Sequence[int]) -> Ticket:
        """Queue work after what is queued in that lane and in lanes that exclude it (`EXCLUSIVE`).

        It begins when the launches with the numbers `after` are done, on every rank: they may name
        launches that are done here already.

        Never blocks. The units of the prefill lane are counted from one end of the device, those
        of the decode lane from the other: they overlap only if they add up to more than all.
        """

    def set_masks(self, number: int, masks: Sequence[TokenMask]) -> None:
        """Set the masks that a launch waits for (`late`), once, for those of its slots whose
        requests have not left."""

    def drop(self, batch: int) -> None:
        """Drop the hidden states of a batch when its launched slices are done; no further slice of
        it is launched."""

    def load_adapter(self, slot: int, path: str, digest: bytes | None = None) -> None:
        """Read a LoRA adapter into an adapter slot that no launch names; other threads may call
        this while launches go on.

        Args:
            slot: number of the adapter slot.
            path: directory of the adapter.
            digest: digest of its files, which every rank must find; None accepts any files.

        Raises:
            ValueError: the adapter cannot be served, and the slot is unchanged; it says why.
        """

    def drop_adapter(self, slot: int) -> None:
        """Empty an adapter slot that no launch names any more."""

    def silences(self) -> Sequence[float]:
        """Return the seconds since each rank from 1 on last answered or took part in a launch that
        made progress; empty with one rank."""

    def check(self) -> None:
        """Check that all ranks are there.

        Raises:
            ConnectionError: a rank is lost; the message says which.
        """

    def clock(self) -> float:
        """Return the time in seconds on the monotonic clock of the tickets."""


class MachineLanes(Lanes, Protocol):
    """Lanes that a machine has started, and that end."""

    def rest(self, seconds: float) -> None:
        """Let the lanes work: for this many seconds, or to the next event of a virtual clock."""

    def fill_kv(self) -> None:
        """Fill the KV pool with random keys and values where zeros would be read faster: a GPU
        that reads zeros takes less power, and its clocks stay high."""

    def close(self) -> None:
        """Finish what is queued, within bounds, and end the threads."""


class Machine(Protocol):
    """A loaded model on a device, before there is a KV pool."""

    spec: ModelSpec
    kind: MachineKind
    name: str
    """The device's name, as its driver gives it."""
    settles: bool
    """Whether the device's speed follows its load with some delay."""
    pass_sizes: Sequence[int]
    """Tokens that hybrid passes and prefill batches are padded to, ascending; empty: they are
    computed as they are. Sizes whose graphs are captured later come when they are."""
    page_sizes: Sequence[int]
    """Tokens of a KV page that are served, the default first; empty: any, 16 being the default."""
    page_token_bytes: int
    """Bytes of one token's keys and values in all layers, on one GPU."""
    page_layout: PageLayout
    """Which pages the layers have when requests are served."""
    state_bytes: int
    """Bytes of one request's states in layers of linear attention, on one GPU."""
    itemsize: int
    """Bytes of an element of activations and of the classifier."""
    kv_itemsize: float
    """Bytes of an element of the KV cache, scales included."""
    weight_itemsize: float
    """Bytes of an element of the layers' matrices, scales included."""
    tp: int
    """Ranks that share each layer (tensor parallelism)."""
    revision: str
    """Version of what the name stands for if that is no hardware (a device model); else empty."""

    def kv_bytes(self, max_model_len: int) -> int:
        """Return the bytes for the KV pool where its size is not given."""

    def start(
        self, sizes: LaneSizes, notify: Callable[[], None], progress: OnProgress
    ) -> MachineLanes:
        """Allocate the KV pool and start the lanes.

        Args:
            sizes: Sizes of the KV pool and of the slots.
            notify: called from a lane's thread whenever a ticket has results.
            progress: called with the steps of the start.
        """


class OpenLaunches(Protocol):
    """The launches under way, as a watcher sees them."""

    def waiting(self) -> Sequence[Ticket]:
        """Return the tickets that are not done, in the order of their numbers."""


class LaunchLog(Protocol):
    """The launches of rank 0, which every other rank carries out in the same order."""

    silences: Sequence[float]
    """Seconds since each of ranks 1 and up last gave a sign of life."""

    def log(self, record: Record) -> None:
        """Send a record to all ranks, after what was logged before; does not wait."""

    def watch(self, launches: OpenLaunches) -> None:
        """Count a rank as lost, from now on, when launches do not go on within their timeout or
        when it does not answer while there are none.

        Args:
            launches: The launches in which all ranks take part.
        """

    def load_adapter(self, slot: int, path: str, digest: bytes | None) -> None:
        """Have all ranks read an adapter, as `Lanes.load_adapter` does; wait until they have.

        Raises:
            ValueError: one of them cannot; the message says which, and why.
            RankLost: one of them is lost, or they are being ended.
        """

    def check(self) -> None:
        """Check that all ranks are alive and go on.

        Raises:
            RankLost: one is not, or does not.
        """

    def close(self, timeout: float) -> None:
        """End the ranks, by force those that have not ended after `timeout` seconds."""
