"""Sequences of tokens that an output must not contain."""

from array import array
from collections.abc import Collection, Sequence
from functools import lru_cache

from twolane.engine.constrained.bits import without_tokens


class Banned:
    """Masks that keep some sequences out of one request's output.

    The last token of a sequence is masked where the others are the latest tokens of the output.

    Args:
        sequences: the sequences, none of them empty.
        allowed: mask of the tokens that may be chosen where no sequence would be complete.
    """

    def __init__(self, sequences: Collection[Sequence[int]], allowed: bytes) -> None:
        self._always = without_tokens(allowed, [only for only, *more in sequences if not more])
        self._begins = _begins_of(tuple(map(tuple, sequences)))

    free = False
    """See `TokenRule.free`."""

    @property
    def changes(self) -> bool:
        """Whether the mask depends on the output."""
        return bool(self._begins.longer)

    def mask(self, tokens: "array[int]", prompt_tokens: int) -> bytes:
        """See `TokenRule.mask`."""
        ends: list[int] = []
        node: _Begin | None = self._begins
        place = len(tokens)
        while place > prompt_tokens and node is not None:
            place -= 1
            node = node.longer.get(tokens[place])
            ends += node.lasts if node is not None else ()
        return without_tokens(self._always, ends) if ends else self._always


class _Begin:
    """What banned sequences have before their last tokens, in a tree that is read from its end:
    looking through it takes as many steps as a sequence has tokens, however many there are."""

    def __init__(self) -> None:
        self.longer: dict[int, _Begin] = {}
        """The begins that have one more token in front, by that token."""
        self.lasts: list[int] = []
        """Last tokens of the sequences that have exactly this begin."""


@lru_cache(8)
def _begins_of(sequences: tuple[tuple[int, ...], ...]) -> _Begin:
    """Return the root of the tree of the sequences' begins, which a request's answers share."""
    root = _Begin()
    for *begin, last in filter(lambda each: len(each) > 1, sequences):
        node = root
        for token in reversed(begin):
            node = node.longer.setdefault(token, _Begin())
        node.lasts.append(last)
    return root
