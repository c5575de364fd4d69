"""Request bodies of Anthropic's endpoints, and their conversion to requests."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec.structs import replace
from pydantic import Field, ValidationError, model_validator

from twolane.frontend import fields
from twolane.frontend.answer_formats import FormatOptions
from twolane.frontend.body import Body, wrong
from twolane.frontend.generate_request import (
    NO_DEFAULTS,
    ContextExceeded,
    GenerateRequest,
    sampling_params,
)
from twolane.frontend.messages import Turn
from twolane.frontend.structured import jobs
from twolane.frontend.structured.tools import Tool
from twolane.frontend.text.codec import EFFORTS, NO_THINKING, SWITCHES
from twolane.frontend.text.output_reader import TextOptions
from twolane.frontend.text.stops import MAX_STRINGS
from twolane.sampling import SamplingParams
from twolane.server.anthropic.blocks import AnthropicMessage, Text
from twolane.server.http.errors import ApiError, from_validation

SAMPLED = ("temperature", "top_p", "top_k", "max_tokens")
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
    name: fields.FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    def tool(self) -> Tool:
        """Return the tool for templates, grammars and parsers."""
        return Tool(self.name, self.input_schema, bool(self.strict), self.description)


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
    tools: (
        Annotated[list[AnthropicTool], Field(max_length=fields.MAX_TOOLS, fail_fast=True)] | None
    ) = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """Deprecated name of `output_config.format`."""
    context_management: ContextManagement | None = None

    @model_validator(mode="after")
    def fields_agree(self) -> "CountTokensRequest":
        """Refuse a format under both of its names, and tools that differ under one name."""
        config = self.output_config
        if self.output_format is not None and config is not None and config.format is not None:
            raise wrong("output_format", "cannot be combined with output_config.format")
        choice = self.tool_choice
        chosen = [choice.name] if choice is not None and choice.name is not None else []
        needed = choice is not None and choice.type in ("any", "tool")
        fields.check_tools(self._tools, chosen, needed=needed)
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

    @property
    def _tools(self) -> list[Tool]:
        return [tool.tool() for tool in self.tools or ()]

    def request(
        self, has_variable: Callable[[str], bool], defaults: Mapping[str, Any] = NO_DEFAULTS
    ) -> GenerateRequest:
        """Return the request of a conversation.

        Args:
            has_variable: says whether the chat template has a variable.
            defaults: sampling parameters of requests that say nothing of them.

        Raises:
            ApiError: 400, a message cannot be served.
        """
        system, turns = self._conversation()
        for edit in self.context_management.edits if self.context_management else ():
            edit.apply(turns)
        messages = [{"role": "system", "content": system}, *turns] if system else turns
        conversation = fields.Rendering(continue_final_message=continues(turns)).conversation(
            validated_turns(messages)
        )
        variables = self._variables(has_variable)
        return GenerateRequest(
            prompt_field="messages",
            conversation=replace(conversation, variables=variables or None),
            format=self._format,
            sampling=self.sampling(defaults),
            adapter=self.model,
        )

    def sampling(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Return the sampling parameters."""
        return sampling_params({}, defaults)

    def _conversation(self) -> tuple[str, list[Turn]]:
        """Return the system message and the other messages.

        Claude Code says things as the system after what its user says; models know one message of
        the system, in front, and some templates refuse others.
        """
        turns = [turn for message in self.messages for turn in message.turns()]
        texts = ["" if self.system is None else BILLING.sub("", self.system)]
        texts += [turn["content"] for turn in turns if turn["role"] == "system"]
        return "\n\n".join(filter(None, texts)), [t for t in turns if t["role"] != "system"]

    @property
    def _format(self) -> FormatOptions:
        form = self.output_format if self.output_config is None else self.output_config.format
        form, choice = form or self.output_format, self.tool_choice
        mode = None if choice is None else choice.type
        return FormatOptions.of(
            self._tools,
            "required" if mode == "any" else mode,
            None if form is None else ("output_config.format", jobs.Schema(form.schema_)),
            named=None if choice is None else choice.name,
            several=not (choice and choice.disable_parallel_tool_use),
        )

    def _variables(self, has_variable: Callable[[str], bool]) -> dict[str, Any]:
        """Return the chat template's variables."""
        variables: dict[str, Any] = {}
        effort = None if self.output_config is None else self.output_config.effort
        if effort is not None:
            variables |= {name: effort for name in EFFORTS if has_variable(name)}
        if self.thinking is not None:
            thinks = self.thinking.type != "disabled"
            variables |= {name: thinks for name in SWITCHES if not thinks or has_variable(name)}
            if not thinks:
                variables |= {name: v for name, v in NO_THINKING.items() if has_variable(name)}
        return variables


class MessagesRequest(CountTokensRequest):
    """The body of POST /v1/messages."""

    max_tokens: fields.AnswerTokens
    temperature: fields.Temperature | None = None
    top_p: fields.TopP | None = None
    top_k: fields.TopK | None = None
    priority: fields.Priority | None = None
    stop_sequences: (
        Annotated[list[fields.StopString], Field(max_length=MAX_STRINGS, fail_fast=True)] | None
    ) = None
    stream: bool | None = None

    def sampling(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """See `CountTokensRequest.sampling`."""
        given = {name: getattr(self, name) for name in SAMPLED}
        return sampling_params(given, defaults)

    def request(
        self, has_variable: Callable[[str], bool], defaults: Mapping[str, Any] = NO_DEFAULTS
    ) -> GenerateRequest:
        """See `CountTokensRequest.request`."""
        return replace(
            super().request(has_variable, defaults),
            text=TextOptions(stop=tuple(self.stop_sequences or ())),
            limit_field="max_tokens",
            priority=self.priority or 0,
            stream=bool(self.stream),
        )


def continues(turns: Sequence[Turn]) -> bool:
    """Return whether the answer continues the last message, a text of the assistant."""
    last = turns[-1] if turns else {"role": "system"}
    return last["role"] == "assistant" and "content" in last and "tool_calls" not in last


def validated_turns(messages: Sequence[Turn]) -> list[Turn]:
    """Return converted messages after the checks of all conversations.

    Raises:
        ApiError: 400, one cannot be served.
    """
    try:
        return fields.read_turns(messages)
    except ValidationError as error:
        raise from_validation(error.errors(), "messages") from error


def in_own_words(error: ContextExceeded) -> ApiError:
    """Return an error in the words of Anthropic's API, by which clients shorten a conversation."""
    field, context = error.field, error.context
    message = f"prompt is too long: {error.tokens} tokens > {context} maximum"
    if error.wanted is not None:
        message = (
            f"input length and `{field}` exceed context limit: {error.tokens} + {error.wanted} > "
            f"{context}, decrease input length or `{field}` and try again"
        )
    return ApiError(400, message, code="context_length_exceeded", param=field)
