"""The endpoints of OpenAI's Responses API."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from fastapi import FastAPI, Query, Request, Response
from pydantic import ConfigDict, Field

from twolane.common.checked_json import Json
from twolane.frontend.body import Body
from twolane.frontend.prepare import Prepared
from twolane.server.http.calls import key_of
from twolane.server.http.errors import ApiError
from twolane.server.http.route import json_response
from twolane.server.http.schemas import ERRORS, NAMED_STREAM, NO_KEY, OBJECT, QUEUE_FULL
from twolane.server.http.slo_headers import BoundedCall
from twolane.server.responses.events import ResponseAnswer
from twolane.server.responses.items import MessagePart, ReferenceItem, Turn, joined, read_item
from twolane.server.responses.request import Included, InputTokensRequest, ResponsesRequest, renamed
from twolane.server.responses.store import (
    NOTHING_BEFORE,
    ListedItem,
    OwnResponses,
    ResponseStore,
    StoredConversation,
)
from twolane.server.responses.tools import called_tools
from twolane.server.service.respond import answer
from twolane.server.service.service import Service

STORED: dict[int | str, dict[str, Any]] = {
    200: {"description": "The response.", "content": OBJECT},
    404: {**ERRORS[404], "description": "There is no such response."},
    "default": ERRORS["default"],
    **NO_KEY,
}
NEUTRAL_FALSE = ("false", "False", "0")


class StoredQuery(Body):
    """Query of GET /v1/responses/{id}."""

    model_config = ConfigDict(strict=False)
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "stream": NEUTRAL_FALSE,
        "include_obfuscation": NEUTRAL_FALSE,
        "starting_after": (),
    }
    why_unsupported = dict.fromkeys(unsupported, "is not supported: a stored response comes whole")

    include: list[Included] | None = None
    """Without effect, as in the request that made the response."""
    included: list[Included] | None = Field(default=None, alias="include[]")
    """`include` as OpenAI's clients write it."""


class InputItemsQuery(Body):
    """Query of GET /v1/responses/{id}/input_items."""

    model_config = ConfigDict(strict=False)

    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None
    """Id of the item after which the list begins, in its order."""
    include: list[Included] | None = None
    """See `StoredQuery.include`."""
    included: list[Included] | None = Field(default=None, alias="include[]")
    """See `StoredQuery.included`."""


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
        service.check_model(body.model)
        own = store.of(key_of(request))
        before = earlier(own, body.previous_response_id)
        body = body.resolved(own.finder())
        asked = body.request(before.turns, service.sampling_defaults)
        keep = await keeper(own, body, before)

        def made(prepared: Prepared) -> ResponseAnswer:
            [tokens], reader = prepared.tokens, prepared.format.reader
            return ResponseAnswer(
                prepared.request.adapter or service.model_name,
                len(tokens),
                body.repeated(asked.sampling),
                reader and reader(),
                called_tools(body.all_tools),
                keep,
            )

        try:
            return await answer(request, service, asked, call, made)
        except ApiError as error:
            raise renamed(error) from error

    @app.post(
        "/v1/responses/input_tokens",
        response_class=Response,
        responses={200: {"description": "The count.", "content": OBJECT}, **ERRORS, **NO_KEY},
    )
    async def input_tokens(body: InputTokensRequest, request: Request) -> Response:
        """Count the tokens of a conversation of items, which may be longer than the context."""
        service.check_model(body.model)
        own = store.of(key_of(request))
        before = earlier(own, body.previous_response_id)
        asked = body.resolved(own.finder()).request(before.turns)
        try:
            tokens = await service.count(asked)
        except ApiError as error:
            raise renamed(error) from error
        return json_response({"object": "response.input_tokens", "input_tokens": tokens})

    _add_stored(app, store)


def _add_stored(app: FastAPI, store: ResponseStore) -> None:
    """Add the paths of the responses in memory; each key sees its own ones only."""

    @app.get("/v1/responses/{id}", response_class=Response, responses=STORED)
    async def stored(id: str, request: Request, query: Annotated[StoredQuery, Query()]) -> Response:
        """Return a response that is still in memory."""
        own = store.of(key_of(request))
        response = own.response(id)
        if response is None:
            raise not_stored(own, id)
        return Response(response, media_type="application/json")

    @app.get("/v1/responses/{id}/input_items", response_class=Response, responses=STORED)
    async def input_items(
        id: str, request: Request, query: Annotated[InputItemsQuery, Query()]
    ) -> Response:
        """List the items that a response in memory was made from, those before its own included."""
        own = store.of(key_of(request))
        items = own.inputs(id)
        if items is None:
            raise not_stored(own, id)
        return json_response(page_of(items, query))

    @app.post("/v1/responses/{id}/cancel", response_class=Response, include_in_schema=False)
    async def cancel(id: str, request: Request) -> Response:
        """Refuse: only what is made in the background can be cancelled."""
        own = store.of(key_of(request))
        if own.response(id) is None:
            raise not_stored(own, id)
        message = "the response is complete: there are none in the background to cancel"
        raise ApiError(400, message, code="invalid_value", param="id")

    @app.delete("/v1/responses/{id}", response_class=Response, responses=STORED)
    async def forget(id: str, request: Request) -> Response:
        """Forget a response."""
        own = store.of(key_of(request))
        if not own.remove(id):
            raise not_stored(own, id)
        return json_response({"id": id, "object": "response", "deleted": True})


def page_of(items: list[ListedItem], query: InputItemsQuery) -> Json:
    """Return the part of a list that a query asks for.

    Args:
        items: all of them, oldest first.
        query: the query of the HTTP request.

    Raises:
        ApiError: 400, there is no item of the id `after`.
    """
    ordered = items if query.order == "asc" else items[::-1]
    if query.after is not None:
        ids = [item.id for item in ordered]
        if query.after not in ids:
            message = f"after: the response was made from no item {query.after[:100]!r}"
            raise ApiError(400, message, code="item_not_found", param="after")
        ordered = ordered[ids.index(query.after) + 1 :]
    page = ordered[: query.limit]
    return {
        "object": "list",
        "data": [item.json for item in page],
        "first_id": page[0].id if page else None,
        "last_id": page[-1].id if page else None,
        "has_more": len(page) < len(ordered),
    }


def earlier(own: OwnResponses, id: str | None) -> StoredConversation:
    """Return the conversation up to the end of an earlier response.

    Raises:
        ApiError: 400, it is not in memory.
    """
    if id is None:
        return NOTHING_BEFORE
    before = own.conversation(id)
    if before is None:
        param = "previous_response_id"
        raise not_stored(own, id, 400, param, code="previous_response_not_found")
    return before


async def keeper(
    own: OwnResponses, body: ResponsesRequest, before: StoredConversation
) -> Callable[[Json], None]:
    """Return what is called with the complete response, to store it if the request says so.

    Args:
        own: responses of the request's key.
        body: the request, whose references are resolved.
        before: the conversation that it continues.
    """
    if body.store is False:
        return lambda response: None
    turns = [*before.turns, *body.turns]
    items = []
    for place, item in enumerate(body.items, 1):
        if not isinstance(item, ReferenceItem):
            items.append(ListedItem.of(item.listed()))
        # Items that are encoded before others have their turn: about 10 ms.
        if place % 1000 == 0:
            await asyncio.sleep(0)  # others have their turn
    inputs = (*before.items, *items)
    return lambda response: own.add(response, [*turns, *answered(response)], inputs)


def answered(response: Json) -> list[Turn]:
    """Return the messages that a response's output is as the input of another request."""
    items = map(read_item, response["output"])
    return joined([item.turn() for item in items if isinstance(item, MessagePart)])


def not_stored(
    own: OwnResponses,
    id: str,
    status: int = 404,
    param: str = "id",
    code: str = "response_not_found",
) -> ApiError:
    """Return the refusal of a response that is not in memory, or is another key's."""
    why = f"of the latest ones, {own.max_bytes} bytes are kept in memory"
    if own.max_bytes == 0:
        why = "this server stores none (--stored-response-bytes)"
    message = f"{param}: there is no response {id[:100]!r}; {why}"
    return ApiError(status, message, code=code, param=param)
