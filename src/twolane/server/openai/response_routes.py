"""The endpoints of OpenAI's Responses API."""

from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response

from twolane.server.http.bounds import BoundedCall
from twolane.server.http.errors import ApiError
from twolane.server.http.route import json_response
from twolane.server.openai.response_events import ResponseAnswer
from twolane.server.openai.response_items import Turn
from twolane.server.openai.response_request import (
    RENAMED,
    InputTokensRequest,
    ResponsesRequest,
    renamed,
)
from twolane.server.openai.response_store import Json, ResponseStore
from twolane.server.openai.response_tools import called_tools
from twolane.server.openai.schemas import ERRORS, NAMED_STREAM, NO_KEY, QUEUE_FULL
from twolane.server.respond import begin_chat, respond
from twolane.server.service import Service

OBJECT: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
STORED: dict[int | str, dict[str, Any]] = {
    200: {"description": "The response.", "content": OBJECT},
    404: {**ERRORS[404], "description": "There is no such response."},
    "default": ERRORS["default"],
    **NO_KEY,
}


def add_response_routes(app: FastAPI, service: Service, store: ResponseStore) -> None:
    """Add the endpoints of /v1/responses, which store answers in `store`."""

    @app.post(
        "/v1/responses",
        response_class=Response,
        responses={
            200: {"description": "The response.", "content": {**OBJECT, **NAMED_STREAM}},
            **ERRORS,
            **QUEUE_FULL,
            **NO_KEY,
        },
    )
    async def responses(body: ResponsesRequest, request: Request, call: BoundedCall) -> Response:
        """Answer a conversation of items."""
        model = service.check_model(body.model)
        history = earlier(store, body.previous_response_id)
        body = body.resolved(store.finder())
        chat = body.as_chat(history)
        try:
            tokens, reader, generation = await begin_chat(request, service, chat, call, RENAMED)
        except ApiError as error:
            raise renamed(error) from error
        answer = ResponseAnswer(
            model,
            tokens,
            body.repeated(chat.sampling(service.sampling_defaults)),
            reader,
            called_tools(body.all_tools),
            partial(keep, store, [*history, *body.turns] if body.store is not False else None),
        )
        return await respond(request, generation, answer, streams=bool(body.stream))

    @app.post(
        "/v1/responses/input_tokens",
        response_class=Response,
        responses={200: {"description": "The count.", "content": OBJECT}, **ERRORS, **NO_KEY},
    )
    async def input_tokens(body: InputTokensRequest) -> Response:
        """Count the tokens of a conversation of items, which may be longer than the context."""
        service.check_model(body.model)
        history = earlier(store, body.previous_response_id)
        chat = body.resolved(store.finder()).as_chat(history)
        try:
            tokens = await service.prompts.count_chat(chat)
        except ApiError as error:
            raise renamed(error) from error
        return json_response({"object": "response.input_tokens", "input_tokens": tokens})

    _add_stored(app, store)


def _add_stored(app: FastAPI, store: ResponseStore) -> None:
    """Add the paths of the responses in memory."""

    @app.get("/v1/responses/{id}", response_class=Response, responses=STORED)
    async def stored(id: str, stream: bool = False) -> Response:
        """Return a response that is still in memory."""
        if stream:
            message = "stream is not supported: a stored response comes whole"
            raise ApiError(400, message, code="unsupported_parameter", param="stream")
        found = store.response(id)
        if found is None:
            raise not_stored(store, id, 404, "id")
        return Response(found, media_type="application/json")

    @app.delete("/v1/responses/{id}", response_class=Response, responses=STORED)
    async def forget(id: str) -> Response:
        """Forget a response."""
        if not store.remove(id):
            raise not_stored(store, id, 404, "id")
        return json_response({"id": id, "object": "response", "deleted": True})


def earlier(store: ResponseStore, id: str | None) -> list[Turn]:
    """Return the messages up to the end of an earlier response.

    Raises:
        ApiError: 400, it is not in memory.
    """
    turns = [] if id is None else store.turns(id)
    if turns is None:
        param = "previous_response_id"
        raise not_stored(store, str(id), 400, param, code="previous_response_not_found")
    return turns


def keep(store: ResponseStore, turns: list[Turn] | None, response: Json, answer: Json) -> None:
    """Store a complete response, unless `turns` is None."""
    if turns is not None:
        store.add(response, [*turns, answer])


def not_stored(
    store: ResponseStore, id: str, status: int, param: str, code: str = "response_not_found"
) -> ApiError:
    """Return the refusal of a response that is not in memory."""
    why = f"of the latest ones, {store.max_bytes} bytes are kept in memory"
    if store.max_bytes == 0:
        why = "this server stores none (--stored-response-bytes)"
    message = f"{param}: there is no response {id[:100]!r}; {why}"
    return ApiError(status, message, code=code, param=param)
