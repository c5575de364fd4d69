"""The plan: what a system answers at a scheduling point.

A plan names requests by id and lanes by name; it carries no tensors and has no effect by itself.
The engine checks it (`PlanError` says what was illegal) and carries it out.
"""

from dataclasses import dataclass

from twolane.vocabulary import LaneName


@dataclass(frozen=True, slots=True)
class Chunk:
    """`n` new tokens of one waiting request, from where its KV cache ends."""

    request: str
    n: int


@dataclass(frozen=True, slots=True)
class PrefillSlice:
    """Layers `first:last` of the open prefill batch; `first` is where the last slice ended."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class DecodeSteps:
    """`k` tokens for every decoding request, without coming back to the CPU in between."""

    k: int = 1


@dataclass(frozen=True, slots=True)
class Hybrid:
    """All layers of the open prefill batch and one decode step, as one forward pass."""


Work = PrefillSlice | DecodeSteps | Hybrid


@dataclass(frozen=True, slots=True)
class Launch:
    """Work for one lane on its own number of units.

    The lanes' units need not add up to the device: an overlap is legal (Bullet §3.3.1, two
    streams), and so is leaving units idle.
    """

    lane: LaneName
    units: int
    work: Work


@dataclass(frozen=True, slots=True)
class Refusal:
    """A waiting request that is turned away, and why (shown to the client)."""

    request: str
    message: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Carried out in the order of the fields; the default is to do nothing.

    One prefill batch at most is *open*: admitted, not parked, with layers left to launch.
    """

    refuse: tuple[Refusal, ...] = ()
    preempt: bool = False
    """Park the open prefill batch: it keeps its pages and hidden states. At most one is parked."""
    admit: tuple[Chunk, ...] = ()
    """Open a new prefill batch of these chunks, in this order."""
    resume: bool = False
    """Open the parked batch again."""
    launches: tuple[Launch, ...] = ()
    """In launch order; DuetServe §4.3 and MuxWise §3.2.2 put decode first."""
    wake_at: float | None = None
    """Ask again at this time (seconds, the view's clock) if nothing happens before."""
    reason: str = ""
    """Why, in a few words, for the trace."""


class PlanError(Exception):
    """The plan breaks the rules: a defect of the system that made it."""
