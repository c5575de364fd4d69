"""The one record of a request: every API's adapter builds it, and `prepare` makes it ready."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec.structs import replace

from twolane.common.errors import FieldError
from twolane.frontend.answer_formats import FormatOptions
from twolane.frontend.messages import Turn
from twolane.frontend.text.output_reader import TextOptions
from twolane.sampling import SamplingParams
from twolane.slo import Slo

NO_DEFAULTS: Mapping[str, Any] = MappingProxyType({})
INSTRUCTIONS = ("system", "developer")
"""Roles of the messages at the beginning that a shortened conversation keeps."""


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation, and how the chat template renders it. Its tools are those of the format."""

    turns: Sequence[Turn]
    add_generation_prompt: bool = True
    """Whether the prompt ends where the assistant's answer begins."""
    continue_final_message: bool = False
    """Whether the answer continues the last message."""
    variables: Mapping[str, Any] | None = None
    """Variables of the chat template."""
    effort: str | None = None
    """Reasoning effort, "none" for no thinking; None: the template's own."""
    drops_oldest: bool = False
    """Whether the oldest messages are left out of a prompt that is too long."""

    @property
    def length(self) -> int:
        """Characters of all messages."""
        return sum(len(text_of(turn)) for turn in self.turns)

    @property
    def continued(self) -> str | None:
        """Text of the message that the answer continues; None: it is a new one."""
        return text_of(self.turns[-1]) if self.continue_final_message else None

    @property
    def cuts(self) -> list[tuple[Sequence[Turn], int]]:
        """The ways to shorten this conversation, the one that leaves out least first.

        Each has the messages to keep at the beginning (instructions, then the user's latest message
        if calls after it are left out) and the place of the first other message that stays. What is
        left out ends before a message of the user or, after the latest of these, before an answer.
        """
        turns, count = self.turns, len(self.turns)
        begin = next((i for i in range(count) if turns[i]["role"] not in INSTRUCTIONS), count)
        asked = [i for i in range(begin, count) if turns[i]["role"] == "user"]
        if not asked:
            return []
        answers = [i for i in range(asked[-1] + 1, count) if turns[i]["role"] == "assistant"]
        cuts = [(turns[:begin], i) for i in asked if i > begin]
        kept = [*turns[:begin], turns[asked[-1]]]
        return [*cuts, *((kept, i) for i in answers[1:])]

    def cut(self, kept: Sequence[Turn], place: int) -> "Conversation":
        """Return the conversation shortened in one of the ways of `cuts`."""
        return replace(self, turns=[*kept, *self.turns[place:]])


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts, or one conversation, to answer. Nothing in it is derived from anything else."""

    prompts: Sequence[str | list[int]] = ()
    """Texts or token ids to continue; none with a conversation."""
    conversation: Conversation | None = None
    """Conversation to answer instead of prompts."""
    rendered: list[int] | None = None
    """Tokens of each text or of the conversation, from a router that had them made; None: they are
    made here."""
    sampling: SamplingParams
    n: int = 1
    """Number of answers to each prompt."""
    text: TextOptions = TextOptions()
    format: FormatOptions = FormatOptions(reads=False)
    slo: Slo = Slo()
    """Latency bounds, completed by the server's."""
    adapter: str | None = None
    """Name of the LoRA adapter that answers; None: the model itself."""
    priority: int = 0
    """Requests of a lower number are served first."""
    key: int | None = None
    """Index of the API key that it came with; keys take turns. None: it came with none."""
    cache_salt: str | None = None
    """Salt of the prefix cache: prefixes are shared only by requests with the same one."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its own tokens around a prompt; None: around plain prompts only,
    since the chat template adds them."""
    truncate_prompt_tokens: int | None = None
    """Number of last prompt tokens to keep; -1: as many as leave room for the answer; None: all."""
    stream: bool = False
    """Whether the answers leave in pieces."""
    prompt_field: str = "prompt"
    """Client's field that has the prompts or the conversation."""
    limit_field: str | None = None
    """Client's field that limits the output, which must then fit into the context; None: the answer
    may end at the context length instead."""
    label: str | None = None
    """Name of the only prompt in errors; None: it is the only one of its call."""

    @property
    def answers(self) -> int:
        """Number of answers to all prompts."""
        return max(1, len(self.prompts)) * self.n

    @property
    def counted_by(self) -> str:
        """The client's field to blame where these are too many answers."""
        return "n" if self.n > 1 else self.prompt_field

    @property
    def prompt_name(self) -> str:
        """Name of a single prompt in errors."""
        return self.label or "the prompt"


class PromptError(FieldError):
    """A prompt that cannot be served.

    Args:
        field: the client's field that has the prompt.
        message: the problem as a whole sentence.
    """

    def __str__(self) -> str:
        return self.problem


class ContextExceeded(PromptError):
    """A prompt that, alone or with its answer, exceeds the model's context.

    Clients shorten a conversation, or ask for less, where they find the words of OpenAI's message.

    Args:
        field: the field at fault.
        context: number of tokens that the context has.
        tokens: number of prompt tokens as text, since only a lower bound may be known.
        wanted: number of tokens that `field` asks for; None: the prompt is too long by itself.
        name: name of the prompt in the message.
    """

    def __init__(
        self, field: str, context: int, tokens: str, wanted: int | None, name: str
    ) -> None:
        self.context, self.tokens, self.wanted = context, tokens, wanted
        limit = f"This model's maximum context length is {context} tokens"
        message = (
            f"{limit}. However, {name} has {tokens} tokens, and at least one is for the answer. "
            f"Please reduce the length of the {field}."
        )
        if wanted is not None:
            message = (
                f"{field} is too large: {wanted}. {limit}, and {name} has {tokens} tokens "
                f"({wanted} > {context} - {tokens})."
            )
        super().__init__(field, message)


def text_of(turn: Turn) -> str:
    """Return the text of a message, its parts joined by newlines."""
    content = turn["content"]
    if isinstance(content, str):
        return content
    return "\n".join(part for part in content or () if isinstance(part, str))


def sampling_params(
    fields: Mapping[str, Any],
    defaults: Mapping[str, Any] = NO_DEFAULTS,
    limit_field: str = "max_tokens",
) -> SamplingParams:
    """Return the sampling parameters of a request.

    Args:
        fields: fields of `SamplingParams`; None and missing ones have their default. `max_tokens`
            has none: without it there is no limit.
        defaults: the model's own defaults.
        limit_field: the client's name of `max_tokens`.

    Raises:
        FieldError: a field is out of range.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        return SamplingParams(**{"max_tokens": None, **defaults, **given})
    except FieldError as error:
        field = limit_field if error.field == "max_tokens" else error.field
        raise FieldError(field, error.problem.replace("max_tokens", limit_field)) from error
