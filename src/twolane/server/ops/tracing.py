"""OpenTelemetry traces: a span for each request, with its queue, prefill and decode.

Needs the extra `twolane[otel]`. Spans are made when a request has ended, from the times that the
engine gives and the launches that it tells of, so nothing is done while tokens flow. Attributes are
named by the semantic conventions for generative AI (opentelemetry.io/docs/specs/semconv/gen-ai).
"""

import asyncio
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import twolane
from twolane.engine.messages import Launched, Output, Times
from twolane.frontend.engine_client import EngineClient, Event

log = logging.getLogger("twolane.server")

TRACES = "/v1/traces"
NAMING = ("operation.name", "request.model")
"""Attributes whose values form the name of a request's span: `chat NAME`, also of an adapter."""
CLOSE_SECONDS = 3.0
"""Seconds that sending the last spans may take."""


def traces_url(endpoint: str) -> str:
    """Return a collector's URL for traces: OTLP's path under its address, or the full URL."""
    return endpoint if endpoint.endswith(TRACES) else endpoint.rstrip("/") + TRACES


class FaultLog(logging.Handler):
    """Log handler that reduces the span senders' errors to one line until sending works again."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._failing = False
        self._lost = 0
        # Loggers of the span senders, which write several lines for each attempt.
        for name in ("opentelemetry.exporter", "opentelemetry.sdk._shared_internal"):
            sender = logging.getLogger(name)
            sender.handlers, sender.propagate = [self], False

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        if not self._failing:
            self._failing = True
            # Most characters of a sender's message in the log.
            reason = record.getMessage()[:300]
            log.warning("traces do not reach the collector: %s", reason)

    def note(self, spans: int, *, sent: bool) -> None:
        """Record the number of spans that were sent or lost."""
        self._lost += 0 if sent else spans
        if sent and self._failing:
            log.warning("traces reach the collector again; %d spans were lost", self._lost)
            self._failing, self._lost = False, 0


class Exporter(OTLPSpanExporter):
    """Sends spans to a collector.

    Args:
        endpoint: the collector's URL for traces.
    """

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint)
        self._faults = FaultLog()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """See `SpanExporter`."""
        result = super().export(spans)
        self._faults.note(len(spans), sent=result is SpanExportResult.SUCCESS)
        return result


def make_provider(endpoint: str) -> TracerProvider:
    """Return a provider that sends spans to a collector; OTEL_* variables set the rest."""
    exporter = Exporter(traces_url(endpoint))
    provider = TracerProvider(resource=described())
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def described() -> Resource:
    """Return the spans' resource: what OTEL_* variables set, and defaults."""
    named = Resource({"service.version": twolane.__version__}).merge(Resource.create())
    # Prefix of the SDK's service name where no variable sets one.
    if str(named.attributes["service.name"]).startswith("unknown_service"):
        return named.merge(Resource({"service.name": "twolane"}))
    return named


class Tracing:
    """Makes the spans of requests, on the engine client's event loop.

    Args:
        provider: the provider that sends the spans.
        engine: is asked to tell of every launch.
    """

    def __init__(self, provider: TracerProvider, engine: EngineClient) -> None:
        self.tracer = provider.get_tracer("twolane", twolane.__version__)
        self._provider = provider
        self._slices: OrderedDict[str, list[Launched]] = OrderedDict()
        self._ending: set[RequestTrace] = set()
        engine.watchers.append(self._note)
        engine.watch(math.inf)

    def begin(
        self, headers: Mapping[str, str], arrival: float, attributes: Mapping[str, Any]
    ) -> "RequestTrace":
        """Begin the trace of a request.

        Args:
            headers: HTTP headers of the call; a `traceparent` among them is the span's parent.
            arrival: time of arrival in seconds on the monotonic clock.
            attributes: attributes of the span.
        """
        return RequestTrace(self, headers, arrival, attributes)

    def end(self, request: "RequestTrace") -> None:
        """Make a request's spans once the launches that served it are known."""
        self._ending.add(request)
        # Seconds after a request's end within which its last launch is reaped.
        asyncio.get_running_loop().call_later(0.2, self._write, request)

    def slices(self, id: str) -> list[Launched]:
        """Return the launches that computed a request's prompt, and forget them."""
        return self._slices.pop(id, [])

    async def close(self) -> None:
        """Send the remaining spans within `CLOSE_SECONDS`."""
        for request in list(self._ending):
            self._write(request)
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        end = time.monotonic() + CLOSE_SECONDS
        while sending.is_alive() and time.monotonic() < end:
            await asyncio.sleep(0.02)

    def _write(self, request: "RequestTrace") -> None:
        if request in self._ending:
            self._ending.remove(request)
            request.write()

    def _note(self, launches: list[Launched]) -> None:
        for launch in launches:
            for id in launch.prompts:
                self._slices.setdefault(id, []).append(launch)
        # Most requests whose slices are kept; those of abandoned requests are never read.
        while len(self._slices) > 10_000:
            self._slices.popitem(last=False)


class RequestTrace:
    """Trace of a request in progress; see `Tracing.begin`."""

    def __init__(
        self,
        tracing: Tracing,
        headers: Mapping[str, str],
        arrival: float,
        attributes: Mapping[str, Any],
    ) -> None:
        self._tracing = tracing
        self._parent = TraceContextTextMapPropagator().extract(headers)
        self._arrival = arrival
        self._end = arrival
        self._attributes = dict(attributes)
        self._tokens = 0
        self._event: Event | None = None
        self._error: str | None = None

    def tokens(self, count: int, now: float, cached: int | None) -> None:
        """See `Observer.tokens`."""
        if not self._tokens:
            self._attributes["gen_ai.usage.cache_read.input_tokens"] = cached or 0
            self._attributes["gen_ai.response.time_to_first_chunk"] = now - self._arrival
        self._tokens += count

    def ended(self, event: Event | None, reason: str, now: float) -> None:
        """Record the request's end.

        Args:
            event: the engine's last word; None: the client gave the request up.
            reason: `stop`, `length`, or what went wrong.
            now: time of the end.
        """
        self._event, self._end = event, now
        self._attributes["gen_ai.usage.output_tokens"] = self._tokens
        self._attributes["gen_ai.response.finish_reasons"] = [reason]
        if reason not in ("stop", "length"):
            self._attributes["error.type"] = self._error = reason
        self._tracing.end(self)

    def write(self) -> None:
        """Create the spans."""
        # One for all spans: whoever reads two clocks may lose the processor in between.
        epoch = time.time_ns() - time.monotonic_ns()
        operation, model = (self._attributes[f"gen_ai.{one}"] for one in NAMING)
        span = self._tracing.tracer.start_span(
            f"{operation} {model}",
            self._parent,
            trace.SpanKind.SERVER,
            self._attributes,
            start_time=nanoseconds(self._arrival, epoch),
        )
        if isinstance(self._event, Output):
            slices = self._tracing.slices(self._event.id)
            if span.is_recording():
                self._write_parts(span, self._event.times or Times(), slices, epoch)
        if self._error is not None and self._event is not None:
            span.set_status(trace.StatusCode.ERROR, self._error)
        span.end(nanoseconds(self._end, epoch))

    def _write_parts(
        self, span: trace.Span, times: Times, slices: list[Launched], epoch: int
    ) -> None:
        inside = trace.set_span_in_context(span)
        begin = times.taken
        for name, seconds in (
            ("queue", times.queue),
            ("prefill", times.prefill),
            ("decode", times.decode),
        ):
            if begin is None or seconds is None:
                return
            part = self._tracing.tracer.start_span(
                name, inside, start_time=nanoseconds(begin, epoch)
            )
            if name == "prefill":
                add_slices(part, slices, epoch)
            begin += seconds
            part.end(nanoseconds(begin, epoch))


def add_slices(span: trace.Span, slices: list[Launched], epoch: int) -> None:
    """Add an event for each launch that computed layers of a prompt, at its start; for `epoch` see
    `nanoseconds`."""
    for launch in slices:
        attributes = {
            "twolane.lane": launch.lane,
            "twolane.units": launch.units,
            "twolane.layers": launch.layers,
            "twolane.seconds": launch.end - launch.start,
            "twolane.requests": len(launch.prompts) + launch.decoding,
            "twolane.reason": launch.reason,
        }
        span.add_event("slice", attributes, timestamp=nanoseconds(launch.start, epoch))


def nanoseconds(monotonic: float, epoch: int) -> int:
    """Return a time of the monotonic clock as nanoseconds since the epoch; `epoch` is the
    difference between the clocks."""
    return round(monotonic * 1e9) + epoch
