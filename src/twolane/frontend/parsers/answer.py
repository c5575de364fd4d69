"""Parser of a whole answer: thinking, text and tool calls."""

import uuid
from dataclasses import KW_ONLY, dataclass, field

from twolane.common.checked_json import Json
from twolane.frontend.parsers.json_call import is_object
from twolane.frontend.parsers.pieces import (
    CallArguments,
    CallStart,
    Content,
    Parser,
    Piece,
    Reasoning,
)
from twolane.frontend.parsers.unclosed import CallsInThinking


@dataclass
class ParsedCall:
    """A tool call of an answer, so far."""

    name: str
    arguments: str = ""
    """Arguments so far; JSON once the call is complete."""
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    @property
    def shown(self) -> Json:
        """The call in the format of a message."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(eq=False)
class AnswerReader:
    """Parses an answer's text incrementally, and keeps its parts."""

    reasoning: Parser | None = None
    """Tells the thinking apart; None: the model does not think."""
    tools: Parser | None = None
    """Finds tool calls in what is left; None: there can be none."""
    _: KW_ONLY
    unclosed: CallsInThinking | None = None
    """Finds calls with which the thinking ends; None: there can be none."""
    several: bool = True
    """Whether more than the first call is kept."""

    def __post_init__(self) -> None:
        self.calls: list[ParsedCall] = []
        self._thinking: list[str] = []
        self._content: list[str] = []
        self._called = False
        """Whether a call followed the last text for the user."""

    @property
    def thinking(self) -> str:
        """Thinking so far."""
        return "".join(self._thinking)

    @property
    def content(self) -> str:
        """Text for the user so far."""
        return "".join(self._content)

    @property
    def only_thinks(self) -> bool:
        """Whether the answer so far is only thinking."""
        kept_back = self.unclosed is not None and self.unclosed.holds
        return any(self._thinking) and not (any(self._content) or self.calls or kept_back)

    @property
    def calls_are_whole(self) -> bool:
        """Whether there are calls and none was cut off: the last one's arguments are JSON."""
        return bool(self.calls) and is_object(self.calls[-1].arguments)

    def read(self, text: str, *, ended: bool) -> list[Piece]:
        """Parse more text; return the pieces that are certain now.

        Args:
            text: new text since the last call.
            ended: true if nothing follows it.
        """
        pieces: list[Piece] = []
        for piece in self._split(text, ended=ended):
            match piece:
                case Reasoning(text):
                    self._thinking.append(text)
                case Content(text):
                    piece = Content(text, self._called and any(self._content))
                    self._content.append(piece.joined)
                    self._called = False
                case CallStart(_, name):
                    self._called = True
                    if self._dropped(piece):
                        continue
                    self.calls.append(ParsedCall(name))
                case CallArguments(index, text):
                    if self._dropped(piece):
                        continue
                    self.calls[index].arguments += text
            pieces.append(piece)
        return pieces

    def _dropped(self, piece: CallStart | CallArguments) -> bool:
        """Return whether a piece belongs to a call that is not kept."""
        return piece.index > 0 and not self.several

    def _split(self, text: str, *, ended: bool) -> list[Piece]:
        reasoning, tools = self.reasoning, self.tools
        pieces: list[Piece] = [Content(text)] if text else []
        if reasoning is not None:
            pieces = reasoning.feed(text) + (reasoning.finish() if ended else [])
        if tools is None:
            return pieces
        found: list[Piece] = []
        for piece in pieces:
            match piece:
                case Content(text):
                    found += self.unclosed.release() if self.unclosed is not None else []
                    found += tools.feed(text)
                case Reasoning(text) if self.unclosed is not None:
                    found += self.unclosed.feed(text)
                case _:
                    found.append(piece)
        if ended:
            found += self.unclosed.finish() if self.unclosed is not None else []
            found += tools.finish()
        return found
