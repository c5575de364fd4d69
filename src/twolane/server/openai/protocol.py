"""Request bodies of OpenAI's API: honoured, accepted and refused fields.

`Body` subclasses hold the fields that are honoured. `UNSUPPORTED` holds the fields that OpenAI or
vLLM know and this server does not serve: they may be sent with a neutral value, which changes
nothing, and are refused by name with any other. `INERT` fields say nothing about the answer.
Every other field is unknown and refused. docs/guides/api.md has the table of all of them.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import ConfigDict, model_validator

from twolane.frontend.answer_formats import FormatOptions
from twolane.frontend.body import Body, wrong
from twolane.frontend.fields import (
    INERT,
    Count,
    LimitedFields,
    LogprobCount,
    Priority,
    Prompts,
    Rendering,
    TextFields,
    TokenIds,
    Whole,
    check_tools,
    prompt_list,
)
from twolane.frontend.generate_request import NO_DEFAULTS, GenerateRequest, sampling_params
from twolane.frontend.messages import Messages, turns_of
from twolane.sampling import SamplingParams
from twolane.server.openai.structured import ConstraintFields
from twolane.server.openai.tools import ToolChoice, Tools, chosen_tools

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "spaces_between_special_tokens": (True,),
    "guided_whitespace_pattern": (),
    "logits_processors": ([],),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    "request_id": (),
}
"""Refused fields of both endpoints, with their neutral values; null is always neutral."""

UNSUPPORTED_CHAT: Mapping[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "moderation": (),
    "audio": (),
    "prediction": (),
    "include_reasoning": (True,),
    "verbosity": ("medium",),
    "web_search_options": (),
    "echo": (False,),
    "documents": ([],),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
}
UNSUPPORTED_COMPLETION: Mapping[str, tuple[Any, ...]] = {"suffix": ("",), "prompt_embeds": ()}
TEXT_ALONE = "is not supported: answers are text"

WHY_UNSUPPORTED: Mapping[str, str] = {
    "chat_template": "is not supported: only the model's own template is used",
    "guided_whitespace_pattern": "is not supported: white space is fixed",
    "request_id": "is not supported: send the header X-Request-Id",
    "functions": "is not supported: send tools",
    "function_call": "is not supported: send tool_choice",
    "documents": "is not supported: put them into messages",
    "modalities": TEXT_ALONE,
    "audio": TEXT_ALONE,
    "web_search_options": "is not supported: tools run in the client",
}

WITHOUT_EFFECT = INERT | {"guided_decoding_backend"}
"""Fields of both endpoints that are accepted with any value."""
DEFAULT_MAX_TOKENS = 16
"""Default limit on a completion's tokens, as in OpenAI's API."""


class StreamOptions(Body):
    """Additions to a stream."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"include_obfuscation": (False,)}

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(TextFields, LimitedFields, ConstraintFields):
    """Fields of both completion endpoints."""

    inert = WITHOUT_EFFECT
    why_unsupported = WHY_UNSUPPORTED

    model: str | None = None
    best_of: Whole | None = None
    priority: Priority | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_token_ids: TokenIds | None = None
    """Tokens of the prompt, from a router that had it rendered; it is not tokenised again."""

    @property
    def limit(self) -> tuple[str, int | None]:
        """Name and value of the field that limits the output; None: up to the context length."""
        return "max_tokens", self.max_tokens

    @property
    def limited_by(self) -> str | None:
        """Field whose tokens must fit into the context; None: the answer may end there instead."""
        return self.limit[0]

    @property
    def logprob_count(self) -> int | None:
        """Number of alternatives to show for each output token; None: no log-probabilities."""
        raise NotImplementedError

    @property
    def prompt_logprob_count(self) -> int | None:
        """Number of alternatives to show for each prompt token; None: no log-probabilities."""
        return self.prompt_logprobs

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether each chunk of the stream includes the usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @model_validator(mode="after")
    def fields_agree(self) -> "GenerationBody":
        """Refuse fields that contradict each other."""
        if self.stream_options is not None and not self.stream:
            raise wrong("stream_options", "needs stream = true")
        if self.best_of not in (None, self.n or 1):
            raise wrong("best_of", "must equal n: all generated answers are returned")
        if self.prompt_token_ids is not None and self.truncate_prompt_tokens is not None:
            raise wrong("prompt_token_ids", "cannot be combined with truncate_prompt_tokens")
        if self.prompt_logprobs is not None and self.stream:
            raise wrong("prompt_logprobs", "cannot be streamed")
        return self

    def sampling(self, defaults: Mapping[str, Any] = NO_DEFAULTS) -> SamplingParams:
        """Return the sampling parameters; `defaults` replace fields that are not given.

        Raises:
            FieldError: a field is out of range.
        """
        name, limit = self.limit
        shown = {"logprobs": self.logprob_count, "prompt_logprobs": self.prompt_logprob_count}
        return sampling_params({**self.sampled, **shown, "max_tokens": limit}, defaults, name)

    def as_request(
        self, defaults: Mapping[str, Any] = NO_DEFAULTS, **prompt: Any
    ) -> GenerateRequest:
        """Return the request of a completion or a conversation.

        Args:
            defaults: sampling parameters of requests that say nothing of them.
            prompt: fields of `GenerateRequest` that the two have differently.

        Raises:
            FieldError: a field is out of range.
        """
        return GenerateRequest(
            sampling=self.sampling(defaults),
            limit_field=self.limited_by,
            rendered=self.prompt_token_ids,
            adapter=self.model,
            priority=self.priority or 0,
            stream=bool(self.stream),
            **self.answering,
            **prompt,
        )


class CompletionRequest(GenerationBody):
    """The body of POST /v1/completions."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {**UNSUPPORTED, **UNSUPPORTED_COMPLETION}

    prompt: Prompts
    echo: bool | None = None
    logprobs: LogprobCount | None = None

    @property
    def limit(self) -> tuple[str, int | None]:
        """See `GenerationBody.limit`."""
        if self.only_echo:
            return "max_tokens", 1  # what is made is not shown
        return "max_tokens", DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def limited_by(self) -> str | None:
        """See `GenerationBody.limited_by`; the default limit is no field of the request."""
        given = self.max_tokens is not None or self.truncate_prompt_tokens is not None
        return "max_tokens" if given else None

    @property
    def only_echo(self) -> bool:
        """Whether only the prompt is shown."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def logprob_count(self) -> int | None:
        """See `GenerationBody.logprob_count`."""
        return self.logprobs

    @property
    def prompt_logprob_count(self) -> int | None:
        """See `GenerationBody.prompt_logprob_count`; an echo shows those of `logprobs`."""
        shown = self.logprobs if self.echo else None
        counts = [count for count in (shown, self.prompt_logprobs) if count is not None]
        return max(counts, default=None)

    @model_validator(mode="after")
    def tokens_are_those_of_a_text(self) -> "CompletionRequest":
        """Refuse tokens of a prompt beside anything but one text."""
        one_text = isinstance(self.prompt, str) or (
            len(self.prompt) == 1 and isinstance(self.prompt[0], str)
        )
        if self.prompt_token_ids is not None and not one_text:
            raise wrong("prompt_token_ids", "needs a prompt that is one text")
        return self

    def request(self, defaults: Mapping[str, Any] = NO_DEFAULTS) -> GenerateRequest:
        """See `GenerationBody.as_request`."""
        form = FormatOptions(constraint=self.constraint, reads=False)
        return self.as_request(defaults, prompts=prompt_list(self.prompt), format=form)


class ChatRequest(GenerationBody, Rendering):
    """The body of POST /v1/chat/completions."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {**UNSUPPORTED, **UNSUPPORTED_CHAT}

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    """Value of the chat template's variable of this name, if it has one."""

    def request(self, defaults: Mapping[str, Any] = NO_DEFAULTS) -> GenerateRequest:
        """See `GenerationBody.as_request`."""
        tools, mode, named = chosen_tools(self.tools, self.tool_choice)
        several = self.parallel_tool_calls is not False
        return self.as_request(
            defaults,
            prompt_field="messages",
            conversation=self.conversation(turns_of(self.messages), self.reasoning_effort),
            format=FormatOptions.of(tools, mode, self.constraint, named=named, several=several),
        )

    @property
    def limit(self) -> tuple[str, int | None]:
        """See `GenerationBody.limit`."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    def logprob_count(self) -> int | None:
        """See `GenerationBody.logprob_count`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def chat_fields_agree(self) -> "ChatRequest":
        """Refuse chat fields that contradict each other."""
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise wrong("max_completion_tokens", "differs from max_tokens")
        if self.top_logprobs and not self.logprobs:
            raise wrong("top_logprobs", "needs logprobs = true")
        choice, tools = self.tool_choice, [tool.tool() for tool in self.tools or ()]
        chosen = choice.names if isinstance(choice, Body) else ()
        check_tools(tools, chosen, needed=choice not in (None, "none", "auto"))
        return self


class TokenizeRequest(Rendering):
    """The body of POST /tokenize: a text, or a conversation."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}]}
    )

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def request(self) -> GenerateRequest:
        """Return the request of an answer to the same text or conversation."""
        asked: dict[str, Any] = {"prompts": [self.prompt]}
        if self.messages is not None:
            tools = [tool.tool() for tool in self.tools or ()]
            asked = {
                "prompt_field": "messages",
                "conversation": self.conversation(turns_of(self.messages)),
                "format": FormatOptions(tools),
            }
        special = self.add_special_tokens
        return GenerateRequest(sampling=SamplingParams(), add_special_tokens=special, **asked)

    @model_validator(mode="after")
    def text_or_conversation(self) -> "TokenizeRequest":
        """Require either a prompt or messages, and messages for the fields of a conversation."""
        if (self.prompt is None) == (self.messages is None):
            raise wrong("prompt", "or messages is required, and only one of them")
        check_tools([tool.tool() for tool in self.tools or ()])
        for name in (*Rendering.model_fields, "tools") if self.messages is None else ():
            if getattr(self, name) is not None:
                raise wrong(name, "needs messages")
        return self


class DetokenizeRequest(Body):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: TokenIds
