"""What `/metrics` says. Names are vLLM's after the prefix where the meaning is the same.

`calls.py` says what counts as a request.
"""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from twolane.engine.messages import FinishReason, Stats

PREFIX = "twolane:"
TTFT_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5),
    *(0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
GAP_BUCKETS = (
    *(0.002, 0.004, 0.006, 0.008, 0.01, 0.012, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0),
)
E2E_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class EngineCollector(Collector):
    """Gauges and counters that the engine keeps."""

    def __init__(self, stats: Callable[[], Stats], model_name: str) -> None:
        self._stats = stats
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        """Yield the engine's latest figures."""
        stats = self._stats()
        held = stats.kv_pages - stats.kv_pages_free - stats.kv_pages_cached
        gauges = (
            ("num_requests_running", "Requests in prefill or decode", self._running(stats)),
            ("num_requests_prefilling", "Requests in prefill", stats.prefilling),
            ("num_requests_waiting", "Requests waiting for prefill", stats.waiting),
            (
                "kv_cache_usage_perc",
                "Share of the KV pages that requests hold; 1 is all of them",
                held / stats.kv_pages if stats.kv_pages else 0.0,
            ),
        )
        counters = (
            ("prefix_cache_queries", "Prompt tokens looked up", stats.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found", stats.prefix_hits),
            ("num_preemptions", "Requests recomputed for want of pages", stats.preemptions),
        )
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        for name, text, value in counters:
            counter = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
            counter.add_metric([self._model_name], value)
            yield counter

    @staticmethod
    def _running(stats: Stats) -> int:
        return stats.running + stats.prefilling


class Metrics:
    """The counters of one server, in a registry of their own."""

    def __init__(self, stats: Callable[[], Stats], model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(stats, model_name))
        self._model_name = model_name
        self._http = Counter(
            f"{PREFIX}http_requests",
            "HTTP requests",
            ["method", "handler", "status"],
            registry=self.registry,
        )
        self.received = self._counter("requests_received", "Requests received")
        self.success = self._counter_by(
            "finished_reason", "request_success", "Requests answered to the end"
        )
        self.refused = self._counter_by("reason", "requests_refused", "Requests refused")
        self.aborted = self._counter_by("reason", "requests_aborted", "Requests broken off")
        self.in_flight = Gauge(
            f"{PREFIX}requests_in_flight",
            "Requests received and not ended",
            ["model_name"],
            registry=self.registry,
        ).labels(model_name)
        self.prompt = self._counter("prompt_tokens", "Prompt tokens of requests with a first token")
        self.output = self._counter("generation_tokens", "Tokens generated")
        self.ttft = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token", TTFT_BUCKETS
        )
        self.gap = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of one request", GAP_BUCKETS
        )
        self.e2e = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the last token", E2E_BUCKETS
        )

    def request(self, arrival: float, prompt_tokens: int) -> "RequestMetrics":
        """Return a request that was counted; its one ending is to be told to the result."""
        return RequestMetrics(self, arrival, prompt_tokens)

    def http(self, method: str, handler: str, status: int) -> None:
        """Count an HTTP request."""
        self._http.labels(method, handler, str(status)).inc()

    def render(self) -> bytes:
        """Return all figures in Prometheus' text form."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        counter = Counter(PREFIX + name, text, ["model_name"], registry=self.registry)
        return counter.labels(self._model_name)

    def _counter_by(self, label: str, name: str, text: str) -> Callable[[str], Counter]:
        counter = Counter(PREFIX + name, text, ["model_name", label], registry=self.registry)
        return lambda value: counter.labels(self._model_name, value)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(
            PREFIX + name, text, ["model_name"], registry=self.registry, buckets=buckets
        )
        return histogram.labels(self._model_name)


class RequestMetrics:
    """The figures of one request in flight. Times are seconds on one monotonic clock."""

    def __init__(self, metrics: Metrics, arrival: float, prompt_tokens: int) -> None:
        self._metrics = metrics
        self._arrival = arrival
        self._prompt_tokens = prompt_tokens
        self._last: float | None = None
        self._open = True

    def tokens(self, count: int, now: float) -> None:
        """Count tokens that arrived together: one gap, and none between them."""
        metrics = self._metrics
        metrics.output.inc(count)
        if self._last is None:
            metrics.prompt.inc(self._prompt_tokens)
            metrics.ttft.observe(now - self._arrival)
        else:
            metrics.gap.observe(now - self._last)
        for _ in range(count - 1):
            metrics.gap.observe(0.0)
        self._last = now

    def finish(self, reason: FinishReason, now: float) -> None:
        """Count a full answer."""
        if self._end():
            metrics = self._metrics
            metrics.success(reason).inc()
            metrics.e2e.observe(now - self._arrival)

    def refuse(self, reason: str) -> None:
        """Count a request that the engine refused."""
        if self._end():
            self._metrics.refused(reason).inc()

    def abort(self, reason: str) -> None:
        """Count a request that was broken off; nothing happens if it has ended."""
        if self._end():
            self._metrics.aborted(reason).inc()

    def _end(self) -> bool:
        was_open, self._open = self._open, False
        if was_open:
            self._metrics.in_flight.dec()
        return was_open
