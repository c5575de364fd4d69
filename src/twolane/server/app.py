"""The application: every endpoint of the server, and what each request passes first."""

from collections.abc import Sequence

from fastapi import FastAPI

import twolane
from twolane.server.anthropic.routes import add_message_routes
from twolane.server.http.calls import CallMiddleware
from twolane.server.http.cross_origin import CORS, Cors
from twolane.server.http.gate import MAX_BODY_BYTES, Gate
from twolane.server.http.handlers import add_error_handlers
from twolane.server.http.head import Head
from twolane.server.http.route import Route
from twolane.server.http.unknown import UnknownFields
from twolane.server.openai.embeddings import add_embedding_routes
from twolane.server.openai.refused import add_refused_routes
from twolane.server.openai.response_routes import add_response_routes
from twolane.server.openai.response_store import ResponseStore
from twolane.server.openai.routes import add_generation_routes
from twolane.server.ops.adapters import add_adapter_routes
from twolane.server.ops.dashboard.page import add_dashboard_routes
from twolane.server.ops.fleet import add_fleet_routes
from twolane.server.ops.info import add_admin_routes, add_info_routes, add_token_routes
from twolane.server.service import Service

GENERATION_PATHS = frozenset(
    {
        *("/v1/completions", "/v1/chat/completions", "/v1/embeddings"),
        *("/v1/responses", "/v1/messages"),
    }
)
STORED_BYTES = 64 << 20
"""Number of bytes that stored responses may take together, unless a server has another bound."""


def create_app(
    service: Service,
    *,
    api_keys: Sequence[str] = (),
    max_body_bytes: int = MAX_BODY_BYTES,
    cors_origins: Sequence[str] = (),
    stored_response_bytes: int = STORED_BYTES,
    ignore_unknown_fields: bool = False,
    admin_endpoints: bool = False,
    lora_endpoints: bool = False,
) -> FastAPI:
    """Return the application that serves `service`; for keys and bound see `Gate`.

    Pages of `cors_origins` may ask it from a browser; "*" is every page.
    """
    app = FastAPI(
        title="Twolane",
        version=twolane.__version__,
        description="OpenAI's and Anthropic's APIs, in two lanes.",
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    app.router.route_class = Route
    app.state.judge = service.judge
    app.state.unknown_fields = UnknownFields(ignore=ignore_unknown_fields)
    app.add_middleware(Head)
    app.add_middleware(Gate, api_keys=api_keys, max_body_bytes=max_body_bytes)
    if cors_origins:  # around the gate: a browser asks whether it may without the key
        app.add_middleware(Cors, allow_origins=list(cors_origins), **CORS)
    app.add_middleware(  # the outermost
        CallMiddleware,
        metrics=service.metrics,
        paths=GENERATION_PATHS,
        quiet=service.engine.wait_for_gap,
    )
    add_error_handlers(app, service.admission.retry_after)
    add_info_routes(app, service)
    add_fleet_routes(app, service)
    add_token_routes(app, service)
    add_generation_routes(app, service)
    add_embedding_routes(app, service)
    add_response_routes(app, service, ResponseStore(stored_response_bytes))
    add_message_routes(app, service)
    add_refused_routes(app)
    if admin_endpoints:
        add_admin_routes(app, service)
    if lora_endpoints:
        add_adapter_routes(app, service)
    add_dashboard_routes(app, service)
    return app
