"""The endpoints of Anthropic's Messages API."""

from functools import partial
from typing import Any, Literal

from fastapi import FastAPI, Request, Response

from twolane.frontend.generate_request import ContextExceeded, GenerateRequest
from twolane.frontend.prepare import Prepared
from twolane.server.anthropic.answers import MessageAnswer
from twolane.server.anthropic.request import CountTokensRequest, MessagesRequest, in_own_words
from twolane.server.http.route import json_response
from twolane.server.http.schemas import ERRORS, NAMED_STREAM, NO_KEY, OBJECT, QUEUE_FULL, ErrorBody
from twolane.server.http.slo_headers import BoundedCall
from twolane.server.service.respond import answer
from twolane.server.service.service import Service


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

    def asked_by(body: CountTokensRequest) -> GenerateRequest:
        has_variable = partial(service.texts.has_variable, tools=body.shows_tools)
        return body.request(has_variable, service.sampling_defaults)

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

        def made(prepared: Prepared) -> MessageAnswer:
            [tokens], reader = prepared.tokens, prepared.format.reader
            return MessageAnswer(
                prepared.request.adapter or service.model_name,
                len(tokens),
                reader and reader(),
                shows_thinking=body.shows_thinking,
            )

        try:
            return await answer(request, service, asked_by(body), call, made)
        except ContextExceeded as error:
            raise in_own_words(error) from error

    @app.post(
        "/v1/messages/count_tokens",
        response_class=Response,
        responses={200: {"description": "The count.", "content": OBJECT}, **REFUSALS},
    )
    async def count_tokens(body: CountTokensRequest) -> Response:
        """Count the tokens of a conversation, which may be longer than the context."""
        return json_response({"input_tokens": await service.count(asked_by(body))})
