"""What a rule on one request's tokens answers."""

from array import array
from typing import Protocol


class TokenRule(Protocol):
    """A rule on one request's tokens, by which their masks depend on the output."""

    @property
    def changes(self) -> bool:
        """Whether later masks may differ from the latest one."""

    @property
    def free(self) -> bool:
        """Whether the latest mask allows every token."""

    def mask(self, tokens: "array[int]", prompt_tokens: int) -> bytes:
        """Return the mask of the next token.

        Args:
            tokens: the prompt and the output so far.
            prompt_tokens: the number of prompt tokens among them.
        """
