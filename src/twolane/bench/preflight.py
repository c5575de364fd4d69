"""Checks before a run that a server will not refuse all of its requests."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from twolane.bench import http
from twolane.common.checked_json import UNREADABLE
from twolane.results.result import BenchConfig

_ANSWER_SECONDS = 30.0
"""Seconds that a server may take for each of these requests; slower ones are left to the run."""
_SHOWN = 8
"""Most served models that a message names."""
_UNKNOWN, _UNAUTHORISED = (404, 405), (401, 403)
"""Statuses for unknown endpoints, and for invalid keys."""


class BenchError(RuntimeError):
    """The run cannot start; the message says why."""


async def check(config: BenchConfig, smallest: Callable[[str], bytes]) -> str:
    """Check a server; return the name of the model for requests.

    It costs the server no work, unless it does not list the model that is asked for: some serve
    more names than they list, so that the smallest request tells.

    Args:
        config: Settings of the run.
        smallest: returns the body of a request for one token of a model.

    Raises:
        BenchError: the server cannot be reached, takes no such key, or serves no such path or
            model.
    """
    listed = await _listed(config)
    model = config.model or (listed[0] if listed else "")
    await _check_endpoint(config, model, known=config.model is None or model in listed)
    if config.model is None:
        if not listed:
            raise BenchError(f"{_models_url(config)} lists no model; name one with --model")
        return listed[0]
    if listed and config.model not in listed:
        await _try_model(config, smallest(config.model), listed)
    return config.model


async def _listed(config: BenchConfig) -> Sequence[str]:
    """Return the models that the server lists; empty: it lists none, but one is configured."""
    url = _models_url(config)
    try:
        status, answer = await http.get(url, config.request_headers, _ANSWER_SECONDS)
    except (http.HTTPError, TimeoutError) as error:
        if config.model is not None and not isinstance(error, http.ConnectError):
            return ()
        why = str(error) or type(error).__name__
        raise BenchError(f"{url} does not answer: {why}; is the server up?") from error
    if config.model is None:
        _check_key(config, url, status)
        if status not in (200, *_UNKNOWN):
            raise BenchError(f"{url} does not answer: status {status}; is the server up?")
    try:
        return _names(answer) if status == 200 else ()
    except UNREADABLE:
        return ()


async def _check_endpoint(config: BenchConfig, model: str, *, known: bool) -> None:
    """Check the endpoint with a request that starts no work.

    Args:
        config: Settings of the run.
        model: Name of the model to ask for.
        known: Whether the server lists the model.

    Raises:
        BenchError: it is not served, or not for this key.
    """
    try:
        headers, url = config.request_headers, config.url
        status, _ = await http.get(url, headers, _ANSWER_SECONDS)
        if status in (404, *_UNAUTHORISED):  # also where a path is only there for POST
            body = msgspec.json.encode({"model": model})
            status, _ = await http.post(url, headers, body, _ANSWER_SECONDS)
            if status in _UNKNOWN:
                where = config.base_url.rstrip("/")
                where += "" if known else f", or not for --model {model}"  # as Ollama says it
                message = f"--endpoint {config.endpoint} is not served at {where}: status {status}"
                raise BenchError(message)
    except (http.HTTPError, TimeoutError):  # the run shows what is wrong
        return
    _check_key(config, url, status)


async def _try_model(config: BenchConfig, body: bytes, listed: Sequence[str]) -> None:
    try:
        headers, url = config.request_headers, config.url
        status, _ = await http.post(url, headers, body, _ANSWER_SECONDS)
    except (http.HTTPError, TimeoutError):
        return
    if 400 <= status < 500 and status != 429:
        names = ", ".join(listed[:_SHOWN]) + (", …" if len(listed) > _SHOWN else "")
        where = config.base_url.rstrip("/")
        raise BenchError(
            f"--model {config.model} is not served at {where}, which serves {names}: "
            f"status {status}"
        )


def _check_key(config: BenchConfig, url: str, status: int) -> None:
    if status in _UNAUTHORISED:
        what = "--api-key is wrong" if config.api_key else "--api-key is needed"
        raise BenchError(f"{what}: {url} answers with status {status}")


def _models_url(config: BenchConfig) -> str:
    return config.base_url.rstrip("/") + "/v1/models"


def _names(answer: bytes) -> list[str]:
    listed = msgspec.json.decode(answer, type=dict[str, object]).get("data")
    models = msgspec.convert(listed, list[Mapping[str, Any]])
    return [model["id"] for model in models if isinstance(model.get("id"), str)]
