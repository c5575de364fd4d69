"""What the pages for users of other servers say of fields, endpoints and metrics."""

import re
from pathlib import Path

import pytest

from twolane.frontend.fields import INERT
from twolane.server.openai.protocol import ChatRequest, CompletionRequest
from twolane.server.openai.refused import OPENED, REFUSED

GUIDES = Path(__file__).parents[2] / "docs/guides"
SERVERS = ("sglang", "llama-cpp")
NAME = re.compile(r"`(\w+)`")


def table(server: str, heading: str) -> list[tuple[str, str]]:
    """The rows below a heading of a server's page: what it has, and what that is here."""
    page = (GUIDES / f"from-{server}.md").read_text()
    part = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.+?) \| (.+) \|$", part, re.MULTILINE)
    assert len(rows) > 5
    return rows


def fields(body: type[ChatRequest] | type[CompletionRequest]) -> set[str]:
    return {field.alias or name for name, field in body.model_fields.items()}


@pytest.mark.parametrize("server", SERVERS)
def test_fields_are_the_same_where_the_page_says_so_and_else_refused(server: str) -> None:
    chat, both = fields(ChatRequest), fields(ChatRequest) & fields(CompletionRequest)
    for theirs, here in table(server, "Request fields"):
        names = set(NAME.findall(theirs))
        if here.startswith("the same, in chat"):
            assert names <= chat
        elif here.startswith("the same"):
            assert names - {"schema"} <= both
        elif "of an answer" not in theirs:
            assert not names & (chat | set(INERT)), here
            answers = {"include_stop_str_in_output", "tools", "model", "grammar", "json"}
            words = set(NAME.findall(here)) - {"repeat_last_n"}
            assert words <= chat | fields(CompletionRequest) | answers, here


@pytest.mark.parametrize("server", SERVERS)
def test_an_unknown_field_of_another_server_is_refused_by_name(tiny, server: str) -> None:
    [row] = [theirs for theirs, here in table(server, "Request fields") if "as unknown" in here]
    for name in NAME.findall(row):
        body = {"prompt": [5], "max_tokens": 1, name: 1}
        status, _, answer = tiny.request("/v1/completions", body)
        assert (status, answer["error"]["param"]) == (400, name)


@pytest.mark.parametrize("server", SERVERS)
def test_endpoints_are_where_the_page_says(tiny, server: str) -> None:
    served = set(tiny.request("/openapi.json")[2]["paths"]) | {"/dashboard", "/metrics"}
    enabled = {path for paths in OPENED.values() for path in paths}
    for theirs, here in table(server, "Endpoints"):
        paths, ours = (set(re.findall(r"`(/[\w/-]+)`", text)) for text in (theirs, here))
        if here == "not served":
            assert not paths & served - REFUSED.keys()
        elif here.startswith("the same"):
            assert paths <= served
        else:
            assert ours <= served | enabled
            assert not paths & served


def test_endpoints_that_are_not_served_say_why(tiny) -> None:
    """Also those of a path that another endpoint might take for an id."""
    for path, why in REFUSED.items():
        status, _, answer = tiny.request(path, {})
        error = answer["error"]
        assert (status, error["message"], error.get("code")) == (501, f"{path} {why}", "not_served")


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),  # a base URL without /v1
        ("/v1/v1/chat/completions", "/v1/chat/completions"),  # and one with two
        ("/models", "/v1/models"),
        ("/metadata", None),
    ],
)
def test_a_mistyped_path_is_answered_with_the_nearest_one(tiny, path: str, meant: str) -> None:
    status, _, answer = tiny.request(path, {})
    hint = f"; did you mean {meant!r}?" if meant else ""
    assert (status, answer["error"]["message"]) == (404, f"POST {path}: Not Found{hint}")


@pytest.mark.parametrize("server", SERVERS)
def test_metrics_are_those_that_the_server_has(tiny, server: str) -> None:
    text = tiny.request("/metrics")[2]
    scraped = set(re.findall(r"^# TYPE twolane:(\w+) ", text, re.MULTILINE))
    for theirs, here in table(server, "Metrics"):
        assert set(NAME.findall(theirs if here == "the same" else here)) <= scraped, here
