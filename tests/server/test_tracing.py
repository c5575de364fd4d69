"""Traces of requests, as an OpenTelemetry collector gets them."""

import http.client
import json
import sys
import threading
import urllib.parse
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import twolane
from twolane.common.errors import FieldError
from twolane.server.options import ServerOptions
from twolane.server.run import span_provider

from .serving import PATIENCE, serving, wait_for

pytest.importorskip("opentelemetry.exporter", reason="twolane[otel] is not installed")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from twolane.server.ops.tracing import TRACES, Exporter, described

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """Takes OTLP over HTTP, and keeps the spans."""

    def __init__(self):
        self.status = 200
        self.spans: list[Span] = []
        self.resources = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                assert self.path == "/v1/traces"
                data = self.rfile.read(int(self.headers["Content-Length"]))
                if collector.status == 200:
                    collector.take(ExportTraceServiceRequest.FromString(data))
                self.send_response(collector.status)
                self.end_headers()

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"

    def take(self, message):
        for resource in message.resource_spans:
            self.resources.append(attributes(resource.resource))
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]

    def trees(self, trace):
        """Return (span, {name: child}) of each request of a trace, once there are some. A request's
        own span is sent with its children or after them."""

        def found():
            ours = [span for span in list(self.spans) if span.trace_id.hex() == trace]
            return ours, [span for span in ours if span.kind == Span.SPAN_KIND_SERVER]

        wait_for(lambda: found()[1])
        ours, roots = found()
        return [
            (root, {span.name: span for span in ours if span.parent_span_id == root.span_id})
            for root in roots
        ]


def attributes(thing):
    values = {}
    for pair in thing.attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        if kind == "array_value":
            value = [getattr(v, v.WhichOneof("value")) for v in value.values]
        values[pair.key] = value
    return values


@contextmanager
def collecting():
    collector = Collector()
    thread = threading.Thread(target=collector.server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        collector.server.shutdown()
        thread.join()
        collector.server.server_close()


@pytest.fixture(scope="module")
def traced(tiny_model):
    with collecting() as collector, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        patch.setenv("OTEL_SERVICE_NAME", "shop")
        args = ("--load-format", "dummy", "--kv-tokens", "20000", "--served-model-name", "tiny")
        with serving(str(tiny_model), *args, "--otlp-endpoint", collector.address) as served:
            served.collector = collector
            yield served


def post(served, body, trace=TRACE, flags="01", leave=False):
    address = urllib.parse.urlsplit(served.base)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=PATIENCE)
    headers = {"Content-Type": "application/json", "traceparent": f"00-{trace}-{PARENT}-{flags}"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    if not leave:
        response.read()
    connection.close()
    return response.status


def test_a_request_has_its_parts_and_the_slices_of_its_prompt(traced):
    body = {"prompt": [5] * 300, "max_tokens": 6, "ignore_eos": True, "temperature": 0, "seed": 3}
    assert post(traced, body) == 200
    [(root, parts)] = traced.collector.trees(TRACE)
    assert root.parent_span_id.hex() == PARENT
    assert root.name == "text_completion tiny"
    said = attributes(root)
    assert {name: said[f"gen_ai.{name}"] for name in ("usage.input_tokens", "request.seed")} == {
        "usage.input_tokens": 300,
        "request.seed": 3,
    }
    assert said["gen_ai.usage.output_tokens"] == said["gen_ai.request.max_tokens"] == 6
    assert said["gen_ai.response.finish_reasons"] == ["length"]
    assert said["gen_ai.usage.cache_read.input_tokens"] == 0
    assert said["gen_ai.operation.name"] == "text_completion"
    first = said["gen_ai.response.time_to_first_chunk"]
    assert 0 < first <= (root.end_time_unix_nano - root.start_time_unix_nano) / 1e9
    assert traced.collector.resources[0]["service.name"] == "shop"

    queue, prefill, decode = (parts[name] for name in ("queue", "prefill", "decode"))
    close = 1_000  # ns: seconds of a clock that runs for months are no more exact
    assert root.start_time_unix_nano <= queue.start_time_unix_nano + close
    for one, then in ((queue, prefill), (prefill, decode)):
        assert abs(one.end_time_unix_nano - then.start_time_unix_nano) <= close
        assert one.start_time_unix_nano <= one.end_time_unix_nano
    assert decode.end_time_unix_nano <= root.end_time_unix_nano + close

    slices = [attributes(event) for event in prefill.events]
    layers = [layer for part in slices for layer in range(*part["twolane.layers"])]
    assert layers == [0, 1]
    for event, part in zip(prefill.events, slices, strict=True):
        assert part["twolane.lane"] in ("prefill", "device")
        assert part["twolane.units"] in (1, 2)
        assert prefill.start_time_unix_nano <= event.time_unix_nano + close
        assert event.time_unix_nano <= prefill.end_time_unix_nano + close


def test_each_answer_is_a_request(traced):
    trace = TRACE[::-1]
    body = {"prompt": [[5, 6], [7]], "max_tokens": 1, "n": 2, "ignore_eos": True}
    assert post(traced, body, trace) == 200
    wait_for(lambda: len(traced.collector.trees(trace)) == 4)
    roots = traced.collector.trees(trace)
    assert sorted(attributes(root)["gen_ai.usage.input_tokens"] for root, _ in roots) == [
        1,
        1,
        2,
        2,
    ]
    for _, parts in roots:
        assert parts["prefill"].events  # that of its last slice, too, which ends with the request


def test_a_client_that_leaves_and_one_that_wants_no_trace(traced):
    left, unwanted = "1" * 32, "2" * 32
    body = {"prompt": [5], "max_tokens": 15_000, "ignore_eos": True, "stream": True}
    assert post(traced, {**body, "max_tokens": 1}, unwanted, flags="00") == 200
    assert post(traced, body, left, leave=True) == 200
    [(root, parts)] = traced.collector.trees(left)
    assert attributes(root)["error.type"] == "disconnect"
    assert attributes(root)["gen_ai.response.finish_reasons"] == ["disconnect"]
    assert root.status.code == Status.STATUS_CODE_UNSET
    assert not parts
    assert not [span for span in traced.collector.spans if span.trace_id.hex() == unwanted]


def test_a_collector_that_takes_nothing_is_a_line_and_another_when_it_does_again(
    caplog, monkeypatch
):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", str(PATIENCE))
    with collecting() as collector:
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(Exporter(collector.address + TRACES)))
        for status in (400, 400, 200, 200, 400):
            collector.status = status
            provider.get_tracer("test").start_span("x").end()
        provider.shutdown()
    fault, mended, again = caplog.messages
    assert fault == again
    assert fault.startswith("traces do not reach the collector: ")
    assert "400" in fault
    assert mended == "traces reach the collector again; 2 spans were lost"


@pytest.mark.parametrize(
    "endpoint",
    ["localhost:4318", "grpc://x", "", "http://", "http://[", "http://a b", "http://a:b"],
)
def test_an_endpoint_that_is_no_url_is_refused(endpoint):
    with pytest.raises(FieldError, match="otlp_endpoint must be an http:// or https:// URL"):
        ServerOptions(otlp_endpoint=endpoint)


def test_without_the_extra_it_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "twolane.server.ops.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ValueError, match=r"--otlp-endpoint needs an extra: .*twolane\[otel\]"):
        span_provider("http://localhost:4318")


def test_spans_are_sent_before_the_server_ends(traced):
    """The last test of that server."""
    trace = "3" * 32
    assert post(traced, {"prompt": [5], "max_tokens": 2, "ignore_eos": True}, trace) == 200
    traced.process.terminate()
    assert traced.process.wait(PATIENCE) == 0
    [(_, parts)] = traced.collector.trees(trace)
    assert parts.keys() == {"queue", "prefill", "decode"}


@pytest.mark.parametrize("given, name", [(None, "twolane"), ("shop", "shop")])
def test_a_service_that_no_variable_names_is_called_twolane(given, name, monkeypatch):
    monkeypatch.delenv("OTEL_RESOURCE_ATTRIBUTES", raising=False)
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    if given:
        monkeypatch.setenv("OTEL_SERVICE_NAME", given)
    assert described().attributes["service.name"] == name
    assert described().attributes["service.version"] == twolane.__version__
