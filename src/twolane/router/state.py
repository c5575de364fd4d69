"""State that a replica publishes, and the facts of a request that routing uses."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from twolane.engine.kv.prefix_digest import Landmarks, PrefixBook, PrefixDigest
from twolane.engine.messages import Ready, Stats
from twolane.engine.prompt_work import UNKNOWN, PromptPace, PromptWork, WaitingPrompt
from twolane.slo import Slo

NO_LANDMARKS = Landmarks()
MAX_NUMBER = 1e15
"""Largest number, in whatever unit, that is believed of a replica."""
FORMAT = 3
"""Version of `ReplicaState`; a router skips replicas with another one."""


class ReplicaState(msgspec.Struct, frozen=True, kw_only=True):
    """State of a replica at one moment, as `GET /fleet/state` answers."""

    format: int = FORMAT
    model: str = ""
    """Name that clients call the model by."""
    ready: bool = True
    """Whether requests can be served."""
    draining: bool = False
    """Whether the replica finishes its requests and accepts no more."""
    running: int = 0
    """Number of requests in decode."""
    waiting: int = 0
    """Number of requests without a first token."""
    prefilling: int = 0
    """Number of these in prefill."""
    queued: PromptWork = PromptWork()
    """Prefill work left of the requests without a first token."""
    yielding: list[WaitingPrompt] | None = None
    """Largest queued prompts that may be given up for smaller ones; None: the system gives up
    none."""
    prompt_pace: PromptPace = UNKNOWN
    """Recent pace of the launches with prompts."""
    page_size: int = 1
    """Tokens in a KV page."""
    pages: int = 0
    """Number of KV pages of the pool."""
    pages_free: int = 0
    """Number of KV pages that are free or hold unpinned cached prefixes."""
    slo: Slo = Slo()
    """Latency bounds of requests that set none."""
    attainment: float | None = None
    """Share of recent first tokens within their TTFT bound; None: no bound."""
    digest: PrefixDigest | None = None
    """Landmarks of the prefix tree; None: unchanged since the version that the caller named."""

    @classmethod
    def of(cls, ready: Ready, stats: Stats, prefixes: PrefixBook, known: int) -> "ReplicaState":
        """Return the state of an engine.

        Args:
            ready: the engine's description of itself.
            stats: The engine's current gauges.
            prefixes: landmarks of its prefix tree.
            known: version of the digest that the router has; such a digest is left out.
        """
        return cls(
            running=stats.running,
            waiting=stats.waiting + stats.prefilling,
            prefilling=stats.prefilling,
            queued=stats.queued,
            yielding=stats.yielding,
            prompt_pace=stats.prompt_pace,
            page_size=ready.page_size,
            pages=stats.kv_pages,
            pages_free=stats.kv_pages_free + stats.kv_pages_cached,
            slo=ready.slo,
            digest=None if known == prefixes.version else prefixes.digest(),
        )


def read_state(data: bytes) -> ReplicaState:
    """Decode what a replica says of its state.

    Raises:
        msgspec.ValidationError: it has numbers that no server has and a router cannot compute with.
        Exception: one of `UNREADABLE`: it is no state.
    """
    state = msgspec.json.decode(data, type=ReplicaState)
    pace, slo, prompts = state.prompt_pace, state.slo, state.yielding or ()
    counts = (
        *(state.running, state.waiting, state.prefilling, state.pages, state.pages_free),
        *(*state.queued, pace.prompt, pace.token, pace.pair, state.attainment or 0.0),
        *(slo.ttft or 0.0, slo.ttft_per_token, slo.tbt or 0.0, slo.tpot or 0.0),
        *(number for prompt in prompts for number in (prompt.new, prompt.reused)),
    )
    believed = all(-1.0 <= number <= MAX_NUMBER for number in counts)  # sums of fractions may round
    believed = believed and all(abs(prompt.left) <= MAX_NUMBER for prompt in prompts)
    sizes = (state.page_size, state.page_size if state.digest is None else state.digest.page_size)
    if not believed or not all(1 <= size <= MAX_NUMBER for size in sizes):
        raise msgspec.ValidationError("the state of a replica has numbers that no server has")
    return state


def total_load(states: Sequence[ReplicaState]) -> dict[str, int]:
    """Return the answer of /load for these replicas together; `server_load` counts open
    requests."""
    running = sum(state.running for state in states)
    waiting = sum(state.waiting for state in states)
    prefilling = sum(state.prefilling for state in states)
    return {
        "server_load": running + waiting,
        "running": running,
        "prefilling": prefilling,
        "waiting": waiting - prefilling,
        "kv_pages": sum(state.pages for state in states),
        "kv_pages_free": sum(state.pages_free for state in states),
    }


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """The facts of a request that routing uses."""

    prompt_tokens: int
    output_tokens: int = 256
    """Limit on the answer's tokens, or a guess."""
    landmarks: Landmarks = NO_LANDMARKS
    """Landmarks of the prompt; empty: its tokens are unknown, and none count as reused."""
    ttft: float | None = None
    """TTFT bound in seconds; None: the replica's default."""
    session: str | None = None
    """Key that the requests of one user or conversation share."""
