"""Request bodies of Anthropic's endpoints, and their conversion to chat requests."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError, model_validator

from twolane.frontend.body import Body, wrong
from twolane.frontend.fields import AnswerTokens, Priority, StopString, Temperature, TopK, TopP
from twolane.frontend.text.codec import SWITCHES
from twolane.frontend.text.stops import MAX_STRINGS
from twolane.server.anthropic.blocks import AnthropicMessage, Text, Turn
from twolane.server.http.errors import ApiError, ContextExceeded, from_validation
from twolane.server.openai.protocol import ChatRequest
from twolane.server.openai.tools import MAX_TOOLS, FunctionName

SAME = ("model", "temperature", "top_p", "top_k", "stream", "priority")
"""Fields that /v1/chat/completions has under the same name."""
RENAMED: Mapping[str, str] = {
    "messages": "messages",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
}
"""Names here of fields of /v1/chat/completions."""
BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")
"""Header that Claude Code puts before its system prompt: it is not for the model, and as it differs
between requests, it would keep the rest out of the prefix cache."""


class AnthropicTool(Body):
    """A tool that the client runs."""

    inert = frozenset(
        {
            *("cache_control", "input_examples", "allowed_callers"),
            *("defer_loading", "eager_input_streaming"),
        }
    )
    null_is_unset = True

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    def for_chat(self) -> dict[str, Any]:
        """Return the tool in the format of /v1/chat/completions."""
        function = {"name": self.name, "parameters": self.input_schema, "strict": self.strict}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function}


class ToolChoice(Body):
    """The choice of a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def name_where_it_belongs(self) -> "ToolChoice":
        """Refuse the type "tool" without a name, and a name with another type."""
        if (self.type == "tool") != (self.name is not None):
            raise wrong("name", 'is required with the type "tool", and only there')
        return self

    def for_chat(self) -> Any:
        """Return the choice in the format of /v1/chat/completions."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class Thinking(Body):
    """Whether the model thinks, and whether its thinking is shown."""

    inert = frozenset({"budget_tokens"})
    """Without effect: only `max_tokens` bounds the thinking."""

    type: Literal["enabled", "disabled", "adaptive"]
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Body):
    """The JSON schema that the answer follows."""

    null_is_unset = True

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """Effort and format of the answer."""

    null_is_unset = True

    effort: str | None = None
    format: OutputFormat | None = None


class KeptThinking(Body):
    """Number of answers whose thinking is kept in the conversation."""

    type: Literal["thinking_turns"]
    value: Annotated[int, Field(ge=1)]


class ContextEdit(Body):
    """An edit that removes the thinking of earlier answers from the conversation."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | KeptThinking = KeptThinking(type="thinking_turns", value=1)

    def apply(self, turns: Sequence[Turn]) -> None:
        """Remove the thinking from `turns`."""
        if self.keep == "all":
            return
        thinking = [turn for turn in turns if "reasoning_content" in turn]
        for turn in thinking[: -self.keep.value]:
            del turn["reasoning_content"]


class ContextManagement(Body):
    """Edits that shorten the conversation."""

    edits: list[ContextEdit] = Field(default_factory=list)


class CountTokensRequest(Body):
    """The body of POST /v1/messages/count_tokens."""

    inert = frozenset({"cache_control", "metadata", "service_tier"})
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "container": (),
        "diagnostics": (),
        "inference_geo": (),
        "mcp_servers": ([],),
        "speed": ("standard",),
        "thread": (),
    }

    model: str | None = None
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, fail_fast=True)]
    system: Text | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """Deprecated name of `output_config.format`."""
    context_management: ContextManagement | None = None

    @model_validator(mode="after")
    def one_form(self) -> "CountTokensRequest":
        """Refuse a format under both of its names."""
        config = self.output_config
        if self.output_format is not None and config is not None and config.format is not None:
            raise wrong("output_format", "cannot be combined with output_config.format")
        return self

    @property
    def shows_thinking(self) -> bool:
        """Whether the answer includes the thinking."""
        return self.thinking is None or self.thinking.display != "omitted"

    @property
    def shows_tools(self) -> bool:
        """Whether the model is told of tools."""
        none = self.tool_choice is not None and self.tool_choice.type == "none"
        return bool(self.tools) and not none

    def as_chat(self, has_variable: Callable[[str], bool]) -> ChatRequest:
        """Return the request as a request of /v1/chat/completions.

        Args:
            has_variable: says whether the chat template has a variable.

        Raises:
            ApiError: 400, it cannot be served; the field is named as it is here.
        """
        try:
            return ChatRequest.model_validate(self._chat_fields(has_variable))
        except ValidationError as error:
            raise renamed(from_validation(error.errors())) from error

    def _conversation(self) -> tuple[str, list[Turn]]:
        """Return the system message and the other messages.

        Claude Code says things as the system behind what its user says; models know one message of
        the system, in front, and some templates refuse others.
        """
        turns = [turn for message in self.messages for turn in message.turns()]
        texts = ["" if self.system is None else BILLING.sub("", self.system)]
        texts += [turn["content"] for turn in turns if turn["role"] == "system"]
        return "\n\n".join(filter(None, texts)), [t for t in turns if t["role"] != "system"]

    def _chat_fields(self, has_variable: Callable[[str], bool]) -> dict[str, Any]:
        system, turns = self._conversation()
        for edit in self.context_management.edits if self.context_management else ():
            edit.apply(turns)
        choice, config = self.tool_choice, self.output_config or OutputConfig()
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "system", "content": system}, *turns] if system else turns,
            "continue_final_message": continues(turns),
            "tools": [tool.for_chat() for tool in self.tools or ()] or None,
            "tool_choice": None if choice is None else choice.for_chat(),
            "parallel_tool_calls": not (choice and choice.disable_parallel_tool_use),
        }
        form = config.format or self.output_format
        if form is not None:
            schema = {"name": "answer", "schema": form.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        variables: dict[str, Any] = {}
        if config.effort is not None and has_variable("reasoning_effort"):
            variables["reasoning_effort"] = config.effort
        if self.thinking is not None:
            thinks = self.thinking.type != "disabled"
            variables |= {name: thinks for name in SWITCHES if not thinks or has_variable(name)}
        if variables:
            fields["chat_template_kwargs"] = variables
        return fields


class MessagesRequest(CountTokensRequest):
    """The body of POST /v1/messages."""

    max_tokens: AnswerTokens
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    priority: Priority | None = None
    stop_sequences: (
        Annotated[list[StopString], Field(max_length=MAX_STRINGS, fail_fast=True)] | None
    ) = None
    stream: bool | None = None

    def _chat_fields(self, has_variable: Callable[[str], bool]) -> dict[str, Any]:
        same = {name: getattr(self, name) for name in SAME}
        ends = {"max_tokens": self.max_tokens, "stop": self.stop_sequences}
        return {**super()._chat_fields(has_variable), **same, **ends}


def continues(turns: Sequence[Turn]) -> bool:
    """Return whether the answer continues the last message, a text of the assistant."""
    last = turns[-1] if turns else {"role": "system"}
    return last["role"] == "assistant" and "content" in last and "tool_calls" not in last


def renamed(error: ApiError) -> ApiError:
    """Return an error of the chat request under the field's name here."""
    param = error.param or ""
    old = re.split(r"[.\[]", param)[0]
    new = RENAMED.get(old) or param.replace(".function.parameters", ".input_schema")
    new = new.replace(".function.", ".")
    if new == param and not isinstance(error, ContextExceeded):
        return error
    message = error.in_anthropic_words if isinstance(error, ContextExceeded) else error.message
    return error.about(new, message.replace(param, new))
