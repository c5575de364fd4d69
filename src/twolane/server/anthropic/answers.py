"""Answers of /v1/messages: the message, and the events of its stream.

A message is a list of content blocks: thinking, text, tool uses. Each is opened, grows, and is
closed before the next one is opened.
"""

import uuid

from twolane.common.checked_json import Json
from twolane.frontend.parsers.answer import AnswerReader
from twolane.frontend.parsers.json_call import arguments_object
from twolane.frontend.parsers.pieces import CallArguments, CallStart, Content, Piece, Reasoning
from twolane.frontend.text.output_reader import Delta
from twolane.server.http.errors import as_anthropic
from twolane.server.http.events import named_event
from twolane.server.service.counts import AnswerCounts

PING: Json = {"type": "ping"}
SIGNATURE = "dHdvbGFuZQ=="
"""Placeholder signature of thinking, never checked: clients drop or refuse thinking without one."""


class MessageAnswer:
    """A message in progress (`Answering`).

    Args:
        model: the served model's name.
        prompt_tokens: number of the prompt's tokens.
        reader: tells thinking and calls apart; None: all of the answer is text.
        shows_thinking: true if the thinking is part of what is shown.
    """

    def __init__(
        self,
        model: str,
        prompt_tokens: int,
        reader: AnswerReader | None = None,
        *,
        shows_thinking: bool = True,
    ) -> None:
        self._head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant"}
        self._model = model
        self._reader = reader or AnswerReader()
        self._shows_thinking = shows_thinking
        self._counts = AnswerCounts(prompt_tokens)
        self._blocks: list[Json] = []
        self._arguments: list[str] = []
        """Pieces of the last tool use's input."""
        self._open = False
        """Whether the last block is open."""
        self._events: list[Json] = []
        self._begun = False

    def add(self, delta: Delta) -> None:
        """See `Answering.add`."""
        for piece in self._counts.read(delta, self._reader):
            self._take(piece)

    def whole(self) -> Json:
        """See `Answering.whole`."""
        self._close()
        return self._shown(self._reason())

    def events(self, delta: Delta) -> bytes:
        """See `Answering.events`."""
        if not self._begun:
            self._begun = True
            self._counts.cached = delta.cached or 0  # a stream ends with the input it began with
            self._events += [{"type": "message_start", "message": self._shown(None)}, PING]
        self.add(delta)
        return self._emitted()

    def closing(self) -> bytes:
        """See `Answering.closing`."""
        self._close()
        delta = {"stop_reason": self._reason(), "stop_sequence": self._stop}
        self._events.append({"type": "message_delta", "delta": delta, "usage": self._usage()})
        self._events.append({"type": "message_stop"})
        return self._emitted()

    def failing(self, error: Json) -> bytes:
        """See `Answering.failing`."""
        self._events.append(as_anthropic(error))
        return self._emitted()

    def _take(self, piece: Piece) -> None:
        match piece:
            case Reasoning(text):
                if self._shows_thinking:
                    self._grow("thinking", text)
            case Content(text):
                self._grow("text", text)
            case CallStart(_, name):
                self._close()
                id = f"toolu_{uuid.uuid4().hex[:24]}"
                self._start({"type": "tool_use", "id": id, "name": name, "input": {}})
            case CallArguments(_, text):
                self._arguments.append(text)
                self._delta({"type": "input_json_delta", "partial_json": text})

    @property
    def _stop(self) -> str | None:
        """Stop sequence that ended the answer, if one did."""
        return self._counts.stop if isinstance(self._counts.stop, str) else None

    def _reason(self) -> str:
        if self._counts.finish == "length":
            return "max_tokens"
        if self._reader.calls_are_whole:
            return "tool_use"
        return "end_turn" if self._stop is None else "stop_sequence"

    def _shown(self, reason: str | None) -> Json:
        return {
            **self._head,
            "model": self._model,
            "content": list(self._blocks),
            "stop_reason": reason,
            "stop_sequence": self._stop,
            "usage": self._usage(),
        }

    def _usage(self) -> Json:
        counts = self._counts
        return {
            "input_tokens": counts.prompt - counts.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": counts.cached,
            "output_tokens": counts.output,
        }

    def _grow(self, kind: str, text: str) -> None:
        if not self._open or self._blocks[-1]["type"] != kind:
            self._close()
            self._start({"type": kind, kind: ""} | SIGNED.get(kind, {}))
        self._blocks[-1][kind] += text
        self._delta({"type": f"{kind}_delta", kind: text})

    def _start(self, block: Json) -> None:
        self._blocks.append(block)
        self._open = True
        index = len(self._blocks) - 1
        event = {"type": "content_block_start", "index": index, "content_block": dict(block)}
        self._events.append(event)

    def _delta(self, delta: Json) -> None:
        index = len(self._blocks) - 1
        self._events.append({"type": "content_block_delta", "index": index, "delta": delta})

    def _close(self) -> None:
        if not self._open:
            return
        self._open = False
        match self._blocks[-1]["type"]:
            case "tool_use":
                self._blocks[-1]["input"] = arguments_object("".join(self._arguments))
                self._arguments = []
            case "thinking":
                self._blocks[-1]["signature"] = SIGNATURE
                self._delta({"type": "signature_delta", "signature": SIGNATURE})
        self._events.append({"type": "content_block_stop", "index": len(self._blocks) - 1})

    def _emitted(self) -> bytes:
        events, self._events = self._events, []
        return b"".join(map(named_event, events))


SIGNED: dict[str, Json] = {"thinking": {"signature": ""}}
"""Additional fields of new blocks, by kind."""
