"""The view: a system's read-only input at a scheduling point.

Every request and batch has two frontiers: what is *done* (its ticket was reaped) and what is
*launched* (queued in a lane or done). The protocols below describe the engine's own objects, so
making a view copies nothing. A system keeps no reference to them after `plan` returns.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from twolane.devices import LaneName
from twolane.estimate.base import Estimator
from twolane.slo import Slo
from twolane.systems.plan import Work
from twolane.systems.request_view import RequestView as RequestView
from twolane.systems.rows import RowTable, WaitingTable


class ChunkView(Protocol):
    """A request's part of a prefill batch."""

    @property
    def request(self) -> RequestView:
        """The request whose prompt this is a part of."""

    @property
    def start(self) -> int:
        """Number of the request's tokens before this chunk."""

    @property
    def n(self) -> int:
        """Number of new tokens."""


class BatchView(Protocol):
    """The part of a prefill batch that systems see."""

    @property
    def chunks(self) -> Sequence[ChunkView]:
        """The chunks of requests that have not ended."""

    @property
    def layers_launched(self) -> int:
        """Number of layers that are queued in a lane or done."""

    @property
    def layers_done(self) -> int:
        """Number of layers whose tickets were reaped."""


class GapsView(Protocol):
    """The latest gaps between two tokens of a request, in seconds, as the pacer schedules them."""

    @property
    def total(self) -> int:
        """Number of gaps since the start."""

    def above(self, bound: float, count: int) -> int:
        """Return how many of the latest `count` remembered gaps exceed `bound` seconds."""


class LaunchCostsView(Protocol):
    """The host's seconds for launches (`engine.launch_costs`)."""

    @property
    def layers_at_once(self) -> int:
        """Largest number of layers in a prefill slice whose launch does not delay decode."""

    def seconds(self, work: Work) -> float:
        """Return the decayed maximum of the host's seconds for such a launch; 0.0 if there was
        none."""


class LaneView(msgspec.Struct, frozen=True):
    """The queue of one lane."""

    queued: int = 0
    """Number of launches that are not done; the first of them is running."""
    units: int = 0
    """Units of the launch that was queued last; 0 when idle."""
    until: float | None = None
    """Predicted time in seconds at which the queue will be empty; None without a prediction."""
    launch_cost: float = 0.0
    """Seconds that the host recently took for the slowest kind of launch of this lane."""

    def due(self, now: float, lead: float) -> bool:
        """Return whether the lane needs another launch now.

        It does when it is idle, or when the host must begin the next launch within `lead` seconds
        so that the lane does not run dry. Without a prediction, a lane with one launch waits for
        its end.
        """
        at = self.due_at(lead)
        return self.queued == 0 or (at is not None and at <= now)

    def due_at(self, lead: float) -> float | None:
        """Return the time in seconds at which a lane with one launch will be due; None if only the
        end of a launch will show it."""
        if self.queued != 1 or self.until is None:
            return None
        return self.until - lead - self.launch_cost


class View(msgspec.Struct, frozen=True):
    """The state of the engine at one scheduling point."""

    now: float
    """The time in seconds on the lanes' clock, which is monotonic."""
    layers: int
    """Layers of the model."""
    units: int
    """Units of the whole device."""
    levels: Sequence[tuple[int, int]]
    """Partitions (prefill units, decode units) on offer, including the solo ones."""
    pass_sizes: Sequence[int]
    """Numbers of tokens that the device pads passes to, ascending; empty if it pads none."""
    waiting: Sequence[RequestView]
    """Requests with new tokens that are in no batch, of the API keys whose turn it is: started ones
    first, then by priority and age."""
    batch: BatchView | None
    """The open prefill batch, which has layers left to launch."""
    launched_batches: Sequence[BatchView]
    """Prefill batches launched to the last layer and not done, oldest first."""
    parked: BatchView | None
    """The preempted prefill batch."""
    decoding: Sequence[RequestView]
    """Requests with a token, which a decode step launched now would serve in any lane, by priority
    and age."""
    joining: Mapping[LaneName, Sequence[RequestView]]
    """Requests whose prompt is launched to the end and not done, by the lane of that launch. A step
    launched in the same lane or on the whole device serves them too, because it runs after their
    prompt."""
    lanes: Mapping[LaneName, LaneView]
    free_pages: int
    """Number of empty KV pages."""
    reclaimable_pages: int
    """Number of KV pages that only the prefix cache holds, which can be taken at any time."""
    free_slots: int
    """Number of requests that can be admitted in addition to those in prefill and decode."""
    slo: Slo
    """The server's latency bounds, which requests without bounds of their own have."""
    gaps: GapsView
    """The latest gaps between tokens."""
    estimator: Estimator
    launch_costs: LaunchCostsView
    page_tables: int = 1
    """Number of KV pages that hold the same tokens of a request: one in each of its tables."""
    waiting_table: WaitingTable | None = None
    """The columns of `waiting`, if the engine keeps them: the same object while nothing changes."""
    row_table: RowTable | None = None
    """The columns of `decoding`, if the engine keeps them."""

    @property
    def prompts(self) -> WaitingTable:
        """The columns of `waiting`."""
        return self.waiting_table or WaitingTable.of(self.waiting)

    @property
    def decode_rows(self) -> RowTable:
        """The columns of `decoding`."""
        return self.row_table or RowTable.of(self.decoding)

    def rows(self, lane: LaneName) -> Sequence[RequestView]:
        """Return the requests that a decode step launched now in this lane would serve."""
        return [*self.decoding, *self.joining[lane]]
