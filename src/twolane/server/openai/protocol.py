"""Request bodies of OpenAI's API: honoured, accepted and refused fields.

`Body` subclasses hold the fields that are honoured. `UNSUPPORTED` holds the fields that OpenAI or
vLLM know and this server does not serve: they may be sent with a neutral value, which changes
nothing, and are refused by name with any other. `INERT` fields say nothing about the answer.
Every other field is unknown and refused. docs/guides/api.md has the table of all of them.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, model_validator

from twolane.common.errors import FieldError
from twolane.frontend.answer_formats import FormatOptions
from twolane.frontend.body import Body, one_message, wrong
from twolane.frontend.fields import (
    INT32_MAX,
    Priority,
    Prompts,
    Rendering,
    Temperature,
    TextFields,
    TokenIds,
    TopK,
    TopP,
    Whole,
    prompt_list,
)
from twolane.frontend.messages import Messages
from twolane.frontend.structured.jobs import OutputConstraint
from twolane.sampling import (
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORDS,
    MAX_LOGPROBS,
    SamplingParams,
)
from twolane.server.openai.structured import ResponseFormat, StructuredOutputs
from twolane.server.openai.tools import (
    NamedChoice,
    ToolChoice,
    Tools,
    check_names,
    chosen_names,
    enforced,
    offered,
    shown,
)

INERT = frozenset(
    {
        *("user", "metadata", "store", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "service_tier"),
    }
)
"""Fields accepted with any value: they concern the sender's bookkeeping."""

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "spaces_between_special_tokens": (True,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
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
UNSUPPORTED_COMPLETION: Mapping[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "prompt_embeds": (),
}
GUIDED = "is not supported: send structured_outputs or response_format"
TEXT_ALONE = "is not supported: answers are text"
WHY_UNSUPPORTED: Mapping[str, str] = {
    "chat_template": "is not supported: only the model's own template is used",
    "guided_json": GUIDED,
    "guided_regex": GUIDED,
    "guided_choice": GUIDED,
    "guided_grammar": GUIDED,
    "guided_decoding_backend": "is not supported: llguidance is the only one",
    "guided_whitespace_pattern": "is not supported: white space is fixed",
    "request_id": "is not supported: send the header X-Request-Id",
    "functions": "is not supported: send tools",
    "function_call": "is not supported: send tool_choice",
    "documents": "is not supported: put them into messages",
    "modalities": TEXT_ALONE,
    "audio": TEXT_ALONE,
    "web_search_options": "is not supported: tools run in the client",
}

DEFAULT_MAX_TOKENS = 16
"""Default limit on a completion's tokens, as in OpenAI's API."""
Count = Annotated[Whole, Field(ge=0, le=INT32_MAX)]
LogprobCount = Annotated[Whole, Field(ge=0, le=MAX_LOGPROBS)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Field(ge=0.01)]
"""Divisor of logits; it has a minimum because what is almost 0 in float64 is 0 in float32."""


BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_LENGTH)]
BadWords = Annotated[
    Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS, fail_fast=True)],
    one_message(f"must be up to {MAX_BAD_WORDS} strings of 1 to {MAX_BAD_WORD_LENGTH} characters"),
]
LogitBias = Annotated[
    dict[
        Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,8})$")],
        Annotated[float, Field(ge=-100, le=100)],
    ],
    one_message("must map token ids to numbers between -100 and 100"),
]


class StreamOptions(Body):
    """Additions to a stream."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"include_obfuscation": (False,)}

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(Body):
    """Sampling parameters, with the same names in all of OpenAI's endpoints."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    seed: Annotated[Whole, Field(ge=-(2**63), lt=2**63)] | None = None


class GenerationBody(TextFields, SamplingFields):
    """Fields of both completion endpoints."""

    inert = INERT
    why_unsupported = WHY_UNSUPPORTED

    model: str | None = None
    best_of: Whole | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    stop_token_ids: TokenIds | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: BadWords | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: LogprobCount | None = None
    priority: Priority | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_token_ids: TokenIds | None = None
    """Tokens of the prompt, from a router that had it rendered; it is not tokenised again."""

    @property
    def limit(self) -> tuple[str, int | None]:
        """Name and value of the field that limits the output; None: up to the context length."""
        return "max_tokens", self.max_tokens

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
        if self.best_of not in (None, self.choices):
            raise wrong("best_of", "must equal n: all generated answers are returned")
        if self.structured_outputs is not None and self.response_format is not None:
            raise wrong("structured_outputs", "cannot be combined with response_format")
        if self.prompt_token_ids is not None and self.truncate_prompt_tokens is not None:
            raise wrong("prompt_token_ids", "cannot be combined with truncate_prompt_tokens")
        if self.prompt_logprobs is not None and self.stream:
            raise wrong("prompt_logprobs", "cannot be streamed")
        return self

    @property
    def format_options(self) -> FormatOptions:
        """Options that determine the format of the answers."""
        return FormatOptions(constraint=self._constraint)

    @property
    def _constraint(self) -> tuple[str, OutputConstraint] | None:
        if self.structured_outputs is not None:
            return "structured_outputs", self.structured_outputs.constraint()
        constraint = None if self.response_format is None else self.response_format.constraint()
        return None if constraint is None else ("response_format", constraint)

    def sampling(self, defaults: Mapping[str, Any] = MappingProxyType({})) -> SamplingParams:
        """Return the sampling parameters; `defaults` replace fields that are not given.

        Raises:
            FieldError: a field is out of range.
        """
        name, limit = self.limit
        same = (
            *("temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "ignore_eos"),
            *("repetition_penalty", "presence_penalty", "frequency_penalty"),
        )
        fields: dict[str, Any] = {field: getattr(self, field) for field in same}
        fields["logprobs"] = self.logprob_count
        fields["prompt_logprobs"] = self.prompt_logprob_count
        fields["stop_token_ids"] = tuple(self.stop_token_ids or ())
        fields["bad_words"] = tuple(self.bad_words or ())
        if self.allowed_token_ids is not None:
            fields["allowed_token_ids"] = tuple(self.allowed_token_ids)
        fields["logit_bias"] = {int(id): bias for id, bias in (self.logit_bias or {}).items()}
        chosen = {key: value for key, value in fields.items() if value is not None}
        try:
            return SamplingParams(max_tokens=limit, **{**defaults, **chosen})
        except FieldError as error:
            field = name if error.field == "max_tokens" else error.field
            raise FieldError(field, error.problem.replace("max_tokens", name)) from error


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

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts in order."""
        return prompt_list(self.prompt)


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

    @property
    def shown_tools(self) -> list[dict[str, Any]] | None:
        """The tools as the chat template shows them; None: it shows none."""
        return shown(offered(self.tools or (), self.tool_choice))

    @property
    def continued(self) -> str | None:
        """Text of the message that the answer continues; None: it is a new one."""
        return self.messages[-1].text if self.continue_final_message else None

    @property
    def format_options(self) -> FormatOptions:
        """See `GenerationBody.format_options`."""
        tools = offered(self.tools or (), self.tool_choice)
        if not tools:
            return FormatOptions(constraint=self._constraint)
        return FormatOptions(
            tools=[tool.tool() for tool in tools],
            enforced=enforced(tools, self.tool_choice),
            named=isinstance(self.tool_choice, NamedChoice),
            several=self.parallel_tool_calls is not False,
            constraint=self._constraint,
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
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise wrong("tool_choice", "needs tools")
        names = [tool.function.name for tool in self.tools or ()]
        check_names(self.tools)
        if not set(chosen_names(self.tool_choice) or ()).issubset(names):
            raise wrong("tool_choice", f"is not one of the tools: {', '.join(names)[:200]}")
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

    @property
    def shown_tools(self) -> list[dict[str, Any]] | None:
        """The tools as the chat template shows them; None: it shows none."""
        return shown(self.tools)

    @model_validator(mode="after")
    def text_or_conversation(self) -> "TokenizeRequest":
        """Require either a prompt or messages, and messages for the fields of a conversation."""
        if (self.prompt is None) == (self.messages is None):
            raise wrong("prompt", "or messages is required, and only one of them")
        check_names(self.tools)
        for name in (*Rendering.model_fields, "tools") if self.messages is None else ():
            if getattr(self, name) is not None:
                raise wrong(name, "needs messages")
        return self


class DetokenizeRequest(Body):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: TokenIds
