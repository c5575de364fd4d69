"""The ASGI application: every endpoint, and the middleware before them."""

from functools import partial
from http import HTTPStatus

from fastapi import FastAPI
from starlette.datastructures import Headers

import twolane
from twolane.server.anthropic.routes import add_message_routes
from twolane.server.http.calls import CallMiddleware
from twolane.server.http.connection import unread_body
from twolane.server.http.entry import EarlyGate
from twolane.server.http.errors import ApiError
from twolane.server.http.gate import Gate
from twolane.server.http.handlers import add_error_handlers
from twolane.server.http.methods import CORS, Cors, Head
from twolane.server.http.route import Route
from twolane.server.http.slo_headers import names_ttft
from twolane.server.http.unknown import UnknownFields
from twolane.server.openai.embeddings import add_embedding_routes
from twolane.server.openai.refused import add_refused_routes
from twolane.server.openai.routes import add_generation_routes
from twolane.server.ops.adapters import add_adapter_routes
from twolane.server.ops.dashboard.page import add_dashboard_routes
from twolane.server.ops.fleet import add_fleet_routes
from twolane.server.ops.info import add_admin_routes, add_info_routes, add_token_routes
from twolane.server.ops.metrics import ServerMetrics
from twolane.server.ops.monitoring import Monitoring
from twolane.server.options import ServerOptions
from twolane.server.responses.routes import add_response_routes
from twolane.server.responses.store import ResponseStore
from twolane.server.service.service import Service

GENERATION_PATHS = frozenset(
    {
        *("/v1/completions", "/v1/chat/completions", "/v1/embeddings"),
        *("/v1/responses", "/v1/messages"),
    }
)
DEFAULTS = ServerOptions()


def create_app(
    service: Service,
    monitoring: Monitoring,
    options: ServerOptions = DEFAULTS,
    *,
    lora_endpoints: bool = False,
) -> FastAPI:
    """Return the application for `service`.

    Args:
        service: the served model.
        monitoring: the server's metrics and dashboard.
        options: keys, bounds, origins, and which endpoints there are.
        lora_endpoints: true if adapters can be loaded and unloaded.
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
    app.state.body_checker = service.body_checker
    app.state.unknown_fields = UnknownFields(ignore=options.unknown_fields == "warn")
    app.add_middleware(Head)
    metrics = monitoring.metrics
    add_gates(app, service, metrics, options)
    if options.cors_origins:  # around the gate: a browser asks whether it may without the key
        app.add_middleware(Cors, allow_origins=list(options.cors_origins), **CORS)
    app.add_middleware(  # the outermost
        CallMiddleware,
        observer=metrics,
        paths=GENERATION_PATHS,
        quiet=service.engine.wait_for_gap,
        unread=unread_body,
    )
    add_error_handlers(app, service.admission.retry_after)
    add_info_routes(app, service, metrics)
    add_fleet_routes(app, service, monitoring.dashboard)
    add_token_routes(app, service)
    add_generation_routes(app, service)
    add_embedding_routes(app, service)
    # Before those of responses, which take what follows for an id.
    opened = {"--admin-endpoints": options.admin_endpoints, "--lora-endpoints": lora_endpoints}
    add_refused_routes(app, [option for option, enabled in opened.items() if enabled])
    add_response_routes(app, service, ResponseStore(options.stored_response_bytes))
    add_message_routes(app, service)
    if options.admin_endpoints:
        add_admin_routes(app, service)
    if lora_endpoints:
        add_adapter_routes(app, service, metrics)
    add_dashboard_routes(app, service, monitoring.dashboard)
    return app


def add_gates(
    app: FastAPI, service: Service, metrics: ServerMetrics, options: ServerOptions
) -> None:
    """Put the gate before an application, and before all else (`app.state.early`) what it refuses
    by a head alone."""
    guard = service.late_guard
    gate = partial(
        Gate,
        api_keys=options.api_keys,
        max_body_bytes=options.max_body_bytes,
        operator_key=options.operator_key,
        check_call=guard.check_arrival,
        allowed_hosts=options.hosts,
    )
    app.add_middleware(gate)

    def check_call(headers: Headers, path: str, key: int | None, unread: float) -> None:
        guard.check_early(headers, metrics.slo, key, unread)

    def note(path: str, error: ApiError) -> None:
        overload = error.status_code == HTTPStatus.TOO_MANY_REQUESTS
        metrics.begin_call().refuse(error.code, error.message, overload=overload)
        metrics.count_http("POST", path, error.status_code)

    def watches(data: bytes) -> bool:
        return guard.on and (metrics.slo.ttft is not None or names_ttft(data))

    app.state.early = EarlyGate(gate(app), GENERATION_PATHS, watches, check_call, note)
