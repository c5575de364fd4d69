"""Request fields that `LLM` and the HTTP endpoints share: prompts, rendering, text."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, cast

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from twolane.frontend.answer_formats import FormatOptions
from twolane.frontend.body import Body, first_finding, one_message, wrong
from twolane.frontend.generate_request import Conversation
from twolane.frontend.messages import Messages, Turn, turns_of
from twolane.frontend.structured import jobs
from twolane.frontend.structured.grammar import ANY_OBJECT
from twolane.frontend.structured.tools import Tool
from twolane.frontend.text.output_reader import TextOptions
from twolane.frontend.text.stops import MAX_STRING_LENGTH, MAX_STRINGS
from twolane.sampling import (
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORDS,
    MAX_BIASED_TOKENS,
    MAX_LOGPROBS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)

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
StopTokenIds = Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)]
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
    Field(max_length=MAX_BIASED_TOKENS),
    one_message(f"must map up to {MAX_BIASED_TOKENS} token ids to numbers between -100 and 100"),
]
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,256}$")]
MAX_TOOLS = 1024
"""Most tools of a request. OpenAI's API takes 128; users of MCP have hundreds."""
Prompts = Annotated[
    str
    | TokenIds
    | Annotated[list[str], Field(fail_fast=True)]
    | Annotated[list[TokenIds], Field(fail_fast=True)],
    one_message(
        "must be a string, a list of strings, a list of token ids or a list of lists of token ids"
    ),
]
INERT = frozenset(
    {
        *("user", "metadata", "store", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "service_tier"),
    }
)
"""Fields accepted with any value: they concern the client's bookkeeping."""

Schema = Annotated[dict[str, Any] | bool, one_message("must be a JSON object or a boolean")]
SchemaOrText = Annotated[
    dict[str, Any] | bool | str, one_message("must be a JSON object, a boolean, or a text of one")
]
Choices = Annotated[list[str], Field(min_length=1, fail_fast=True)]
_MESSAGES = TypeAdapter(Messages)
_PROMPTS = TypeAdapter(Prompts)


class Rendering(Body):
    """Options of rendering a conversation."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def conversation(self, turns: Sequence[Turn], effort: str | None = None) -> Conversation:
        """Return a conversation that is rendered by these options."""
        continued = bool(self.continue_final_message)
        prompted = self.add_generation_prompt
        return Conversation(
            turns=turns,
            add_generation_prompt=not continued if prompted is None else prompted,
            continue_final_message=continued,
            variables=self.chat_template_kwargs,
            effort=effort,
        )

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
    def answering(self) -> dict[str, Any]:
        """The fields as those of `GenerateRequest`."""
        text = TextOptions(
            stop=stop_strings(self.stop),
            include_stop=bool(self.include_stop_str_in_output),
            skip_special_tokens=self.skip_special_tokens is not False,
        )
        same = ("add_special_tokens", "truncate_prompt_tokens", "cache_salt")
        return {"n": self.n or 1, "text": text, **{name: getattr(self, name) for name in same}}


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
    seed: Annotated[Whole, Field(ge=-(2**63), le=2**63 - 1)] | None = None

    @property
    def sampled(self) -> dict[str, Any]:
        """The fields that are sampling parameters, as those of `SamplingParams`; None: not
        given."""
        names = type(self).model_fields.keys() & set(SamplingParams.__struct_fields__)
        fields = {name: getattr(self, name) for name in sorted(names)}
        if self.logit_bias is not None:
            fields["logit_bias"] = {int(id): bias for id, bias in self.logit_bias.items()}
        return {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in fields.items()
        }


class LimitedFields(SamplingFields):
    """Sampling parameters of the endpoints of completions and chat, with vLLM's additions."""

    max_tokens: Count | None = None
    min_tokens: Count | None = None
    stop_token_ids: StopTokenIds | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: BadWords | None = None
    thinking_token_budget: Annotated[Whole, Field(ge=-1, le=INT32_MAX)] | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: LogprobCount | None = None


class StructuredOutputs(Body):
    """The format of the answer (vLLM): exactly one of the fields is given."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "disable_fallback": (False,),
        "disable_any_whitespace": (False,),
        "whitespace_pattern": (),
        "structural_tag": (),
    }

    json_: SchemaOrText | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    disable_additional_properties: bool | None = None
    """Whether objects have declared names only where the schema does not say it; None: as the
    server's option says."""

    @model_validator(mode="after")
    def exactly_one(self) -> "StructuredOutputs":
        """Require exactly one format."""
        forms = (self.json_, self.json_object or None, self.regex, self.choice, self.grammar)
        if sum(one is not None for one in forms) != 1:
            known = "json, json_object, regex, choice and grammar"
            raise PydanticCustomError("invalid_value", f"must have exactly one of {known}")
        if self.disable_additional_properties and not (self.json_object or self.json_ is not None):
            raise wrong("disable_additional_properties", "is for json and json_object alone")
        return self

    def constraint(self) -> jobs.OutputConstraint:
        """Return the constraint on the answer."""
        if self.regex is not None:
            return jobs.Regex(self.regex)
        if self.choice is not None:
            return jobs.Choices(self.choice)
        if self.grammar is not None:
            return jobs.ContextFree(self.grammar)
        schema = ANY_OBJECT if self.json_ is None else self.json_
        return schema_of(schema, closes=self.disable_additional_properties)


def schema_of(
    schema: Mapping[str, Any] | bool | str, *, closes: bool | None = None
) -> jobs.Schema | jobs.SchemaText:
    """Return the constraint of a schema, or of a text of one; `closes`: see `jobs.Schema`."""
    if isinstance(schema, str):
        return jobs.SchemaText(schema, closes)
    return jobs.Schema(schema, closes)


class FormatFields(Body):
    """The format of an answer by `LLM`; requests to a server have more fields for it."""

    structured_outputs: StructuredOutputs | None = None

    @property
    def format(self) -> FormatOptions:
        """The format of the answers, all of which is text."""
        wanted = self.structured_outputs
        constraint = None if wanted is None else ("structured_outputs", wanted.constraint())
        return FormatOptions(constraint=constraint, reads=False)


def ambiguous(named: Iterable[tuple[str, object]]) -> str | None:
    """Return the name of two tools that differ, since nobody could say which one is called; None:
    there are none.

    Args:
        named: the name of each tool, and the tool. The same tool may come twice.
    """
    known: dict[str, object] = {}
    return next((name for name, tool in named if known.setdefault(name, tool) != tool), None)


def check_tools(tools: Sequence[Tool], chosen: Sequence[str] = (), *, needed: bool = False) -> None:
    """Refuse two different tools of one name, and the choice of tools that are not there.

    Args:
        tools: the tools that a request offers.
        chosen: names of the tools that may be called; none: all.
        needed: true if the choice needs tools.

    Raises:
        PydanticCustomError: one of these is the case.
    """
    if needed and not tools:
        raise wrong("tool_choice", "needs tools")
    if twice := ambiguous((tool.name, tool) for tool in tools):
        raise wrong("tools", f"has two different functions of the name {twice}")
    names = [tool.name for tool in tools]
    if not set(chosen).issubset(names):
        raise wrong("tool_choice", f"is not one of the tools: {', '.join(names)[:200]}")


def stop_strings(stop: "str | Sequence[str] | None") -> tuple[str, ...]:
    """Return stop strings as a tuple."""
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def read_turns(messages: object) -> list[Turn]:
    """Validate messages of a conversation, for the chat template.

    Raises:
        ValidationError: a message is refused.
    """
    return turns_of(_MESSAGES.validate_python(messages))


def read_messages(messages: object, name: str) -> list[Turn]:
    """Validate a conversation that a Python caller gives.

    Raises:
        ValueError: a message is refused; the text names its field, below `name`.
    """
    lists = [as_list(turn) for turn in messages] if isinstance(messages, list | tuple) else messages
    try:
        return read_turns(lists)
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
