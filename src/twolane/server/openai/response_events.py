"""The answers of /v1/responses: the response object, and the events of its stream.

A response is a list of items: thinking, a message, function calls. Each is opened, grows, and is
closed before the next one is opened.
"""

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from twolane.frontend.parsers.pieces import (
    CallArguments,
    CallStart,
    Content,
    Piece,
    Reasoning,
)

Json = dict[str, Any]


def named_event(body: Json) -> bytes:
    """Write a server-sent event that is named after its type."""
    kind: str = body["type"]
    return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(body) + b"\n\n"


class ResponseAnswer:
    """One response under way.

    Args:
        model: the served model's name.
        asked: fields of the request that the response repeats.
    """

    def __init__(self, model: str, asked: Mapping[str, Any]) -> None:
        self.id = f"resp_{uuid.uuid4().hex}"
        self._head = {"id": self.id, "object": "response", "created_at": int(time.time())}
        self._asked = {"model": model, **asked}
        self._items: list[Json] = []
        self._open = False
        """Whether the last item still grows."""
        self._events: list[Json] = []
        self._sequence = 0

    def begin(self) -> list[Json]:
        """Return the events with which the stream begins."""
        for kind in ("response.created", "response.in_progress"):
            self._emit(kind, response=self.shown("in_progress"))
        return self._emitted()

    def add(self, pieces: Sequence[Piece]) -> list[Json]:
        """Take pieces of the answer; return the events that they make."""
        for piece in pieces:
            match piece:
                case Reasoning(text):
                    self._grow("reasoning", text)
                case Content(text):
                    self._grow("message", text)
                case CallStart(_, name):
                    self._close()
                    self._open_call(name)
                case CallArguments(_, text):
                    self._items[-1]["arguments"] += text
                    self._emit_item("response.function_call_arguments.delta", delta=text)
        return self._emitted()

    def end(self, *, complete: bool, usage: Json) -> list[Json]:
        """Return the events with which the stream ends."""
        self._close()
        status = "completed" if complete else "incomplete"
        self._emit(f"response.{status}", response=self.shown(status, usage))
        return self._emitted()

    def fail(self, message: str) -> list[Json]:
        """Return the event with which a stream ends that cannot go on."""
        failed = self.shown("failed")
        failed["error"] = {"code": "server_error", "message": message}
        self._emit("response.failed", response=failed)
        return self._emitted()

    def shown(self, status: str, usage: Json | None = None) -> Json:
        """Return the response object as it is now."""
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        items = msgspec.json.decode(msgspec.json.encode(self._items))  # events keep what they show
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": why,
            "output": items,
            "usage": usage,
            **self._asked,
        }

    def _grow(self, kind: str, text: str) -> None:
        """Add text to an item of that kind, which is opened if need be."""
        if not self._open or self._items[-1]["type"] != kind:
            self._close()
            self._open_text(kind)
        self._items[-1]["content"][0]["text"] += text
        self._emit_part(f"response.{TEXT_OF[kind]}.delta", delta=text, **LOGPROBS[kind])

    def _open_text(self, kind: str) -> None:
        item: Json = {"id": f"{PREFIX[kind]}_{uuid.uuid4().hex}", "type": kind}
        if kind == "reasoning":
            item |= {"summary": [], "content": [], "status": "in_progress"}
        else:
            item |= {"role": "assistant", "status": "in_progress", "content": []}
        self._add_item(item)
        part: Json = {"type": TEXT_OF[kind], "text": ""}
        if kind == "message":
            part |= {"annotations": [], "logprobs": []}
        item["content"].append(part)
        if kind == "message":
            self._emit_part("response.content_part.added", part=dict(part))

    def _open_call(self, name: str) -> None:
        self._add_item(
            {
                "id": f"fc_{uuid.uuid4().hex}",
                "type": "function_call",
                "call_id": f"call_{uuid.uuid4().hex[:24]}",
                "name": name,
                "arguments": "",
                "status": "in_progress",
            }
        )

    def _add_item(self, item: Json) -> None:
        self._items.append(item)
        self._open = True
        shown = msgspec.json.decode(msgspec.json.encode(item))
        self._emit("response.output_item.added", output_index=len(self._items) - 1, item=shown)

    def _close(self) -> None:
        """Say that the last item is whole, if it still grows."""
        if not self._open:
            return
        self._open, item = False, self._items[-1]
        item["status"] = "completed"
        kind = item["type"]
        if kind == "function_call":
            said = {"name": item["name"], "arguments": item["arguments"]}
            self._emit_item("response.function_call_arguments.done", **said)
        else:
            part = item["content"][0]
            text = part["text"]
            self._emit_part(f"response.{TEXT_OF[kind]}.done", text=text, **LOGPROBS[kind])
            if kind == "message":
                self._emit_part("response.content_part.done", part=dict(part))
        shown = msgspec.json.decode(msgspec.json.encode(item))
        self._emit("response.output_item.done", output_index=len(self._items) - 1, item=shown)

    def _emit_part(self, kind: str, **fields: Any) -> None:
        self._emit_item(kind, content_index=0, **fields)

    def _emit_item(self, kind: str, **fields: Any) -> None:
        index = len(self._items) - 1
        self._emit(kind, item_id=self._items[-1]["id"], output_index=index, **fields)

    def _emit(self, kind: str, **fields: Any) -> None:
        self._events.append({"type": kind, "sequence_number": self._sequence, **fields})
        self._sequence += 1

    def _emitted(self) -> list[Json]:
        events, self._events = self._events, []
        return events


PREFIX = {"reasoning": "rs", "message": "msg"}
TEXT_OF = {"reasoning": "reasoning_text", "message": "output_text"}
LOGPROBS: Mapping[str, Json] = {"reasoning": {}, "message": {"logprobs": []}}
