"""The endpoints that load and unload LoRA adapters, with vLLM's names."""

from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import FastAPI, Response
from pydantic import Field

from twolane.frontend.adapters import AdapterRefused
from twolane.frontend.body import Body
from twolane.frontend.engine_client import EngineError
from twolane.server.http.errors import ApiError
from twolane.server.http.route import json_response
from twolane.server.http.schemas import ERRORS, NO_KEY, UNAVAILABLE, Health
from twolane.server.ops.metrics import ServerMetrics
from twolane.server.service.service import Service

MAX_NAME_LENGTH, MAX_PATH_LENGTH = 256, 4096
"""Most characters of an adapter's name and of its path."""


class UnloadRequest(Body):
    """The body of POST /v1/unload_lora_adapter."""

    lora_name: str = Field(min_length=1, max_length=MAX_NAME_LENGTH)


class LoadRequest(UnloadRequest):
    """The body of POST /v1/load_lora_adapter."""

    lora_path: str = Field(min_length=1, max_length=MAX_PATH_LENGTH)


def add_adapter_routes(app: FastAPI, service: Service, metrics: ServerMetrics) -> None:
    """Add the endpoints that load and unload adapters."""
    described = {200: {"model": Health}, **ERRORS, **NO_KEY, **UNAVAILABLE}

    @app.post("/v1/load_lora_adapter", response_class=Response, responses=described)
    async def load_lora_adapter(body: LoadRequest) -> Response:
        """Load an adapter from a directory of the server's; requests can ask for it by its name
        when this has been answered."""
        service.availability.check()
        if body.lora_name in service.model_names:
            raise refused("lora_name", "this is the name of the model itself")
        with refusing("lora_path"):
            await service.engine.adapters.load(body.lora_name, body.lora_path)
        return json_response({"status": "ok"})

    @app.post("/v1/unload_lora_adapter", response_class=Response, responses=described)
    async def unload_lora_adapter(body: UnloadRequest) -> Response:
        """Unload an adapter: no new request gets it, and when those that have it have ended, this
        is answered."""
        service.availability.check()
        if body.lora_name not in service.engine.adapters.loaded:
            service.check_model(body.lora_name, "lora_name")
            raise refused("lora_name", "this is the model itself")
        try:
            with refusing("lora_name"):
                await service.engine.adapters.unload(body.lora_name)
        finally:  # also where the client does not wait
            if body.lora_name not in service.engine.adapters.loaded:
                metrics.forget_adapter(body.lora_name)
        return json_response({"status": "ok"})


def refused(param: str, problem: str) -> ApiError:
    """Return the refusal of loading or unloading an adapter."""
    return ApiError(400, f"{param}: {problem}", code="invalid_value", param=param)


@contextmanager
def refusing(param: str) -> Iterator[None]:
    """Report what is wrong with loading or unloading an adapter as a problem of a field.

    Raises:
        ApiError: it was refused, or the engine is gone.
    """
    try:
        yield
    except AdapterRefused as error:
        raise refused(param, str(error)) from error
    except EngineError as error:
        raise ApiError(503, str(error), code="unavailable") from error
