"""Messages of /v1/messages, converted to those of /v1/chat/completions."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator, TypeAdapter, WithJsonSchema
from pydantic_core import PydanticCustomError

from twolane.frontend.body import PROXIES, Body, wrong

Turn = dict[str, Any]
"""A message of /v1/chat/completions."""


class ContentBlock(Body):
    """A block of a message's content."""

    inert = PROXIES | {"cache_control", "caller", "citations", "toolset_name"}
    null_is_unset = True


class TextBlock(ContentBlock):
    """A piece of text."""

    type: Literal["text"]
    text: str


class TextSource(Body):
    """The text of a document."""

    type: Literal["text"]
    media_type: Literal["text/plain"] = "text/plain"
    data: str


class DocumentBlock(ContentBlock):
    """A text document; its title and context are put before it."""

    inert = ContentBlock.inert - {"citations"}
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"citations": ({"enabled": False}, {})}

    type: Literal["document"]
    source: TextSource
    title: str | None = None
    context: str | None = None

    @property
    def text(self) -> str:
        """Text that the model reads."""
        return "\n".join(filter(None, [self.title, self.context, self.source.data]))


class SearchResultBlock(ContentBlock):
    """A passage that a search of the client's found; its title and source are put before it."""

    inert = ContentBlock.inert - {"citations"}
    unsupported = DocumentBlock.unsupported

    type: Literal["search_result"]
    title: str
    source: str
    content: Annotated[list[TextBlock], Field(min_length=1, fail_fast=True)]

    @property
    def text(self) -> str:
        """Text that the model reads."""
        return "\n".join([self.title, self.source, *(block.text for block in self.content)])


class ToolReferenceBlock(ContentBlock):
    """A tool found by a tool search; the model knows all tools of the request anyway."""

    type: Literal["tool_reference"]
    tool_name: str

    @property
    def text(self) -> str:
        """Text that the model reads: the tool's name."""
        return self.tool_name


class ThinkingBlock(ContentBlock):
    """Thinking of an earlier answer; redacted thinking is not shown to the model."""

    inert = ContentBlock.inert | {"signature", "data"}

    type: Literal["thinking", "redacted_thinking"]
    thinking: str = ""


class ToolUseBlock(ContentBlock):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


def _list_of(kinds: Mapping[str, type[Body]]) -> TypeAdapter[Any]:
    """Return a validator of lists of these block types; other types are refused by name."""

    def block(value: Any) -> Body:
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(kind, str) or kind not in kinds:
            raise wrong("type", f"must be one of {', '.join(kinds)}", "unsupported_field")
        return kinds[kind].model_validate(value)

    return TypeAdapter(
        Annotated[list[Annotated[Any, PlainValidator(block)]], Field(fail_fast=True)]
    )


TextualBlock = TextBlock | DocumentBlock | SearchResultBlock
"""Blocks with text, in messages and in results of tools."""
TEXTUAL: Mapping[str, type[Body]] = {
    "text": TextBlock,
    "document": DocumentBlock,
    "search_result": SearchResultBlock,
}
_TEXTS: TypeAdapter[list[TextBlock]] = _list_of({"text": TextBlock})
_TEXTUAL: TypeAdapter[list[TextualBlock | ToolReferenceBlock]] = _list_of(
    {**TEXTUAL, "tool_reference": ToolReferenceBlock}
)


def _joined(value: Any, form: TypeAdapter[Any]) -> str:
    """Return a string, or the texts of a list of blocks joined by newlines."""
    if isinstance(value, str) or value is None:
        return value or ""
    if not isinstance(value, list):
        text = "must be a string or a list of blocks of text"
        raise PydanticCustomError("invalid_value", "{text}", {"text": text})
    return "\n".join(block.text for block in form.validate_python(value))


TEXT_SCHEMA = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]
}
Text = Annotated[
    str, PlainValidator(lambda value: _joined(value, _TEXTS)), WithJsonSchema(TEXT_SCHEMA)
]
ResultText = Annotated[
    str, PlainValidator(lambda value: _joined(value, _TEXTUAL)), WithJsonSchema(TEXT_SCHEMA)
]


class ToolResultBlock(ContentBlock):
    """The result of a tool call."""

    inert = ContentBlock.inert | {"is_error"}
    """`is_error` is not shown: chat templates have no place for it."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: ResultText = ""


Block = TextualBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock
_BLOCKS: TypeAdapter[list[Block]] = _list_of(
    {
        **TEXTUAL,
        "thinking": ThinkingBlock,
        "redacted_thinking": ThinkingBlock,
        "tool_use": ToolUseBlock,
        "tool_result": ToolResultBlock,
    }
)


def _content(value: Any) -> list[Block]:
    if isinstance(value, str):
        return [TextBlock(type="text", text=value)]
    if not isinstance(value, list):
        raise wrong("content", "must be a string or a list of blocks")
    return _BLOCKS.validate_python(value)


class AnthropicMessage(Body):
    """A message of a conversation."""

    null_is_unset = True

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], PlainValidator(_content), WithJsonSchema(TEXT_SCHEMA)]

    def turns(self) -> list[Turn]:
        """Return the turn as chat messages: tool results first, then text."""
        if self.role == "assistant":
            return [self._answer()]
        results = [
            {"role": "tool", "tool_call_id": block.tool_use_id, "content": block.content}
            for block in self.content
            if isinstance(block, ToolResultBlock)
        ]
        messages = [{"role": self.role, "content": text}] if (text := joined(self.content)) else []
        return [*results, *messages] or [{"role": self.role, "content": ""}]

    def _answer(self) -> Turn:
        thinking = [block.thinking for block in self.content if isinstance(block, ThinkingBlock)]
        calls = [
            {
                "id": block.id,
                "type": "function",
                "function": {"name": block.name, "arguments": block.input},
            }
            for block in self.content
            if isinstance(block, ToolUseBlock)
        ]
        fields = {
            "content": joined(self.content),
            "reasoning_content": "\n".join(filter(None, thinking)),
            "tool_calls": calls,
        }
        return {"role": "assistant", **{name: value for name, value in fields.items() if value}}


def joined(blocks: Sequence[Block]) -> str:
    """Return the texts of the text blocks, joined by newlines."""
    texts = (block for block in blocks if isinstance(block, TextualBlock))
    return "\n".join(block.text for block in texts)
