"""The HTTP endpoints."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

import twolane
from twolane.api.answers import DONE, Answer, event
from twolane.api.calls import CLIENT_GONE, Calls, call_of, set_reason
from twolane.api.errors import ApiError, error_body, from_validation
from twolane.api.generation import Delta, Generation, GenerationFailed, GenerationRefused
from twolane.api.protocol import ChatRequest, CompletionRequest, GenerationBody
from twolane.api.service import Service

log = logging.getLogger("twolane.api")

T = TypeVar("T")
GENERATION_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})
REFUSED_CODES = {"too_long": "context_length_exceeded", "invalid": "invalid_value"}


class ClientGone(Exception):
    """The client closed the connection before its answer was there."""


class StrictJson(Request):
    """A request whose body must be JSON by the letter: UTF-8, no NaN, no lone surrogates."""

    async def json(self) -> Any:
        """Parse the body.

        Raises:
            ApiError: 400.
        """
        try:
            return msgspec.json.decode(await self.body())
        except (ValueError, RecursionError) as error:
            message = f"the body is not valid JSON: {error}"
            raise ApiError(400, message, code="invalid_json") from error


class Route(APIRoute):
    """A route that parses bodies with `StrictJson`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap FastAPI's handler."""
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            return await handle(StrictJson(request.scope, request.receive))

        return handler


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


def json_response(body: Any, status: int = 200) -> Response:
    """Return `body` as JSON."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def create_app(service: Service) -> FastAPI:
    """Return the application that serves `service`."""
    app = FastAPI(
        title="Twolane", version=twolane.__version__, description="OpenAI's API, in two lanes."
    )
    app.router.route_class = Route
    app.add_middleware(Calls, metrics=service.metrics, paths=GENERATION_PATHS)  # the outermost
    add_error_handlers(app)
    add_info_routes(app, service)

    @app.post("/v1/completions", response_class=Response)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue one or more prompts."""
        service.check_model(body.model)
        prompts = await service.completion_prompts(body)
        answer = Answer(
            "completion",
            service.model_name,
            prompts,
            return_token_ids=bool(body.return_token_ids),
        )
        return await respond(
            request, body, service.generate(body, prompts, call_of(request)), answer
        )

    @app.post("/v1/chat/completions", response_class=Response)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        service.check_model(body.model)
        prompts = [await service.chat_prompt(body)]
        answer = Answer(
            "chat", service.model_name, prompts, return_token_ids=bool(body.return_token_ids)
        )
        return await respond(
            request, body, service.generate(body, prompts, call_of(request)), answer
        )

    return app


def add_info_routes(app: FastAPI, service: Service) -> None:
    """Add what tells about the server."""

    def model_card() -> dict[str, Any]:
        return {
            "id": service.model_name,
            "object": "model",
            "created": service.created,
            "owned_by": "twolane",
            "root": service.model_name,
            "parent": None,
            "max_model_len": service.engine.ready.max_model_len,
        }

    @app.get("/v1/models")
    async def models() -> Response:
        """List the one served model."""
        return json_response({"object": "list", "data": [model_card()]})

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        """Describe the served model."""
        service.check_model(model)
        return json_response(model_card())

    @app.get("/health")
    async def health() -> Response:
        """Say whether requests can be served: 200 or 503."""
        if service.unavailable is not None:
            raise ApiError(503, service.unavailable, code="unavailable")
        return json_response({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Return the metrics in Prometheus' text form."""
        return Response(service.metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST})


def add_error_handlers(app: FastAPI) -> None:
    """Put every error into OpenAI's form."""

    async def refuse(request: Request, error: ApiError) -> Response:
        set_reason(request, error.code)
        log.debug("%s %s %d %s", request.method, request.url.path, error.status_code, error.message)
        response = json_response(error.body, error.status_code)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return await refuse(request, error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return await refuse(request, from_validation(error.errors()))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid")
        message = f"{request.method} {request.url.path}: {error.detail}"
        headers: Mapping[str, str] | None = error.headers
        if error.status_code == 405:
            headers = {"Allow": allowed_methods(app, request)}
        return await refuse(
            request, ApiError(error.status_code, message, code=code, headers=headers)
        )

    @app.exception_handler(GenerationRefused)
    async def engine_refused(request: Request, error: GenerationRefused) -> Response:
        code = REFUSED_CODES.get(error.refused.code, "refused")
        return json_response(error_body(400, error.refused.message, code), 400)

    @app.exception_handler(GenerationFailed)
    async def failed(request: Request, error: GenerationFailed) -> Response:
        return json_response(error_body(503, str(error), "unavailable"), 503)

    @app.exception_handler(ClientGone)
    async def client_gone(request: Request, error: ClientGone) -> Response:
        return Response(status_code=CLIENT_GONE)  # nobody reads it

    @app.exception_handler(Exception)
    async def internal(request: Request, error: Exception) -> Response:
        return json_response(error_body(500, "internal error", "internal_error"), 500)


def allowed_methods(app: FastAPI, request: Request) -> str:
    """Return the methods that the request's path has, as the Allow header lists them."""
    routes = [route for route in app.routes if isinstance(route, APIRoute)]
    fitting = [r for r in routes if r.matches(request.scope)[0] is not Match.NONE]
    return ", ".join(sorted({method for route in fitting for method in route.methods or ()}))


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
    events = stream(first, deltas, answer, include_usage=body.include_usage)
    return EventStream(events, generation)


async def collect(deltas: AsyncIterator[Delta], answer: Answer) -> None:
    """Read an answer to its end."""
    async for delta in deltas:
        answer.choices[delta.index].add(delta)


async def stream(
    first: Delta, deltas: AsyncIterator[Delta], answer: Answer, *, include_usage: bool
) -> AsyncIterator[bytes]:
    """Yield the events of a streamed answer; an error is an event of its own, and the last."""
    try:
        for chunk in answer.chunks(first):
            yield event(chunk)
        async for delta in deltas:
            for chunk in answer.chunks(delta):
                yield event(chunk)
    except GenerationFailed as error:
        yield event(error_body(503, str(error), "unavailable"))
        return
    except GenerationRefused as error:
        yield event(error_body(400, str(error), "refused"))
        return
    if include_usage:
        yield event(answer.usage_chunk())
    yield DONE


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
        for task in (working, watching):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
