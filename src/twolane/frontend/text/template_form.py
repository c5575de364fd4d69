"""Format in which a chat template reads messages."""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from twolane.frontend.parsers.json_call import arguments_object

Message = Mapping[str, Any]
PYTHON_CALLS = "<|tool_call_start|>"
"""Mark of calls of LFM2, whose templates do not show `tool_calls`."""
SHORT_ID = 9
"""Length of call ids in Mistral's templates."""


class TemplateForm(msgspec.Struct, frozen=True):
    """The format in which a chat template reads messages, determined by rendering some.

    Templates differ: some put the content into the text as it is, some walk over its parts, some
    take both; the arguments of a tool call are an object for most of them and text for a few.
    """

    text_roles: tuple[str, ...]
    """Roles of messages whose content the template renders when it is text."""
    part_roles: tuple[str, ...]
    """Roles of messages whose content the template renders when it is a list of parts."""
    arguments: Literal["object", "text"] | None = None
    """Type of a tool call's arguments; None: the template renders no calls."""
    null_content: bool = False
    """Whether the content of a message with tool calls may be null."""
    empty_content: bool = True
    """Whether the content of a message with tool calls may be empty text."""
    developer: bool = False
    """Whether the template has the role "developer", which is otherwise sent as "system"."""
    turn_end: str = ""
    """Text after an answer, with which the model ends its turn."""
    calls_as_text: str = ""
    """Mark of the list of calls in the content, where calls are not rendered; the list is JSON, or
    Python after `PYTHON_CALLS`."""
    shows_tools: bool = True
    """Whether the template renders the tools that the model may call."""
    system_tools: Literal["beside", "within"] | None = None
    """Whether the template renders tools only beside a message of the system, or takes them from
    that message (GLM-4-9B)."""
    thinking_parts: bool = False
    """Whether thinking is rendered from parts of the assistant's content (Magistral)."""
    thinking_key: bool = False
    """Whether thinking before a call is its message's `thinking` (gpt-oss, LFM2.5)."""
    thinking_alone: bool = False
    """Whether there cannot be content beside this thinking (gpt-oss)."""
    named_calls: bool = False
    """Whether a call is a message whose `metadata` is the tool's name, and its result one of the
    role `observation` (GLM-4-0414)."""
    short_ids: bool = False
    """Whether ids of calls must have 9 letters and digits (Mistral)."""

    @property
    def shows_calls(self) -> bool:
        """Whether the template renders tool calls."""
        return self.arguments is not None or self.named_calls or bool(self.calls_as_text)

    def has_role(self, role: str) -> bool:
        """Return whether the template renders messages of a role."""
        return role in self.text_roles or role in self.part_roles

    def adapted(self, turn: Message) -> list[dict[str, Any]]:
        """Return a message as the message or messages that the template reads."""
        if not self.named_calls:
            return [self._adapted(turn)]
        if turn["role"] == "tool":
            return [self._adapted({**turn, "role": "observation"})]
        rest = {name: value for name, value in turn.items() if name != "tool_calls"}
        calls = [call["function"] for call in turn.get("tool_calls", ())]
        named = [
            {"role": "assistant", "metadata": call["name"], "content": as_text(call["arguments"])}
            for call in calls
        ]
        return [self._adapted(rest), *named] if turn["content"] or not named else named

    def _adapted(self, turn: Message) -> dict[str, Any]:
        made = dict(turn)
        if self.calls_as_text and "tool_calls" in made:
            made["content"] = self._calls_as_text(made["content"], made.pop("tool_calls"))
        if made["role"] == "developer" and not self.developer:
            made["role"] = "system"
        made["content"] = self._content(made["role"], made.get("content"), "tool_calls" in made)
        if "tool_calls" in made:
            made["tool_calls"] = [self._call(call) for call in made["tool_calls"]]
        if self.thinking_parts and (thought := made.pop("reasoning_content", None)):
            content = made["content"] or []
            parts = [part(content)] if isinstance(content, str) else content
            made["content"] = [thinking_part(thought), *parts]
        if self.thinking_key and (thought := made.pop("reasoning_content", None)):
            made["thinking"] = thought
            if self.thinking_alone and "tool_calls" in made and made["content"]:
                made["thinking"], made["content"] = f"{thought}\n\n{made['content']}", ""
        if thought := made.get("reasoning_content"):
            made["reasoning"] = thought  # the name that Gemma 4's template reads
        if self.short_ids and "tool_call_id" in made:
            made["tool_call_id"] = short_id(made["tool_call_id"])
        return made

    def _content(self, role: str, content: Any, with_calls: bool) -> Any:
        if with_calls and not content:
            if content is None:
                return None if self.null_content else ""
            return "" if self.empty_content else None
        if content is None:
            return ""
        if isinstance(content, str):
            wants_parts = role in self.part_roles and role not in self.text_roles
            return [part(content)] if wants_parts else content
        if self.thinking_parts and role in self.part_roles:
            return [part(piece) if isinstance(piece, str) else piece for piece in content]
        texts = [piece for piece in content if isinstance(piece, str)]
        return [part(text) for text in texts] if role in self.part_roles else "\n".join(texts)

    def _calls_as_text(self, content: Any, calls: Sequence[Mapping[str, Any]]) -> str:
        """Return the content with the calls appended in the model's format."""
        functions = [call["function"] for call in calls]
        listed = [{**each, "arguments": _as_object(each["arguments"])} for each in functions]
        texts = [content] if isinstance(content, str) else content or []
        written = to_json(listed)
        if self.calls_as_text == PYTHON_CALLS:
            written = f"[{', '.join(map(python_call, listed))}]<|tool_call_end|>"
        return "\n".join(texts) + self.calls_as_text + written

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        if self.arguments == "object":
            function["arguments"] = _as_object(function["arguments"])
        elif not isinstance(function["arguments"], str):
            function["arguments"] = to_json(function["arguments"])
        adapted = {**call, "function": function}
        if self.short_ids and "id" in adapted:
            adapted["id"] = short_id(adapted["id"])
        return adapted


def python_call(call: Mapping[str, Any]) -> str:
    """Return a call in Python's syntax, with strings as in JSON."""
    values = call["arguments"].items()
    named = (f"{name}={to_json(v) if isinstance(v, str) else repr(v)}" for name, v in values)
    return f"{call['name']}({', '.join(named)})"


def with_names_of_results(turns: Sequence[Message]) -> list[Message]:
    """Return the messages with the tool's name in each result that has only the id of its call.

    OpenAI's clients send no names, without which templates such as Functionary's refuse a result or
    write an unknown one.
    """
    names = {
        call.get("id"): call["function"]["name"]
        for turn in turns
        for call in turn.get("tool_calls") or ()
    }
    return [
        {**turn, "name": names[turn["tool_call_id"]]}
        if turn["role"] == "tool" and not turn.get("name") and turn.get("tool_call_id") in names
        else turn
        for turn in turns
    ]


def with_tools(
    turns: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    place: Literal["beside", "within"] | None,
) -> Sequence[Message]:
    """Return the messages with tools where the template has them; see
    `TemplateForm.system_tools`."""
    if place is None:
        return turns
    first, rest = turns[0], turns[1:]
    if first["role"] not in ("system", "developer"):
        first, rest = {"role": "system", "content": ""}, turns
    return [{**first, "tools": [*tools]} if place == "within" else first, *rest]


def short_id(id: str) -> str:
    """Return the id if it has 9 letters and digits, else one derived from it."""
    if len(id) == SHORT_ID and id.isalnum() and id.isascii():
        return id
    digest = hashlib.sha256(id.encode(errors="surrogatepass")).digest()
    return base64.b32encode(digest).decode()[:SHORT_ID]


def as_text(arguments: Any) -> str:
    """Return the arguments of a call as JSON."""
    return to_json(_as_object(arguments))


def _as_object(arguments: Any) -> Any:
    return arguments_object(arguments) if isinstance(arguments, str) else arguments


def part(text: str) -> dict[str, str]:
    """Return a part of a message that is text."""
    return {"type": "text", "text": text}


def thinking_part(text: str) -> dict[str, str]:
    """Return a part of a message that is thinking."""
    return {"type": "thinking", "thinking": text}


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON; unlike Jinja's own filter, without HTML escapes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
