"""Parser of the thinking of reasoning models."""

import msgspec

from twolane.frontend.parsers.pieces import Content, Piece, Reasoning, held_back


class ThinkingMarks(msgspec.Struct, frozen=True):
    """Marks around a model's thinking before its answer."""

    begin: str = "<think>"
    """Mark before the thinking."""
    end: str = "</think>"
    """Mark after the thinking."""
    opened: bool = False
    """Whether the prompt ends within thinking; if not, the answer may begin with it."""
    around_answer: tuple[str, str] | None = None
    """Marks around the answer after the thinking, which are not shown."""
    needed: bool = False
    """Whether no answer is without thinking."""
    bare: str = ""
    """Mark of an answer without thinking, where it has one."""


KNOWN_MARKS = (
    ThinkingMarks(),
    ThinkingMarks("[THINK]", "[/THINK]"),
    ThinkingMarks("Here is my thought process:", "Here is my response:"),
    ThinkingMarks("<seed:think>", "</seed:think>"),
    ThinkingMarks("<|channel>thought", "<channel|>"),
)
"""Known marks: those of most models, of Mistral's, of Granite 3.2, of Seed-OSS, and of Gemma 4."""
AROUND_ANSWER = ("<response>", "</response>")
"""Marks around the answers of Granite 3.3, after thinking."""
ANSWER = ("<answer>", "</answer>")
"""Those around the answers of Hunyuan."""


class ReasoningParser:
    """Splits text at the marks around a model's thinking (`Parser`).

    Thinking comes first, if at all; white space around the marks belongs to neither side.

    Args:
        marks: the marks around the thinking.
    """

    def __init__(self, marks: ThinkingMarks = KNOWN_MARKS[0]) -> None:
        self._marks = marks
        self._state = "thinking" if marks.opened else "start"
        self._text = ""
        self._blank = marks.opened
        """Whether only white space, which is dropped, has come since the last mark."""
        self._opened = marks.opened
        """Whether a repeated opening mark, which models write at times, is dropped."""
        self._within = marks.around_answer and _AnswerWithin(*marks.around_answer)

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
        if self._state == "answer" and self._within:
            rest += self._within.finish()
        if not rest or (self._state == "thinking" and not rest.strip()):
            return []
        return [Reasoning(rest) if self._state == "thinking" else Content(rest)]

    def _open(self, pieces: list[Piece]) -> None:
        begun, mark = self._text.lstrip(), self._marks.begin
        if begun.startswith(mark):
            self._text, self._state, self._blank = begun[len(mark) :], "thinking", True
        elif not mark.startswith(begun):
            self._state = "answer"
            self._within = None  # the marks follow thinking alone

    def _think(self, pieces: list[Piece]) -> None:
        if self._blank:
            self._text, begin = self._text.lstrip(), self._marks.begin
            if self._opened and len(self._text) < len(begin) and begin.startswith(self._text):
                return
            if self._opened:
                self._opened = False
                self._text = self._text.removeprefix(begin).lstrip()
            self._blank = not self._text
        thought, mark, rest = self._text.partition(self._marks.end)
        if mark:
            self._text, self._state, self._blank = rest, "answer", True
            thought = thought.rstrip()
        else:
            kept = held_back(thought, (self._marks.end,))
            certain = thought[: len(thought) - kept].rstrip()  # white space may be before the mark
            self._text, thought = self._text[len(certain) :], certain
        if thought:
            pieces.append(Reasoning(thought))

    def _answer(self, pieces: list[Piece]) -> None:
        if self._blank:
            self._text = self._text.lstrip()
            self._blank = not self._text
        shown, self._text = self._text, ""
        if self._within:
            shown = self._within.feed(shown)
        if shown:
            pieces.append(Content(shown))


class _AnswerWithin:
    """Drops the marks around an answer, if it begins with the first one, and the white space
    within them. The second one is a mark at the answer's end alone."""

    def __init__(self, begin: str, end: str) -> None:
        self._begin, self._end = begin, end
        self._state = "start"
        self._text = ""
        """Text that may become a mark, or be one."""

    def feed(self, text: str) -> str:
        """Process more text; return what is certain now."""
        self._text += text
        if self._state == "start" and self._text.startswith(self._begin):
            self._text, self._state = self._text.removeprefix(self._begin), "blank"
        elif self._state == "start" and not self._begin.startswith(self._text):
            self._state = "plain"
        if self._state == "blank" and (said := self._text.lstrip()):
            self._text, self._state = said, "within"
        certain = {"plain": len(self._text), "within": self._certain()}.get(self._state, 0)
        shown, self._text = self._text[:certain], self._text[certain:]
        return shown

    def finish(self) -> str:
        """Return the text that was held back and is no mark."""
        ended = self._state != "plain" and self._text.rstrip().endswith(self._end)
        rest, self._text = "" if ended or self._state == "blank" else self._text, ""
        return rest

    def _certain(self) -> int:
        """Return the number of characters that belong neither to the end mark nor to the white
        space before it."""
        said, mark, rest = self._text.rpartition(self._end)
        if not mark or rest.strip():
            said = self._text[: len(self._text) - held_back(self._text, (self._end,))]
        return len(said.rstrip())


class AnswerGate:
    """Separates the answer's text, in which stop strings count, from the thinking before it.

    White space after the thinking belongs to neither, and no stop string counts in it.

    Args:
        marks: the marks around the thinking.
    """

    def __init__(self, marks: ThinkingMarks) -> None:
        self._marks = marks
        self._state = "thinking" if marks.opened else "start"
        self._seen = ""
        """Text in which marks are searched."""
        self._held = 0
        """Number of characters at its end that may belong to the answer."""

    @property
    def thinks(self) -> bool:
        """Whether the text is within thinking."""
        return self._state == "thinking"

    def feed(self, text: str) -> tuple[str, str]:
        """Process more text; return its thinking and its answer."""
        if self._state == "answer":
            return "", text
        if self._state == "blank":
            return self._after("", text)
        self._seen += text
        if self._state == "start":
            begun, marks = self._seen.lstrip(), (self._marks.begin, self._marks.bare)
            self._held += len(text)
            if marks[1] and begun.startswith(marks[1]):
                self._state, whole = "blank", self.release()
                answer = len(whole) - len(begun) + len(marks[1])
                return self._after(whole[:answer], whole[answer:])
            if not begun.startswith(marks[0]):
                may_be = any(mark.startswith(begun) for mark in marks)
                return ("", "") if may_be else ("", self._answer())
            text, self._state = self.release(), "thinking"
        thought, mark, _ = self._seen.partition(self._marks.end)
        if not mark:
            self._seen = self._seen[1 - len(self._marks.end) :]
            return text, ""
        rest = len(self._seen) - len(thought) - len(mark)
        self._state = "blank"
        return self._after(text[: len(text) - rest], text[len(text) - rest :])

    def _after(self, before: str, text: str) -> tuple[str, str]:
        """Process text after the thinking, of which only white space has come."""
        rest = text.lstrip()
        if rest:
            self._state = "answer"
        return before + text[: len(text) - len(rest)], rest

    def release(self) -> str:
        """Return the text that is held back."""
        text = self._seen[len(self._seen) - self._held :]
        self._held = 0
        return text

    def _answer(self) -> str:
        self._state = "answer"
        return self.release()


def thinking_of(template: str | None) -> ThinkingMarks | None:
    """Return the marks of thinking in a chat template; None: the model does not think."""
    found = next(
        (marks for marks in KNOWN_MARKS if template is not None and marks.end in template), None
    )
    if found is None or template is None:
        return found
    if "".join(AROUND_ANSWER) in template:
        return msgspec.structs.replace(found, around_answer=AROUND_ANSWER)
    if all(mark in template for mark in ANSWER):
        return msgspec.structs.replace(found, around_answer=ANSWER)
    return found


def ends_in_thinking(marks: ThinkingMarks, prompt: str, continued: str | None = None) -> bool:
    """Return whether a prompt ends within thinking.

    Args:
        marks: the marks around the thinking.
        prompt: the end of it.
        continued: the text of the message that the answer goes on with.
    """
    if continued is not None and continued.rfind(marks.begin) > continued.rfind(marks.end):
        return True
    return prompt.rstrip().endswith(marks.begin)
