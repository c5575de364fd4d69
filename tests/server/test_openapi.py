"""The OpenAPI description tells the truth: answers and errors are as it says."""

import pytest
from pydantic import TypeAdapter

from twolane.server.anthropic.routes import MessageErrorBody
from twolane.server.http import schemas

from .conftest import MODEL

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "temperature": 0}
TEXT = {"prompt": "Hi", "max_tokens": 3, "temperature": 0}
ANSWERS = [
    ("/v1/chat/completions", CHAT, schemas.ChatCompletion),
    (
        "/v1/chat/completions",
        {**CHAT, "logprobs": True, "top_logprobs": 2, "return_token_ids": True, "n": 2},
        schemas.ChatCompletion,
    ),
    ("/v1/chat/completions", {**CHAT, "prompt_logprobs": 1}, schemas.ChatCompletion),
    ("/v1/completions", TEXT, schemas.Completion),
    (
        "/v1/completions",
        {**TEXT, "logprobs": 2, "echo": True, "return_token_ids": True, "prompt_logprobs": 0},
        schemas.Completion,
    ),
    ("/v1/completions", {**TEXT, "stop": "e"}, schemas.Completion),
    ("/v1/models", None, schemas.ModelList),
    (f"/v1/models/{MODEL}", None, schemas.Model),
    ("/tokenize", {"prompt": "Hi"}, schemas.Tokens),
    ("/tokenize", {"messages": CHAT["messages"], "return_token_strs": True}, schemas.Tokens),
    ("/detokenize", {"tokens": [1, 500]}, schemas.Text),
    ("/health", None, schemas.Health),
    ("/health/live", None, schemas.Health),
    ("/version", None, schemas.Version),
    ("/v1/models/other", None, schemas.ErrorBody),
    ("/nothing", None, schemas.ErrorBody),
    ("/health", {}, schemas.ErrorBody),
    ("/v1/completions", {}, schemas.ErrorBody),
    ("/v1/messages", {}, MessageErrorBody),
    ("/v1/messages/count_tokens", {"messages": []}, MessageErrorBody),
    ("/tokenize", {"prompt": "a", "messages": CHAT["messages"]}, schemas.ErrorBody),
    ("/detokenize", {"tokens": [10**6]}, schemas.ErrorBody),
]


@pytest.mark.parametrize(("path", "body", "model"), ANSWERS)
def test_answers_are_as_described(real, path, body, model):
    status, headers, answer = real.request(path, body)
    assert (status == 200) == (not issubclass(model, schemas.ErrorBody))
    assert headers["Content-Type"] == "application/json"
    TypeAdapter(model).validate_python(answer, strict=True)


@pytest.fixture(scope="module")
def description(real):
    return real.request("/openapi.json")[2]


def test_bodies_answers_and_errors_are_described(description):
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            answers = operation["responses"]
            assert "content" in answers["200"], (path, method)
            assert "422" not in answers, (path, method)
            if method == "post":
                assert {"400", "404", "413", "415", "503", "default"} <= answers.keys(), path
    completions = description["paths"]["/v1/completions"]["post"]
    assert "text/event-stream" in completions["responses"]["200"]["content"]
    assert {p["name"] for p in completions["parameters"]} == {
        *("x-slo-ttft-ms", "x-slo-tbt-ms", "x-slo-tpot-ms"),
        *("x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms"),
    }


def test_fields_have_their_ranges(description):
    fields = description["components"]["schemas"]["CompletionRequest"]
    assert fields["additionalProperties"] is False
    temperature = fields["properties"]["temperature"]["anyOf"][0]
    assert (temperature["minimum"], temperature["maximum"]) == (0, 100)
    assert description["components"]["schemas"]["ChatRequest"]["required"] == ["messages"]
