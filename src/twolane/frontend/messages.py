"""Messages of a conversation in OpenAI's API, validated for the chat template.

What an answer's message contains may be sent back in the history: its tool calls, its reasoning,
and the fields that are null.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    Field,
    TypeAdapter,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from twolane.frontend.body import PROXIES, Body, one_message, wrong
from twolane.frontend.text.template_form import thinking_part

Turn = dict[str, Any]
"""A message in a common format for all templates: `content` is text, a list of texts and of parts
that are thinking, or None."""


class Part(Body):
    """A part of a message: text, a refusal, or thinking (Mistral's models)."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "image_url": (),
        "image": (),
        "source": (),
        "input_audio": (),
        "video_url": (),
        "audio_url": (),
        "file": (),
    }
    why_unsupported = dict.fromkeys(unsupported, "is not supported: prompts are text")
    inert = PROXIES | {"annotations", "cache_control", "closed", "logprobs", "signature"}
    null_is_unset = True

    type: Literal["text", "refusal", "input_text", "output_text", "thinking"]
    """Type of the part; `input_text` and `output_text` are those of text in the Responses API."""
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None

    @model_validator(mode="after")
    def has_its_text(self) -> "Part":
        """Require the field that the part's type names."""
        named = self.type if self.type in ("refusal", "thinking") else "text"
        if getattr(self, named) is None:
            raise wrong(named, "is required")
        return self

    @property
    def shown(self) -> str | dict[str, str]:
        """Text of the part, or the part itself if it is thinking."""
        if self.type == "thinking":
            return thinking_part(self.thinking or "")
        return self.text if self.text is not None else self.refusal or ""


Parts = Annotated[list[Part], Field(fail_fast=True)]
_PARTS = TypeAdapter(Parts)


def _content(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Validate a list as parts, so that errors name the part's field, and anything else as text."""
    if isinstance(value, list):
        return _PARTS.validate_python(value)
    if value is None or isinstance(value, str):
        return handler(value)
    text = 'must be a string or a list of parts {"type": "text", "text": …}'
    raise PydanticCustomError("invalid_value", "{text}", {"text": text})


Arguments = Annotated[str | dict[str, Any], one_message("must be a JSON object or a text of one")]


class FunctionCall(Body):
    """The function and arguments of a tool call."""

    inert = frozenset({"parsed_arguments", "provider_specific_fields"})
    """Fields that OpenAI's client adds to answers."""
    null_is_unset = True

    name: str
    arguments: Arguments | None = None


class MessageToolCall(Body):
    """A tool call of the assistant."""

    inert = PROXIES | {"index", "cache_control"}
    """Fields that clients and their proxies add to a history."""
    null_is_unset = True

    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall

    def for_template(self) -> dict[str, Any]:
        """Return the call with its arguments as given; templates convert them."""
        call: dict[str, Any] = {"type": "function"}
        if self.id is not None:
            call["id"] = self.id
        call["function"] = {"name": self.function.name, "arguments": self.function.arguments or {}}
        return call


class Message(Body):
    """One turn of a conversation."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "audio": (),
        "function_call": (),
        "images": ([],),
    }
    inert = PROXIES | {
        *("annotations", "cache_control", "parsed", "id"),
        *("reasoning_details", "thinking_blocks"),
    }
    """Fields that clients and their proxies add to a history; the last two repeat the reasoning."""
    null_is_unset = True

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | Parts | None, WrapValidator(_content)] = None
    name: str | None = None
    tool_calls: Annotated[list[MessageToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def fields_fit_the_role(self) -> "Message":
        """Refuse an empty message, and fields of other roles."""
        if self.role != "assistant":
            if self.content is None and self.role != "tool":  # a tool may return nothing
                raise wrong("content", "is required")
            if self.thoughts and self.role not in ("system", "developer"):
                raise wrong("content", "has thinking, but is not of the assistant or the system")
            for name in ("tool_calls", "reasoning_content", "reasoning", "refusal"):
                if getattr(self, name):
                    raise wrong(name, "belongs to messages of the assistant only")
        if self.tool_call_id is not None and self.role != "tool":
            raise wrong("tool_call_id", "belongs to messages of a tool only")
        return self

    @property
    def thoughts(self) -> str:
        """Thinking parts of the content, joined by newlines."""
        parts = self.content if isinstance(self.content, list) else ()
        return "\n".join(part.thinking for part in parts if part.thinking)

    def for_template(self) -> Turn:
        """Return the message in the form of `ChatTemplate.render`."""
        turn: Turn = {"role": self.role, "content": self._content()}
        reasoning = self.reasoning_content or self.reasoning
        if self.role == "assistant" and isinstance(turn["content"], list):
            turn["content"] = [part for part in turn["content"] if isinstance(part, str)]
            reasoning = reasoning or self.thoughts
        calls = [call.for_template() for call in self.tool_calls or ()]
        others = {
            "name": self.name,
            "tool_calls": calls or None,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": reasoning or None,
        }
        return turn | {name: value for name, value in others.items() if value is not None}

    def _content(self) -> str | list[str | dict[str, str]] | None:
        if isinstance(self.content, list):
            return [part.shown for part in self.content]
        return self.refusal if not self.content and self.refusal else self.content


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True)]


def turns_of(messages: Sequence[Message]) -> list[Turn]:
    """Return the messages in the form of `ChatTemplate.render`."""
    return [message.for_template() for message in messages]
