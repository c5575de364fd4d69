"""Errors in OpenAI's format."""

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException

from twolane.common.errors import FieldError
from twolane.frontend.body import NO_OBJECT, first_finding
from twolane.frontend.generate_request import ContextExceeded, PromptError

ANTHROPIC_PATH = "/v1/messages"
"""Prefix of paths whose errors have Anthropic's format."""
ANTHROPIC_KINDS: Mapping[str, str] = {
    "server_error": "api_error",
    "service_unavailable_error": "overloaded_error",
    "model_not_found": "not_found_error",
    "not_found": "not_found_error",
    "body_too_large": "request_too_large",
}
"""Anthropic's error types, by OpenAI's types or codes."""
WHOLE_BODY = {
    "missing": "the request needs a JSON body",
    **dict.fromkeys(
        NO_OBJECT, 'the body must be a JSON object with "Content-Type: application/json"'
    ),
}
"""Messages for errors of a whole body, by kind."""


PROMPT_CODES: Mapping[type[FieldError], str] = {
    ContextExceeded: "context_length_exceeded",
    PromptError: "invalid_prompt",
}
"""Codes of errors of prompts; those of all other fields are "invalid_value"."""


class ApiError(HTTPException):
    """An error with an HTTP status, in OpenAI's format.

    Args:
        status: the HTTP status.
        message: the problem in words.
        code: the problem for programs; also its reason in the metrics.
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
        """JSON body of the answer."""
        return error_body(self.status_code, self.message, self.code, self.param)

    def about(self, param: str, message: str) -> "ApiError":
        """Return the same error with another field and message."""
        return ApiError(
            self.status_code, message, code=self.code, param=param, headers=self.headers
        )


def queue_full(waiting: str) -> ApiError:
    """Return the refusal of a request because too many of its kind wait.

    Args:
        waiting: the waiting requests and what they wait for, as a phrase.
    """
    headers = {"Retry-After": "1"}
    return ApiError(429, f"too many {waiting}", code="queue_full", headers=headers)


def worker_lost(problem: str) -> ApiError:
    """Return the refusal of a request whose process was stopped or killed: it may be sent again."""
    return ApiError(503, problem, code="unavailable", headers={"Retry-After": "1"})


def from_field(error: FieldError) -> ApiError:
    """Return the refusal of a request's field."""
    code = PROMPT_CODES.get(type(error), "invalid_value")
    return ApiError(400, str(error), code=code, param=error.field)


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


def as_anthropic(body: dict[str, Any]) -> dict[str, Any]:
    """Return OpenAI's error object in Anthropic's format, which has `param` and `code` besides."""
    error = body["error"]
    kind = ANTHROPIC_KINDS.get(error["code"]) or ANTHROPIC_KINDS.get(error["type"], error["type"])
    return {"type": "error", "error": {**error, "type": kind}}


def error_for(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return an error object in the format of the API that a path belongs to."""
    return as_anthropic(body) if path.startswith(ANTHROPIC_PATH) else body


def from_validation(errors: Sequence[Any], prefix: str = "") -> ApiError:
    """Convert pydantic's findings to one error that names the first field at fault.

    Args:
        errors: the errors of a `ValidationError`.
        prefix: name of the object, if it is itself a field.
    """
    finding = first_finding(errors, prefix)
    message = finding.message
    if finding.param is None:
        message = WHOLE_BODY.get(finding.kind, message)
    code = {"unsupported_field": "unsupported_parameter", "unknown_field": "unknown_parameter"}
    return ApiError(400, message, code=code.get(finding.kind, "invalid_value"), param=finding.param)
