"""Amount of prefill work of prompts, and a linear model of the seconds that it takes."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec


class PromptWork(NamedTuple):
    """Prefill work of some prompts; works add up field by field."""

    prompts: float = 0.0
    """Number of prompts; a partly computed one counts by the fraction of its layers left."""
    tokens: float = 0.0
    """Number of new tokens."""
    pairs: float = 0.0
    """Pairs of a new token and an earlier one, which attention reads."""

    @classmethod
    def of(cls, new: float, reused: float) -> "PromptWork":
        """Return the work of one prompt by its numbers of new and reused tokens."""
        return cls(1.0, new, new * (reused + new / 2))

    def plus(self, other: "PromptWork", share: float = 1.0) -> "PromptWork":
        """Return the sum of this and `share` times the other work."""
        prompts, tokens, pairs = other
        return PromptWork(
            self.prompts + share * prompts, self.tokens + share * tokens, self.pairs + share * pairs
        )


class WaitingPrompt(NamedTuple):
    """A queued prompt whose prefill has not begun."""

    new: int
    """Number of its tokens to compute."""
    reused: int
    """Number of its tokens that the prefix cache has."""
    left: float
    """Seconds until its first token is due; negative if it is overdue."""

    @property
    def work(self) -> PromptWork:
        """Prefill work of the prompt."""
        return PromptWork.of(self.new, self.reused)


class PromptPace(msgspec.Struct, frozen=True):
    """Coefficients of a server's prefill time; all 0: not known."""

    prompt: float = 0.0
    """Seconds for each prompt whatever its length: reading weights, launching."""
    token: float = 0.0
    """Seconds for each new token."""
    pair: float = 0.0
    """Seconds for each pair of a new token and an earlier one."""

    def __bool__(self) -> bool:
        """Return whether the pace is known."""
        return self != UNKNOWN

    def seconds(self, work: PromptWork) -> float:
        """Return the seconds that a work takes."""
        return self.prompt * work.prompts + self.token * work.tokens + self.pair * work.pairs


UNKNOWN = PromptPace()
SHAPE_DECAY = 0.99
"""Decay per observation of earlier works when the ratios of the coefficients are fitted."""
LEVEL_DECAY = 0.97
"""Decay per observation of earlier works when the level of the pace is fitted, which follows the
decode load."""


class PromptPaces:
    """Learns a server's prefill pace from observed works and seconds, by exponentially weighted
    non-negative least squares."""

    def __init__(self) -> None:
        self._squares = [[0.0] * 3 for _ in range(3)]
        self._products = [0.0] * 3
        self._level = 0.0, PromptWork()
        """Decayed sums of seconds and of works."""
        self._shape, self._age = UNKNOWN, 0

    def note(self, work: PromptWork, seconds: float) -> None:
        """Add the observation of a work and the seconds that it took."""
        weight = 1.0 / max(work.tokens, 1.0)  # a prompt counts by its length, not by its square
        for i, mine in enumerate(work):
            self._products[i] = SHAPE_DECAY * self._products[i] + weight * mine * seconds
            for j, other in enumerate(work):
                self._squares[i][j] = SHAPE_DECAY * self._squares[i][j] + weight * mine * other
        spent, done = self._level
        level = PromptWork(*(LEVEL_DECAY * each for each in done)).plus(work)
        self._level = LEVEL_DECAY * spent + seconds, level
        self._age += 1
        # Observations after which the coefficients are fitted again.
        if not self._shape or self._age >= 8:
            self._shape, self._age = _fitted(self._squares, self._products, self._shape), 0

    @property
    def pace(self) -> PromptPace:
        """The current pace."""
        seconds, work = self._level
        predicted = self._shape.seconds(work)
        factor = seconds / predicted if predicted else 0.0
        shape = self._shape
        return PromptPace(shape.prompt * factor, shape.token * factor, shape.pair * factor)


def _fitted(
    squares: Sequence[Sequence[float]], products: Sequence[float], before: PromptPace
) -> PromptPace:
    """Return non-negative coefficients that reduce the squared error, by coordinate descent.

    The first one begins at tokens alone: works that do not tell two terms apart leave the term of
    tokens with what both explain.

    Args:
        squares: sums of the products of two of a work's fields.
        products: sums of the products of a field and the seconds.
        before: the law to begin with.
    """
    terms = [before.prompt, before.token, before.pair]
    if not before and squares[1][1]:
        terms[1] = products[1] / squares[1][1]
    # Rounds of coordinate descent at each fit, which starts from the previous fit.
    for _ in range(6):
        for i, row in enumerate(squares):
            if row[i]:
                others = sum(row[j] * terms[j] for j in range(3) if j != i)
                terms[i] = max(0.0, (products[i] - others) / row[i])
    return PromptPace(*terms)
