"""The request bodies of OpenAI's API: what is honoured, what is accepted, what is refused.

`Body` subclasses hold the fields that are honoured. `UNSUPPORTED` holds the fields that OpenAI or
vLLM know and this server does not serve yet: they may be sent with a neutral value, which changes
nothing, and are refused by name with any other. `INERT` fields say nothing about the answer.
Every other field is unknown and refused.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

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

from twolane.sampling import SamplingParams

INERT = frozenset(
    {"user", "metadata", "store", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
)
"""Accepted with any value: they are about the sender's own bookkeeping."""

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stop": ([], ""),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "return_tokens_as_token_ids": (False,),
    "cache_salt": (),
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
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "echo": (False,),
    "documents": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
}
UNSUPPORTED_COMPLETION: Mapping[str, tuple[Any, ...]] = {
    "echo": (False,),
    "suffix": ("",),
    "add_special_tokens": (True,),
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

INT32_MAX = 2**31 - 1
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
Count = Annotated[int, Field(ge=0, le=INT32_MAX)]


def one_message(text: str) -> WrapValidator:
    """Say `text` when a value fits none of a union's members, instead of one error for each."""

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            raise PydanticCustomError("invalid_value", "{text}", {"text": text}) from error

    return WrapValidator(validate)


class Body(BaseModel):
    """A JSON object of which every field is honoured or refused by name."""

    model_config = ConfigDict(extra="forbid", strict=True)
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    inert: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def drop_neutral(cls, body: Any) -> Any:
        """Drop fields that say nothing; refuse those that ask for what is not served."""
        if not isinstance(body, dict):
            return body
        for name, neutral in cls.unsupported.items():
            if name in body and not is_neutral(body[name], neutral):
                raise PydanticCustomError(
                    "unsupported_field", "{param} is not supported yet", {"param": name}
                )
        dropped = cls.unsupported.keys() | cls.inert
        return {name: value for name, value in body.items() if name not in dropped}


def is_neutral(value: object, neutral: tuple[Any, ...]) -> bool:
    """Whether an unsupported field holds a value that changes nothing (1 is not True here)."""
    return value is None or any(
        value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
        for allowed in neutral
    )


class StreamOptions(Body):
    """What to add to a stream."""

    unsupported = {"include_obfuscation": (False,), "continuous_usage_stats": (False,)}

    include_usage: bool | None = None


class GenerationBody(Body):
    """What both endpoints share."""

    inert = INERT

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None

    @property
    def limit(self) -> tuple[str, int | None]:
        """The field that limits the output, and its value; None: up to the context length."""
        return "max_tokens", self.max_tokens

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @model_validator(mode="after")
    def stream_options_need_stream(self) -> "GenerationBody":
        """Refuse options of a stream that is not asked for."""
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError(
                "invalid_value", "needs stream = true", {"param": "stream_options"}
            )
        return self

    def sampling(self) -> SamplingParams:
        """Return the engine's form of the sampling fields.

        Raises:
            ValueError: a field is out of range; the message begins with the field's name.
        """
        name, limit = self.limit
        given = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "seed": self.seed,
            "min_tokens": self.min_tokens,
            "stop_token_ids": None if self.stop_token_ids is None else tuple(self.stop_token_ids),
            "ignore_eos": self.ignore_eos,
        }
        chosen: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
        try:
            return SamplingParams(max_tokens=limit, **chosen)
        except ValueError as error:
            raise ValueError(str(error).replace("max_tokens", name)) from error


class CompletionRequest(GenerationBody):
    """The body of POST /v1/completions."""

    unsupported = {**UNSUPPORTED, **UNSUPPORTED_COMPLETION}
    default_max_tokens: ClassVar[int] = 16

    prompt: Annotated[
        str | list[TokenId] | list[str] | list[list[TokenId]],
        one_message(
            "must be a string, a list of strings, a list of token ids "
            "or a list of lists of token ids"
        ),
    ]

    @property
    def limit(self) -> tuple[str, int | None]:
        """See `GenerationBody.limit`; OpenAI's default is 16 tokens."""
        given = self.max_tokens
        return "max_tokens", self.default_max_tokens if given is None else given

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one for each choice of the answer."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        texts = [item for item in self.prompt if not isinstance(item, int)]
        tokens = [item for item in self.prompt if isinstance(item, int)]
        return [tokens] if tokens else list(texts)


class TextPart(Body):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One turn of a conversation."""

    unsupported = UNSUPPORTED_MESSAGE

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        str | list[TextPart],
        one_message('must be a string or a list of parts {"type": "text", "text": …}'),
    ]
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        """Return the message as chat templates know it; parts are joined by new lines."""
        content = self.content
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        named = {} if self.name is None else {"name": self.name}
        return {"role": role, "content": content, **named}


class ChatRequest(GenerationBody):
    """The body of POST /v1/chat/completions."""

    unsupported = {**UNSUPPORTED, **UNSUPPORTED_CHAT}

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None

    @property
    def limit(self) -> tuple[str, int | None]:
        """See `GenerationBody.limit`."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @model_validator(mode="after")
    def one_limit(self) -> "ChatRequest":
        """Refuse two names of one limit that disagree."""
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise PydanticCustomError(
                "invalid_value",
                "{param} differs from max_tokens",
                {"param": "max_completion_tokens"},
            )
        return self
