"""Prompts of requests: text, tokens or conversations, converted to tokens."""

from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from twolane.frontend.engine_client import EngineClient
from twolane.frontend.fields import kept_tokens
from twolane.frontend.messages import turns_of
from twolane.frontend.sandbox import QueueFull
from twolane.frontend.text.codec import SWITCHES, TextCodec, TextError
from twolane.frontend.text.jobs import Chat, Encode, Listed, Listing
from twolane.frontend.text.texts import Texts
from twolane.server.http.errors import ApiError, ContextExceeded, queue_full
from twolane.server.http.gate import CLIENT
from twolane.server.openai.answers import Echo
from twolane.server.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    GenerationBody,
    TokenizeRequest,
)
from twolane.server.service.admission import Admission
from twolane.server.service.availability import Availability

T = TypeVar("T")
MIN_TEXT, TEXT_FACTOR = 1 << 20, 64
"""Characters of a text that are always tokenised, or this many per token of the context."""


def effort_variables(effort: str, has_variable: Callable[[str], bool]) -> dict[str, object]:
    """Return the chat template's variables for a reasoning effort.

    Many templates know no efforts, but whether to think, and some think only when they are told.

    Args:
        effort: "none" for no thinking.
        has_variable: says whether the template has a variable.
    """
    variables = {"reasoning_effort": effort, **dict.fromkeys(SWITCHES, effort != "none")}
    return {name: value for name, value in variables.items() if has_variable(name)}


class Prompt(NamedTuple):
    """A prompt to answer."""

    tokens: list[int]
    text: str | None = None
    """Text as given; None: it was not text, or was cut."""

    def last(self, most: int) -> "Prompt":
        """Return the prompt cut to its last tokens."""
        return self if len(self.tokens) <= most else Prompt(self.tokens[-most:])

    def shown(self, codec: TextCodec, skip_special_tokens: bool) -> str:
        """Return the prompt's text, empty without a tokenizer."""
        if self.text is not None or not codec.has_tokenizer:
            return self.text or ""
        return codec.decode(self.tokens, skip_special_tokens=skip_special_tokens)


class PromptReader:
    """Converts requests to prompts, and refuses those that cannot be served.

    Args:
        engine: a running engine, whose context and vocabulary bound a prompt.
        texts: its tokenizer and chat template.
        admission: the queue, which bounds the prompts of one call.
        availability: whether anything is served.
    """

    def __init__(
        self, engine: EngineClient, texts: Texts, admission: Admission, availability: Availability
    ) -> None:
        self._texts = texts
        self._admission = admission
        self._availability = availability
        self._context = engine.ready.max_model_len
        self._vocabulary = engine.ready.vocab_size

    async def of_completion(self, body: CompletionRequest) -> list[Prompt]:
        """Return the prompts of a completion request.

        Raises:
            ApiError: 400, the prompts cannot be served; 503.
        """
        special = body.add_special_tokens is not False
        prompts, all_given = [], body.prompts
        self._admission.check_count(len(all_given) * body.choices, counted_by(body))
        for prompt in all_given:
            if isinstance(prompt, str) and body.prompt_token_ids is not None:
                prompts.append(Prompt(body.prompt_token_ids, prompt))
            elif isinstance(prompt, str):
                self._check_text(len(prompt), body, "prompt")
                encode = self._texts.encode(prompt, add_special_tokens=special, client=CLIENT.get())
                prompts.append(Prompt(await self._text(encode, "prompt"), prompt))
            else:
                prompts.append(Prompt(prompt))
        return self._fitted(prompts, body, "prompt")

    async def of_chat(self, body: ChatRequest) -> Prompt:
        """Return a conversation as a prompt.

        Raises:
            ApiError: 400, the conversation cannot be served; 503.
        """
        tokens = body.prompt_token_ids
        if tokens is None:
            length = sum(len(message.text) for message in body.messages)
            self._check_text(length, body, "messages")
            tokens = await self._rendered(body)
        return self._fitted([Prompt(tokens)], body, "messages")[0]

    async def count_chat(self, body: ChatRequest) -> int:
        """Return how many tokens a conversation has, which may be longer than the context.

        Raises:
            ApiError: 400, the conversation cannot be served; 503.
        """
        self._check_length(sum(len(message.text) for message in body.messages), "messages")
        return len(await self._rendered(body))

    async def _rendered(self, body: ChatRequest) -> list[int]:
        options = {**self._rendering(body), **self._for_template(body)}
        chat = self._texts.chat(turns_of(body.messages), client=CLIENT.get(), **options)
        return await self._text(chat, "messages")

    def _for_template(self, body: ChatRequest) -> dict[str, Any]:
        """Return the tools and variables for the chat template."""
        more: dict[str, Any] = {"tools": body.shown_tools}
        stated = body.chat_template_kwargs or {}
        if body.reasoning_effort is not None:
            known = partial(self._texts.has_variable, tools=bool(body.shown_tools))
            variables = effort_variables(body.reasoning_effort, known)
            more["variables"] = {**variables, **stated}
        return more

    async def tokenize(self, body: TokenizeRequest) -> Listed:
        """Return the tokens of a text or a conversation, which may be longer than the context, and
        their names if they are wanted.

        Raises:
            ApiError: 400, there is no tokenizer or template, or the template refuses; 503.
        """
        listing = Listing(bool(body.return_token_strs))
        if body.prompt is not None:
            self._check_length(len(body.prompt), "prompt")
            special = body.add_special_tokens is not False
            job: Encode | Chat = Encode(body.prompt, special, listing)
            return await self._text(self._texts.listed(job, CLIENT.get()), "prompt")
        messages = body.messages or []
        self._check_length(sum(len(message.text) for message in messages), "messages")
        turns = [dict(turn) for turn in turns_of(messages)]
        job = Chat(turns, {**self._rendering(body), "tools": body.shown_tools}, listing)
        return await self._text(self._texts.listed(job, CLIENT.get()), "messages")

    async def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones too.

        Raises:
            ApiError: 400, there is no tokenizer; 503.
        """
        self.check_ids("tokens", tokens)
        return await self._text(self._texts.decode(tokens, CLIENT.get()), "tokens")

    async def banned(self, body: GenerationBody) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences of `bad_words`.

        Raises:
            ApiError: 400, there is no tokenizer, or it makes no tokens of one; 503.
        """
        words = tuple(body.bad_words or ())
        return await self._text(self._texts.sequences(words, CLIENT.get()), "bad_words")

    def echo(self, body: CompletionRequest, prompts: Sequence[Prompt]) -> Echo | None:
        """Return the part of the prompts that is shown before the answers; None: nothing."""
        if not body.echo:
            return None
        hide = body.skip_special_tokens is not False
        return Echo([prompt.shown(self._texts.codec, hide) for prompt in prompts], body.only_echo)

    def _rendering(self, body: ChatRequest | TokenizeRequest) -> dict[str, Any]:
        """Return the options of rendering, without those that only answers need."""
        return {"add_special_tokens": bool(body.add_special_tokens), **body.rendering}

    async def _text(self, work: Coroutine[Any, Any, T], param: str) -> T:
        """Wait for the sandbox, unless the server is unavailable."""
        if self._availability.problem is not None:
            work.close()
        self._availability.check()
        try:
            return await work
        except TextError as error:
            self._availability.check()  # it may have been given up for that
            raise refused_text(error, param) from error
        except QueueFull as error:
            raise queue_full("long texts wait to be tokenised") from error

    def _check_length(self, length: int, param: str) -> None:
        """Refuse a text that would take too long to tokenise."""
        most = max(MIN_TEXT, TEXT_FACTOR * self._context)
        if length > most:
            message = f"{param} has {length} characters; at most {most} are tokenised"
            raise ApiError(400, message, code="invalid_value", param=param)

    def _check_text(self, length: int, body: GenerationBody, param: str) -> None:
        """Refuse, by its length alone, a text that is slow to tokenise or cannot fit the
        context."""
        least = self._texts.codec.min_tokens_of(length)
        if body.truncate_prompt_tokens is not None or least == 0:
            self._check_length(length, param)
        if least >= self._context and body.truncate_prompt_tokens is None:
            raise ContextExceeded(param, self._context, f"at least {least}")

    def _fitted(self, prompts: list[Prompt], body: GenerationBody, param: str) -> list[Prompt]:
        """Cut the prompts as the request asks, and check them."""
        if not prompts:
            raise ApiError(400, "there is no prompt", code="invalid_prompt", param=param)
        context = self._context
        if body.truncate_prompt_tokens is not None:
            answer = body.limit[1] or body.min_tokens
            most = kept_tokens(body.truncate_prompt_tokens, context, answer)
            prompts = [prompt.last(most) for prompt in prompts]
        for place, prompt in enumerate(prompts):
            name = "the prompt" if len(prompts) == 1 else f"prompt {place}"
            if not prompt.tokens:
                raise ApiError(400, f"{name} is empty", code="invalid_prompt", param=param)
            if len(prompt.tokens) >= context:
                raise ContextExceeded(param, context, str(len(prompt.tokens)), name=name)
            self.check_ids(param, prompt.tokens)
        return prompts

    def check_ids(self, param: str, ids: Iterable[int]) -> None:
        """Refuse token ids that the model does not have.

        Raises:
            ApiError: 400.
        """
        largest = max(ids, default=0)
        if largest >= self._vocabulary:
            raise ApiError(
                400,
                f"{param}: token id {largest} is beyond the vocabulary of {self._vocabulary}",
                code="invalid_value",
                param=param,
            )


def refused_text(error: TextError, param: str) -> ApiError:
    """Return the refusal of a text; `param` is at fault where the error names no field."""
    return ApiError(400, str(error), code="invalid_prompt", param=error.param or param)


def counted_by(body: GenerationBody) -> str:
    """Return the field to blame when a call asks for too many answers."""
    return "n" if body.choices > 1 else "prompt"
