"""The endpoints of Anthropic's Messages API."""

from functools import partial
from typing import Any, Literal

from fastapi import FastAPI, Request, Response

from twolane.server.anthropic.answers import MessageAnswer
from twolane.server.anthropic.request import RENAMED, CountTokensRequest, MessagesRequest, renamed
from twolane.server.http.errors import ApiError
from twolane.server.http.route import json_response
from twolane.server.http.schemas import ERRORS, NAMED_STREAM, NO_KEY, QUEUE_FULL, ErrorBody
from twolane.server.http.slo_headers import BoundedCall
from twolane.server.openai.protocol import ChatRequest
from twolane.server.service.respond import begin_chat, respond
from twolane.server.service.service import Service

OBJECT: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}


class MessageErrorBody(ErrorBody):
    """Body of every error of these endpoints."""

    type: Literal["error"]


REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {**described, "model": MessageErrorBody}
    for status, described in {**ERRORS, **QUEUE_FULL, **NO_KEY}.items()
}
"""Errors of these endpoints by status, for the OpenAPI description."""


def add_message_routes(app: FastAPI, service: Service) -> None:
    """Add /v1/messages and /v1/messages/count_tokens."""

    def as_chat(body: CountTokensRequest) -> ChatRequest:
        return body.as_chat(partial(service.texts.has_variable, tools=body.shows_tools))

    @app.post(
        "/v1/messages",
        response_class=Response,
        responses={
            200: {"description": "The message.", "content": {**OBJECT, **NAMED_STREAM}},
            **REFUSALS,
        },
    )
    async def messages(body: MessagesRequest, request: Request, call: BoundedCall) -> Response:
        """Answer a conversation of blocks."""
        model = service.check_model(body.model)
        chat = as_chat(body)
        try:
            tokens, reader, generation = await begin_chat(request, service, chat, call, RENAMED)
        except ApiError as error:
            raise renamed(error) from error
        answer = MessageAnswer(model, tokens, reader, shows_thinking=body.shows_thinking)
        return await respond(request, generation, answer, streams=bool(body.stream))

    @app.post(
        "/v1/messages/count_tokens",
        response_class=Response,
        responses={200: {"description": "The count.", "content": OBJECT}, **REFUSALS},
    )
    async def count_tokens(body: CountTokensRequest) -> Response:
        """Count the tokens of a conversation, which may be longer than the context."""
        service.check_model(body.model)
        try:
            tokens = await service.prompts.count_chat(as_chat(body))
        except ApiError as error:
            raise renamed(error) from error
        return json_response({"input_tokens": tokens})
