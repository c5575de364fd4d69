"""The engine's records of a request, a prefill batch and a launch in flight."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from twolane.devices import LaneName
from twolane.engine.adapters.registry import LoadedAdapter
from twolane.engine.constrained.constraints import Constraint
from twolane.engine.constrained.token_rule import TokenRule
from twolane.engine.kv.manager import Allocation, Lookup
from twolane.engine.kv.page_hash import salt_bytes
from twolane.engine.messages import Submit, Times
from twolane.engine.prompt_work import PromptWork
from twolane.estimate.query import Ints, LaunchShape
from twolane.lanes.base import Ticket
from twolane.lanes.work import PromptRow, Sampling
from twolane.sampling import PackedLogprobs
from twolane.slo import Slo
from twolane.systems.plan import Launch


class Phase(Enum):
    """The phase of a request."""

    WAITING = "waiting"
    """The request waits for prefill, also between two chunks of its prompt, when it keeps its
    pages."""
    PREFILL = "prefill"
    """The request is in a prefill batch: open, parked or launched to the end."""
    DECODE = "decode"
    """The prompt is done, and decode steps serve the request."""
    FINISHED = "finished"
    """The request has ended and gets no more tokens."""


@dataclass(slots=True, eq=False)
class Request:
    """A request in the engine. `systems.view.RequestView` is the part of it that systems see."""

    id: str
    tokens: "array[int]"
    """The prompt and the output delivered so far."""
    prompt_tokens: int
    limit: int
    """Largest number of tokens, prompt and output together."""
    to_generate: int
    """Output tokens that may still be launched: `limit` less those delivered or in flight."""
    priority: int
    order: int
    """Place in the order of arrival, unique."""
    arrival: float
    slo: Slo
    sampling: Sampling
    stops: frozenset[int]
    """Tokens that end the request."""
    lookup: Callable[["Request"], Lookup]
    """Looks the prompt up in the prefix cache."""
    salt: bytes = b""
    """Bytes that keep its pages apart from those of other salts and adapters."""
    key: int | None = None
    """Index of the API key that it came with; keys take turns."""
    adapter: int = -1
    """Adapter slot of the request; -1 if the base model answers."""
    constraint: Constraint | None = None
    """Matcher of its compiled grammar; None if it has no grammar."""
    rule: TokenRule | None = None
    """Rule on its tokens, if the mask depends on the output."""
    mask: bytes | None = None
    """Mask of the tokens that may follow those delivered; None: all may, or it is being computed.
    With neither a grammar nor a rule it is the same for every token."""
    unmasks: bool = False
    """Whether the mask allows every token, and goes once no launch waits for it."""
    awaiting_masks: int = 0
    """Number of its launches that wait for a mask, at most `MAX_AWAITING_MASKS`."""
    looked_up: Lookup | None = None
    """Latest result of `lookup`."""
    phase: Phase = Phase.WAITING
    leader: str | None = None
    """Key of `WaitingQueue.held` that hides the request from systems; None: it is not hidden."""
    allocation: Allocation | None = None
    context: int = 0
    """Number of tokens in the KV cache at the launched frontier."""
    cached: int | None = None
    """Prompt tokens found in the prefix cache when first admitted."""
    prompt_logprobs: PackedLogprobs = field(default_factory=PackedLogprobs)
    """Log-probabilities of the prompt so far, if asked for; delivered with the first token."""
    admitted_at: float | None = None
    last_token_at: float | None = None
    first_token_at: float | None = None
    due: float | None = None
    """Time in seconds at which the latest token is delivered; None if at once, or if there is
    none."""
    slack: float = 0.0
    """Seconds for which the pacer holds the latest token back."""

    @property
    def in_flight(self) -> bool:
        """Whether a launched token has not been delivered."""
        return self.phase is Phase.PREFILL or self.context >= len(self.tokens)

    @property
    def next_mask(self) -> bytes | None:
        """Mask of the next decode step; None: all tokens are allowed, or it is not known yet."""
        return None if self.in_flight and self.mask_changes else self.mask

    @property
    def mask_changes(self) -> bool:
        """Whether the mask depends on the output."""
        return self.constraint is not None or self.rule is not None

    @property
    def masked(self) -> bool:
        """Whether each decode step of the request has a mask."""
        return self.constraint is not None or self.mask is not None

    @property
    def sits_out(self) -> bool:
        """Whether decode launches leave the request out: they do not wait for a slow grammar's
        mask."""
        constraint = self.constraint
        return constraint is not None and constraint.pace.apart and self.next_mask is None

    @property
    def decodes(self) -> bool:
        """Whether decode launches serve the request when its prompt is done."""
        return self.to_generate > 0 and not self.sits_out

    @property
    def plain(self) -> bool:
        """Whether all tokens are allowed at every position, by no rule and no grammar."""
        masked = self.mask is not None or self.unmasks or self.awaiting_masks > 0
        return self.constraint is None and self.rule is None and not masked

    @property
    def started(self) -> bool:
        """Whether the request holds a slot and pages."""
        return self.allocation is not None

    @property
    def held(self) -> Allocation:
        """The slot and pages of a request that has started."""
        assert self.allocation is not None
        return self.allocation

    @property
    def reused(self) -> int:
        """Number of prompt tokens in the prefix cache, or computed by earlier chunks."""
        return self.context if self.started else self.lookup(self).reused

    @property
    def new(self) -> int:
        """Number of prompt tokens to compute."""
        return len(self.tokens) - self.reused

    @property
    def yields(self) -> bool:
        """Whether a system may give the request up, because nothing was computed or delivered
        yet."""
        return not (self.started or self.generated)

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of its prompt are still to be computed."""
        return self.sampling.params.prompt_logprobs is not None and not self.generated

    @property
    def page_cost(self) -> int:
        """Free or reclaimable pages that admitting it takes."""
        return 0 if self.started else self.lookup(self).cost

    @property
    def deadline(self) -> float | None:
        """Time in seconds at which the first token is due by the TTFT SLO; None without one."""
        cached = self.reused if self.cached is None else self.cached
        bound = self.slo.first_token(self.prompt_tokens - cached)
        return None if bound is None else self.arrival + bound

    @property
    def generated(self) -> int:
        """Output tokens delivered."""
        return len(self.tokens) - self.prompt_tokens

    def times(self) -> Times:
        """Return the seconds that the request has spent in each phase."""

        def between(start: float | None, end: float | None) -> float | None:
            return None if start is None or end is None else end - start

        return Times(
            taken=self.arrival,
            queue=between(self.arrival, self.admitted_at),
            prefill=between(self.admitted_at, self.first_token_at),
            decode=between(self.first_token_at, self.last_token_at),
        )

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key of service: priority, then age."""
        return self.priority, self.order

    @classmethod
    def from_submit(
        cls,
        submit: Submit,
        *,
        order: int,
        now: float,
        max_model_len: int,
        tokens: "array[int]",
        sampling: Sampling,
        slo: Slo,
        lookup: Callable[["Request"], Lookup],
        adapter: LoadedAdapter | None = None,
    ) -> "Request":
        """Return a new waiting request, which owns `tokens`, its prompt."""
        salted = salt_bytes if adapter is None else adapter.salt
        prompt, params = len(submit.prompt), submit.params
        limit = min(prompt + (params.max_tokens or max_model_len), max_model_len)
        eos = () if params.ignore_eos else sampling.eos_token_ids
        return cls(
            id=submit.id,
            tokens=tokens,
            prompt_tokens=prompt,
            limit=limit,
            to_generate=limit - prompt,
            priority=submit.priority,
            order=order,
            arrival=now,
            slo=slo,
            sampling=sampling,
            stops=frozenset((*eos, *params.stop_token_ids)),
            lookup=lookup,
            salt=salted(submit.cache_salt),
            key=submit.key,
            adapter=-1 if adapter is None else adapter.slot,
        )


@dataclass(frozen=True, slots=True, eq=False)
class BatchChunk:
    """A request's part of a prefill batch, with the allocation it had when admitted."""

    request: Request
    allocation: Allocation
    start: int
    n: int
    row: PromptRow

    @property
    def final(self) -> bool:
        """Whether the prompt ends here."""
        return self.row.samples


@dataclass(slots=True, eq=False)
class PrefillBatch:
    """Chunks that go through the layers together."""

    id: int
    """Unique among the engine's batches."""
    members: list[BatchChunk]
    layers_launched: int = 0
    layers_done: int = 0
    last_lane: LaneName | None = None
    """The lane of its last layers; None: they were not launched yet."""

    @property
    def work(self) -> PromptWork:
        """Work of the batch in all layers."""
        work = PromptWork()
        for chunk in self.members:
            work = work.plus(PromptWork.of(chunk.n, chunk.start))
        return work

    @property
    def chunks(self) -> Sequence[BatchChunk]:
        """Chunks whose request still has its pages; the others leave at the next slice boundary."""
        return [each for each in self.members if each.request.allocation is each.allocation]


MAX_AWAITING_MASKS = 2
"""This many launches of a request may wait for masks: the second one's forward pass is queued in
the moment in which the first one is sampled."""


class LateRow(NamedTuple):
    """A row of a launch that was launched before its mask was known."""

    request: Request
    allocation: Allocation
    tokens: int
    """Number of the request's tokens that precede the masked one."""

    @property
    def left(self) -> bool:
        """Whether the request has left the launch, and needs no mask in it."""
        return self.request.allocation is not self.allocation

    @property
    def mask(self) -> bytes | None:
        """The mask, if it is known."""
        request = self.request
        return request.mask if len(request.tokens) == self.tokens else None


@dataclass(slots=True, eq=False)
class InFlightLaunch:
    """A launch in flight, with what the engine needs when its results arrive."""

    launch: Launch
    rows: Sequence[tuple[Request, Allocation]]
    """Requests of the launch, in the order of the rows of the ticket's steps."""
    shape: LaunchShape
    predicted: float | None
    """Predicted seconds of device work; None without a prediction."""
    reason: str
    batch: PrefillBatch | None = None
    slots: Ints | None = None
    """Slots of the rows; None: none of them decodes."""
    after: Sequence[Ticket] = ()
    """Tickets of other lanes that it waits for."""
    late: Sequence[LateRow] = ()
    """Rows whose masks are set after the launch."""
    ticket: Ticket = field(init=False)
    launched_at: float = field(init=False)
    taken: int = 0
    """Number of the ticket's steps that were delivered."""
