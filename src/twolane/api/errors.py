"""Errors in OpenAI's form."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import HTTPException


class ApiError(HTTPException):
    """A refusal with a status, in OpenAI's form.

    Args:
        status: the HTTP status.
        message: what is wrong, for a person.
        code: what is wrong, for a program; also the reason under which metrics count it.
        param: the request field at fault.
        headers: further HTTP headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.message = message
        self.code = code
        self.param = param

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body of the answer."""
        return error_body(self.status_code, self.message, self.code, self.param)


def error_body(status: int, message: str, code: str, param: str | None = None) -> dict[str, Any]:
    """Return OpenAI's error object for an HTTP status."""
    kinds = {
        401: "authentication_error",
        429: "rate_limit_error",
        500: "server_error",
        503: "service_unavailable_error",
    }
    kind = kinds.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def from_validation(errors: Sequence[Any]) -> ApiError:
    """Turn pydantic's findings into one error that names the first field at fault."""
    error = errors[0]
    context = error.get("ctx", {})
    param = field_name((*error["loc"], *([context["param"]] if "param" in context else [])))
    message = {
        "unknown_field": f"unknown field {param!r}",
        "missing": f"{param} is required" if param else "the request needs a JSON body",
        "model_attributes_type": 'the body must be a JSON object with "Content-Type: '
        'application/json"',
        "unsupported_field": error["msg"],
    }.get(error["type"])
    code = {"unsupported_field": "unsupported_parameter", "unknown_field": "unknown_parameter"}
    return ApiError(
        400,
        message or (f"{param}: {error['msg']}" if param else error["msg"]),
        code=code.get(error["type"], "invalid_value"),
        param=param,
    )


def field_name(location: Sequence[str | int]) -> str | None:
    """Write pydantic's location as in JSON: ("body", "messages", 0, "role") → messages[0].role."""
    name = ""
    for part in location[1:] if location[:1] in (("body",), ("header",)) else location:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else part
    return name or None
