"""The plan: what a system answers at a scheduling point.

A plan names requests by id and lanes by name; it carries no tensors and has no effect by itself.
The engine checks it (`PlanError` says what was illegal) and carries it out.
"""

import msgspec

from twolane.common.vocabulary import LaneName


class Chunk(msgspec.Struct, frozen=True):
    """`n` new tokens of one waiting request, from where its KV cache ends."""

    request: str
    n: int


class PrefillSlice(msgspec.Struct, frozen=True):
    """Layers `first:last` of the open prefill batch; `first` is where the last slice ended."""

    first: int
    last: int


class DecodeSteps(msgspec.Struct, frozen=True):
    """`k` tokens for every decoding request, without coming back to the CPU in between."""

    k: int = 1
    waits: bool = False
    """Also for requests whose prompt is launched to its end in another lane: on the device, the
    step waits for them."""


class Hybrid(msgspec.Struct, frozen=True):
    """All layers of the open prefill batch and one decode step, as one forward pass."""


Work = PrefillSlice | DecodeSteps | Hybrid


class Launch(msgspec.Struct, frozen=True):
    """Work for one lane on its own number of units.

    The lanes' units need not add up to the device: an overlap is legal (Bullet §3.3.1, two
    streams), and so is leaving units idle.
    """

    lane: LaneName
    units: int
    work: Work


class Refusal(msgspec.Struct, frozen=True):
    """A waiting request that is turned away, and why (shown to the client)."""

    request: str
    message: str


class Plan(msgspec.Struct, frozen=True):
    """Carried out in the order of the fields; the default is to do nothing.

    One prefill batch at most is *open*: admitted, not parked, with layers left to launch.
    """

    refuse: tuple[Refusal, ...] = ()
    """Waiting requests to turn away."""
    preempt: bool = False
    """Park the open prefill batch: it keeps its pages and hidden states. At most one is parked."""
    admit: tuple[Chunk, ...] = ()
    """Open a new prefill batch of these chunks, in this order."""
    resume: bool = False
    """Open the parked batch again."""
    launches: tuple[Launch, ...] = ()
    """Launches in the order in which the host makes them; decode goes first in DuetServe §4.3 and
    MuxWise §3.2.2."""
    wake_at: float | None = None
    """Ask again at this time (seconds, the view's clock) if nothing happens before."""
    reason: str = ""
    """Why, in a few words, for the trace."""


class PlanError(Exception):
    """The plan breaks the rules: a defect of the system that made it."""
