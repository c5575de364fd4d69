"""The thinking of reasoning models, told apart from the answer."""

from typing import Literal

from twolane.frontend.parsers.pieces import Content, Piece, Reasoning, held_back

THINK, END_THINK = "<think>", "</think>"
Thinking = Literal["possible", "begun"]
"""How an answer begins: it may begin with thinking, or the prompt has opened the thinking."""


class ReasoningParser:
    """Splits text at the marks around a model's thinking (`Parser`).

    Thinking comes first, if at all; white space around the marks belongs to neither side.

    Args:
        thinking: whether the prompt ended inside the thinking, so that no mark opens it.
    """

    def __init__(self, *, thinking: bool = False) -> None:
        self._state = "thinking" if thinking else "start"
        self._text = ""
        self._blank = thinking
        """Whether white space is to be dropped: nothing but that has come since the last mark."""
        self._opened = thinking
        """Whether the mark that opens the thinking would be there twice: models write it again."""

    def feed(self, text: str) -> list[Piece]:
        """See `Parser.feed`."""
        self._text += text
        pieces: list[Piece] = []
        if self._state == "start":
            self._open(pieces)
        if self._state == "thinking":
            self._think(pieces)
        if self._state == "answer":
            self._answer(pieces)
        return pieces

    def finish(self) -> list[Piece]:
        """See `Parser.finish`."""
        rest, self._text = self._text, ""
        if not rest or (self._state == "thinking" and not rest.strip()):
            return []
        return [Reasoning(rest) if self._state == "thinking" else Content(rest)]

    def _open(self, pieces: list[Piece]) -> None:
        begun = self._text.lstrip()
        if begun.startswith(THINK):
            self._text, self._state, self._blank = begun[len(THINK) :], "thinking", True
        elif not THINK.startswith(begun):
            self._state = "answer"

    def _think(self, pieces: list[Piece]) -> None:
        if self._blank:
            self._text = self._text.lstrip()
            if self._opened and len(self._text) < len(THINK) and THINK.startswith(self._text):
                return
            if self._opened:
                self._opened = False
                self._text = self._text.removeprefix(THINK).lstrip()
            self._blank = not self._text
        thought, mark, rest = self._text.partition(END_THINK)
        if mark:
            self._text, self._state, self._blank = rest, "answer", True
            thought = thought.rstrip()
        else:
            kept = held_back(thought, (END_THINK,))
            certain = thought[: len(thought) - kept].rstrip()  # white space may be before the mark
            self._text, thought = self._text[len(certain) :], certain
        if thought:
            pieces.append(Reasoning(thought))

    def _answer(self, pieces: list[Piece]) -> None:
        if self._blank:
            self._text = self._text.lstrip()
            self._blank = not self._text
        if self._text:
            pieces.append(Content(self._text))
            self._text = ""


class AnswerGate:
    """Tells the text of the answer, in which stop strings count, from the thinking before it.

    Args:
        thinking: how the answer begins.
    """

    def __init__(self, thinking: Thinking) -> None:
        self._state = "start" if thinking == "possible" else "thinking"
        self._seen = ""
        """The text that decides what follows."""
        self._held = 0
        """Number of characters at its end that may turn out to be of the answer."""

    def feed(self, text: str) -> tuple[str, str]:
        """Take some more text; return what is thinking, and what is of the answer."""
        if self._state == "answer":
            return "", text
        self._seen += text
        if self._state == "start":
            begun = self._seen.lstrip()
            self._held += len(text)
            if not begun.startswith(THINK):
                return ("", "") if THINK.startswith(begun) else ("", self._answer())
            text, self._state = self.release(), "thinking"
        thought, mark, _ = self._seen.partition(END_THINK)
        if not mark:
            self._seen = self._seen[1 - len(END_THINK) :]
            return text, ""
        behind = len(self._seen) - len(thought) - len(mark)
        self._state = "answer"
        return text[: len(text) - behind], text[len(text) - behind :]

    def release(self) -> str:
        """Return what is held back."""
        text = self._seen[len(self._seen) - self._held :]
        self._held = 0
        return text

    def _answer(self) -> str:
        self._state = "answer"
        return self.release()


def thinking_of(template: str | None) -> bool:
    """Return whether a chat template is one of a model that thinks between `<think>` marks."""
    return template is not None and END_THINK in template


def ends_in_thinking(prompt: str, continued: str | None = None) -> bool:
    """Return whether a prompt has opened the thinking and not closed it.

    Args:
        prompt: the end of it.
        continued: the text of the message that the answer goes on with.
    """
    if continued is not None and continued.rfind(THINK) > continued.rfind(END_THINK):
        return True
    return prompt.rstrip().endswith(THINK)
