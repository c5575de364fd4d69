"""Items of /v1/responses, and their conversion to chat messages."""

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import Field, PlainValidator, TypeAdapter, WithJsonSchema

from twolane.frontend.body import PROXIES, Body, wrong
from twolane.server.responses.tools import CUSTOM_INPUT, ResponseTools, qualified

Turn = dict[str, Any]
"""A message of /v1/chat/completions."""
ITEM_INERT = PROXIES | {"phase", "caller", "async", "created_by"}
"""Fields of items that the model does not see."""
PREFIX: Mapping[str, str] = {
    "reasoning": "rs",
    "message": "msg",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "function_call_output": "fco",
    "custom_tool_call_output": "ctco",
    "agent_message": "amsg",
    "additional_tools": "at",
}
"""What the ids of items begin with, by kind."""
MAX_ID_LENGTH = 128
"""Most characters of a client's id of an item; items with a longer one get a new one."""
STATUSES = ("in_progress", "completed", "incomplete")


class TextPart(Body):
    """A piece of text in a message, in thinking or in a tool's output."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = dict.fromkeys(
        ("image_url", "file_id", "file_data", "file_url", "detail", "input_audio"), ()
    )
    why_unsupported = dict.fromkeys(unsupported, "is not supported: prompts are text")
    inert = PROXIES | {"annotations", "logprobs", "prompt_cache_breakpoint"}
    null_is_unset = True

    type: Literal["input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text"]
    text: str | None = None
    refusal: str | None = None

    @property
    def shown(self) -> str:
        """Text of the part."""
        return self.text or self.refusal or ""


class AgentPart(Body):
    """A part of a message from another agent."""

    inert = frozenset({"annotations", "prompt_cache_breakpoint"})
    null_is_unset = True

    type: Literal["input_text", "encrypted_content"]
    text: str | None = None
    encrypted_content: str | None = None
    """Plain text: Codex puts the model's text here, which only OpenAI's models encrypt."""

    @property
    def shown(self) -> str:
        """Text of the part."""
        return self.text or self.encrypted_content or ""


Parts = Annotated[list[TextPart], Field(fail_fast=True)]
_PARTS = TypeAdapter(Parts)


def _text(value: Any) -> str | list[TextPart]:
    """Validate a string or a list of parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong("text", "must be a string or a list of parts of text")
    return _PARTS.validate_python(value)


Text = Annotated[
    str | list[TextPart],
    PlainValidator(_text),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}),
]


def shown(text: str | Sequence[TextPart | AgentPart]) -> str:
    """Return a string, or the texts of parts joined by newlines."""
    return text if isinstance(text, str) else "\n".join(part.shown for part in text)


def set_fields(body: Body) -> dict[str, Any]:
    """Return the fields of an object that are not null, as they are: pydantic's serializer takes
    milliseconds for each list of `PlainValidator` objects."""
    return {name: value for name, value in body if value is not None}


class InputItem(Body):
    """An item, with the fields of its own that the model does not see and lists of items show."""

    inert = ITEM_INERT
    null_is_unset = True

    id: Any = None
    status: Any = None

    def listed(self) -> dict[str, Any]:
        """Return the item as a list of a response's inputs shows it: with an id and a status, and
        without the fields that have no effect."""
        fields = set_fields(self)
        fields.pop("id", None)
        fields.pop("status", None)
        for name, value in fields.items():
            if isinstance(value, list):
                fields[name] = list(map(set_fields, value))
        kept = isinstance(self.id, str) and 0 < len(self.id) <= MAX_ID_LENGTH
        id = self.id if kept else f"{PREFIX[fields['type']]}_{uuid.uuid4().hex}"
        status = self.status if self.status in STATUSES else "completed"
        return {"id": id, **fields, "status": status}


class MessageItem(InputItem):
    """A message of any role."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text

    def turn(self) -> Turn:
        """Return the item as a message."""
        return {"role": self.role, "content": shown(self.content)}

    def listed(self) -> dict[str, Any]:
        """See `InputItem.listed`; the content is a list of parts."""
        item = super().listed()
        if isinstance(self.content, str):
            kind = "output_text" if self.role == "assistant" else "input_text"
            item["content"] = [{"type": kind, "text": self.content}]
        for part in item["content"]:
            if part["type"] == "output_text":
                part |= {"annotations": [], "logprobs": []}
        return item


class ReasoningItem(InputItem):
    """The thinking of an earlier answer."""

    inert = ITEM_INERT | {"encrypted_content"}

    type: Literal["reasoning"]
    summary: Parts | None = None
    content: Parts | None = None

    def turn(self) -> Turn:
        """Return the item as a message, to be merged with its neighbours."""
        return {"role": "assistant", "reasoning_content": shown(self.content or self.summary or ())}

    def listed(self) -> dict[str, Any]:
        """See `InputItem.listed`."""
        return {"summary": [], **super().listed()}


class FunctionCallItem(InputItem):
    """A call of a function that an earlier answer made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None

    def turn(self) -> Turn:
        """Return the item as a message, to be merged with its neighbours."""
        return _calling(self.call_id, qualified(self.namespace, self.name), self.arguments)


class CustomCallItem(InputItem):
    """A call of a tool with free text as input."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    namespace: str | None = None

    def turn(self) -> Turn:
        """Return the item as a message, to be merged with its neighbours."""
        arguments = msgspec.json.encode({CUSTOM_INPUT: self.input}).decode()
        return _calling(self.call_id, qualified(self.namespace, self.name), arguments)


class OutputItem(InputItem):
    """The output of a tool call."""

    inert = ITEM_INERT | {"name", "namespace"}

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Text

    def turn(self) -> Turn:
        """Return the item as a message."""
        return {"role": "tool", "tool_call_id": self.call_id, "content": shown(self.output)}


class AgentMessageItem(InputItem):
    """A message from another agent of the client (Codex)."""

    type: Literal["agent_message"]
    author: str | None = None
    recipient: str | None = None
    content: str | Annotated[list[AgentPart], Field(fail_fast=True)] | None = None

    def turn(self) -> Turn:
        """Return the item as a user message that names its author."""
        whose = f"Message from {self.author} to {self.recipient}:\n" if self.author else ""
        return {"role": "user", "content": whose + shown(self.content or "")}


class ToolsItem(InputItem):
    """Tools among the items instead of in `tools` (Codex)."""

    inert = ITEM_INERT | {"role"}

    type: Literal["additional_tools"]
    tools: ResponseTools

    def listed(self) -> dict[str, Any]:
        """See `InputItem.listed`."""
        tools = [tool.repeated for tool in self.tools]
        return {**super().listed(), "role": "developer", "tools": tools}


class ReferenceItem(Body):
    """An item of a response that is still in memory."""

    type: Literal["item_reference"] = "item_reference"
    id: str


MessagePart = (
    MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem | OutputItem | AgentMessageItem
)
"""Items that become messages or parts of them."""
Item = MessagePart | ToolsItem | ReferenceItem
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
    """Validate an item; an error names its field."""
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
    """Return messages with the parts of each answer merged, and likewise the first instructions.

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
