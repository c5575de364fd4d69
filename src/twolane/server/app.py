"""The HTTP endpoints that ask the model."""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, TypeVar

from fastapi import Depends, FastAPI, Header, Request, Response
from fastapi.responses import StreamingResponse
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Receive, Scope, Send

import twolane
from twolane.frontend.forms import AnswerForm
from twolane.frontend.generation import Delta, Generation, GenerationFailed, GenerationRefused
from twolane.server.http.calls import Call, Calls, call_of
from twolane.server.http.connection import CONNECTION, Connection
from twolane.server.http.errors import error_body
from twolane.server.http.gate import MAX_BODY_BYTES, REQUEST_ID, Gate
from twolane.server.http.handlers import ClientGone, add_error_handlers, from_engine
from twolane.server.http.head import Head
from twolane.server.http.route import Route, json_response
from twolane.server.openai.answers import DONE, Answer, AnswerOptions, Echo, event
from twolane.server.openai.logprobs import LogprobWriter
from twolane.server.openai.protocol import ChatRequest, CompletionRequest, GenerationBody
from twolane.server.openai.schemas import (
    ERRORS,
    NO_KEY,
    QUEUE_FULL,
    STREAM,
    ChatCompletion,
    Completion,
)
from twolane.server.ops.dashboard.page import add_dashboard_routes
from twolane.server.ops.info import add_info_routes, add_token_routes
from twolane.server.service import Service
from twolane.slo import Slo

T = TypeVar("T")
GENERATION_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})


class EventStream(StreamingResponse):
    """A stream of server-sent events that closes its generation, however it ends."""

    def __init__(self, events: AsyncIterator[bytes], generation: Generation) -> None:
        super().__init__(
            events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        with self._generation:
            await super().__call__(scope, receive, send)


def create_app(
    service: Service,
    *,
    api_keys: Sequence[str] = (),
    max_body_bytes: int = MAX_BODY_BYTES,
    cors_origins: Sequence[str] = (),
) -> FastAPI:
    """Return the application that serves `service`; for keys and bound see `Gate`.

    Pages of `cors_origins` may ask it from a browser; "*" is every page.
    """
    app = FastAPI(
        title="Twolane",
        version=twolane.__version__,
        description="OpenAI's API, in two lanes.",
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    app.router.route_class = Route
    app.add_middleware(Head)
    app.add_middleware(Gate, api_keys=api_keys, max_body_bytes=max_body_bytes)
    if cors_origins:  # around the gate: a browser asks whether it may without the key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(cors_origins),
            allow_methods=["GET", "HEAD", "POST"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID, "Retry-After"],
        )
    app.add_middleware(  # the outermost
        Calls, metrics=service.metrics, paths=GENERATION_PATHS, quiet=service.engine.wait_for_gap
    )
    add_error_handlers(app, service.admission.retry_after)
    add_info_routes(app, service)
    add_token_routes(app, service)
    add_generation_routes(app, service)
    add_dashboard_routes(app, service)
    return app


Milliseconds = Annotated[float | None, Header(gt=0, allow_inf_nan=False)]


async def bounded_call(
    request: Request,
    x_slo_ttft_ms: Milliseconds = None,
    x_slo_tbt_ms: Milliseconds = None,
    x_slo_tpot_ms: Milliseconds = None,
) -> Call:
    """Return the call of a request, with what its headers say."""
    call = call_of(request)
    own = Slo(ttft=seconds(x_slo_ttft_ms), tbt=seconds(x_slo_tbt_ms), tpot=seconds(x_slo_tpot_ms))
    call.slo = own.over(call.slo)
    call.headers = request.headers
    return call


BoundedCall = Annotated[Call, Depends(bounded_call)]


def seconds(milliseconds: float | None) -> float | None:
    """Return seconds, which stay above 0."""
    return None if milliseconds is None else max(milliseconds / 1e3, sys.float_info.min)


def add_generation_routes(app: FastAPI, service: Service) -> None:
    """Add what asks the model."""
    described = {**ERRORS, **QUEUE_FULL, **NO_KEY}

    @app.post(
        "/v1/completions",
        response_class=Response,
        responses={200: {"model": Completion, "content": STREAM}, **described},
    )
    async def completions(body: CompletionRequest, request: Request, call: BoundedCall) -> Response:
        """Continue one or more prompts."""
        service.check_model(body.model)
        prompts = await unless_gone(request, service.completion_prompts(body))
        tokens = [prompt.tokens for prompt in prompts]
        form = await unless_gone(request, service.answer_form(body, tokens[0]))
        options = answer_options(body, form, service.echo(body, prompts))
        writer = logprob_writer(body, service)
        answer = Answer("completion", service.model_name, tokens, writer, options)
        generation = service.generate(body, tokens, call, form)
        return await respond(request, body, generation, answer)

    @app.post(
        "/v1/chat/completions",
        response_class=Response,
        responses={200: {"model": ChatCompletion, "content": STREAM}, **described},
    )
    async def chat_completions(body: ChatRequest, request: Request, call: BoundedCall) -> Response:
        """Answer a conversation."""
        service.check_model(body.model)
        tokens = [(await unless_gone(request, service.chat_prompt(body))).tokens]
        form = await unless_gone(request, service.answer_form(body, tokens[0]))
        options, writer = answer_options(body, form), logprob_writer(body, service)
        answer = Answer("chat", service.model_name, tokens, writer, options)
        generation = service.generate(body, tokens, call, form)
        return await respond(request, body, generation, answer)


def answer_options(
    body: GenerationBody, form: AnswerForm, echo: Echo | None = None
) -> AnswerOptions:
    """Return what a request wants to see."""
    return AnswerOptions(
        n=body.choices,
        return_token_ids=bool(body.return_token_ids),
        logprobs=body.logprob_count is not None,
        prompt_logprobs=body.prompt_logprobs is not None,
        echo=echo,
        continuous_usage=body.continuous_usage,
        include_usage=body.include_usage,
        parsed=form.reader,
        forced_call=form.forced_call,
    )


def logprob_writer(body: GenerationBody, service: Service) -> LogprobWriter:
    """Return what writes the log-probabilities that a request wants to see."""
    as_ids = bool(body.return_tokens_as_token_ids)
    return LogprobWriter(service.codec, body.logprob_count or 0, as_ids=as_ids)


async def respond(
    request: Request, body: GenerationBody, generation: Generation, answer: Answer
) -> Response:
    """Answer a request that the engine has: whole or as a stream.

    A stream begins only when the engine has spoken, so that refusals have a status of their own.
    """
    deltas = aiter(generation)
    if not body.stream:
        with generation:
            await unless_gone(request, collect(deltas, answer))
        return json_response(answer.whole())
    try:
        first = await unless_gone(request, anext(deltas))
    except BaseException:
        generation.close()
        raise
    begun = partial(write_at_once, request.scope["state"].get(CONNECTION), generation, answer)
    events = stream(first, deltas, answer, begun, include_usage=body.include_usage)
    return EventStream(events, generation)


async def collect(deltas: AsyncIterator[Delta], answer: Answer) -> None:
    """Read an answer to its end."""
    async for delta in deltas:
        answer.add(delta)


async def stream(
    first: Delta,
    deltas: AsyncIterator[Delta],
    answer: Answer,
    begun: Callable[[], None],
    *,
    include_usage: bool,
) -> AsyncIterator[bytes]:
    """Yield the events of a streamed answer; an error is an event of its own, and the last.

    `begun` is called when the first of them has been sent.
    """
    try:
        yield events_of(first, answer)
        begun()
        async for delta in deltas:
            if events := events_of(delta, answer):
                yield events
    except GenerationFailed as error:
        yield event(error_body(503, str(error), "unavailable"))
        return
    except GenerationRefused as error:
        yield event(from_engine(error).body)
        return
    if include_usage:
        yield event(answer.usage_chunk())
    yield DONE


def events_of(delta: Delta, answer: Answer) -> bytes:
    """Return the events that a delta adds to a streamed answer."""
    return b"".join([event(chunk) for chunk in answer.chunks(delta)])


def write_at_once(connection: Connection | None, generation: Generation, answer: Answer) -> None:
    """Write what an answer gets from now on when it comes, wherever the connection takes it."""

    if connection is None:  # another server's
        return

    def write(delta: Delta) -> bool:
        if not connection.takes_parts:
            return False
        if events := events_of(delta, answer):
            connection.write_part(events)
        return True

    generation.offer(write)


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Wait for `work`, but give it up when the client closes the connection.

    Raises:
        ClientGone: it did.
    """

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    watching = asyncio.create_task(gone())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (watching, working):  # working may raise
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
