"""Pages of another origin, and probes by HEAD, as clients of a running server."""

import urllib.error
import urllib.request

import pytest

from .conftest import KEYS, ORIGIN
from .serving import PATIENCE

KEY = KEYS[0]


def ask(served, path, method="GET", **headers):
    """Return status, headers and body."""
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(served.base + path, headers=given, method=method)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def test_a_browser_asks_without_the_key_whether_it_may(guarded):
    """After llama.cpp#6544: a preflight has no key."""
    wanted = {
        "Access_Control_Request_Method": "POST",
        "Access_Control_Request_Headers": "authorization,content-type",
    }
    status, headers, body = ask(guarded, "/v1/chat/completions", "OPTIONS", Origin=ORIGIN, **wanted)
    assert (status, headers["Access-Control-Allow-Origin"], body) == (200, ORIGIN, b"")
    assert "POST" in headers["Access-Control-Allow-Methods"]
    status, headers, _ = ask(guarded, "/v1/models", "OPTIONS", Origin="http://evil", **wanted)
    assert (status, headers["Access-Control-Allow-Origin"]) == (400, None)


@pytest.mark.parametrize(("key", "status"), [(KEY, 200), ("wrong", 401)])
def test_answers_and_refusals_may_be_read_by_the_page(guarded, key, status):
    got, headers, _ = ask(guarded, "/v1/models", Origin=ORIGIN, Authorization=f"Bearer {key}")
    assert (got, headers["Access-Control-Allow-Origin"]) == (status, ORIGIN)


def test_other_pages_are_told_nothing_and_by_default_no_page_is(guarded, tiny):
    for server, origin in (guarded, "http://evil"), (tiny, ORIGIN):
        assert ask(server, "/health", Origin=origin)[1]["Access-Control-Allow-Origin"] is None


@pytest.mark.parametrize(
    "path",
    ["/health", "/ping", "/health/live", "/health/ready", "/version", "/metrics", "/v1/models"],
)
def test_head_is_answered_as_get_is_without_a_body(guarded, path):
    key = {"Authorization": f"Bearer {KEY}"}
    get, head = (ask(guarded, path, method, **key) for method in ("GET", "HEAD"))
    assert (head[0], head[2]) == (get[0], b"") == (200, b"")
    assert head[1]["Content-Type"] == get[1]["Content-Type"]
    if path != "/metrics":
        assert head[1]["Content-Length"] == get[1]["Content-Length"]


def test_head_needs_the_key_and_a_path_that_has_get(guarded):
    assert ask(guarded, "/v1/models", "HEAD")[0] == 401
    status, headers, _ = ask(guarded, "/v1/completions", "HEAD", Authorization=f"Bearer {KEY}")
    assert (status, headers["Allow"]) == (405, "POST")
    assert ask(guarded, "/health", "POST")[1]["Allow"] == "GET, HEAD"


def test_head_is_counted_under_its_own_name(guarded):
    ask(guarded, "/health/live", "HEAD")
    metrics = ask(guarded, "/metrics")[2].decode()
    [line] = [
        x for x in metrics.splitlines() if "HEAD" in x and '"/health/live"' in x and "200" in x
    ]
    assert float(line.rsplit(" ", 1)[1]) >= 1
