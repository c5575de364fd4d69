"""Multi-turn sessions, each of whose prompts extends the previous one."""

import itertools
from collections.abc import Iterator

import msgspec
import numpy as np

from twolane.workload.draws import Floats, Lengths, spread
from twolane.workload.traces import BLOCK_TOKENS, TraceRequest

MAX_TOKENS = 123_392
"""Most tokens of a prompt, before which a session ends: MuxWise (Table 1) has up to 122,880 tokens
reused."""


class Sessions(msgspec.Struct, frozen=True):
    """Sessions that begin with a shared context and grow from turn to turn.

    A turn's prompt is that of the turn before, its reply, and new text. Full blocks keep their hash
    ids, so what a turn reuses is what a cache of blocks would find.
    """

    opening: Lengths
    """Tokens of a session's first prompt after the shared context."""
    message: Lengths
    """Tokens that a later turn adds to the previous prompt and its reply."""
    output: Lengths
    stopping: float
    """Parameter of the number of turns: a session continues after turn t with probability t / (t +
    stopping)."""
    contexts: int
    """Number of shared contexts, such as system prompts and tool descriptions. The i-th has weight
    1 / i."""
    context_blocks: tuple[int, int]
    """Blocks of the shortest and the longest context."""
    request_rate: float
    """Requests per second."""
    pause: Lengths
    """Seconds between two turns of a session."""

    def draw(self, count: int, seed: int) -> list[TraceRequest]:
        """Return `count` requests in order of arrival. Every session but the last drawn is
        complete.

        Sessions begin evenly over `count / request_rate` seconds and last as long as they last: a
        short draw has the statistics of a long one, but is not its beginning.
        """
        from scipy.stats import qmc

        rng = np.random.default_rng([seed, _SESSIONS])
        # A few long sessions with long openings hold much of what is reused: evenly spread in all
        # dimensions at once, any number of sessions has about its share of them.
        opening, length, context, start = qmc.Halton(4, seed=rng).random(count).T
        columns = zip((self.message, self.output, self.pause), spread(rng, count, 3), strict=True)
        turns = zip(*(lengths.at(draw).tolist() for lengths, draw in columns), strict=True)
        sessions = zip(
            (start * count / self.request_rate).tolist(),
            self._shared(context),
            self.opening.at(opening).tolist(),
            self._turns(length),
            strict=True,
        )
        fresh = itertools.count(self.contexts * self.context_blocks[1])
        requests: list[TraceRequest] = []
        for arrival, shared, tokens, most in sessions:
            own = itertools.islice(turns, min(most, count - len(requests)))
            requests += self._session(arrival, shared, tokens, own, fresh)
        return sorted(requests, key=lambda request: request.arrival or 0.0)

    def _session(
        self,
        arrival: float,
        shared: range,
        tokens: int,
        turns: Iterator[tuple[int, int, int]],
        fresh: Iterator[int],
    ) -> Iterator[TraceRequest]:
        """Yield the requests of a session by its `turns` (message, output and pause of each)."""
        blocks = list(shared)
        prompt = len(blocks) * BLOCK_TOKENS + tokens
        for message, output, pause in turns:
            blocks += itertools.islice(fresh, prompt // BLOCK_TOKENS - len(blocks))
            partial = (next(fresh),) if prompt % BLOCK_TOKENS else ()
            yield TraceRequest(arrival, prompt, output, (*blocks, *partial))
            prompt += output + message
            arrival += pause
            if prompt > MAX_TOKENS:
                return

    def _turns(self, shares: Floats) -> list[int]:
        """Return the numbers of turns of sessions, mostly small: a Waring distribution."""
        # Most turns of a session.
        turn = np.arange(1, 30)
        going_on = np.cumprod(turn / (turn + self.stopping))
        turns: list[int] = (1 + np.searchsorted(-going_on, -shares)).tolist()
        return turns

    def _shared(self, shares: Floats) -> list[range]:
        """Return the ids of the blocks of each session's context."""
        weights = 1 / np.arange(1, self.contexts + 1)
        chosen = np.searchsorted(np.cumsum(weights / weights.sum()), shares)
        shortest, longest = self.context_blocks
        # The golden ratio spreads short and long contexts evenly over heavy and light ones.
        blocks = shortest + chosen * 0.618034 % 1 * (longest + 1 - shortest)
        return [
            range(which * longest, which * longest + int(many))
            for which, many in zip(chosen.tolist(), blocks.tolist(), strict=True)
        ]


_SESSIONS = 0x53455353
"""Seed offset that separates the draws of sessions from those of arrivals and tokens."""
