"""Errors in OpenAI's form."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import HTTPException

MOST_REPEATED = 200
"""Characters of a client's own text that an error repeats."""
NO_OBJECT = ("model_attributes_type", "model_type")
"""What pydantic calls it when something else stands where an object should."""
WHOLE_BODY = {
    "missing": "the request needs a JSON body",
    **dict.fromkeys(
        NO_OBJECT, 'the body must be a JSON object with "Content-Type: application/json"'
    ),
}
"""What is wrong with a body of which no field is at fault."""


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
    location = (*error["loc"], context["param"]) if "param" in context else error["loc"]
    param = field_name(location)
    if "problem" in context:
        message = f"{param} {context['problem']}"
    elif param is None:
        message = WHOLE_BODY.get(error["type"], error["msg"])
    else:
        message = {
            "unknown_field": f"unknown field {param!r}",
            "missing": f"{param} is required",
            **dict.fromkeys(NO_OBJECT, f"{param} must be a JSON object"),
        }.get(error["type"], f"{param}: {error['msg']}")
    code = {"unsupported_field": "unsupported_parameter", "unknown_field": "unknown_parameter"}
    return ApiError(400, message, code=code.get(error["type"], "invalid_value"), param=param)


def field_name(location: Sequence[str | int]) -> str | None:
    """Write pydantic's location as in JSON: ("body", "messages", 0, "role") → messages[0].role.

    None: it is the body itself. Names are those of the client, and shortened.
    """
    parts = location[1:] if location[:1] in (("body",), ("header",)) else location
    if not parts:
        return None
    name = shortened(str(parts[0]))
    for part in parts[1:]:
        name += f"[{part}]" if isinstance(part, int) else f".{shortened(part)}"
    return name


def shortened(text: str) -> str:
    """Cut what a client sent to what an error repeats."""
    return text if len(text) <= MOST_REPEATED else text[:MOST_REPEATED] + "…"
