"""How much there is to compute of prompts, and how long that takes: a sum and a linear law."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec


class PromptWork(NamedTuple):
    """What is to be computed of some prompts; works add up field by field."""

    prompts: float = 0.0
    """Number of prompts; a fraction is the part of the layers that is left."""
    tokens: float = 0.0
    """Number of new tokens."""
    pairs: float = 0.0
    """Pairs of a new token and a token before it, which attention reads."""

    @classmethod
    def of(cls, new: float, reused: float) -> "PromptWork":
        """Return that of one prompt by its numbers of new and of reused tokens."""
        return cls(1.0, new, new * (reused + new / 2))

    def plus(self, other: "PromptWork", share: float = 1.0) -> "PromptWork":
        """Return the sum with a share of another work."""
        return PromptWork(*(mine + share * its for mine, its in zip(self, other, strict=True)))


class WaitingPrompt(NamedTuple):
    """A prompt of which nothing was computed yet."""

    new: int
    """Number of its tokens to compute."""
    reused: int
    """Number of its tokens that the prefix cache has."""
    left: float
    """Seconds until its first token is due; negative if it is overdue."""

    @property
    def work(self) -> PromptWork:
        """What is to be computed of it."""
        return PromptWork.of(self.new, self.reused)


class PromptPace(msgspec.Struct, frozen=True):
    """Seconds that a server takes for prompts; all 0: not known."""

    prompt: float = 0.0
    """Seconds for each prompt whatever its length: weights are read, launches are made."""
    token: float = 0.0
    """Seconds for each new token."""
    pair: float = 0.0
    """Seconds for each pair of a new token and a token before it."""

    def __bool__(self) -> bool:
        """Whether it is known."""
        return self != UNKNOWN

    def seconds(self, work: PromptWork) -> float:
        """Return how long a work takes."""
        return self.prompt * work.prompts + self.token * work.tokens + self.pair * work.pairs


UNKNOWN = PromptPace()
KEPT_SHAPE = 0.99
"""Share of the weight that earlier works keep at each one, as far as the pace's shape goes."""
KEPT_LEVEL = 0.97
"""The same for its level, which follows the load beside the prompts."""
SOLVED_EVERY = 8
"""The law is fitted anew after this many works."""
SWEEPS = 6
"""Number of rounds over the three terms at each fit, which begins at the law of the one before."""


class PromptPaces:
    """Learns the pace of a server from works and their seconds, by least squares without negative
    terms; later works count for more."""

    def __init__(self) -> None:
        self._squares = [[0.0] * 3 for _ in range(3)]
        self._products = [0.0] * 3
        self._level = 0.0, PromptWork()
        """Seconds and works of the latest, weighted."""
        self._shape, self._age = UNKNOWN, 0

    def note(self, work: PromptWork, seconds: float) -> None:
        """Learn how many seconds a work took."""
        weight = 1.0 / max(work.tokens, 1.0)  # a prompt counts by its length, not by its square
        for i, mine in enumerate(work):
            self._products[i] = KEPT_SHAPE * self._products[i] + weight * mine * seconds
            for j, other in enumerate(work):
                self._squares[i][j] = KEPT_SHAPE * self._squares[i][j] + weight * mine * other
        spent, done = self._level
        level = PromptWork(*(KEPT_LEVEL * each for each in done)).plus(work)
        self._level = KEPT_LEVEL * spent + seconds, level
        self._age += 1
        if not self._shape or self._age >= SOLVED_EVERY:
            self._shape, self._age = _fitted(self._squares, self._products, self._shape), 0

    @property
    def pace(self) -> PromptPace:
        """The law as it holds now."""
        seconds, work = self._level
        predicted = self._shape.seconds(work)
        factor = seconds / predicted if predicted else 0.0
        shape = self._shape
        return PromptPace(shape.prompt * factor, shape.token * factor, shape.pair * factor)


def _fitted(
    squares: Sequence[Sequence[float]], products: Sequence[float], before: PromptPace
) -> PromptPace:
    """Return a law with less squares than the one before and no negative term, by coordinate
    descent.

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
    for _ in range(SWEEPS):
        for i, row in enumerate(squares):
            if row[i]:
                others = sum(row[j] * terms[j] for j in range(3) if j != i)
                terms[i] = max(0.0, (products[i] - others) / row[i])
    return PromptPace(*terms)
