"""What every endpoint shares: the engine, the tokenizer, admission and the books."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from twolane.api.admission import Admission
from twolane.api.calls import Call
from twolane.api.engine_client import EngineClient, EngineError, EngineGone, Event
from twolane.api.errors import ApiError
from twolane.api.generation import Generation
from twolane.api.metrics import Metrics
from twolane.api.protocol import ChatRequest, CompletionRequest, GenerationBody
from twolane.api.text import TextCodec, TextError
from twolane.engine.messages import Output, Refused
from twolane.sampling import SamplingParams

log = logging.getLogger("twolane.api")

T = TypeVar("T")


class Service:
    """The served model.

    Args:
        engine: a running engine.
        codec: its tokenizer.
        model_name: what clients call it.
        max_queue: how many requests may wait for their first token.
    """

    def __init__(
        self, engine: EngineClient, codec: TextCodec, model_name: str, max_queue: int
    ) -> None:
        self.engine = engine
        self.codec = codec
        self.model_name = model_name
        self.created = int(time.time())
        self.admission = Admission(max_queue)
        self.metrics = Metrics(lambda: engine.stats, model_name, engine.ready.slo)
        self.draining = False
        # One thread: tokenizers are not safe to share, and long prompts must not hold the loop.
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenize")

    @property
    def unavailable(self) -> str | None:
        """Why no request can be served, or None."""
        if self.engine.failure is not None:
            return f"the engine is gone: {self.engine.failure}"
        return "the server is shutting down" if self.draining else None

    def check_model(self, name: str | None) -> None:
        """Refuse a request for another model.

        Raises:
            ApiError: 404.
        """
        if name is not None and name != self.model_name:
            raise ApiError(
                404,
                f"the model {name!r} does not exist here; {self.model_name!r} does",
                code="model_not_found",
                param="model",
            )

    async def completion_prompts(self, body: CompletionRequest) -> list[list[int]]:
        """Return the tokens of each prompt of a completion request.

        Raises:
            ApiError: 400, the prompts cannot be served.
        """
        tokens = [
            prompt if isinstance(prompt, list) else await self._text(self.codec.encode, prompt)
            for prompt in body.prompts
        ]
        self._check_prompts(tokens, "prompt")
        return tokens

    async def chat_prompt(self, body: ChatRequest) -> list[int]:
        """Return the tokens of a conversation.

        Raises:
            ApiError: 400, the conversation cannot be served.
        """
        messages = [message.for_template() for message in body.messages]
        tokens = await self._text(self.codec.chat, messages, param="messages")
        self._check_prompts([tokens], "messages")
        return tokens

    def sampling(self, body: GenerationBody, prompts: Sequence[list[int]]) -> SamplingParams:
        """Return the sampling parameters of a request, checked against the model's limits.

        Raises:
            ApiError: 400, a field is out of range or the answer has no room in the context.
        """
        try:
            params = body.sampling()
        except ValueError as error:
            name = str(error).split(" ", 1)[0]
            raise ApiError(400, str(error), code="invalid_value", param=name) from error
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
        self._check_ids("stop_token_ids", params.stop_token_ids)
        return params

    def generate(
        self, body: GenerationBody, prompts: Sequence[list[int]], call: Call
    ) -> Generation:
        """Admit a request and send it to the engine.

        Raises:
            ApiError: 400, 429 or 503.
        """
        params = self.sampling(body, prompts)
        if self.unavailable is not None:
            raise ApiError(503, self.unavailable, code="unavailable")
        self.admission.enter(len(prompts))
        books = Books(self, prompts, call)
        try:
            return Generation(
                self.engine,
                self.codec,
                prompts,
                [params] * len(prompts),
                priority=body.priority or 0,
                observer=books,
            )
        except EngineError as error:
            raise ApiError(503, str(error), code="unavailable") from error

    def close(self) -> None:
        """Free the tokenizing thread."""
        self._tokenizing.shutdown(cancel_futures=True)

    async def _text(
        self, function: Callable[[T], list[int]], text: T, param: str = "prompt"
    ) -> list[int]:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._tokenizing, function, text)
        except TextError as error:
            raise ApiError(400, str(error), code="invalid_prompt", param=param) from error

    def _check_prompts(self, prompts: Sequence[list[int]], param: str) -> None:
        context = self.engine.ready.max_model_len
        if not prompts:
            raise ApiError(400, "there is no prompt", code="invalid_prompt", param=param)
        for prompt in prompts:
            if not prompt:
                raise ApiError(400, "the prompt is empty", code="invalid_prompt", param=param)
            if len(prompt) >= context:
                raise ApiError(
                    400,
                    f"the prompt has {len(prompt)} tokens; the context has {context}, and at "
                    "least one is for the answer",
                    code="context_length_exceeded",
                    param=param,
                )
            self._check_ids(param, prompt)

    def _check_ids(self, param: str, ids: Sequence[int]) -> None:
        vocabulary = self.engine.ready.vocab_size
        if ids and max(ids) >= vocabulary:
            raise ApiError(
                400,
                f"{param}: token id {max(ids)} is beyond the vocabulary of {vocabulary}",
                code="invalid_value",
                param=param,
            )


class Books:
    """Keeps admission and metrics right for the prompts of one request.

    Invariant: each prompt leaves the queue once and ends once in the metrics.
    """

    def __init__(self, service: Service, prompts: Sequence[list[int]], call: Call) -> None:
        self._service = service
        self._metrics = call.admit(prompts)
        self._queued = [True] * len(prompts)
        self._lengths = [len(prompt) for prompt in prompts]
        self._arrival = call.arrival

    def tokens(self, index: int, count: int, now: float) -> None:
        """See `Observer.tokens`."""
        self._leave(index, served=True)
        self._metrics[index].tokens(count, now)

    def ended(self, index: int, event: Event | None, now: float) -> None:
        """See `Observer.ended`."""
        self._leave(index, served=False)
        metrics = self._metrics[index]
        outcome: str
        match event:
            case Output(finish="stop" | "length" as outcome):
                metrics.finish(outcome, now, event.times)
            case Refused(code=outcome):
                metrics.refuse(outcome)
            case Output() | EngineGone():
                outcome = "broken off by the server"
                metrics.fail("shutdown" if self._service.draining else "engine")
            case None:
                outcome = "given up"
                metrics.give_up("disconnect", now)
        log.debug(
            "%d prompt tokens: %s after %.3f s", self._lengths[index], outcome, now - self._arrival
        )

    def _leave(self, index: int, *, served: bool) -> None:
        if self._queued[index]:
            self._queued[index] = False
            self._service.admission.leave(served=served)
