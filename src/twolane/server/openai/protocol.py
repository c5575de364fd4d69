"""Request bodies of OpenAI's API: honoured, accepted and refused fields.

`Body` subclasses hold the fields that are honoured. `UNSUPPORTED` holds the fields that OpenAI or
vLLM know and this server does not serve: they may be sent with a neutral value, which changes
nothing, and are refused by name with any other. `INERT` fields say nothing about the answer.
Every other field is unknown and refused. docs/guides/api.md has the table of all of them.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import ConfigDict, model_validator

from twolane.frontend import fields
from twolane.frontend.answer_formats import FormatOptions
from twolane.frontend.body import Body, wrong
from twolane.frontend.generate_request import NO_DEFAULTS, GenerateRequest, sampling_params
from twolane.frontend.messages import Messages, turns_of
from twolane.sampling import SamplingParams
from twolane.server.openai.structured import ConstraintFields
from twolane.server.openai.tools import ToolChoice, Tools, chosen_tools

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "spaces_between_special_tokens": (True,),
    "logits_processors": ([],),
    "vllm_xargs": ({},),
    **dict.fromkeys(("guided_whitespace_pattern", "kv_transfer_params", "request_id"), ()),
}
"""Refused fields of both endpoints, with their neutral values; null is always neutral."""

UNSUPPORTED_CHAT: Mapping[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "include_reasoning": (True,),
    "verbosity": ("medium",),
    "echo": (False,),
    "documents": ([],),
    **dict.fromkeys(("mm_processor_kwargs", "media_io_kwargs"), ({},)),
    **dict.fromkeys(("moderation", "audio", "prediction", "web_search_options"), ()),
    "chat_template": (),
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

WITHOUT_EFFECT = fields.INERT | {"guided_decoding_backend"}
"""Fields of both endpoints that are accepted with any value."""
DEFAULT_MAX_TOKENS = 16
"""Default limit on a completion's tokens, as in OpenAI's API."""


class StreamOptions(Body):
    """Additions to a stream."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"include_obfuscation": (False,)}

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(fields.TextFields, fields.LimitedFields, ConstraintFields):
    """Fields of both completion endpoints."""

    inert = WITHOUT_EFFECT
    why_unsupported = WHY_UNSUPPORTED

    model: str | None = None
    best_of: fields.Whole | None = None
    priority: fields.Priority | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_token_ids: fields.TokenIds | None = None
    """Tokens of the prompt, from a router that had it rendered; it is not tokenised again."""

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

    def as_request(
        self,
        defaults: Mapping[str, Any],
        limit: tuple[str, int | None],
        scores: Mapping[str, int | None],
        **different: Any,
    ) -> GenerateRequest:
        """Return the request of a completion or a conversation.

        Args:
            defaults: sampling parameters of requests that say nothing of them.
            limit: name and value of the field that limits the output; None: it has no limit.
            scores: numbers of log-probabilities, by the names of sampling parameters.
            different: fields of `GenerateRequest` that the two have differently.

        Raises:
            FieldError: a field is out of range.
        """
        field, tokens = limit
        sampled = {**self.sampled, **scores, "max_tokens": tokens}
        return GenerateRequest(
            sampling=sampling_params(sampled, defaults, field),
            rendered=self.prompt_token_ids,
            adapter=self.model,
            priority=self.priority or 0,
            stream=bool(self.stream),
            **self.answering,
            **different,
        )


class CompletionRequest(GenerationBody):
    """The body of POST /v1/completions."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {**UNSUPPORTED, **UNSUPPORTED_COMPLETION}

    prompt: fields.Prompts
    echo: bool | None = None
    logprobs: fields.LogprobCount | None = None

    @property
    def only_echo(self) -> bool:
        """Whether only the prompt is shown."""
        return bool(self.echo) and self.max_tokens == 0

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
        """See `GenerationBody.as_request`; the default limit is no field of the request, and an
        echo shows the log-probabilities of `logprobs` for the prompt, too."""
        limit = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        given = self.max_tokens is not None or self.truncate_prompt_tokens is not None
        shown = (self.logprobs if self.echo else None, self.prompt_logprobs)
        scored = max((count for count in shown if count is not None), default=None)
        return self.as_request(
            defaults,
            ("max_tokens", 1 if self.only_echo else limit),  # what is made is not shown
            {"logprobs": self.logprobs, "prompt_logprobs": scored},
            limit_field="max_tokens" if given else None,
            prompts=fields.prompt_list(self.prompt),
            format=FormatOptions(constraint=self.constraint, reads=False),
        )


class ChatRequest(GenerationBody, fields.Rendering):
    """The body of POST /v1/chat/completions."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {**UNSUPPORTED, **UNSUPPORTED_CHAT}

    messages: Messages
    max_completion_tokens: fields.Count | None = None
    logprobs: bool | None = None
    top_logprobs: fields.LogprobCount | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    """Value of the chat template's variable of this name, if it has one."""

    def request(self, defaults: Mapping[str, Any] = NO_DEFAULTS) -> GenerateRequest:
        """See `GenerationBody.as_request`."""
        tools, mode, named = chosen_tools(self.tools, self.tool_choice)
        several = self.parallel_tool_calls is not False
        field = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return self.as_request(
            defaults,
            (field, getattr(self, field)),
            {"logprobs": (self.top_logprobs or 0) if self.logprobs else None},
            limit_field=field,
            prompt_field="messages",
            conversation=self.conversation(turns_of(self.messages), self.reasoning_effort),
            format=FormatOptions.of(tools, mode, self.constraint, named=named, several=several),
        )

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
        fields.check_tools(tools, chosen, needed=choice not in (None, "none", "auto"))
        return self


class TokenizeRequest(fields.Rendering):
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
        fields.check_tools([tool.tool() for tool in self.tools or ()])
        for name in (*fields.Rendering.model_fields, "tools") if self.messages is None else ():
            if getattr(self, name) is not None:
                raise wrong(name, "needs messages")
        return self


class DetokenizeRequest(Body):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: fields.TokenIds
