"""Sequences of tokens that an output must not contain."""

from array import array
from collections.abc import Iterable, Sequence

from twolane.engine.constrained.bits import without_tokens


class Banned:
    """Masks that keep some sequences out of one request's output.

    The last token of a sequence is masked where the others are the latest tokens of the output.

    Args:
        sequences: the sequences, none of them empty.
        allowed: mask of the tokens that may be chosen where no sequence would be complete.
    """

    def __init__(self, sequences: Iterable[Sequence[int]], allowed: bytes) -> None:
        self._always = without_tokens(allowed, [only for only, *more in sequences if not more])
        self._by_last_but_one: dict[int, list[tuple[array[int], int]]] = {}
        for *begin, last in sequences:
            if begin:
                ends = self._by_last_but_one.setdefault(begin[-1], [])
                ends.append((array("q", begin), last))

    free = False
    """See `TokenRule.free`."""

    @property
    def changes(self) -> bool:
        """Whether the mask depends on the output."""
        return bool(self._by_last_but_one)

    def mask(self, tokens: "array[int]", prompt_tokens: int) -> bytes:
        """See `TokenRule.mask`."""
        output = len(tokens) - prompt_tokens
        begun = self._by_last_but_one.get(tokens[-1], ()) if output else ()
        ends = [
            last for begin, last in begun if len(begin) <= output and tokens[-len(begin) :] == begin
        ]
        return without_tokens(self._always, ends) if ends else self._always
