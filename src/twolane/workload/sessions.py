"""Sessions of several turns, whose prompts stand on each other."""

import itertools
from collections.abc import Iterator

import msgspec
import numpy as np

from twolane.workload.draws import Floats, Lengths, spread
from twolane.workload.traces import BLOCK_TOKENS, TraceRequest

MOST_TURNS = 30
"""Number of turns that a session has at most."""
MOST_TOKENS = 123_392
"""A session ends before a longer prompt: MuxWise (Table 1) has up to 122,880 tokens reused."""


class Sessions(msgspec.Struct, frozen=True):
    """Sessions that open with a shared context and grow from turn to turn.

    A turn's prompt is that of the turn before, its reply, and new text. Full blocks keep their hash
    ids, so what a turn reuses is what a cache of blocks would find.
    """

    opening: Lengths
    """Tokens of a session's first prompt after the shared context."""
    message: Lengths
    """Tokens that a later turn adds to the last prompt and its reply."""
    output: Lengths
    stopping: float
    """A session goes on after its t-th turn with probability t / (t + stopping)."""
    contexts: int
    """Shared openings: system prompts, descriptions of tools. The i-th has weight 1 / i."""
    context_blocks: tuple[int, int]
    """Blocks of the shortest and of the longest of them."""
    request_rate: float
    """Requests a second."""
    pause: Lengths
    """Seconds between two turns of a session."""

    def draw(self, count: int, seed: int) -> list[TraceRequest]:
        """`count` requests in order of arrival. Every session but the last drawn is whole.

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
        """One session, as far as `turns` (message, output and pause of each) go."""
        blocks = list(shared)
        prompt = len(blocks) * BLOCK_TOKENS + tokens
        for message, output, pause in turns:
            blocks += itertools.islice(fresh, prompt // BLOCK_TOKENS - len(blocks))
            partial = (next(fresh),) if prompt % BLOCK_TOKENS else ()
            yield TraceRequest(arrival, prompt, output, (*blocks, *partial))
            prompt += output + message
            arrival += pause
            if prompt > MOST_TOKENS:
                return

    def _turns(self, shares: Floats) -> list[int]:
        """How many turns sessions have, most of them few: a Waring distribution."""
        turn = np.arange(1, MOST_TURNS)
        going_on = np.cumprod(turn / (turn + self.stopping))
        turns: list[int] = (1 + np.searchsorted(-going_on, -shares)).tolist()
        return turns

    def _shared(self, shares: Floats) -> list[range]:
        """Ids of the blocks of each session's context."""
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
"""Keeps the draws of sessions apart from those of arrivals and tokens under one seed."""
