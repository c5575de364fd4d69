"""Exception handlers that answer with errors in the format of the path's API."""

import logging
from collections.abc import Callable, Mapping

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.routing import Match

from twolane.common.errors import FieldError
from twolane.common.nearest import did_you_mean
from twolane.frontend.generation import GenerationFailed, GenerationRefused
from twolane.frontend.text.codec import TextError
from twolane.server.http.calls import CLIENT_GONE, set_reason
from twolane.server.http.disconnect import ClientGone
from twolane.server.http.errors import ApiError, error_body, error_for, from_field, from_validation
from twolane.server.http.route import json_response

log = logging.getLogger("twolane.server")

REFUSED_CODES = {"too_long": "context_length_exceeded", "invalid": "invalid_value"}


def from_engine(error: GenerationRefused, retry_after: int = 0) -> ApiError:
    """Return an engine's refusal as an API error.

    A system refuses a good request that could not meet its deadline any more: 429, to be sent again
    in this many seconds. A model that gives NaN is the server's fault: 500. Everything else is the
    request's.
    """
    if error.refused.code == "unknown_model":  # its adapter was unloaded on the way
        return ApiError(404, str(error), code="model_not_found", param=error.param)
    if error.refused.code == "broken":
        return ApiError(500, str(error), code="model_error")
    if error.refused.code == "refused":
        headers = {"Retry-After": str(retry_after)}
        return ApiError(429, str(error), code="overloaded", headers=headers)
    return ApiError(400, str(error), code=REFUSED_CODES[error.refused.code], param=error.param)


def add_error_handlers(app: FastAPI, retry_after: Callable[[], int]) -> None:
    """Add handlers of all exceptions.

    Args:
        app: gets the handlers.
        retry_after: returns the seconds after which a refused request may be sent again.
    """

    async def refuse(request: Request, error: ApiError) -> Response:
        set_reason(request, error.code, error.message)
        path = request.url.path
        log.debug("%s %r %d %r", request.method, path, error.status_code, error.message)
        response = json_response(error_for(path, error.body), error.status_code)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return await refuse(request, error)

    @app.exception_handler(FieldError)
    async def field_error(request: Request, error: FieldError) -> Response:
        return await refuse(request, from_field(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return await refuse(request, from_validation(error.errors()))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        return await refuse(request, from_routing(error, request, app))

    @app.exception_handler(GenerationRefused)
    async def engine_refused(request: Request, error: GenerationRefused) -> Response:
        return await refuse(request, from_engine(error, retry_after()))

    @app.exception_handler(TextError)
    async def tokenizer_failed(request: Request, error: TextError) -> Response:
        return await refuse(request, ApiError(500, str(error), code="model_error"))

    @app.exception_handler(GenerationFailed)
    async def failed(request: Request, error: GenerationFailed) -> Response:
        body = error_body(503, str(error), "unavailable")
        return json_response(error_for(request.url.path, body), 503)

    @app.exception_handler(ClientGone)
    async def client_gone(request: Request, error: ClientGone) -> Response:
        return Response(status_code=CLIENT_GONE)  # nobody reads it

    @app.exception_handler(Exception)
    async def internal(request: Request, error: Exception) -> Response:
        body = error_body(500, "internal error", "internal_error")
        return json_response(error_for(request.url.path, body), 500)


def from_routing(error: HTTPException, request: Request, app: FastAPI) -> ApiError:
    """Return an error of the routes as an API error: there is no such path, or not this method."""
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid")
    message = f"{request.method} {request.url.path}: {error.detail}"
    if error.status_code == 404:
        message += did_you_mean(request.url.path, served_paths(app))
    headers: Mapping[str, str] | None = error.headers
    if error.status_code == 405:
        headers = {"Allow": allowed_methods(app, request)}
    return ApiError(error.status_code, message, code=code, headers=headers)


def served_paths(app: FastAPI) -> list[str]:
    """Return the paths that clients ask, without those that have an id in them."""
    routes = (route for route in app.routes if isinstance(route, APIRoute))
    return [route.path for route in routes if route.include_in_schema and "{" not in route.path]


def allowed_methods(app: FastAPI, request: Request) -> str:
    """Return the methods that the request's path has, as the Allow header lists them."""
    routes = [route for route in app.routes if isinstance(route, APIRoute)]
    fitting = [r for r in routes if r.matches(request.scope)[0] is not Match.NONE]
    methods = {method for route in fitting for method in route.methods or ()}
    return ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set())))
