"""Work for a lane: what the engine makes of a plan's launch, with slots, pages and tokens.

A *slot* is a request's place in the device's own state: the last token it sampled stays there,
so that a decode step can be queued before the token is known to the CPU. `pages` lists the
physical pages of a sequence in order; while work that names it is in flight the engine only
ever appends to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from twolane.common.vocabulary import LANES, LaneName
from twolane.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the token after a row is chosen."""

    params: SamplingParams
    seed: int
    prompt_tokens: int
    """Of the request as it was sent, for `min_tokens`."""
    eos_token_ids: tuple[int, ...]
    tokens: Sequence[int] = field(repr=False, compare=False)
    """The prompt and the output delivered so far, the engine's own: it appends to it. A lane
    reads it when a prompt ends, as far as the position after that; what it samples from then on it
    must remember itself, by slot, for steps are launched before their tokens are delivered."""

    def banned(self, position: int) -> Sequence[int]:
        """Tokens that may not be chosen at this index of the sequence."""
        if position - self.prompt_tokens >= self.params.min_tokens:
            return ()
        eos = () if self.params.ignore_eos else self.eos_token_ids
        return (*eos, *self.params.stop_token_ids)


@dataclass(frozen=True, slots=True)
class Scoring:
    """Tokens of a prompt whose log-probabilities are asked for."""

    targets: Sequence[int]
    """The tokens that follow the chunk's first `len(targets)` tokens."""
    top: int
    """Alternatives for each."""


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A chunk: `tokens` go to the positions from `start` on."""

    slot: int
    start: int
    tokens: Sequence[int]
    pages: Sequence[int]
    sampling: Sampling | None
    """Given if the prompt ends here and its first token is to be sampled."""
    scoring: Scoring | None = None
    """Given if log-probabilities of the prompt are asked for."""


class DecodeRow(msgspec.Struct, frozen=True):
    """A decoding request: the token in its slot goes to `position`, the next one is sampled."""

    slot: int
    position: int
    steps: int
    """How many of the launch's steps it takes part in."""
    pages: Sequence[int]
    sampling: Sampling


@dataclass(slots=True, eq=False)
class PrefillState:
    """Between two slices of a batch: its hidden states, kept by the lanes.

    Freed with its last reference; the engine drops its own when the batch is done or given up.
    """

    hidden: object | None = None
    rows: tuple[PromptRow, ...] = ()
    """Those that `hidden` is made of, in order."""


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """Layers `first:last` of a batch. `rows` are those still alive, a subset of the last slice's.

    Step tokens name places in `rows`.
    """

    state: PrefillState = field(repr=False)
    rows: tuple[PromptRow, ...]
    first: int
    last: int
    finishes: bool
    """Whether `last` is the model's last layer: then it samples, too."""


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """`k` decode steps."""

    rows: tuple[DecodeRow, ...]
    k: int


@dataclass(frozen=True, slots=True)
class HybridWork:
    """One forward pass; step tokens number the decode rows first, then the prompt rows."""

    decode: tuple[DecodeRow, ...]
    prompts: tuple[PromptRow, ...]


Work = PrefillWork | DecodeWork | HybridWork


def used_by(lane: LaneName, work: Work) -> Sequence[str]:
    """What no two launches may use at a time: a lane's memory, and the decode steps' buffers.

    The whole device excludes everything, which lets it use the prefill lane's memory.
    """
    if lane == "device":
        return (*LANES, "steps")
    return (lane,) if isinstance(work, PrefillWork) else (lane, "steps")
