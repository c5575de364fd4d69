"""Endpoints about the server, the model and its tokens."""

from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse

import twolane
from twolane.frontend.text.jobs import Listing
from twolane.router.state import ReplicaState, total_load
from twolane.server.http.disconnect import unless_gone
from twolane.server.http.gate import CLIENT
from twolane.server.http.route import json_response
from twolane.server.http.schemas import (
    ERRORS,
    NO_KEY,
    UNAVAILABLE,
    Health,
    Model,
    ModelList,
    ServerLoad,
    Text,
    Tokens,
    Version,
)
from twolane.server.openai.protocol import DetokenizeRequest, TokenizeRequest
from twolane.server.ops.docs import DOCS_HEADERS, described
from twolane.server.ops.metrics import CONTENT_TYPE, ServerMetrics
from twolane.server.service.service import Service


def add_info_routes(app: FastAPI, service: Service, metrics: ServerMetrics) -> None:
    """Add the endpoints about the server."""
    _add_model_routes(app, service)
    _add_probes(app, service)
    _add_state_routes(app, service, metrics)


def _add_model_routes(app: FastAPI, service: Service) -> None:
    """Add the endpoints about the served model and its adapters."""

    def model_card(name: str) -> dict[str, Any]:
        adapter = service.engine.adapters.loaded.get(name)
        return {
            "id": name,
            "object": "model",
            "created": service.created if adapter is None else adapter.created,
            "owned_by": "twolane",
            "root": service.model_name if adapter is None else adapter.path,
            "parent": None if adapter is None else service.model_name,
            "max_model_len": service.engine.ready.max_model_len,
        }

    @app.get("/v1/models", response_class=Response, responses={200: {"model": ModelList}, **NO_KEY})
    async def models() -> Response:
        """List the served model and its adapters."""
        names = *service.model_names, *service.engine.adapters.loaded
        return json_response({"object": "list", "data": [model_card(name) for name in names]})

    @app.get(
        "/v1/models/{model:path}",
        response_class=Response,
        responses={200: {"model": Model}, **NO_KEY, 404: ERRORS[404], "default": ERRORS["default"]},
    )
    async def model(model: str) -> Response:
        """Describe the served model, or an adapter."""
        known = service.check_model(model)
        return json_response(model_card(model if model in service.model_names else known))


def _add_probes(app: FastAPI, service: Service) -> None:
    """Add the probes of readiness and liveness."""

    probe: dict[int | str, dict[str, Any]] = {200: {"model": Health}, **UNAVAILABLE}

    @app.get("/ping", response_class=Response, responses=probe)
    @app.get("/health/ready", response_class=Response, responses=probe)
    @app.get("/health", response_class=Response, responses=probe)
    async def ready() -> Response:
        """Say whether requests can be served: 200 or 503."""
        service.availability.check_ready()
        silences = service.engine.liveness.silences
        ranks = {str(rank): round(silence, 1) for rank, silence in enumerate(silences, start=1)}
        return json_response({"status": "ok", **({"ranks": ranks} if ranks else {})})

    @app.get("/livez", response_class=Response, responses={200: {"model": Health}})
    @app.get("/health/live", response_class=Response, responses={200: {"model": Health}})
    async def live() -> Response:
        """Say that the server answers at all."""
        return json_response({"status": "ok"})


def _add_state_routes(app: FastAPI, service: Service, counted: ServerMetrics) -> None:
    """Add the endpoints of version, load, API description and metrics."""

    @app.get("/version", response_class=Response, responses={200: {"model": Version}})
    async def version() -> Response:
        """Say which version serves."""
        return json_response({"version": twolane.__version__})

    @app.get("/load", response_class=Response, responses={200: {"model": ServerLoad}})
    @app.get("/v1/load", response_class=Response, responses={200: {"model": ServerLoad}, **NO_KEY})
    async def load() -> Response:
        """Say how busy the server is: `server_load` is the number of open requests."""
        engine = service.engine
        state = ReplicaState.of(
            engine.ready, engine.stats, engine.prefixes, engine.prefixes.version
        )
        return json_response({**total_load([state]), "kv_cache_dtype": engine.ready.kv_cache_dtype})

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        """Describe the API for people."""
        return Response(described(app.openapi()), headers=DOCS_HEADERS)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Return the metrics in Prometheus' text form."""
        return Response(counted.render(), headers={"Content-Type": CONTENT_TYPE})


def add_admin_routes(app: FastAPI, service: Service) -> None:
    """Add the endpoints that change the server's state for all clients."""

    @app.post("/reset_prefix_cache", response_class=Response, responses={200: {"model": Health}})
    async def reset_prefix_cache() -> Response:
        """Empty the prefix cache: requests sent from now on reuse nothing that is in it."""
        service.availability.check()
        service.engine.forget_prefixes()
        return json_response({"status": "ok"})


def add_token_routes(app: FastAPI, service: Service) -> None:
    """Add the endpoints that tokenise and detokenise, with vLLM's names."""

    @app.post(
        "/tokenize", response_class=Response, responses={200: {"model": Tokens}, **ERRORS, **NO_KEY}
    )
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """Return the tokens of a text, or of a conversation."""
        service.check_model(body.model)
        asked, listing = body.request(), Listing(bool(body.return_token_strs))
        work = service.preparer.listed(asked, listing, CLIENT.get())
        listed = await unless_gone(request, service.refusing(work, asked.prompt_field))
        return json_response(
            {
                "count": listed.count,
                "max_model_len": service.engine.ready.max_model_len,
                "tokens": msgspec.Raw(listed.tokens),
                "token_strs": None if listed.names is None else msgspec.Raw(listed.names),
            }
        )

    @app.post(
        "/detokenize", response_class=Response, responses={200: {"model": Text}, **ERRORS, **NO_KEY}
    )
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        """Return the text of tokens."""
        service.check_model(body.model)
        work = service.preparer.decoded(body.tokens, CLIENT.get())
        text = await unless_gone(request, service.refusing(work, "tokens"))
        return json_response({"prompt": text})
