"""The served model, which every endpoint asks: from a request to its generation."""

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from twolane.common.errors import FieldError
from twolane.frontend.answer_formats import FREE_TEXT, AnswerFormat, ModelFormats
from twolane.frontend.body import shortened
from twolane.frontend.engine_client import EngineClient, EngineError
from twolane.frontend.generation import Generation, GenerationOptions
from twolane.frontend.pooling import NO_EMBEDDING, Embedding
from twolane.frontend.text.codec import TextError
from twolane.frontend.text.texts import Texts
from twolane.sampling import SamplingParams
from twolane.server.http.body_checks import BodyChecker
from twolane.server.http.calls import Call
from twolane.server.http.errors import ApiError, ContextExceeded
from twolane.server.openai.protocol import GenerationBody
from twolane.server.options import ServerOptions
from twolane.server.service.accounting import (
    AdmissionObserver,
    RequestAccounting,
    RequestTrace,
    Tracer,
    span_attributes,
)
from twolane.server.service.admission import Admission
from twolane.server.service.availability import Availability
from twolane.server.service.format_resolver import FormatResolver
from twolane.server.service.prompts import PromptReader, counted_by, refused_text

MAX_PROMPT_LOGPROBS, MAX_ANSWER_LOGPROBS = 1 << 20, 1 << 22
"""Most log-probabilities of prompt tokens and of output tokens in an answer that is kept in memory;
each takes about 70 bytes, and 200 while it is encoded."""


class Service:
    """The served model.

    Args:
        engine: a running engine.
        texts: its tokenizer and chat template.
        model_name: its name for clients.
        options: bounds of the queue, and whether requests may have a priority.
        observer: counts what is admitted.
        embedding: the model's embeddings.
        sampling: fields of `SamplingParams`, for requests that say nothing of them.
        formats: of the model's answers; None: detected from its chat template.
    """

    def __init__(
        self,
        engine: EngineClient,
        texts: Texts,
        model_name: str,
        options: ServerOptions,
        observer: AdmissionObserver,
        sampling: Mapping[str, Any] = MappingProxyType({}),
        formats: ModelFormats | None = None,
        embedding: Embedding = NO_EMBEDDING,
    ) -> None:
        self.engine = engine
        self.texts = texts
        self.codec = texts.codec
        self.model_name = model_name
        self.sampling_defaults = sampling
        self.embedding = embedding
        self.created = int(time.time())
        self._allow_priority = options.allow_priority
        self.reasoning_field = options.reasoning_field
        """Field of chat answers for the thinking."""
        self.admission = Admission(
            options.max_queue,
            options.max_queued_per_key,
            lambda: engine.stats.prompt_token_seconds,
        )
        self._observer = observer
        self.tracing: Tracer | None = None
        """Tracing of requests; None: not traced."""
        self.availability = Availability(engine)
        self.prompts = PromptReader(engine, texts, self.admission, self.availability)
        formats = formats or ModelFormats(texts.template_source)
        self.formats = FormatResolver(engine, texts.codec, formats, self.availability)
        self.body_checker = BodyChecker()
        """Checks large bodies in a sandbox."""

    def check_model(self, name: str | None, param: str = "model") -> str:
        """Return the served model's or adapter's name for a requested one, the field `param`.

        Raises:
            ApiError: 404, there is no such model and no such adapter.
        """
        if name is None or name == self.model_name:
            return self.model_name
        if name not in self.engine.adapters.loaded:
            raise ApiError(
                404,
                f"there is no model {shortened(name)!r} here; {self.model_name!r} is served",
                code="model_not_found",
                param=param,
            )
        return name

    def sampling(self, body: GenerationBody, prompts: Sequence[list[int]]) -> SamplingParams:
        """Return the sampling parameters of a request, checked against the model's limits.

        Raises:
            ApiError: 400, a field is out of range or the answer has no room in the context.
        """
        try:
            params = body.sampling(self.sampling_defaults)
        except FieldError as error:
            raise ApiError(400, str(error), code="invalid_value", param=error.field) from error
        context = self.engine.ready.max_model_len
        longest = max(map(len, prompts))
        name = body.limit[0] if params.max_tokens else "min_tokens"
        wanted = params.max_tokens or params.min_tokens
        if longest + wanted > context:
            raise ContextExceeded(name, context, str(longest), wanted)
        self.prompts.check_ids("stop_token_ids", params.stop_token_ids)
        self.prompts.check_ids("logit_bias", params.logit_bias)
        self.prompts.check_ids("allowed_token_ids", params.allowed_token_ids or ())
        return params

    def generate(
        self,
        body: GenerationBody,
        prompts: Sequence[list[int]],
        call: Call,
        answer_format: AnswerFormat = FREE_TEXT,
        banned: tuple[tuple[int, ...], ...] = (),
    ) -> Generation:
        """Admit a request and send it to the engine.

        Args:
            body: the request.
            prompts: tokens of each prompt, which fit the context.
            call: the HTTP call, which is admitted here.
            answer_format: of the answers.
            banned: token sequences of the request's `bad_words`.

        Raises:
            ApiError: 400, 429 or 503.
        """
        params = self._params(body, prompts, answer_format)
        name = self.check_model(body.model)
        lora = None if name == self.model_name else name
        self.availability.check()
        account = self._admit(body, params, prompts, call, lora)
        text = replace(body.text_options, thinking=answer_format.thinking)
        if answer_format.shows_special:
            text = replace(text, skip_special_tokens=False)
        options = GenerationOptions(
            body.choices, text, body.priority or 0, body.cache_salt, call.slo, lora, banned=banned
        )
        if answer_format.grammar_job is not None:
            options = options._replace(asks_for_grammar=answer_format.grammar_job.field)
        every = [params] * len(prompts)
        try:
            if answer_format.grammar is not None:
                self.formats.send_vocabulary()
            return Generation(self.engine, self.codec, prompts, every, options, account)
        except EngineError as error:
            raise ApiError(503, str(error), code="unavailable") from error

    def _params(
        self, body: GenerationBody, prompts: Sequence[list[int]], answer_format: AnswerFormat
    ) -> SamplingParams:
        """Return the sampling parameters of a request, with its grammar, after all checks.

        Raises:
            ApiError: 400, it cannot.
        """
        params = self.sampling(body, prompts)
        try:
            if answer_format.grammar is not None:
                params = replace(params, grammar=answer_format.grammar)
            self.codec.check_stop(body.stop_strings)
        except FieldError as error:
            raise ApiError(400, str(error), code="invalid_value", param=error.field) from error
        except TextError as error:
            raise refused_text(error, "prompt") from error
        self._check_logprobs(body, params, prompts)
        self._check_priority(body.priority)
        return params

    def _admit(
        self,
        body: GenerationBody,
        params: SamplingParams,
        prompts: Sequence[list[int]],
        call: Call,
        lora: str | None,
    ) -> RequestAccounting:
        """Take places in the queue; return the accounting that gives them back.

        Raises:
            ApiError: 429, there is no room.
        """
        answers = [prompt for prompt in prompts for _ in range(body.choices)]
        tokens = sum(map(len, answers))
        self.admission.enter(len(answers), counted_by(body), key=call.key, tokens=tokens)
        if lora is not None:
            self._observer.count_adapter(lora, len(answers))
        traces = self._traces(body, params, answers, call)
        return RequestAccounting(self.admission, self.availability, answers, call, traces)

    def _check_priority(self, priority: int | None) -> None:
        """Refuse a priority unless clients may set one: whoever has the best one has the server.

        Raises:
            ApiError: 400.
        """
        if priority and not self._allow_priority:
            message = "priority: this server serves in order of arrival (see --allow-priority)"
            raise ApiError(400, message, code="unsupported_parameter", param="priority")

    def _check_logprobs(
        self, body: GenerationBody, params: SamplingParams, prompts: Sequence[list[int]]
    ) -> None:
        """Refuse an answer whose log-probabilities would take too much memory.

        Raises:
            ApiError: 400; its message says which field to lower.
        """
        count = 0
        if params.prompt_logprobs is not None:
            count = sum(map(len, prompts)) * (params.prompt_logprobs + 1)
        self._check_amount(count, MAX_PROMPT_LOGPROBS, "prompt_logprobs")
        if body.logprob_count is not None and not body.stream:
            room = self.engine.ready.max_model_len - min(map(len, prompts))
            tokens = min(params.max_tokens or room, room) * len(prompts) * body.choices
            self._check_amount(
                tokens * (body.logprob_count + 1), MAX_ANSWER_LOGPROBS, body.limit[0]
            )

    def _check_amount(self, count: int, most: int, param: str) -> None:
        if count > most:
            numbers = f"{count} log-probabilities, more than {most}"
            message = f"{param} is too large: the answer could have {numbers}"
            raise ApiError(400, message, code="invalid_value", param=param)

    def _traces(
        self,
        body: GenerationBody,
        params: SamplingParams,
        answers: Sequence[list[int]],
        call: Call,
    ) -> list[RequestTrace]:
        if self.tracing is None:
            return []
        attributes = span_attributes(body, params, self.check_model(body.model))
        return [
            self.tracing.begin(
                call.headers, call.arrival, {**attributes, "gen_ai.usage.input_tokens": len(prompt)}
            )
            for prompt in answers
        ]

    async def close(self) -> None:
        """End the sandboxes."""
        self.availability.draining = True
        await self.body_checker.close()
        await self.formats.close()
        await self.texts.close()
