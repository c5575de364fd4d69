"""Request fields that `LLM` and the HTTP endpoints share: prompts, rendering, text."""

from collections.abc import Mapping
from typing import Annotated, Any, cast

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from twolane.frontend.body import Body, first_finding, one_message, wrong
from twolane.frontend.messages import Messages, Turn, turns_of
from twolane.frontend.text.output_reader import TextOptions
from twolane.frontend.text.stops import MAX_STRING_LENGTH, MAX_STRINGS

INT32_MAX = 2**31 - 1


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _leaves_tokens(count: int) -> int:
    if count == 0 or not -1 <= count <= INT32_MAX:
        text = f"must be -1 or between 1 and {INT32_MAX}"
        raise PydanticCustomError("invalid_value", "{text}", {"text": text})
    return count


Whole = Annotated[int, BeforeValidator(_whole)]
"""An integer, which JSON may also write as 8.0."""
Temperature = Annotated[float, Field(ge=0, le=100)]
TopP = Annotated[float, Field(ge=0, le=1)]
TopK = Annotated[Whole, Field(ge=-1, le=INT32_MAX)]
AnswerTokens = Annotated[Whole, Field(ge=1, le=INT32_MAX)]
Priority = Annotated[Whole, Field(ge=-INT32_MAX, le=INT32_MAX)]
Truncation = Annotated[
    Whole, AfterValidator(_leaves_tokens), Field(json_schema_extra={"not": {"const": 0}})
]
"""Number of last tokens of a prompt to keep; -1: as many as leave room for the answer."""
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
"""Lists fail fast: only the first error is reported, and millions could be sent."""
MAX_CHOICES = 128
"""Most answers to a prompt, as in OpenAI's API."""
MAX_SALT_LENGTH = 1024
"""Most characters of a `cache_salt`."""
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STRING_LENGTH)]
CacheSalt = Annotated[str, Field(min_length=1, max_length=MAX_SALT_LENGTH)]
Stop = Annotated[
    StopString | Annotated[list[StopString], Field(max_length=MAX_STRINGS, fail_fast=True)],
    one_message(
        f"must be a string of 1 to {MAX_STRING_LENGTH} characters, or up to {MAX_STRINGS} of them"
    ),
]
Prompts = Annotated[
    str
    | TokenIds
    | Annotated[list[str], Field(fail_fast=True)]
    | Annotated[list[TokenIds], Field(fail_fast=True)],
    one_message(
        "must be a string, a list of strings, a list of token ids or a list of lists of token ids"
    ),
]
_MESSAGES = TypeAdapter(Messages)
_PROMPTS = TypeAdapter(Prompts)


class Rendering(Body):
    """Options of rendering a conversation."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def rendering(self) -> dict[str, Any]:
        """The fields as arguments of `TextCodec.chat`."""
        continued = bool(self.continue_final_message)
        prompted = self.add_generation_prompt
        return {
            "add_generation_prompt": not continued if prompted is None else prompted,
            "continue_final_message": continued,
            "variables": self.chat_template_kwargs,
        }

    @model_validator(mode="after")
    def one_ending(self) -> "Rendering":
        """Refuse both kinds of a conversation's ending at once."""
        if self.continue_final_message and self.add_generation_prompt:
            raise wrong("continue_final_message", "cannot be combined with add_generation_prompt")
        return self


class TextFields(Body):
    """Options of tokenising a prompt and of its answers' text, and the cache salt."""

    n: Annotated[Whole, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: Stop | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Truncation | None = None
    cache_salt: CacheSalt | None = None

    @property
    def choices(self) -> int:
        """Number of answers to each prompt."""
        return self.n or 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def text_options(self) -> TextOptions:
        """The fields as `Generation` takes them."""
        return TextOptions(
            stop=self.stop_strings,
            include_stop=bool(self.include_stop_str_in_output),
            skip_special_tokens=self.skip_special_tokens is not False,
        )


def kept_tokens(truncation: int, context: int, answer: int | None) -> int:
    """Return the number of last tokens that `truncate_prompt_tokens` keeps.

    Args:
        truncation: the value.
        context: tokens of the model's context.
        answer: tokens of the answer, for which -1 leaves room; None: one at least.
    """
    return truncation if truncation > 0 else max(1, context - (answer or 1))


def read_messages(messages: object, name: str) -> list[Turn]:
    """Validate a conversation that a Python caller gives, for `TextCodec.chat`.

    Raises:
        ValueError: a message is refused; the text names its field, below `name`.
    """
    lists = [as_list(turn) for turn in messages] if isinstance(messages, list | tuple) else messages
    try:
        return turns_of(_MESSAGES.validate_python(lists))
    except ValidationError as error:
        raise ValueError(first_finding(error.errors(), name).message) from error


def read_prompts(prompts: object) -> list[str | list[int]]:
    """Validate prompts that a Python caller gives.

    Raises:
        ValueError: they are no prompts.
    """
    lists = [as_list(one) for one in prompts] if isinstance(prompts, list | tuple) else prompts
    try:
        return prompt_list(_PROMPTS.validate_python(lists, strict=True))
    except ValidationError as error:
        raise ValueError(first_finding(error.errors(), "prompts").message) from error


def read_prompt(prompt: object) -> str | list[int]:
    """Validate a prompt that a Python caller gives.

    Raises:
        ValueError: it is no prompt, or several.
    """
    return read_prompts([prompt])[0]


def as_list(value: object) -> object:
    """Return a tuple as a list and a mapping as a dict, the only types that pydantic accepts
    here."""
    if isinstance(value, tuple):
        return [*value]
    return dict(value) if isinstance(value, Mapping) else value


def prompt_list(prompts: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    """Return one or more prompts as a list."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):  # so are all
        return [prompts]
    return [*cast("list[str] | list[list[int]]", prompts)]
