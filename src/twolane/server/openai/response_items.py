"""The items of /v1/responses: what a conversation consists of, and as which messages it is read."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import Field, PlainValidator, TypeAdapter, WithJsonSchema

from twolane.frontend.body import Body, wrong
from twolane.server.openai.response_tools import CUSTOM_INPUT, ResponseTools, qualified

Turn = dict[str, Any]
"""A message in the form of /v1/chat/completions."""
ITEM_INERT = frozenset({"id", "status", "phase", "caller", "async", "created_by"})
"""Fields of items that say nothing to the model."""


class TextPart(Body):
    """A piece of text in a message, in thinking or in a tool's output."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "image_url": (),
        "file_id": (),
        "file_data": (),
        "file_url": (),
        "detail": (),
        "input_audio": (),
    }
    why_unsupported = dict.fromkeys(unsupported, "is not supported: prompts are text")
    inert = frozenset({"annotations", "logprobs", "prompt_cache_breakpoint"})
    null_says_nothing = True

    type: Literal["input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text"]
    text: str | None = None
    refusal: str | None = None

    @property
    def shown(self) -> str:
        """What the part says."""
        return self.text or self.refusal or ""


class AgentPart(Body):
    """A piece of what an agent wrote to another one."""

    inert = frozenset({"annotations", "prompt_cache_breakpoint"})
    null_says_nothing = True

    type: Literal["input_text", "encrypted_content"]
    text: str | None = None
    encrypted_content: str | None = None
    """Text: Codex puts here what the model has written, which only OpenAI's models encrypt."""

    @property
    def shown(self) -> str:
        """What the part says."""
        return self.text or self.encrypted_content or ""


Parts = Annotated[list[TextPart], Field(fail_fast=True)]
_PARTS = TypeAdapter(Parts)


def _text(value: Any) -> str:
    """Read a text, or a list of parts that are joined by new lines."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong("text", "must be a string or a list of parts of text")
    return "\n".join(part.shown for part in _PARTS.validate_python(value))


Text = Annotated[
    str,
    PlainValidator(_text),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}),
]


class MessageItem(Body):
    """A message of anybody."""

    inert = ITEM_INERT
    null_says_nothing = True

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text

    def turn(self) -> Turn:
        """Return the message that the item is."""
        return {"role": self.role, "content": self.content}


class ReasoningItem(Body):
    """The thinking of an earlier answer."""

    inert = ITEM_INERT | {"encrypted_content"}
    null_says_nothing = True

    type: Literal["reasoning"]
    summary: Parts | None = None
    content: Parts | None = None

    def turn(self) -> Turn:
        """Return the message that the item is part of."""
        parts = self.content or self.summary or ()
        return {"role": "assistant", "reasoning_content": "\n".join(p.shown for p in parts)}


class FunctionCallItem(Body):
    """A call of a function that an earlier answer made."""

    inert = ITEM_INERT
    null_says_nothing = True

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None

    def turn(self) -> Turn:
        """Return the message that the item is part of."""
        return _calling(self.call_id, qualified(self.namespace, self.name), self.arguments)


class CustomCallItem(Body):
    """A call of a tool that takes free text."""

    inert = ITEM_INERT
    null_says_nothing = True

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    namespace: str | None = None

    def turn(self) -> Turn:
        """Return the message that the item is part of."""
        arguments = msgspec.json.encode({CUSTOM_INPUT: self.input}).decode()
        return _calling(self.call_id, qualified(self.namespace, self.name), arguments)


class OutputItem(Body):
    """What a called tool returned."""

    inert = ITEM_INERT | {"name", "namespace"}
    null_says_nothing = True

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Text

    def turn(self) -> Turn:
        """Return the message that the item is."""
        return {"role": "tool", "tool_call_id": self.call_id, "content": self.output}


class AgentMessageItem(Body):
    """What another agent of the client wrote to this one (Codex)."""

    inert = ITEM_INERT
    null_says_nothing = True

    type: Literal["agent_message"]
    author: str | None = None
    recipient: str | None = None
    content: str | Annotated[list[AgentPart], Field(fail_fast=True)] | None = None

    def turn(self) -> Turn:
        """Return the message that the item is: the user's, who says whose it is."""
        parts = self.content or ""
        said = parts if isinstance(parts, str) else "\n".join(part.shown for part in parts)
        whose = f"Message from {self.author} to {self.recipient}:\n" if self.author else ""
        return {"role": "user", "content": whose + said}


class ToolsItem(Body):
    """Tools that are given among the items instead of in `tools` (Codex)."""

    inert = ITEM_INERT | {"role"}
    null_says_nothing = True

    type: Literal["additional_tools"]
    tools: ResponseTools


class ReferenceItem(Body):
    """An item of a response that is still in memory."""

    type: Literal["item_reference"] = "item_reference"
    id: str


Said = (
    MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem | OutputItem | AgentMessageItem
)
"""The items that are, or are part of, messages."""
Item = Said | ToolsItem | ReferenceItem
ITEMS: Mapping[str, Callable[[Any], Item]] = {
    "message": MessageItem.model_validate,
    "reasoning": ReasoningItem.model_validate,
    "function_call": FunctionCallItem.model_validate,
    "custom_tool_call": CustomCallItem.model_validate,
    "function_call_output": OutputItem.model_validate,
    "custom_tool_call_output": OutputItem.model_validate,
    "agent_message": AgentMessageItem.model_validate,
    "additional_tools": ToolsItem.model_validate,
    "item_reference": ReferenceItem.model_validate,
}


def read_item(value: Any) -> Item:
    """Read an item; an error names its field."""
    kind = "message"
    if isinstance(value, dict):
        kind = value.get("type") or ("item_reference" if value.keys() == {"id"} else "message")
    read = ITEMS.get(kind) if isinstance(kind, str) else None
    if read is None:
        raise wrong("type", f"must be one of {', '.join(ITEMS)}", "unsupported_field")
    return read(value)


Items = Annotated[
    list[Annotated[Item, PlainValidator(read_item), WithJsonSchema({"type": "object"})]],
    Field(min_length=1, fail_fast=True),
]


def _calling(id: str, name: str, arguments: str) -> Turn:
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "tool_calls": [{"id": id, "type": "function", "function": function}],
    }


def joined(turns: list[Turn]) -> list[Turn]:
    """Return messages in which the parts of one answer are one, and so are the first instructions.

    An answer is thinking, then text, then calls. Chat templates take one system message, at the
    beginning.
    """
    made: list[Turn] = []
    for turn in turns:
        last = made[-1] if made else {}
        if turn["role"] == last.get("role") == "assistant" and _continues(last, turn):
            calls = [*last.get("tool_calls", ()), *turn.get("tool_calls", ())]
            made[-1] = last | turn | ({"tool_calls": calls} if calls else {})
        elif len(made) == 1 and {turn["role"], last["role"]} <= {"system", "developer"}:
            made[0] = {"role": "system", "content": f"{last['content']}\n\n{turn['content']}"}
        else:
            made.append(turn)
    return made


def _continues(answer: Turn, turn: Turn) -> bool:
    if "reasoning_content" in turn:
        return False
    return "tool_calls" in turn or not (answer.keys() & {"content", "tool_calls"})
