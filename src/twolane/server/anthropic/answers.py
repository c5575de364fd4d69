"""The answers of /v1/messages: the message, and the events of its stream.

A message is a list of content blocks: thinking, text, tool uses. Each is opened, grows, and is
closed before the next one is opened.
"""

import json
import uuid
from collections.abc import Sequence
from typing import Any

from twolane.frontend.parsers.pieces import (
    CallArguments,
    CallStart,
    Content,
    Piece,
    Reasoning,
)

Json = dict[str, Any]
PING: Json = {"type": "ping"}


class MessageAnswer:
    """One message under way.

    Args:
        model: the served model's name.
        input_tokens: of the prompt.
    """

    def __init__(self, model: str, input_tokens: int) -> None:
        self._head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant"}
        self._model = model
        self._input = input_tokens
        self._blocks: list[Json] = []
        self._arguments: list[str] = []
        """The pieces of the last tool use's input."""
        self._open = False
        """Whether the last block still grows."""
        self._events: list[Json] = []

    def begin(self) -> list[Json]:
        """Return the events with which the stream begins."""
        return [{"type": "message_start", "message": self._shown(None, None, 0, 0)}, PING]

    def add(self, pieces: Sequence[Piece]) -> list[Json]:
        """Take pieces of the answer; return the events that they make."""
        for piece in pieces:
            match piece:
                case Reasoning(text):
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
        return self._emitted()

    def end(self, finish: str, stop: str | None, cached: int, output_tokens: int) -> list[Json]:
        """Return the events with which the stream ends.

        Args:
            finish: "stop" or "length".
            stop: the stop sequence that ended the answer, if one did.
            cached: prompt tokens found in the prefix cache.
            output_tokens: tokens of the answer.
        """
        self._close()
        reason = self._reason(finish, stop)
        usage = self._usage(cached, output_tokens)
        said = {"stop_reason": reason, "stop_sequence": stop}
        self._events.append({"type": "message_delta", "delta": said, "usage": usage})
        self._events.append({"type": "message_stop"})
        return self._emitted()

    def whole(self, finish: str, stop: str | None, cached: int, output_tokens: int) -> Json:
        """Return the message that does not stream; for the arguments see `end`."""
        self._close()
        return self._shown(self._reason(finish, stop), stop, cached, output_tokens)

    def _reason(self, finish: str, stop: str | None) -> str:
        if finish == "length":
            return "max_tokens"
        if self._blocks and self._blocks[-1]["type"] == "tool_use":
            return "tool_use"
        return "end_turn" if stop is None else "stop_sequence"

    def _shown(self, reason: str | None, stop: str | None, cached: int, output: int) -> Json:
        return {
            **self._head,
            "model": self._model,
            "content": list(self._blocks),
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": self._usage(cached, output),
        }

    def _usage(self, cached: int, output: int) -> Json:
        return {
            "input_tokens": self._input - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": output,
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
        if self._blocks[-1]["type"] == "tool_use":
            self._blocks[-1]["input"] = read_input("".join(self._arguments))
            self._arguments = []
        self._events.append({"type": "content_block_stop", "index": len(self._blocks) - 1})

    def _emitted(self) -> list[Json]:
        events, self._events = self._events, []
        return events


SIGNED: dict[str, Json] = {"thinking": {"signature": ""}}
"""What blocks of a kind have besides: clients want a signature of thinking, and none is checked."""


def read_input(arguments: str) -> Json:
    """Return a tool's input; what is no JSON object, as when an answer was cut, is shown raw."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return {"raw": arguments}
    return value if isinstance(value, dict) else {"raw": arguments}
