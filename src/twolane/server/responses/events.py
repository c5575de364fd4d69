"""Answers of /v1/responses: the response object, and the events of its stream.

A response is a list of items: thinking, a message, function calls. Each is opened, grows, and is
closed before the next one is opened.
"""

import copy
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from twolane.common.checked_json import UNREADABLE, Json
from twolane.frontend.parsers.answer import AnswerReader
from twolane.frontend.parsers.pieces import CallArguments, CallStart, Content, Piece, Reasoning
from twolane.frontend.text.output_reader import Delta
from twolane.server.http.events import named_event
from twolane.server.responses.items import PREFIX
from twolane.server.responses.tools import CUSTOM_INPUT, CalledTool
from twolane.server.service.counts import AnswerCounts


class ResponseAnswer:
    """A response in progress (`Answering`).

    Args:
        model: the served model's name.
        prompt_tokens: number of the prompt's tokens.
        repeated: fields of the request that the response repeats.
        reader: tells thinking and calls apart; None: all of the answer is text.
        tools: tools as answers name them, by the name that the model knows.
        keep: is given the response when it is whole.
    """

    def __init__(
        self,
        model: str,
        prompt_tokens: int,
        repeated: Mapping[str, Any],
        reader: AnswerReader | None,
        tools: Mapping[str, CalledTool],
        keep: Callable[[Json], None],
    ) -> None:
        self.id = f"resp_{uuid.uuid4().hex}"
        self._created = time.time()
        self._began = time.monotonic()
        self._head = {"id": self.id, "object": "response", "created_at": int(self._created)}
        self._repeated = {"model": model, **repeated}
        self._reader = reader or AnswerReader()
        self._tools = tools
        self._keep = keep
        self._counts = AnswerCounts(prompt_tokens)
        self._items: list[Json] = []
        self._open = False
        """Whether the last item is open."""
        self._free_text = ""
        """Arguments of the open call to a tool that takes free text."""
        self._events: list[Json] = []
        self._sequence = 0

    def add(self, delta: Delta) -> None:
        """See `Answering.add`."""
        for piece in self._counts.read(delta, self._reader):
            self._take(piece)

    def whole(self) -> Json:
        """See `Answering.whole`."""
        self._end()
        return self._ended

    def events(self, delta: Delta) -> bytes:
        """See `Answering.events`."""
        if self._sequence == 0:
            for kind in ("response.created", "response.in_progress"):
                self._emit(kind, response=self.shown("in_progress"))
        self.add(delta)
        return self._emitted()

    def closing(self) -> bytes:
        """See `Answering.closing`."""
        self._end()
        self._emit(f"response.{self._ended['status']}", response=self._ended)
        return self._emitted()

    def failing(self, error: Json) -> bytes:
        """See `Answering.failing`."""
        failed = self.shown("failed")
        failed["error"] = {"code": "server_error", "message": error["error"]["message"]}
        self._emit("response.failed", response=failed)
        return self._emitted()

    def shown(self, status: str) -> Json:
        """Return the current response object."""
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        ended = status in ("completed", "incomplete")
        now = self._created + time.monotonic() - self._began  # the clock may have been set
        return {
            **self._head,
            "completed_at": int(now) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": why,
            "output": copy.deepcopy(self._items),  # events keep what they show
            "usage": self._usage() if ended else None,
            **self._repeated,
        }

    def _take(self, piece: Piece) -> None:
        match piece:
            case Reasoning(text):
                self._grow("reasoning", text)
            case Content(text):
                self._grow("message", text)
            case CallStart(index, name):
                self._close()
                called = self._tools.get(name, CalledTool(name))
                self._open_call(self._reader.calls[index].id, called)
            case CallArguments(_, text):
                self._grow_call(text)

    def _end(self) -> None:
        cut = self._counts.finish == "length"
        self._close("incomplete" if cut else "completed")
        self._ended = self.shown("incomplete" if cut else "completed")
        self._keep(self._ended)

    def _usage(self) -> Json:
        counts = self._counts
        return {
            "input_tokens": counts.prompt,
            "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": 0},
            "output_tokens": counts.output,
            "output_tokens_details": {"reasoning_tokens": counts.thinking},
            "total_tokens": counts.prompt + counts.output,
        }

    def _grow(self, kind: str, text: str) -> None:
        """Add text to the open item of a kind; open one if there is none."""
        if not self._open or self._items[-1]["type"] != kind:
            self._close()
            self._open_text(kind)
        self._items[-1]["content"][0]["text"] += text
        self._emit_part(f"response.{TEXT_OF[kind]}.delta", delta=text, **LOGPROBS[kind])

    def _open_text(self, kind: str) -> None:
        item: Json = {"id": self._item_id(kind), "type": kind}
        if kind == "reasoning":
            item |= {"summary": [], "content": [], "status": "in_progress"}
        else:
            item |= {"role": "assistant", "status": "in_progress", "content": []}
        self._add_item(item)
        part: Json = {"type": TEXT_OF[kind], "text": ""}
        if kind == "message":
            part |= {"annotations": [], "logprobs": []}
        item["content"].append(part)
        self._emit_part("response.content_part.added", part=dict(part))

    def _open_call(self, call_id: str, called: CalledTool) -> None:
        kind = "custom_tool_call" if called.custom else "function_call"
        item = {"id": self._item_id(kind), "type": kind, "call_id": call_id}
        item |= {"name": called.name, TEXT_OF[kind]: "", "status": "in_progress"}
        if called.namespace is not None:
            item["namespace"] = called.namespace
        self._free_text = ""
        self._add_item(item)

    def _grow_call(self, text: str) -> None:
        if self._items[-1]["type"] == "custom_tool_call":
            self._free_text += text  # free text only once it is no JSON any more
            return
        self._items[-1]["arguments"] += text
        self._emit_item("response.function_call_arguments.delta", delta=text)

    def _item_id(self, kind: str) -> str:
        """Return the id of the next item, which names its response: a fleet's router finds the
        server that stores what a request refers to."""
        return f"{PREFIX[kind]}_{self.id.removeprefix('resp_')}{len(self._items):04x}"

    def _add_item(self, item: Json) -> None:
        self._items.append(item)
        self._open = True
        shown = copy.deepcopy(item)
        self._emit("response.output_item.added", output_index=len(self._items) - 1, item=shown)

    def _close(self, status: str = "completed") -> None:
        """Emit the events that complete the last item, if it is open."""
        if not self._open:
            return
        self._open, item = False, self._items[-1]
        item["status"] = status
        kind = item["type"]
        if kind == "function_call":
            fields = {"name": item["name"], "arguments": item["arguments"]}
            self._emit_item("response.function_call_arguments.done", **fields)
        elif kind == "custom_tool_call":
            item["input"] = free_text(self._free_text)
            self._emit_item("response.custom_tool_call_input.delta", delta=item["input"])
            self._emit_item("response.custom_tool_call_input.done", input=item["input"])
        else:
            part = item["content"][0]
            text = part["text"]
            self._emit_part(f"response.{TEXT_OF[kind]}.done", text=text, **LOGPROBS[kind])
            self._emit_part("response.content_part.done", part=dict(part))
        shown = copy.deepcopy(item)
        self._emit("response.output_item.done", output_index=len(self._items) - 1, item=shown)

    def _emit_part(self, kind: str, **fields: Any) -> None:
        self._emit_item(kind, content_index=0, **fields)

    def _emit_item(self, kind: str, **fields: Any) -> None:
        index = len(self._items) - 1
        self._emit(kind, item_id=self._items[-1]["id"], output_index=index, **fields)

    def _emit(self, kind: str, **fields: Any) -> None:
        self._events.append({"type": kind, "sequence_number": self._sequence, **fields})
        self._sequence += 1

    def _emitted(self) -> bytes:
        events, self._events = self._events, []
        return b"".join(map(named_event, events))


TEXT_OF = {
    "reasoning": "reasoning_text",
    "message": "output_text",
    "function_call": "arguments",
    "custom_tool_call": "input",
}
"""Types of the text parts of items, or names of their text fields, by kind."""
LOGPROBS: Mapping[str, Json] = {"reasoning": {}, "message": {"logprobs": []}}


def free_text(arguments: str) -> str:
    """Return the free text in a call's arguments; arguments that are no such JSON are returned as
    they are."""
    try:
        value = msgspec.json.decode(arguments, type=dict[str, str])
    except UNREADABLE:
        return arguments
    return value.get(CUSTOM_INPUT, arguments)
