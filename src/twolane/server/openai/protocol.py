"""The request bodies of OpenAI's API: what is honoured, what is accepted, what is refused.

`Body` subclasses hold the fields that are honoured. `UNSUPPORTED` holds the fields that OpenAI or
vLLM know and this server does not serve: they may be sent with a neutral value, which changes
nothing, and are refused by name with any other. `INERT` fields say nothing about the answer.
Every other field is unknown and refused. docs/guides/api.md has the table of all of them.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, LiteralString

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from twolane.common.errors import FieldError
from twolane.frontend.text.stops import LONGEST_STRING, MOST_STRINGS
from twolane.sampling import SamplingParams

INERT = frozenset(
    {
        *("user", "metadata", "store", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
    }
)
"""Accepted with any value: they are about the sender's own bookkeeping."""

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "length_penalty": (1,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "use_beam_search": (False,),
    "spaces_between_special_tokens": (True,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "logits_processors": ([],),
    "cache_salt": (),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    "request_id": (),
    "service_tier": ("auto", "default"),
}
"""Of both endpoints. null is always neutral."""

UNSUPPORTED_CHAT: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "moderation": (),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
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
UNSUPPORTED_MESSAGE: Mapping[str, tuple[Any, ...]] = {
    "tool_calls": ([],),
    "tool_call_id": (),
    "function_call": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
}
WHY_UNSUPPORTED: Mapping[str, str] = {
    "chat_template": "is not supported: the model's own is the only one that is rendered",
}

INT32_MAX = 2**31 - 1
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
Count = Annotated[int, Field(ge=0, le=INT32_MAX)]
MOST_CHOICES = 128
"""Of one prompt, as in OpenAI's API."""
MOST_LOGPROBS = 20
LogprobCount = Annotated[int, Field(ge=0, le=MOST_LOGPROBS)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
"""All lists fail fast: only the first error is told, and millions could be sent."""
Penalty = Annotated[float, Field(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Field(ge=0.01)]
"""Logits are divided by it, and what is almost 0 in float64 is 0 in float32."""


def one_message(text: str) -> WrapValidator:
    """Say `text` when a value fits none of a union's members, instead of one error for each."""

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            raise PydanticCustomError("invalid_value", "{text}", {"text": text}) from error

    return WrapValidator(validate)


StopString = Annotated[str, Field(min_length=1, max_length=LONGEST_STRING)]
Stop = Annotated[
    StopString | Annotated[list[StopString], Field(max_length=MOST_STRINGS, fail_fast=True)],
    one_message(
        f"must be a string of 1 to {LONGEST_STRING} characters, or up to {MOST_STRINGS} of them"
    ),
]
LogitBias = Annotated[
    dict[
        Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,8})$")],
        Annotated[float, Field(ge=-100, le=100)],
    ],
    one_message("must map token ids to numbers between -100 and 100"),
]


def wrong(param: str, problem: str, kind: LiteralString = "invalid_value") -> PydanticCustomError:
    """Return an error that names the field at fault, which is one of the object's."""
    return PydanticCustomError(kind, "{param} {problem}", {"param": param, "problem": problem})


class Body(BaseModel):
    """A JSON object of which every field is honoured or refused by name."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    inert: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def drop_neutral(cls, body: Any) -> Any:
        """Drop fields that say nothing; refuse the first that is unknown or not served."""
        if not isinstance(body, dict):
            return body
        fields = cls.model_fields
        for name, value in body.items():
            if name in fields or name in cls.inert:
                continue
            if name not in cls.unsupported:  # pydantic would collect them all
                raise PydanticCustomError("unknown_field", "unknown field", {"param": name})
            if not is_neutral(value, cls.unsupported[name]):
                raise wrong(
                    name, WHY_UNSUPPORTED.get(name, "is not supported"), "unsupported_field"
                )
        return {name: value for name, value in body.items() if name in fields}


def is_neutral(value: object, neutral: tuple[Any, ...]) -> bool:
    """Whether an unsupported field holds a value that changes nothing (1 is not True here)."""
    return value is None or any(
        value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
        for allowed in neutral
    )


class StreamOptions(Body):
    """What to add to a stream."""

    unsupported = {"include_obfuscation": (False,)}

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(Body):
    """What both endpoints share."""

    inert = INERT

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    best_of: int | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    stop: Stop | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    prompt_logprobs: LogprobCount | None = None
    priority: Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @property
    def limit(self) -> tuple[str, int | None]:
        """The field that limits the output, and its value; None: up to the context length."""
        return "max_tokens", self.max_tokens

    @property
    def choices(self) -> int:
        """How many answers to give to each prompt."""
        return self.n or 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def logprob_count(self) -> int | None:
        """How many alternatives to show beside each output token; None: no log-probabilities."""
        raise NotImplementedError

    @property
    def prompt_logprob_count(self) -> int | None:
        """The same for the tokens of the prompt."""
        return self.prompt_logprobs

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether each chunk of the stream has the usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @model_validator(mode="after")
    def fields_agree(self) -> "GenerationBody":
        """Refuse fields that contradict each other."""
        if self.stream_options is not None and not self.stream:
            raise wrong("stream_options", "needs stream = true")
        if self.best_of not in (None, self.choices):
            raise wrong("best_of", "must equal n: all answers that are made are returned")
        if self.prompt_logprobs is not None and self.stream:
            raise wrong("prompt_logprobs", "cannot be streamed")
        return self

    def sampling(self, defaults: Mapping[str, Any] = MappingProxyType({})) -> SamplingParams:
        """Return the engine's form of the sampling fields; `defaults`: of those not given.

        Raises:
            FieldError: a field is out of range.
        """
        name, limit = self.limit
        same = (
            *("temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "ignore_eos"),
            *("repetition_penalty", "presence_penalty", "frequency_penalty"),
        )
        given: dict[str, Any] = {field: getattr(self, field) for field in same}
        given["logprobs"] = self.logprob_count
        given["prompt_logprobs"] = self.prompt_logprob_count
        given["stop_token_ids"] = tuple(self.stop_token_ids or ())
        given["logit_bias"] = {int(id): bias for id, bias in (self.logit_bias or {}).items()}
        chosen = {key: value for key, value in given.items() if value is not None}
        try:
            return SamplingParams(max_tokens=limit, **{**defaults, **chosen})
        except FieldError as error:
            field = name if error.field == "max_tokens" else error.field
            raise FieldError(field, error.problem.replace("max_tokens", name)) from error


class CompletionRequest(GenerationBody):
    """The body of POST /v1/completions."""

    unsupported = {**UNSUPPORTED, **UNSUPPORTED_COMPLETION}
    default_max_tokens: ClassVar[int] = 16

    prompt: Annotated[
        str
        | TokenIds
        | Annotated[list[str], Field(fail_fast=True)]
        | Annotated[list[TokenIds], Field(fail_fast=True)],
        one_message(
            "must be a string, a list of strings, a list of token ids "
            "or a list of lists of token ids"
        ),
    ]
    echo: bool | None = None
    logprobs: LogprobCount | None = None

    @property
    def limit(self) -> tuple[str, int | None]:
        """See `GenerationBody.limit`; OpenAI's default is 16 tokens."""
        given = self.max_tokens
        if self.only_echo:
            return "max_tokens", 1  # what is made is not shown
        return "max_tokens", self.default_max_tokens if given is None else given

    @property
    def only_echo(self) -> bool:
        """Whether nothing but the prompt is asked for."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def logprob_count(self) -> int | None:
        """See `GenerationBody.logprob_count`."""
        return self.logprobs

    @property
    def prompt_logprob_count(self) -> int | None:
        """See `GenerationBody.prompt_logprob_count`; an echo shows those of `logprobs`."""
        shown = self.logprobs if self.echo else None
        asked = [count for count in (shown, self.prompt_logprobs) if count is not None]
        return max(asked, default=None)

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one for each choice of the answer."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):  # so are all
            return [self.prompt]
        return [*self.prompt]


class TextPart(Body):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One turn of a conversation."""

    unsupported = UNSUPPORTED_MESSAGE

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        str | Annotated[list[TextPart], Field(fail_fast=True)],
        one_message('must be a string or a list of parts {"type": "text", "text": …}'),
    ]
    name: str | None = None

    @property
    def text(self) -> str:
        """The content; parts are joined by new lines."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content)

    def for_template(self) -> dict[str, str]:
        """Return the message as chat templates know it."""
        role = "system" if self.role == "developer" else self.role
        named = {} if self.name is None else {"name": self.name}
        return {"role": role, "content": self.text, **named}


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True)]


class Rendering(Body):
    """How the chat template renders a conversation."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def rendering(self) -> dict[str, Any]:
        """The arguments of `TextCodec.chat`."""
        continued = bool(self.continue_final_message)
        prompted = self.add_generation_prompt
        return {
            "add_generation_prompt": not continued if prompted is None else prompted,
            "continue_final_message": continued,
            "variables": self.chat_template_kwargs,
        }

    @model_validator(mode="after")
    def one_ending(self) -> "Rendering":
        """Refuse a conversation that would end in two ways."""
        if self.continue_final_message and self.add_generation_prompt:
            raise wrong("continue_final_message", "excludes add_generation_prompt")
        return self


class ChatRequest(GenerationBody, Rendering):
    """The body of POST /v1/chat/completions."""

    unsupported = {**UNSUPPORTED, **UNSUPPORTED_CHAT}

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None

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
        """Refuse two names of one limit that disagree, and alternatives of nothing."""
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise wrong("max_completion_tokens", "differs from max_tokens")
        if self.top_logprobs and not self.logprobs:
            raise wrong("top_logprobs", "needs logprobs = true")
        return self


class TokenizeRequest(Rendering):
    """The body of POST /tokenize: a text, or a conversation."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}]}
    )

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def text_or_conversation(self) -> "TokenizeRequest":
        """Refuse both and neither, and what only a conversation has."""
        if (self.prompt is None) == (self.messages is None):
            raise wrong("prompt", "or messages is required, and only one of them")
        for name in Rendering.model_fields if self.messages is None else ():
            if getattr(self, name) is not None:
                raise wrong(name, "needs messages")
        return self


class DetokenizeRequest(Body):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: TokenIds
