"""The plan: a system's answer at a scheduling point.

A plan names requests by id and lanes by name; it has no tensors and no effect of its own. The
engine checks it (`PlanError` names what is illegal) and carries it out.
"""

import msgspec

from twolane.devices import LaneName


class Chunk(msgspec.Struct, frozen=True):
    """The next `n` new tokens of one waiting request."""

    request: str
    n: int


class PrefillSlice(msgspec.Struct, frozen=True):
    """Layers `first:last` of the open prefill batch; `first` is where the last slice ended."""

    first: int
    last: int


class DecodeSteps(msgspec.Struct, frozen=True):
    """`k` tokens for every decoding request, launched without a return to the CPU in between."""

    k: int = 1
    waits: bool = False
    """Whether the steps also serve requests whose prompt is launched to its end in another lane;
    they then wait for it on the device."""


class Hybrid(msgspec.Struct, frozen=True):
    """All layers of the open prefill batch and one decode step in one forward pass."""


Work = PrefillSlice | DecodeSteps | Hybrid


class Launch(msgspec.Struct, frozen=True):
    """Work for one lane on a number of units.

    The units of both lanes need not add up to the device: the lanes may overlap (Bullet §3.3.1,
    two streams), and units may stay idle.
    """

    lane: LaneName
    units: int
    work: Work


class Refusal(msgspec.Struct, frozen=True):
    """A waiting request to refuse, with a message for its client."""

    request: str
    message: str


class Plan(msgspec.Struct, frozen=True):
    """Changes and launches, carried out in the order of the fields; by default nothing.

    At most one prefill batch is *open*: admitted, not parked, with layers left to launch.
    """

    refuse: tuple[Refusal, ...] = ()
    """Waiting requests to refuse."""
    preempt: bool = False
    """Whether to park the open prefill batch, which keeps its pages and hidden states. At most one
    is parked."""
    admit: tuple[Chunk, ...] = ()
    """Chunks of a new prefill batch to open, in this order."""
    resume: bool = False
    """Whether to open the parked batch again."""
    launches: tuple[Launch, ...] = ()
    """Launches in the order of the host; decode goes first in DuetServe §4.3 and MuxWise §3.2.2."""
    wake_at: float | None = None
    """Time in seconds on the view's clock at which to plan again if nothing happens before."""
    reason: str = ""
    """Reason of the plan in a few words, for the trace."""


class PlanError(Exception):
    """An illegal plan, which is a defect of the system that made it."""
