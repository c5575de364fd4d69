"""The budget of a request's thinking, whose end is forced when it is spent."""

from array import array

from twolane.engine.constrained.bits import every_token, no_token, with_tokens
from twolane.engine.constrained.token_rule import TokenRule


class ThinkingBudget:
    """Masks that bound the number of thinking tokens of one request (`TokenRule`).

    Thinking begins after its mark, in the prompt or in the output, and ends with its other mark.
    Once it has as many tokens as the budget allows, only the mark that ends it may be chosen. The
    thinking in the prompt counts, as in vLLM.

    Args:
        budget: the largest number of tokens between the marks.
        marks: the tokens that begin and end the thinking.
        prompt: the tokens of the prompt.
        always: mask of the tokens that may be chosen where no rule says otherwise.
        other: another rule on the request's tokens; None: there is none.
    """

    def __init__(
        self,
        budget: int,
        marks: tuple[int, int],
        prompt: "array[int]",
        always: bytes,
        other: TokenRule | None,
    ) -> None:
        self._budget = budget
        self._begin, self._end = marks
        self._always = always
        self._other = other
        size = 8 * len(always)
        self._forced = with_tokens(no_token(size), [self._end])
        self._unrestricted = always == every_token(size)
        begun, ended = (_last(prompt, mark) for mark in marks)
        self._first = begun + 1 if begun > ended else None
        """Position of the first token of thinking; None: it has not begun."""
        self._ended = False
        self._read = len(prompt)
        """Number of tokens that were searched for marks."""

    @property
    def changes(self) -> bool:
        """See `TokenRule.changes`."""
        return not self._ended or (self._other is not None and self._other.changes)

    @property
    def free(self) -> bool:
        """See `TokenRule.free`."""
        return self._ended and self._other is None and self._unrestricted

    def mask(self, tokens: "array[int]", prompt_tokens: int) -> bytes:
        """See `TokenRule.mask`."""
        for place in range(self._read, len(tokens)):
            self._see(tokens[place], place)
        self._read = len(tokens)
        spent = self._first is not None and len(tokens) - self._first >= self._budget
        if spent and not self._ended:
            return self._forced
        return self._always if self._other is None else self._other.mask(tokens, prompt_tokens)

    def _see(self, token: int, place: int) -> None:
        if self._first is None and token == self._begin:
            self._first = place + 1
        elif self._first is not None and token == self._end:
            self._ended = True


def _last(tokens: "array[int]", token: int) -> int:
    """Return the last position of a token; -1 if it does not occur."""
    return len(tokens) - 1 - tokens[::-1].index(token) if token in tokens else -1
