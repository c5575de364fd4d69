"""Makes requests ready for the engine: all checks, and all that is derived from a request, once."""

import asyncio
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from twolane.common.errors import FieldError
from twolane.engine.messages import TokenRules, Vocabulary
from twolane.frontend.answer_formats import FREE_TEXT, AnswerFormat, ModelFormats
from twolane.frontend.engine_client import EngineClient
from twolane.frontend.generate_request import ContextExceeded, GenerateRequest, PromptError
from twolane.frontend.structured.jobs import GrammarSetup
from twolane.frontend.structured.maker import GrammarMaker
from twolane.frontend.text.codec import EFFORTS, NO_THINKING, SWITCHES, TextCodec
from twolane.frontend.text.jobs import Chat, Encode, Listed, Listing
from twolane.frontend.text.output_reader import TextOptions
from twolane.frontend.text.texts import Texts
from twolane.sampling import SamplingParams, check_token_ids

MIN_TEXT, TEXT_FACTOR = 1 << 20, 64
"""Characters of a text that are always tokenised, or this many per token of the context."""
SEEN_TOKENS = 32
"""Tokens at a prompt's end that are searched for marks of thinking."""


class MostScores(NamedTuple):
    """Most log-probabilities of an answer that is kept in memory; infinite: any number.

    Each takes about 70 bytes, and 200 while it is encoded.
    """

    prompts: float = math.inf
    answers: float = math.inf


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


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A request that has passed all checks, with all that the engine and the answer need."""

    request: GenerateRequest
    prompts: Sequence[Prompt]
    params: SamplingParams
    """Sampling parameters, with the grammar of the answers, and without `allowed_token_ids`, which
    the rules have as a mask."""
    format: AnswerFormat
    text: TextOptions
    """Options of the text, with those that the format needs."""
    rules: TokenRules
    """Rules on the answers' tokens."""

    @property
    def tokens(self) -> list[list[int]]:
        """Tokens of each prompt."""
        return [prompt.tokens for prompt in self.prompts]


class Preparer:
    """Prepares the requests of one model. All methods belong to one event loop.

    Errors of all methods: a FieldError for a field that cannot be served, a TextError for a text
    that the model's programs refuse or fail at, QueueFull where too many wait for these programs,
    WorkerLost where one was stopped or killed from outside.

    Args:
        engine: a running engine, whose context and vocabulary bound a prompt.
        texts: the model's tokenizer and chat template.
        formats: the formats that the model can write.
        most_scores: see `MostScores`.
    """

    def __init__(
        self,
        engine: EngineClient,
        texts: Texts,
        formats: ModelFormats,
        most_scores: MostScores = MostScores(),  # noqa: B008
    ) -> None:
        self.codec = texts.codec
        self._engine = engine
        self._texts = texts
        self._formats = formats
        self._context = engine.ready.max_model_len
        self._most_text = max(MIN_TEXT, TEXT_FACTOR * self._context)
        """Most characters of a text that is tokenised."""
        self._most_scores = most_scores
        self._maker: GrammarMaker | None = None
        """Compiles grammars; started by the first one."""
        self._vocabulary: asyncio.Future[Vocabulary] | None = None
        """The texts of the tokens, for grammars; None until the first of them."""
        self._vocabulary_sent = False
        """Whether the engine has the tokenizer, which it needs for grammars."""

    async def prepare(self, request: GenerateRequest, client: str = "") -> Prepared:
        """Return a request with all that is derived from it.

        Args:
            request: the request.
            client: who asks; clients are served in rotation.

        Raises:
            FieldError, TextError, QueueFull: see the class.
            EngineError: the engine is gone.
        """
        prompts = await self.prompts(request, client)
        self._check_sampling(request, prompts)
        form = await self._format(request, prompts[0].tokens, client)
        params = request.sampling
        if form.grammar is not None:
            params = replace(params, grammar=form.grammar)
        if params.grammar is not None and self.codec.has_tokenizer:
            vocabulary = await self._token_texts("grammar")
            if not self._vocabulary_sent:
                self._engine.send_vocabulary(vocabulary)
                self._vocabulary_sent = True
        text = replace(request.text, thinking=form.thinking)
        if form.shows_special:
            text = replace(text, skip_special_tokens=False)
        rules = await self._rules(params, client)
        params = replace(params, allowed_token_ids=None)
        return Prepared(
            request=request, prompts=prompts, params=params, format=form, text=text, rules=rules
        )

    async def prompts(self, request: GenerateRequest, client: str = "") -> list[Prompt]:
        """Return the prompts of a request, cut as it asks; see `prepare`."""
        if request.conversation is not None:
            tokens = request.rendered
            if tokens is None:
                if not request.conversation.drops_oldest:
                    self._check_text(request.conversation.length, request)
                tokens = await self._rendered(request, client)
            return self._fitted([Prompt(tokens)], request)
        special, prompts = request.add_special_tokens is not False, []
        for prompt in request.prompts:
            if not isinstance(prompt, str):
                prompts.append(Prompt(prompt))
            elif request.rendered is not None:
                prompts.append(Prompt(request.rendered, prompt))
            else:
                self._check_text(len(prompt), request)
                tokens = await self._texts.tokens(Encode(prompt, special), client)
                prompts.append(Prompt(tokens, prompt))
        return self._fitted(prompts, request)

    async def count(self, request: GenerateRequest, client: str = "") -> int:
        """Return how many tokens a conversation has, which may be longer than the context."""
        return len(await self._rendered(request, client))

    async def listed(self, request: GenerateRequest, listing: Listing, client: str = "") -> Listed:
        """Return the tokens of a text or a conversation, which may be longer than the context."""
        job: Encode | Chat
        if request.conversation is None:
            [text] = request.prompts
            assert isinstance(text, str)
            job = Encode(text, request.add_special_tokens is not False, listing)
            length = len(text)
        else:
            job = self._chat(request, listing)
            length = request.conversation.length
        self._check_length(length, request.prompt_field)
        return await self._texts.listed(job, client)

    async def decoded(self, tokens: Sequence[int], client: str = "") -> str:
        """Return the text of tokens, special ones too; errors name the field `tokens`."""
        check_token_ids("tokens", tokens, self._engine.ready.vocab_size)
        return await self._texts.decode(tokens, client)

    @property
    def problem(self) -> str | None:
        """Reason why texts or grammars are not read for the moment; None: they are."""
        return self._texts.problem or (None if self._maker is None else self._maker.problem)

    async def close(self) -> None:
        """End the sandboxes."""
        if self._maker is not None:
            await self._maker.close()
        await self._texts.close()

    async def _rendered(self, request: GenerateRequest, client: str) -> list[int]:
        """Return the tokens of a conversation; one that drops its oldest messages lacks as few of
        them as leave room for the answer, or as many as it can."""
        whole = request.conversation
        assert whole is not None
        cuts = whole.cuts if whole.drops_oldest else []
        fewest, most, found = 0, len(cuts), None
        while fewest < most:
            place = (fewest + most) // 2 if fewest else 0  # most conversations are short enough
            short = whole if place == 0 else whole.cut(*cuts[place - 1])
            tokens = await self._short(replace(request, conversation=short), client)
            if tokens is None:
                fewest = place + 1
            else:
                most, found = place, tokens
        if found is not None:
            return found
        last = whole.cut(*cuts[-1]) if cuts else whole
        self._check_length(last.length, request.prompt_field)
        return await self._texts.tokens(self._chat(replace(request, conversation=last)), client)

    async def _short(self, request: GenerateRequest, client: str) -> list[int] | None:
        """Return the tokens of a conversation that leaves room for its answer; None: it does
        not."""
        assert request.conversation is not None
        length = request.conversation.length
        if length > self._most_text or self.codec.min_tokens_of(length) >= self._context:
            return None
        tokens = await self._texts.tokens(self._chat(request), client)
        return tokens if len(tokens) <= self._room(request) else None

    def _room(self, request: GenerateRequest) -> int:
        """Return the most tokens that a prompt may have beside the answer that it asks for."""
        params = request.sampling
        wanted = params.max_tokens or params.min_tokens if request.limit_field else 0
        return max(1, self._context - (wanted or 1))

    def _chat(self, request: GenerateRequest, listing: Listing | None = None) -> Chat:
        """Return a conversation as its chat template renders it."""
        asked = request.conversation
        assert asked is not None
        tools = [tool.for_template() for tool in request.format.tools] or None
        variables = asked.variables
        if asked.effort is not None:
            known = partial(self._texts.has_variable, tools=bool(tools))
            variables = {**effort_variables(asked.effort, known), **(variables or {})}
        options = {
            "add_special_tokens": bool(request.add_special_tokens),
            "add_generation_prompt": asked.add_generation_prompt,
            "continue_final_message": asked.continue_final_message,
            "variables": variables,
            "tools": tools,
            "tools_as_text": self._formats.tools_as_text,
        }
        return Chat([dict(turn) for turn in asked.turns], options, listing)

    def _check_length(self, length: int, field: str) -> None:
        """Refuse a text that would take too long to tokenise."""
        if length > self._most_text:
            most = f"at most {self._most_text} are tokenised"
            raise FieldError(field, f"has {length} characters; {most}")

    def _check_text(self, length: int, request: GenerateRequest) -> None:
        """Refuse, by its length alone, a text that is slow to tokenise or cannot fit the
        context."""
        least, cut = self.codec.min_tokens_of(length), request.truncate_prompt_tokens is not None
        if cut or least == 0:
            self._check_length(length, request.prompt_field)
        if least >= self._context and not cut:
            raise self._too_long(request, f"at least {least}", request.prompt_name)

    def _fitted(self, prompts: list[Prompt], request: GenerateRequest) -> list[Prompt]:
        """Cut the prompts as the request asks, and check them."""
        field = request.prompt_field if request.rendered is None else "prompt_token_ids"
        if not prompts:
            raise PromptError(field, "there is no prompt")
        if (kept := request.truncate_prompt_tokens) is not None:
            kept = self._room(request) if kept < 0 else kept
            prompts = [prompt.last(kept) for prompt in prompts]
        for place, prompt in enumerate(prompts):
            name = request.prompt_name if len(prompts) == 1 else f"prompt {place}"
            if not prompt.tokens:
                raise PromptError(field, f"{name} is empty")
            if len(prompt.tokens) >= self._context:
                raise self._too_long(request, str(len(prompt.tokens)), name)
            check_token_ids(field, prompt.tokens, self._engine.ready.vocab_size)
        return prompts

    def _too_long(self, request: GenerateRequest, tokens: str, name: str) -> ContextExceeded:
        return ContextExceeded(request.prompt_field, self._context, tokens, None, name)

    def _check_sampling(self, request: GenerateRequest, prompts: Sequence[Prompt]) -> None:
        """Refuse answers that have no room in the context, and tokens that the model lacks."""
        params = request.sampling
        longest = max(len(prompt.tokens) for prompt in prompts)
        limit = params.max_tokens if request.limit_field is not None else None
        wanted = limit or params.min_tokens
        if longest + wanted > self._context:
            field = (request.limit_field if limit else None) or "min_tokens"
            raise ContextExceeded(field, self._context, str(longest), wanted, "the prompt")
        size = self._engine.ready.vocab_size
        if len(params.allowed_token_ids or ()) > size:
            raise FieldError("allowed_token_ids", f"has more than the vocabulary's {size} tokens")
        for field, ids in params.token_ids.items():
            check_token_ids(field, ids, size)
        self.codec.check_stop(request.text.stop)
        self._check_scores(request, [len(prompt.tokens) for prompt in prompts])

    def _check_scores(self, request: GenerateRequest, lengths: Sequence[int]) -> None:
        """Refuse an answer whose log-probabilities would take too much memory, by the field to
        lower."""
        params, amounts = request.sampling, []
        if params.prompt_logprobs is not None:
            count = sum(lengths) * (params.prompt_logprobs + 1)
            amounts.append(("prompt_logprobs", count, self._most_scores.prompts))
        if params.logprobs is not None and not request.stream:
            room = self._context - min(lengths)
            tokens = min(params.max_tokens or room, room) * len(lengths) * request.n
            count = tokens * (params.logprobs + 1)
            amounts.append((request.limit_field or "max_tokens", count, self._most_scores.answers))
        for field, count, most in amounts:
            if count > most:
                numbers = f"{count} log-probabilities, more than {most}"
                raise FieldError(field, f"is too large: the answer could have {numbers}")

    async def _rules(self, params: SamplingParams, client: str) -> TokenRules:
        """Return the rules on the answers' tokens that follow from the parameters."""
        eos, size = self._engine.ready.eos_token_ids, self._engine.ready.vocab_size
        return TokenRules(
            banned=await self._texts.sequences(params.bad_words, client),
            allowed=allowed_mask(params.allowed_token_ids, size),
            ends=tuple(end for end in self.codec.ends if end not in eos and end < size),
            thinking=self._thinking_tokens(params),
        )

    async def _format(
        self, request: GenerateRequest, tokens: Sequence[int], client: str
    ) -> AnswerFormat:
        """Return the format of the answers to a prompt, with its grammar compiled."""
        options, asked = request.format, request.conversation
        if not (options.constraint or options.tools or (options.reads and self._formats.reads_all)):
            return FREE_TEXT
        if not self.codec.has_tokenizer:
            field, *_ = options.constraint or ("tools",)
            raise FieldError(field, "needs a model with a tokenizer")
        end = self.codec.decode(tokens[-SEEN_TOKENS:], skip_special_tokens=False)
        form = self._formats.of(options, end, None if asked is None else asked.continued)
        if form.grammar_job is None:
            return form
        vocabulary = await self._token_texts(form.grammar_job.field)
        if self._maker is None:
            eos = self._engine.ready.eos_token_ids
            self._maker = GrammarMaker(GrammarSetup(vocabulary, self.codec.added_tokens, eos))
        return form._replace(grammar=await self._maker.make(form.grammar_job, client))

    def _thinking_tokens(self, params: SamplingParams) -> tuple[int, int] | None:
        """Return the tokens around thinking that has a budget; None: it has none."""
        if params.thinking_token_budget in (None, -1):
            return None
        field, marks = "thinking_token_budget", self._formats.thinking
        if marks is None:
            raise FieldError(field, "needs a model whose chat template has marks of thinking")
        begin, end = map(self.codec.token_of, (marks.begin, marks.end))
        if begin is None or end is None:
            problem = (
                f"needs marks of thinking that are tokens; {marks.begin} or {marks.end} is none"
            )
            raise FieldError(field, problem)
        return begin, end

    async def _token_texts(self, field: str) -> Vocabulary:
        """Return the texts of the tokens, for a grammar that a field asks for.

        Raises:
            FieldError: the tokenizer's decoder does not write them independently of each other.
        """
        if self._vocabulary is None:
            making = asyncio.to_thread(self.codec.vocabulary)
            self._vocabulary = asyncio.ensure_future(making)
        try:
            return await asyncio.shield(self._vocabulary)
        except ValueError as error:
            problem = f"cannot be served: the model's tokenizer does not serve: {error}"
            raise FieldError(field, problem) from error


def allowed_mask(tokens: Sequence[int] | None, vocab_size: int) -> bytes | None:
    """Return a bit for each token of the vocabulary, the lowest first: whether it is one of
    these; None for None."""
    if tokens is None:
        return None
    bits = np.zeros(vocab_size, np.bool_)
    bits[np.array(tokens)] = True
    return np.packbits(bits, bitorder="little").tobytes()


def effort_variables(effort: str, has_variable: Callable[[str], bool]) -> dict[str, object]:
    """Return the chat template's variables for a reasoning effort.

    Many templates know no efforts, but whether to think, and some think only when they are told.

    Args:
        effort: the effort; "none" is no thinking.
        has_variable: says whether the template has a variable.
    """
    variables: dict[str, object] = dict.fromkeys(SWITCHES, effort != "none")
    if effort == "none":
        variables |= {"reasoning_effort": effort, **NO_THINKING}
    else:
        variables |= dict.fromkeys(EFFORTS, effort)
    return {name: value for name, value in variables.items() if has_variable(name)}
