"""The form in which a chat template reads messages."""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from twolane.frontend.parsers.json_call import arguments_object

Message = Mapping[str, Any]
SHORT_ID = 9
"""Characters of the ids that Mistral's templates take."""


class TemplateForm(msgspec.Struct, frozen=True):
    """The form in which a chat template reads messages, found by rendering some.

    Templates differ: some put the content into the text as it is, some walk over its parts, some
    take both; the arguments of a tool call are an object for most of them and text for a few.
    """

    text_roles: tuple[str, ...]
    """The template shows the content of messages of these roles when it is text."""
    part_roles: tuple[str, ...]
    """The template shows the content of messages of these roles when it is a list of parts."""
    arguments: Literal["object", "text"] | None = None
    """The template shows a tool call whose arguments have this form; None: it shows no calls."""
    null_content: bool = False
    """The template takes null as the content of a message with tool calls."""
    empty_content: bool = True
    """The template takes empty text as the content of a message with tool calls."""
    developer: bool = False
    """The template has a role "developer", which is sent as "system" to all others."""
    turn_end: str = ""
    """The text that follows an answer, with which the model ends its turn."""
    calls_as_text: str = ""
    """The mark of a list of calls that stands in the content, where no calls are shown."""
    shows_tools: bool = True
    """The template shows the tools that the model may call."""
    thinking_parts: bool = False
    """The template shows the assistant's thinking as parts of its content (Magistral)."""
    named_calls: bool = False
    """The template shows a call as a message whose `metadata` is the tool's name, and its result as
    one of the role `observation` (GLM-4-0414)."""
    short_ids: bool = False
    """The template refuses ids of calls that do not have 9 letters and digits (Mistral)."""

    @property
    def shows_calls(self) -> bool:
        """Whether the template shows tool calls at all."""
        return self.arguments is not None or self.named_calls or bool(self.calls_as_text)

    def adapted(self, turn: Message) -> list[dict[str, Any]]:
        """Return the message or messages that the template reads for one."""
        if not self.named_calls:
            return [self._adapted(turn)]
        if turn["role"] == "tool":
            return [self._adapted({**turn, "role": "observation"})]
        said = {name: value for name, value in turn.items() if name != "tool_calls"}
        calls = [call["function"] for call in turn.get("tool_calls", ())]
        named = [
            {"role": "assistant", "metadata": call["name"], "content": as_text(call["arguments"])}
            for call in calls
        ]
        return [self._adapted(said), *named] if turn["content"] or not named else named

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
            said = [part(content)] if isinstance(content, str) else content
            made["content"] = [thinking_part(thought), *said]
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
        """The content with the calls behind it, as the model has written them."""
        functions = [call["function"] for call in calls]
        listed = [{**each, "arguments": _as_object(each["arguments"])} for each in functions]
        texts = [content] if isinstance(content, str) else content or []
        return "\n".join(texts) + self.calls_as_text + to_json(listed)

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        if self.arguments == "object":
            function["arguments"] = _as_object(function["arguments"])
        elif not isinstance(function["arguments"], str):
            function["arguments"] = to_json(function["arguments"])
        made = {**call, "function": function}
        if self.short_ids and "id" in made:
            made["id"] = short_id(made["id"])
        return made


def short_id(given: str) -> str:
    """Return an id of 9 letters and digits: the given one if it is such, or one made of it."""
    if len(given) == SHORT_ID and given.isalnum() and given.isascii():
        return given
    digest = hashlib.sha256(given.encode(errors="surrogatepass")).digest()
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
    """Write JSON; unlike Jinja's own filter without escapes for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
