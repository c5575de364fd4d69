"""What every endpoint shares: the engine, the tokenizer, admission and the books."""

import logging
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from msgspec.structs import replace

from twolane.common.errors import FieldError
from twolane.engine.messages import Output, Refused
from twolane.frontend.body import shortened
from twolane.frontend.engine_client import EngineClient, EngineError, EngineGone, Event
from twolane.frontend.fence import Crowded
from twolane.frontend.fields import kept_tokens
from twolane.frontend.forms import FREE, AnswerForm, Forms, grammar_alone
from twolane.frontend.generation import Generation
from twolane.frontend.messages import turns_of
from twolane.frontend.pooling import NO_EMBEDDING, Embedding
from twolane.frontend.structured.maker import GrammarMaker
from twolane.frontend.text.codec import TextCodec, TextError
from twolane.frontend.text.jobs import Chat, Encode, Listed, Listing
from twolane.frontend.text.texts import Texts
from twolane.sampling import SamplingParams
from twolane.server.admission import Admission
from twolane.server.http.calls import Call
from twolane.server.http.errors import ApiError
from twolane.server.http.gate import CLIENT
from twolane.server.http.judge import Judge
from twolane.server.openai.answers import Echo
from twolane.server.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    GenerationBody,
    TokenizeRequest,
)
from twolane.server.ops.dashboard.data import Dashboard
from twolane.server.ops.metrics import ServerMetrics
from twolane.server.options import ServerOptions

if TYPE_CHECKING:  # needs an extra
    from twolane.server.ops.tracing import RequestTrace, Tracing

log = logging.getLogger("twolane.server")


T = TypeVar("T")
SEEN_TOKENS = 32
"""The end of a prompt in which the marks of thinking are looked for, in tokens."""

LEAST_TEXT, TEXT_FACTOR = 1 << 20, 64
"""This many characters are always tokenised, and this many for each token of the context."""
MOST_PROMPT_LOGPROBS, MOST_LOGPROBS = 1 << 20, 1 << 22
"""One answer, which is in memory as a whole, holds at most this many log-probabilities of prompt
tokens, and this many of its own tokens; each takes about 70 bytes of it and 200 on the way."""


class Prompt(NamedTuple):
    """A prompt to answer."""

    tokens: list[int]
    text: str | None = None
    """As given; None: it was not text, or was cut."""

    def last(self, most: int) -> "Prompt":
        """Return the prompt cut to its last tokens."""
        return self if len(self.tokens) <= most else Prompt(self.tokens[-most:])

    def shown(self, codec: TextCodec, skip_special_tokens: bool) -> str:
        """Return the prompt as text, which is empty without a tokenizer."""
        if self.text is not None or not codec.has_tokenizer:
            return self.text or ""
        return codec.decode(self.tokens, skip_special_tokens=skip_special_tokens)


class Service:
    """The served model.

    Args:
        engine: a running engine.
        texts: its tokenizer and chat template.
        model_name: what clients call it.
        options: bounds of the queue, whether requests may have a priority, names of the metrics.
        embedding: what embeddings the model gives.
        sampling: fields of `SamplingParams`, for requests that say nothing of them.
        forms: of the model's answers; None: they are found from its chat template.
    """

    def __init__(
        self,
        engine: EngineClient,
        texts: Texts,
        model_name: str,
        options: ServerOptions,
        sampling: Mapping[str, Any] = MappingProxyType({}),
        forms: Forms | None = None,
        embedding: Embedding = NO_EMBEDDING,
    ) -> None:
        self.engine = engine
        self.texts = texts
        self.codec = texts.codec
        self.model_name = model_name
        self._sampling = sampling
        self.embedding = embedding
        self.forms = forms or Forms(texts.template_source)
        self._taught = False
        """Whether the engine has the tokenizer."""
        self.created = int(time.time())
        self._allow_priority = options.allow_priority
        self.reasoning_field = options.reasoning_field
        """The field of chat answers that has the thinking."""
        self.admission = Admission(
            options.max_queue,
            options.max_queued_per_key,
            lambda: engine.stats.prompt_token_seconds,
        )
        self.metrics = ServerMetrics(
            lambda: engine.stats,
            engine.liveness,
            model_name,
            engine.ready.slo,
            engine.ready.page_size,
            options.metrics_prefix,
            engine.ready.kv_cache_dtype,
        )
        self.dashboard = Dashboard(engine, self.metrics)
        self.tracing: Tracing | None = None
        """Where requests are traced, if they are."""
        self.draining = False
        self.judge = Judge()
        """What judges large bodies."""
        self._grammars: GrammarMaker | None = None
        """What makes grammars, from the first one on."""

    @property
    def unavailable(self) -> str | None:
        """Why no request can be served, or None."""
        if self.engine.failure is not None:
            return f"the engine is gone: {self.engine.failure}"
        if self.engine.liveness.problem is not None:
            return self.engine.liveness.problem
        return "the server is shutting down" if self.draining else None

    def check_available(self) -> None:
        """Refuse what can be served no more.

        Raises:
            ApiError: 503.
        """
        if self.unavailable is not None:
            raise ApiError(503, self.unavailable, code="unavailable")

    def check_model(self, name: str | None) -> str:
        """Return the name of the model that answers a request for this one.

        Raises:
            ApiError: 404, there is no such model and no such adapter.
        """
        if name is None or name == self.model_name:
            return self.model_name
        if name not in self.engine.adapters.loaded:
            raise ApiError(
                404,
                f"the model {shortened(name)!r} does not exist here; {self.model_name!r} does",
                code="model_not_found",
                param="model",
            )
        return name

    async def completion_prompts(self, body: CompletionRequest) -> list[Prompt]:
        """Return the prompts of a completion request.

        Raises:
            ApiError: 400, the prompts cannot be served; 503.
        """
        special = body.add_special_tokens is not False
        prompts, all_given = [], body.prompts
        self.admission.check_count(len(all_given) * body.choices, counted_by(body))
        for given in all_given:
            if isinstance(given, str) and body.prompt_token_ids is not None:
                prompts.append(Prompt(body.prompt_token_ids, given))
            elif isinstance(given, str):
                self._check_text(len(given), body, "prompt")
                encode = self.texts.encode(given, add_special_tokens=special, client=CLIENT.get())
                prompts.append(Prompt(await self._text(encode, "prompt"), given))
            else:
                prompts.append(Prompt(given))
        return self._fitted(prompts, body, "prompt")

    async def chat_prompt(self, body: ChatRequest) -> Prompt:
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
        how = {**self._how(body), **self._for_template(body)}
        chat = self.texts.chat(turns_of(body.messages), client=CLIENT.get(), **how)
        return await self._text(chat, "messages")

    def _for_template(self, body: ChatRequest) -> dict[str, Any]:
        """What the chat template gets beside the messages and how to render them."""
        more: dict[str, Any] = {"tools": body.shown_tools}
        given = body.chat_template_kwargs or {}
        effort = body.reasoning_effort
        if effort is not None and self.texts.has_variable("reasoning_effort"):
            more["variables"] = {"reasoning_effort": effort, **given}
        elif effort == "none":
            more["variables"] = {"enable_thinking": False, **given}
        return more

    async def answer_form(self, body: GenerationBody, tokens: Sequence[int]) -> AnswerForm:
        """Return the form of the answers to a prompt.

        Raises:
            ApiError: 400, a field asks for what cannot be served.
        """
        asked, chat = body.asked, isinstance(body, ChatRequest)
        if asked.wanted is None and not (chat and (asked.tools or self.forms.thinks)):
            return FREE
        try:
            if not self.codec.has_tokenizer:
                raise FieldError((asked.wanted or ("tools",))[0], "needs a model with a tokenizer")
            end = self.codec.decode(tokens[-SEEN_TOKENS:], skip_special_tokens=False)
            if isinstance(body, ChatRequest):
                form = self.forms.of(asked, end, body.continued)
            else:
                form = grammar_alone(asked)
            return await self._with_grammar(form)
        except FieldError as error:
            raise ApiError(400, str(error), code="invalid_value", param=error.field) from error

    async def _with_grammar(self, form: AnswerForm) -> AnswerForm:
        """The form with the grammar that it asks for.

        Raises:
            FieldError: the grammar cannot be served.
            ApiError: 429 or 503.
        """
        if form.wanted is None:
            return form
        self.check_available()
        if self._grammars is None:
            eos = self.engine.ready.eos_token_ids
            self._grammars = GrammarMaker(self.codec.tokenizer_json, eos)
        try:
            return form._replace(grammar=await self._grammars.make(form.wanted, CLIENT.get()))
        except FieldError:
            self.check_available()  # it may have been given up for that
            raise
        except Crowded as error:
            headers = {"Retry-After": "1"}
            message = "too many grammars wait to be made"
            raise ApiError(429, message, code="queue_full", headers=headers) from error

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
            return await self._text(self.texts.listed(job, CLIENT.get()), "prompt")
        messages = body.messages or []
        self._check_length(sum(len(message.text) for message in messages), "messages")
        turns = [dict(turn) for turn in turns_of(messages)]
        job = Chat(turns, {**self._how(body), "tools": body.shown_tools}, listing)
        return await self._text(self.texts.listed(job, CLIENT.get()), "messages")

    async def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones too.

        Raises:
            ApiError: 400, there is no tokenizer; 503.
        """
        self.check_ids("tokens", tokens)
        return await self._text(self.texts.decode(tokens, CLIENT.get()), "tokens")

    def echo(self, body: CompletionRequest, prompts: Sequence[Prompt]) -> Echo | None:
        """Return what of the prompts is shown before the answers."""
        if not body.echo:
            return None
        hide = body.skip_special_tokens is not False
        return Echo([prompt.shown(self.codec, hide) for prompt in prompts], body.only_echo)

    def sampling(self, body: GenerationBody, prompts: Sequence[list[int]]) -> SamplingParams:
        """Return the sampling parameters of a request, checked against the model's limits.

        Raises:
            ApiError: 400, a field is out of range or the answer has no room in the context.
        """
        try:
            params = body.sampling(self._sampling)
        except FieldError as error:
            raise ApiError(400, str(error), code="invalid_value", param=error.field) from error
        context = self.engine.ready.max_model_len
        longest = max(map(len, prompts))
        name = body.limit[0] if params.max_tokens else "min_tokens"
        wanted = params.max_tokens or params.min_tokens
        if longest + wanted > context:
            raise ApiError(
                400,
                f"{name} is too large: the context has {context} tokens, the prompt takes "
                f"{longest}, and {wanted} were asked for",
                code="context_length_exceeded",
                param=name,
            )
        self.check_ids("stop_token_ids", params.stop_token_ids)
        self.check_ids("logit_bias", params.logit_bias)
        return params

    def generate(
        self,
        body: GenerationBody,
        prompts: Sequence[list[int]],
        call: Call,
        form: AnswerForm = FREE,
    ) -> Generation:
        """Admit a request and send it to the engine.

        Raises:
            ApiError: 400, 429 or 503.
        """
        params = self._formed(self.sampling(body, prompts), form)
        try:
            self.codec.check_stop(body.stop_strings)
        except TextError as error:
            raise refused_text(error, "prompt") from error
        self._check_logprobs(body, params, prompts)
        self._check_priority(body.priority)
        name = self.check_model(body.model)
        lora = None if name == self.model_name else name
        self.check_available()
        answers = [prompt for prompt in prompts for _ in range(body.choices)]
        tokens = sum(map(len, answers))
        self.admission.enter(len(answers), counted_by(body), key=call.key, tokens=tokens)
        if lora is not None:
            self.metrics.count_adapter(lora, len(answers))
        books = RequestAccounting(self, answers, call, self._traces(body, params, answers, call))
        text = replace(body.text_options, thinking=form.thinking)
        if form.shows_special:
            text = replace(text, skip_special_tokens=False)
        try:
            if form.grammar is not None and not self._taught:
                self.engine.teach(self.codec.tokenizer_json)
                self._taught = True
            return Generation(
                self.engine,
                self.codec,
                prompts,
                [params] * len(prompts),
                n=body.choices,
                text=text,
                priority=body.priority or 0,
                cache_salt=body.cache_salt,
                slo=call.slo,
                lora=lora,
                observer=books,
            )
        except EngineError as error:
            raise ApiError(503, str(error), code="unavailable") from error

    def _check_priority(self, priority: int | None) -> None:
        """Refuse a priority where clients may have none: who has the best one has the server.

        Raises:
            ApiError: 400.
        """
        if priority and not self._allow_priority:
            message = "priority: this server serves in order of arrival (see --allow-priority)"
            raise ApiError(400, message, code="unsupported_parameter", param="priority")

    def _check_logprobs(
        self, body: GenerationBody, params: SamplingParams, prompts: Sequence[list[int]]
    ) -> None:
        """Refuse an answer that would take too much memory.

        Raises:
            ApiError: 400; its message says which field to lower.
        """
        asked = 0
        if params.prompt_logprobs is not None:
            asked = sum(map(len, prompts)) * (params.prompt_logprobs + 1)
        self._check_amount(asked, MOST_PROMPT_LOGPROBS, "prompt_logprobs")
        if body.logprob_count is not None and not body.stream:
            room = self.engine.ready.max_model_len - min(map(len, prompts))
            tokens = min(params.max_tokens or room, room) * len(prompts) * body.choices
            self._check_amount(tokens * (body.logprob_count + 1), MOST_LOGPROBS, body.limit[0])

    def _check_amount(self, asked: int, most: int, param: str) -> None:
        if asked > most:
            message = f"{param}: the answer could have {asked} log-probabilities, and {most} may be"
            raise ApiError(400, f"{message}: lower it", code="invalid_value", param=param)

    def _formed(self, params: SamplingParams, form: AnswerForm) -> SamplingParams:
        """The sampling parameters with the grammar of the form."""
        try:
            return params if form.grammar is None else replace(params, grammar=form.grammar)
        except FieldError as error:
            raise ApiError(400, str(error), code="invalid_value", param=error.field) from error

    def _traces(
        self,
        body: GenerationBody,
        params: SamplingParams,
        answers: Sequence[list[int]],
        call: Call,
    ) -> "list[RequestTrace]":
        if self.tracing is None:
            return []
        asked = span_attributes(body, params, self.check_model(body.model))
        return [
            self.tracing.begin(
                call.headers, call.arrival, {**asked, "gen_ai.usage.input_tokens": len(prompt)}
            )
            for prompt in answers
        ]

    async def close(self) -> None:
        """End the programs that run behind fences."""
        self.draining = True
        await self.judge.close()
        if self._grammars is not None:
            await self._grammars.close()
        await self.texts.close()

    def _how(self, body: ChatRequest | TokenizeRequest) -> dict[str, Any]:
        """How a conversation is rendered, without what only answers need."""
        return {"add_special_tokens": bool(body.add_special_tokens), **body.rendering}

    async def _text(self, work: Coroutine[Any, Any, T], param: str) -> T:
        """Wait for the checkpoint's programs, unless nothing is served any more."""
        if self.unavailable is not None:
            work.close()
        self.check_available()
        try:
            return await work
        except TextError as error:
            self.check_available()  # it may have been given up for that
            raise refused_text(error, param) from error
        except Crowded as error:
            message = "too many long texts wait to be tokenised"
            again = {"Retry-After": "1"}
            raise ApiError(429, message, code="queue_full", headers=again) from error

    def _check_length(self, length: int, param: str) -> None:
        """Refuse a text so long that tokenising it would hold others up."""
        most = max(LEAST_TEXT, TEXT_FACTOR * self.engine.ready.max_model_len)
        if length > most:
            message = f"{param} has {length} characters, and {most} are the most that are tokenised"
            raise ApiError(400, message, code="invalid_value", param=param)

    def _check_text(self, length: int, body: GenerationBody, param: str) -> None:
        """Refuse at a glance what would take long to tokenise and cannot fit."""
        least = self.codec.least_tokens(length)
        if body.truncate_prompt_tokens is not None or least == 0:
            self._check_length(length, param)
        if least >= self.engine.ready.max_model_len and body.truncate_prompt_tokens is None:
            raise self._too_long("the prompt", f"at least {least}", param)

    def _fitted(self, prompts: list[Prompt], body: GenerationBody, param: str) -> list[Prompt]:
        """Cut the prompts as the request asks, and check them."""
        if not prompts:
            raise ApiError(400, "there is no prompt", code="invalid_prompt", param=param)
        context = self.engine.ready.max_model_len
        if body.truncate_prompt_tokens is not None:
            answer = body.limit[1] or body.min_tokens
            most = kept_tokens(body.truncate_prompt_tokens, context, answer)
            prompts = [prompt.last(most) for prompt in prompts]
        for place, prompt in enumerate(prompts):
            name = "the prompt" if len(prompts) == 1 else f"prompt {place}"
            if not prompt.tokens:
                raise ApiError(400, f"{name} is empty", code="invalid_prompt", param=param)
            if len(prompt.tokens) >= context:
                raise self._too_long(name, str(len(prompt.tokens)), param)
            self.check_ids(param, prompt.tokens)
        return prompts

    def _too_long(self, name: str, tokens: str, param: str) -> ApiError:
        return ApiError(
            400,
            f"{name} has {tokens} tokens; the context has "
            f"{self.engine.ready.max_model_len}, and at least one is for the answer",
            code="context_length_exceeded",
            param=param,
        )

    def check_ids(self, param: str, ids: Iterable[int]) -> None:
        """Refuse token ids that the model does not have.

        Raises:
            ApiError: 400.
        """
        vocabulary = self.engine.ready.vocab_size
        largest = max(ids, default=0)
        if largest >= vocabulary:
            raise ApiError(
                400,
                f"{param}: token id {largest} is beyond the vocabulary of {vocabulary}",
                code="invalid_value",
                param=param,
            )


class RequestAccounting:
    """Keeps admission and metrics right for the prompts of one request.

    Invariant: each prompt leaves the queue once and ends once in the metrics.
    """

    def __init__(
        self,
        service: Service,
        prompts: Sequence[list[int]],
        call: Call,
        traces: "Sequence[RequestTrace]" = (),
    ) -> None:
        self._service = service
        self._traces = traces
        self._metrics = call.admit(prompts)
        self._queued = [True] * len(prompts)
        self._lengths = [len(prompt) for prompt in prompts]
        self._arrival, self._key = call.arrival, call.key

    def tokens(self, index: int, count: int, now: float, cached: int | None) -> None:
        """See `Observer.tokens`."""
        self._leave(index, served=True)
        self._metrics[index].tokens(count, now, cached)
        if self._traces:
            self._traces[index].tokens(count, now, cached)

    def ended(self, index: int, event: Event | None, now: float) -> None:
        """See `Observer.ended`."""
        self._leave(index, served=False)
        metrics = self._metrics[index]
        outcome: str
        match event:
            case Output(finish="stop" | "length" as outcome):
                metrics.finish(outcome, now, event.times)
            case Refused(code="broken"):
                outcome = "model"
                metrics.fail(outcome)
            case Refused(code=outcome, message=message):
                metrics.refuse(outcome, message, overload=outcome == "refused")
            case Output() | EngineGone():
                outcome = "shutdown" if self._service.draining else "engine"
                metrics.fail(outcome)
            case None:
                outcome = "disconnect"
                metrics.give_up(outcome, now)
        if self._traces:
            self._traces[index].ended(event, outcome, now)
        log.debug(
            "%d prompt tokens: %s after %.3f s", self._lengths[index], outcome, now - self._arrival
        )

    def _leave(self, index: int, *, served: bool) -> None:
        if self._queued[index]:
            self._queued[index] = False
            self._service.admission.leave(served=served, key=self._key, tokens=self._lengths[index])


def refused_text(error: TextError, param: str) -> ApiError:
    """Return the refusal of a text; `param` is at fault where the error names no field."""
    return ApiError(400, str(error), code="invalid_prompt", param=error.param or param)


def counted_by(body: GenerationBody) -> str:
    """Return the field to blame when a call asks for too many answers."""
    return "n" if body.choices > 1 else "prompt"


def span_attributes(
    body: GenerationBody, params: SamplingParams, model_name: str
) -> dict[str, str | int | float | bool | list[str]]:
    """Return what a request asks for, by OpenTelemetry's names; what it leaves open is missing."""
    chat = isinstance(body, ChatRequest)
    asked = {
        "operation.name": "chat" if chat else "text_completion",
        "provider.name": "twolane",
        "request.model": model_name,
        "response.model": model_name,
        "request.choice.count": body.choices if body.choices > 1 else None,
        "request.stream": bool(body.stream),
        "request.max_tokens": params.max_tokens,
        "request.temperature": params.temperature,
        "request.top_p": params.top_p,
        "request.top_k": params.top_k if params.top_k > 0 else None,
        "request.seed": params.seed,
        "request.frequency_penalty": params.frequency_penalty,
        "request.presence_penalty": params.presence_penalty,
        "request.stop_sequences": list(body.stop_strings) or None,
    }
    return {f"gen_ai.{name}": value for name, value in asked.items() if value is not None}
