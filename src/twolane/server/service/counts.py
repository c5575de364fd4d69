"""Token counts of one answer in progress, and why it ended."""

from collections.abc import Sequence

from twolane.engine.messages import FinishReason
from twolane.frontend.parsers.answer import AnswerReader
from twolane.frontend.parsers.pieces import Piece
from twolane.frontend.text.output_reader import Delta


class AnswerCounts:
    """Token counts of an answer so far.

    Args:
        prompt: number of the prompt's tokens.
    """

    def __init__(self, prompt: int) -> None:
        self.prompt = prompt
        self.cached = 0
        """Number of prompt tokens from the prefix cache."""
        self.output = 0
        """Number of the answer's tokens."""
        self.thinking = 0
        """Number of tokens before the answer itself began."""
        self.finish: FinishReason | None = None
        self.stop: int | str | None = None
        """The stop token or string that ended the answer."""

    def read(self, delta: Delta, reader: AnswerReader) -> Sequence[Piece]:
        """Count a delta; return the pieces that it adds to the answer."""
        self.cached = self.cached if delta.cached is None else delta.cached
        self.output += len(delta.tokens)
        self.finish, self.stop = delta.finish, delta.stop_reason
        pieces = reader.read(delta.text, ended=delta.finish is not None)
        if reader.only_thinks:
            self.thinking = self.output
        return pieces
