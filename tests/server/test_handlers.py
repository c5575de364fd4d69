"""What clients are told when the engine refuses a request."""

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from twolane.engine.messages import Refused
from twolane.frontend.generation import GenerationRefused
from twolane.server.http.handlers import add_error_handlers


@pytest.mark.parametrize(
    ("refused", "status", "kind", "code", "param", "retry_after"),
    [
        (
            Refused("r", "refused", "could begin in 9.1 s, its first token is wanted in 1.0 s"),
            *(429, "rate_limit_error", "overloaded", None, "17"),
        ),
        (
            Refused("r", "too_long", "prompt has 900 tokens, 500 are the most", "prompt"),
            *(400, "invalid_request_error", "context_length_exceeded", "prompt", None),
        ),
        (
            Refused("r", "invalid", "logit_bias has a token id outside 0 to 9", "logit_bias"),
            *(400, "invalid_request_error", "invalid_value", "logit_bias", None),
        ),
    ],
)
def test_a_refusal_says_whose_fault_it_is(refused, status, kind, code, param, retry_after):
    """A system refuses good requests, which may be sent again; the engine refuses bad ones."""
    app = FastAPI()
    add_error_handlers(app, lambda: 17)

    @app.get("/")
    async def refuse() -> None:
        raise GenerationRefused(refused)

    answer = TestClient(app).get("/")
    assert answer.status_code == status
    assert answer.headers.get("retry-after") == retry_after
    error = {"message": refused.message, "type": kind, "param": param, "code": code}
    assert answer.json() == {"error": error}
