"""Endpoints for the router of a fleet."""

import msgspec
from fastapi import FastAPI, Request, Response

from twolane.router.state import ReplicaState
from twolane.server.http.calls import key_of
from twolane.server.http.disconnect import unless_gone
from twolane.server.http.route import json_response
from twolane.server.http.schemas import ERRORS, NO_KEY, OBJECT, PromptLandmarks
from twolane.server.openai.protocol import ChatRequest, CompletionRequest, GenerationBody
from twolane.server.ops.dashboard.data import Dashboard
from twolane.server.service.service import Service


def add_fleet_routes(app: FastAPI, service: Service, dashboard: Dashboard) -> None:
    """Add the endpoints for a router."""

    @app.get(
        "/fleet/state",
        response_class=Response,
        responses={
            200: {"description": "The state.", "content": OBJECT},
            **NO_KEY,
            "default": ERRORS["default"],
        },
    )
    async def state(known: int = -1) -> Response:
        """Say what a router needs to choose a replica; the digest only if it is not `known`."""
        return json_response(replica_state(service, dashboard, known))

    described = {200: {"model": PromptLandmarks}, **ERRORS, **NO_KEY}

    @app.post("/fleet/landmarks/chat", response_class=Response, responses=described)
    async def chat(body: ChatRequest, request: Request, token_ids: bool = False) -> Response:
        """Return the prompt's length and landmarks of a body of /v1/chat/completions, and its
        tokens if that is asked for."""
        [prompt] = await unless_gone(request, service.prompts(body.request()))
        return landmarks(service, body, prompt.tokens, token_ids, key_of(request))

    @app.post("/fleet/landmarks/completions", response_class=Response, responses=described)
    async def completions(
        body: CompletionRequest, request: Request, token_ids: bool = False
    ) -> Response:
        """Return the same of the first prompt of a body of /v1/completions."""
        prompts = await unless_gone(request, service.prompts(body.request()))
        shown = token_ids and len(prompts) == 1 and prompts[0].text is not None
        return landmarks(service, body, prompts[0].tokens, shown, key_of(request))


def replica_state(service: Service, dashboard: Dashboard, known: int) -> ReplicaState:
    """Return the published state; without the digest if the caller has this version."""
    engine = service.engine
    return msgspec.structs.replace(
        ReplicaState.of(engine.ready, engine.stats, engine.prefixes, known),
        model=service.model_name,
        ready=service.availability.problem is None,
        draining=service.availability.draining,
        attainment=dashboard.attainment("ttft"),
    )


def landmarks(
    service: Service, body: GenerationBody, tokens: list[int], shown: bool, key: int | None
) -> Response:
    """Return a prompt's length and landmarks.

    Args:
        service: the served model.
        body: the request, whose adapter and salt are part of the hashes.
        tokens: tokens of the prompt.
        shown: true if the answer has the tokens, too, as `prompt_token_ids` takes them.
        key: The index of the request's API key; None: it has none.
    """
    chosen = service.landmarks(tokens, body.model, service.salted(body.cache_salt, key))
    return json_response(
        {
            "prompt_tokens": len(tokens),
            "page_size": service.engine.ready.page_size,
            "tokens": chosen.tokens,
            "hashes": list(map(service.engine.prefixes.keyed, chosen.hashes)),
            "token_ids": tokens if shown else None,
            "states": chosen.states,
        }
    )
