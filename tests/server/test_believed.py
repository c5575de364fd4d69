"""Hosts, spellings of paths and forwarded addresses that the server believes, and those it does
not."""

import asyncio

import pytest
from starlette.datastructures import Headers

from twolane.common.errors import FieldError
from twolane.server.http.backpressure import UnsentOutput
from twolane.server.http.believed import HostCheck, plain_path
from twolane.server.http.errors import ApiError
from twolane.server.options import ServerOptions
from twolane.server.run import uvicorn_config

from .test_connections import sent

PLAIN = [
    *(b"/", b"/metrics", b"/v1/models", b"/v1/chat/completions", b"/health/ready", b"/%E2%82%AC"),
    *(b"/v1/models//abs/path", b"/v1/models/org%2Fname", b"/v1x//models", b"/%5Cx", b"/%252e"),
]


@pytest.mark.parametrize("path", PLAIN)
def test_the_spelling_that_is_served_stays(path):
    assert plain_path(path) == path


METRICS = [b"/metrics/", b"//metrics", b"/metrics//", b"/%6detrics", b"/%2Fmetrics", b"/metrics%2f"]
MODELS = [b"/v1//models", b"/v1%2Fmodels", b"/v%31/models", b"//v1///models/"]
MODEL = [b"/v1/models/a/", b"/v1/models/%61", b"//v1/models%2fa"]


@pytest.mark.parametrize(
    ("path", "plain"),
    [
        *[(path, b"/metrics") for path in METRICS],
        *[(path, b"/v1/models") for path in MODELS],
        *[(path, b"/v1/models/a") for path in MODEL],
        (b"/%2e%2e/metrics", b"/../metrics"),
        (b"//\\evil.example/", b"/%5Cevil.example"),
        (b"/%2F%2Fevil.example", b"/evil.example"),
        (b"//", b"/"),
    ],
)
def test_each_other_spelling_leads_to_it(path, plain):
    assert plain_path(path) == plain
    assert plain_path(plain) == plain


@pytest.mark.parametrize(
    ("target", "location"),
    [
        (b"/metrics/", b"/metrics"),
        (b"//metrics?a=%2F/", b"/metrics?a=%2F/"),
        (b"/%6Detrics", b"/metrics"),
        (b"/v1//models", b"/v1/models"),
        (b"//evil.example/", b"/evil.example"),
    ],
)
def test_a_server_sends_other_spellings_to_the_one_that_a_proxy_knows(tiny, target, location):
    head = b"GET " + target + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    answer = sent(tiny, head)
    assert answer.startswith(b"HTTP/1.1 308 ")
    assert b"\r\nlocation: " + location + b"\r\n" in answer
    assert b'"code":"path_spelling"' in answer


LOCAL = ["localhost", "127.0.0.1:8000", "[::1]:8000", "10.1.2.3", "LOCALHOST.:80", "server"]
LOCAL += ["a.localhost", "box.local:1", "api.ns.svc", "api.ns.svc.cluster.local", "x.internal", ""]
FOREIGN = ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example."]
FOREIGN += ["evil.example#.local:1/x", "evillocalhost.com", "1.2.3", "[evil.example]", "svc.com"]


@pytest.mark.parametrize("host", LOCAL)
def test_local_hosts_are_allowed(host):
    HostCheck(()).check(Headers({"host": host}))


@pytest.mark.parametrize("host", FOREIGN)
def test_a_page_with_a_name_of_its_own_is_not(host):
    with pytest.raises(ApiError, match="--allowed-hosts") as refused:
        HostCheck(("api.example.com", "*.example.org")).check(Headers({"host": host}))
    assert refused.value.status_code == 403
    HostCheck(("*",)).check(Headers({"host": host}))


@pytest.mark.parametrize(
    "host", ["api.example.com:1", "API.EXAMPLE.COM.", "a.example.org", "a.b.example.org"]
)
def test_hosts_that_are_named_are_allowed(host):
    HostCheck(("api.example.com", "*.example.org")).check(Headers({"host": host}))
    with pytest.raises(ApiError):
        HostCheck(("example.com", "*.api.example.org")).check(Headers({"host": host}))


def test_a_server_without_keys_refuses_foreign_hosts(tiny):
    head = b"GET /v1/models HTTP/1.1\r\nHost: %b\r\nOrigin: http://%b\r\n"
    head += b"Connection: close\r\n\r\n"
    assert sent(tiny, head % ((b"evil.example:8000",) * 2)).startswith(b"HTTP/1.1 403 ")
    assert sent(tiny, head % ((b"localhost:8000",) * 2)).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("proxies", "named"),
    [((), "127.0.0.1"), (("127.0.0.0/8", "10.0.0.1"), "7.7.7.7"), (("10.0.0.1",), "127.0.0.1")],
)
def test_only_trusted_proxies_name_the_client(proxies, named):
    """The nearest address that is no proxy's counts: what stands before it may be invented."""
    seen = []

    async def app(scope, receive, send):
        seen.append(scope["client"][0])

    config = uvicorn_config(app, ServerOptions(trusted_proxies=proxies), UnsentOutput())
    config.load()
    headers = [(b"x-forwarded-for", b"6.6.6.6, 7.7.7.7, 10.0.0.1")]
    scope = {"type": "http", "headers": headers, "client": ("127.0.0.1", 5), "scheme": "http"}
    asyncio.run(config.loaded_app(scope, None, None))
    assert seen == [named]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("trusted_proxies", value) for value in ("proxy.example", "*", "10.0.0.0/99", "")],
        *[("allowed_hosts", value) for value in ("http://a", "a:80", "a/b", "a.*", "")],
    ],
)
def test_wrong_values_are_refused_by_name(field, value):
    with pytest.raises(FieldError, match=field):
        ServerOptions(**{field: (value,)})
