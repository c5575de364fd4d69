"""The view: what a system may know at a scheduling point, read-only.

Every request and batch has two frontiers: what is *done* (its ticket was reaped) and what is
*launched* (queued in a lane or done). The protocols below are windows onto the engine's own
objects, so that a view costs nothing to make; a system reads them and keeps no reference to
them after `plan` returns.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from twolane.common.vocabulary import LaneName
from twolane.estimate.base import Estimator
from twolane.slo import Slo
from twolane.systems.plan import Work


class RequestView(Protocol):
    """What a system may know of one request."""

    @property
    def id(self) -> str:
        """Unique over the life of the engine."""

    @property
    def arrival(self) -> float:
        """When it arrived, in seconds on the view's clock."""

    @property
    def priority(self) -> int:
        """Its priority; requests of a lower one are served earlier."""

    @property
    def deadline(self) -> float | None:
        """When the TTFT SLO wants the first token, in seconds; None without an SLO."""

    @property
    def slo(self) -> Slo:
        """Its own latency bounds, the server's where it has none."""

    @property
    def new(self) -> int:
        """`n`: prompt tokens that no launched batch has computed and the prefix cache lacks."""

    @property
    def reused(self) -> int:
        """`r`: prompt tokens in the prefix cache, or computed by chunks launched before."""

    @property
    def page_cost(self) -> int:
        """Free or reclaimable pages that admitting this request takes; 0 once it holds them."""

    @property
    def started(self) -> bool:
        """Whether it holds a slot and pages: some of its chunks were launched."""

    @property
    def generated(self) -> int:
        """Output tokens delivered (the done frontier)."""

    @property
    def first_token_at(self) -> float | None:
        """When the device made its first output token, or when that was released if it was held,
        in seconds; None: it was not delivered yet."""

    @property
    def last_token_at(self) -> float | None:
        """The same of its latest output token."""

    @property
    def slack(self) -> float:
        """Seconds for which the latest token is held back; the device may take that much longer
        than the TBT bound for the next one."""

    @property
    def context(self) -> int:
        """Tokens in its KV cache at the launched frontier."""

    @property
    def to_generate(self) -> int:
        """Output tokens it may still be launched for, by its limits."""


class ChunkView(Protocol):
    """A request's part of a prefill batch."""

    @property
    def request(self) -> RequestView:
        """The request whose prompt it is."""

    @property
    def start(self) -> int:
        """Tokens of the request before this chunk."""

    @property
    def n(self) -> int:
        """New tokens."""


class BatchView(Protocol):
    """What a system may know of a prefill batch."""

    @property
    def chunks(self) -> Sequence[ChunkView]:
        """Its chunks, but for those of requests that have ended."""

    @property
    def layers_launched(self) -> int:
        """Layers queued in a lane or done."""

    @property
    def layers_done(self) -> int:
        """Layers whose tickets were reaped."""


class GapsView(Protocol):
    """Seconds between two tokens of a request, as they are delivered if nothing delays them."""

    @property
    def total(self) -> int:
        """How many there were."""

    def above(self, bound: float, count: int) -> int:
        """How many of the latest `count`, or of those that are kept, are above a bound."""


class LaunchCostsView(Protocol):
    """What launches cost the host (`engine.launch_costs`)."""

    @property
    def layers_at_once(self) -> int:
        """The most layers of a prefill slice that it launches before decode has to wait for it."""

    def seconds(self, work: Work) -> float:
        """Return the decayed maximum for such a launch, in seconds; 0.0 if there was none."""


class LaneView(msgspec.Struct, frozen=True):
    """What one lane has to do."""

    queued: int = 0
    """Launches that are not done; the first of them is running."""
    units: int = 0
    """Units of the launch queued last; 0 when idle."""
    until: float | None = None
    """When the queue will be empty by prediction, in seconds; None: no prediction."""
    launching: float = 0.0
    """Seconds that the host lately took for the dearest launch that this lane may get."""

    def due(self, now: float, lead: float) -> bool:
        """Whether the lane wants another launch: idle, or predicted to be within `lead` seconds of
        the time at which the host has to begin to launch it.

        With no prediction, a lane that has one launch waits for it to end.
        """
        at = self.due_at(lead)
        return self.queued == 0 or (at is not None and at <= now)

    def due_at(self, lead: float) -> float | None:
        """When a lane that has one launch will be due; None: when that launch ends."""
        if self.queued != 1 or self.until is None:
            return None
        return self.until - lead - self.launching


class View(msgspec.Struct, frozen=True):
    """The state of the engine at one scheduling point."""

    now: float
    """The time in seconds on the lanes' clock, which is monotonic."""
    layers: int
    """Layers of the model."""
    units: int
    """Units of the whole device."""
    levels: Sequence[tuple[int, int]]
    """Partitions (prefill units, decode units) on offer, the solo ones too."""
    pass_sizes: Sequence[int]
    """Tokens that the device pads passes to, ascending; empty: they are computed as they are."""
    waiting: Sequence[RequestView]
    """Requests with new tokens and no open batch: started ones first, then by priority and age."""
    batch: BatchView | None
    """The open prefill batch: layers are left to launch."""
    launched_batches: Sequence[BatchView]
    """Batches that are launched to the last layer and not done, oldest first."""
    parked: BatchView | None
    """The preempted prefill batch."""
    decoding: Sequence[RequestView]
    """Requests that a decode step launched now would serve, oldest first."""
    joining: Mapping[LaneName, Sequence[RequestView]]
    """Requests whose prompt is launched to the end and not done, by the lane it was launched in:
    a step launched in that same lane, or on the whole device, serves them too, for it runs after
    their prompt."""
    lanes: Mapping[LaneName, LaneView]
    free_pages: int
    """KV pages that hold nothing."""
    reclaimable_pages: int
    """Pages that only the prefix cache holds."""
    free_slots: int
    """Requests that can be admitted beside those in prefill and decode."""
    slo: Slo
    """The server's latency bounds; each request has its own."""
    gaps: GapsView
    """The gaps between tokens that were delivered lately."""
    estimator: Estimator
    launching: LaunchCostsView
