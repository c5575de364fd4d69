"""Pages of another origin, and probes by HEAD, as clients of a running server."""

import urllib.error
import urllib.request

import pytest

from .serving import PATIENCE, serving

ORIGIN = "http://localhost:3000"


@pytest.fixture(scope="module")
def served(tiny_model):
    args = ("--load-format", "dummy", "--kv-tokens", "1000", "--api-key", "k")
    with serving(str(tiny_model), *args, "--cors-origins", ORIGIN) as running:
        yield running


def ask(served, path, method="GET", **headers):
    """Return status, headers and body."""
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(served.base + path, headers=given, method=method)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def test_a_browser_asks_without_the_key_whether_it_may(served):
    """After llama.cpp#6544: a preflight has no key."""
    wanted = {
        "Access_Control_Request_Method": "POST",
        "Access_Control_Request_Headers": "authorization,content-type",
    }
    status, headers, body = ask(served, "/v1/chat/completions", "OPTIONS", Origin=ORIGIN, **wanted)
    assert (status, headers["Access-Control-Allow-Origin"], body) == (200, ORIGIN, b"")
    assert "POST" in headers["Access-Control-Allow-Methods"]
    status, headers, _ = ask(served, "/v1/models", "OPTIONS", Origin="http://evil", **wanted)
    assert (status, headers["Access-Control-Allow-Origin"]) == (400, None)


@pytest.mark.parametrize(("key", "status"), [("k", 200), ("wrong", 401)])
def test_answers_and_refusals_may_be_read_by_the_page(served, key, status):
    got, headers, _ = ask(served, "/v1/models", Origin=ORIGIN, Authorization=f"Bearer {key}")
    assert (got, headers["Access-Control-Allow-Origin"]) == (status, ORIGIN)


def test_other_pages_are_told_nothing_and_by_default_no_page_is(served, tiny):
    for server, origin in (served, "http://evil"), (tiny, ORIGIN):
        assert ask(server, "/health", Origin=origin)[1]["Access-Control-Allow-Origin"] is None


@pytest.mark.parametrize(
    "path",
    ["/health", "/ping", "/health/live", "/health/ready", "/version", "/metrics", "/v1/models"],
)
def test_head_is_answered_as_get_is_without_a_body(served, path):
    key = {"Authorization": "Bearer k"}
    get, head = (ask(served, path, method, **key) for method in ("GET", "HEAD"))
    assert (head[0], head[2]) == (get[0], b"") == (200, b"")
    assert head[1]["Content-Type"] == get[1]["Content-Type"]
    if path != "/metrics":
        assert head[1]["Content-Length"] == get[1]["Content-Length"]


def test_head_needs_the_key_and_a_path_that_has_get(served):
    assert ask(served, "/v1/models", "HEAD")[0] == 401
    status, headers, _ = ask(served, "/v1/completions", "HEAD", Authorization="Bearer k")
    assert (status, headers["Allow"]) == (405, "POST")
    assert ask(served, "/health", "POST")[1]["Allow"] == "GET, HEAD"


def test_head_is_counted_under_its_own_name(served):
    ask(served, "/health/live", "HEAD")
    metrics = ask(served, "/metrics")[2].decode()
    [line] = [
        x for x in metrics.splitlines() if "HEAD" in x and '"/health/live"' in x and "200" in x
    ]
    assert float(line.rsplit(" ", 1)[1]) >= 1
