"""Metrics of a server; docs/guides/metrics.md defines each by formula.

Names are vLLM's after the prefix where the meaning is the same. `calls.py` says what counts as a
request.
"""

import functools
import itertools
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from twolane.common.checked_json import read_tables
from twolane.engine.lateness import LATE_BUCKETS, Lateness
from twolane.engine.messages import FinishReason, Stats, Times
from twolane.frontend.liveness import Liveness
from twolane.server.ops.vllm_names import OURS, Scrape
from twolane.server.options import MetricsPrefix
from twolane.slo import Slo

M = TypeVar("M", Counter, Gauge, Histogram)
PREFIX = OURS
MS = 1e-3
"""Seconds in a millisecond."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Prometheus' text format that every scraper reads; some refuse version 1.0.0 unless they ask for
it."""
# Steps of 1 ms up to 15 ms: quantiles are interpolated within a bucket, and SLOs of 10 ms are met.
START_BUCKETS = (
    *(round(ms * MS, 3) for ms in range(1, 16)),
    *(0.0175, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5),
    *(0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
"""Buckets of TTFT and its parts, in seconds."""
GAP_BUCKETS = (
    *(round(ms * MS, 3) for ms in range(2, 26)),
    *(0.03, 0.035, 0.04, 0.05, 0.06, 0.075, 0.1, 0.15, 0.2, 0.3),
    *(0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0),
)
"""Buckets of the time between tokens, in seconds."""
WHOLE_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
"""Buckets of the time of whole requests, in seconds."""
MAX_ADAPTERS, OTHER_ADAPTERS = 100, "(others)"
"""Most adapters with a label of their own, and the label of all others."""
MAX_MESSAGE_LENGTH = 200
"""Most characters of a refusal's message that are kept."""
TOKEN_BUCKETS = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))
BUCKETS: Mapping[str, Sequence[float]] = {
    **{"start": START_BUCKETS, "gap": GAP_BUCKETS},
    **{"whole": WHOLE_BUCKETS, "tokens": TOKEN_BUCKETS},
}
"""The buckets of histograms by their names in `metrics.toml`."""


class _About(msgspec.Struct, frozen=True):
    help: str
    labels: tuple[str, ...] = ()
    """Labels besides the model's name."""
    buckets: str = ""
    """A histogram's key in `BUCKETS`."""


ABOUT = read_tables(Path(__file__).with_name("metrics.toml"), _About)
"""Help texts, labels and buckets of metrics by their names without the prefix."""


class RefusalGroup(msgspec.Struct):
    """Consecutive requests that were refused for one reason."""

    reason: str
    message: str
    """Message of the latest of these refusals."""
    at: float
    """Time of the latest of these refusals, in seconds since the epoch."""
    count: int = 1


Simple = type[GaugeMetricFamily | CounterMetricFamily]


def simple_metric(kind: Simple, name: str, model_name: str, series: Mapping[Any, float]) -> Metric:
    """Return a metric of `ABOUT` with a value for each combination of its labels' values."""
    about = ABOUT[name]
    metric = kind(PREFIX + name, about.help, labels=["model_name", *about.labels])
    for values, value in series.items():
        metric.add_metric([model_name, *map(str, values)], value)
    return metric


def histogram_metric(
    name: str, model_name: str, bounds: Sequence[float], counts: Sequence[int], total: float
) -> Metric:
    """Return a histogram of `ABOUT`.

    Args:
        name: Its name in `ABOUT`.
        model_name: The label of all figures.
        bounds: The upper bound of each bucket but the last, in seconds.
        counts: The number of values in each bucket.
        total: The sum of all values, in seconds.
    """
    metric = HistogramMetricFamily(PREFIX + name, ABOUT[name].help, labels=["model_name"])
    edges = *map(floatToGoString, bounds), "+Inf"
    buckets = list(zip(edges, itertools.accumulate(counts), strict=True))
    metric.add_metric([model_name], buckets, total)
    return metric


@dataclass(eq=False)
class EngineCollector(Collector):
    """Collects gauges and counters that the engine keeps."""

    stats: Callable[[], Stats]
    """Returns the latest ones."""
    liveness: Liveness
    """The engine's signs of life."""
    model_name: str
    """The label of all figures."""
    page_size: int
    """Tokens in a KV page."""
    kv_cache_dtype: str
    """The format of the KV cache."""
    prefix_cache: bool
    """Whether prompts reuse what earlier ones have computed."""
    state_bytes: int
    """Bytes of the states of a request; 0: the model has none."""

    def collect(self) -> Iterator[Metric]:
        """Yield the engine's latest values."""
        stats, alive, gauge, counter = self.stats(), self.liveness, self._gauge, self._counter
        held = stats.kv_pages - stats.kv_pages_free - stats.kv_pages_cached
        yield gauge("num_requests_running", stats.running + stats.prefilling)
        yield gauge("num_requests_prefilling", stats.prefilling)
        yield gauge("num_requests_waiting", stats.waiting)
        yield gauge("kv_cache_usage_perc", held / stats.kv_pages if stats.kv_pages else 0.0)
        sizes = self.page_size, stats.kv_pages, self.kv_cache_dtype, self.prefix_cache
        yield self._family(GaugeMetricFamily, "cache_config_info", {sizes: 1})
        yield counter("prefix_cache_queries", stats.prefix_queries)
        yield counter("prefix_cache_hits", stats.prefix_hits)
        yield from self._states(stats)
        yield counter("num_preemptions", stats.preemptions)
        yield counter("broken_logits", stats.broken)
        busy = {(lane, units): seconds for lane, units, seconds in stats.seconds}
        yield self._family(CounterMetricFamily, "lane_busy_seconds", busy)
        yield gauge("engine_hung", alive.problem is not None)
        yield gauge("engine_silence_seconds", alive.silence)
        yield gauge("launch_wait_seconds", alive.longest_wait)
        silences = {(rank,): silence for rank, silence in enumerate(alive.silences, start=1)}
        yield self._family(GaugeMetricFamily, "rank_silence_seconds", silences)

    def _states(self, stats: Stats) -> Iterator[Metric]:
        """Yield what is known of the states of linear attention; without them, no value."""
        counts = {
            ("requests", "held"): stats.states - stats.states_free,
            ("requests", "free"): stats.states_free,
            ("snapshots", "held"): stats.snapshots_held,
            ("snapshots", "free"): stats.snapshots - stats.snapshots_held,
        }
        size = self.state_bytes
        pool = {labels: count * size for labels, count in counts.items() if size}
        hits = {(): stats.snapshot_hits} if size else {}
        yield self._family(GaugeMetricFamily, "state_pool_bytes", pool)
        yield self._family(CounterMetricFamily, "snapshot_hits", hits)

    def _gauge(self, name: str, value: float) -> Metric:
        return self._family(GaugeMetricFamily, name, {(): value})

    def _counter(self, name: str, value: float) -> Metric:
        return self._family(CounterMetricFamily, name, {(): value})

    def _family(self, kind: Simple, name: str, series: Mapping[Any, float]) -> Metric:
        return simple_metric(kind, name, self.model_name, series)


class PlainHistogram:
    """A histogram of gaps between tokens that is plain arithmetic, without locks."""

    def __init__(self) -> None:
        self._counts = [0] * (len(GAP_BUCKETS) + 1)
        self._seconds = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        """Count gaps of one length."""
        self._counts[bisect_left(GAP_BUCKETS, seconds)] += count
        self._seconds += seconds * count

    def metric(self, name: str, model_name: str) -> Metric:
        """Return the histogram as the metric of a name."""
        return histogram_metric(name, model_name, GAP_BUCKETS, self._counts, self._seconds)


class TokenCounts(Collector):
    """Counts tokens and the gaps between them, which every token costs.

    Args:
        model_name: the label of all figures.
        lateness: counts by how many seconds tokens were written late.
        judged: true if gaps are judged by a server's bound, so that both outcomes are shown.
    """

    def __init__(self, model_name: str, lateness: Lateness, *, judged: bool) -> None:
        self.tokens = 0
        """Number of output tokens."""
        self.due = PlainHistogram()
        """Gaps between the times at which tokens were due."""
        self._gaps = PlainHistogram()
        self._model_name, self._lateness = model_name, lateness
        self._judged = dict.fromkeys(("met", "missed"), 0) if judged else {}

    def gap(self, seconds: float, bound: float | None, count: int = 1) -> None:
        """Count gaps of one length between two tokens, whose bound is the request's, if any."""
        self._gaps.add(seconds, count)
        if bound is not None:
            outcome = "met" if seconds <= bound else "missed"
            self._judged[outcome] = self._judged.get(outcome, 0) + count

    def collect(self) -> Iterator[Metric]:
        """Yield two counters, two histograms of gaps, and one of how late tokens were written."""
        model, late = self._model_name, self._lateness
        judged = {(outcome,): count for outcome, count in self._judged.items()}
        yield simple_metric(CounterMetricFamily, "generation_tokens", model, {(): self.tokens})
        yield simple_metric(CounterMetricFamily, "slo_gaps", model, judged)
        yield self._gaps.metric("inter_token_latency_seconds", model)
        yield self.due.metric("due_gap_seconds", model)
        name = "delivery_lateness_seconds"
        yield histogram_metric(name, model, LATE_BUCKETS, late.counts, late.total)

    # The registry finds them by their names.
    describe = collect


class ServerMetrics:
    """Metrics of one server, in a registry of their own.

    Args:
        stats: returns the engine's latest.
        liveness: the engine's signs of life.
        model_name: the label of every figure that is about the model.
        slo: the bounds of requests that bring none.
        page_size: number of tokens in a KV page.
        prefix: names that `render` uses.
        kv_cache_dtype: the format of the KV pool, as it was asked for.
        prefix_cache: Whether prompts reuse what earlier ones have computed.
        state_bytes: Bytes of the states of a request; 0: the model has none.
        lateness: counts by how many seconds tokens were written late.
    """

    def __init__(
        self,
        stats: Callable[[], Stats],
        liveness: Liveness,
        model_name: str,
        slo: Slo,
        page_size: int,
        prefix: MetricsPrefix = "twolane",
        kv_cache_dtype: str = "auto",
        *,
        prefix_cache: bool = True,
        state_bytes: int = 0,
        lateness: Lateness | None = None,
    ) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.slo = slo
        # Most refusals that the dashboard shows, in groups of one reason.
        self.refusals: deque[RefusalGroup] = deque(maxlen=20)
        """The latest refusals."""
        self.registry = CollectorRegistry()
        pool = page_size, kv_cache_dtype, prefix_cache, state_bytes
        self.registry.register(EngineCollector(stats, liveness, model_name, *pool))
        ProcessCollector(registry=self.registry)
        self._model_name = model_name
        self._prefix: MetricsPrefix = prefix
        self.http = Counter(
            f"{PREFIX}http_requests",
            "HTTP requests",
            ["method", "handler", "status"],
            registry=self.registry,
        )
        self.received = self._counter("requests_received")()
        self.success = self._counter("request_success")
        self.refused = self._counter("requests_refused")
        self.aborted = self._counter("requests_aborted")
        self._adapter = self._made(Counter, "adapter_requests")
        self._adapters = set[str]()
        """Adapters with a label."""
        self._unloaded = dict[str, None]()
        """Those of them that are unloaded, the one that has been for longest first."""
        self.in_flight = self._made(Gauge, "requests_in_flight").labels(model_name)
        self.prompt = self._counter("prompt_tokens")()
        self.slo_requests = self._counter("slo_requests")
        self.counts = TokenCounts(model_name, lateness or Lateness(), judged=slo.tbt is not None)
        """Counts of tokens and gaps."""
        self.registry.register(self.counts)
        self._begin_at_zero()
        self.ttft = self._histogram("time_to_first_token_seconds")
        self.tpot = self._histogram("request_time_per_output_token_seconds")
        self.e2e = self._histogram("e2e_request_latency_seconds")
        self.queue = self._histogram("request_queue_time_seconds")
        self.prefill = self._histogram("request_prefill_time_seconds")
        self.decode = self._histogram("request_decode_time_seconds")
        self.inference = self._histogram("request_inference_time_seconds")
        self.prompt_size = self._histogram("request_prompt_tokens")
        self.output_size = self._histogram("request_generation_tokens")

    def _begin_at_zero(self) -> None:
        """Create the series that are known in advance.

        A query over one that is not there yet has no answer: where all requests are late, their
        attainment would be no data instead of 0.
        """
        for reason in ("stop", "length"):
            self.success(reason)
        for reason in ("disconnect", "engine", "model", "shutdown"):
            self.aborted(reason)
        for outcome in ("met", "missed"):
            for name in self.slo.bounds:
                self.slo_requests(name, outcome)

    def begin_call(self) -> "CallMetrics":
        """See `CallObserver.begin_call`."""
        return CallMetrics(self)

    def count_http(self, method: str, handler: str, status: int) -> None:
        """See `CallObserver.count_http`."""
        self.http.labels(method, handler, str(status)).inc()

    def count_adapter(self, name: str, requests: int) -> None:
        """Count requests that an adapter answers; adapters beyond `MAX_ADAPTERS` share a label."""
        self._unloaded.pop(name, None)
        if name not in self._adapters:
            if len(self._adapters) == MAX_ADAPTERS and self._unloaded:
                self._give_label_back(next(iter(self._unloaded)))
            if len(self._adapters) < MAX_ADAPTERS:
                self._adapters.add(name)
            else:
                name = OTHER_ADAPTERS
        self._adapter.labels(self._model_name, name).inc(requests)

    def forget_adapter(self, name: str) -> None:
        """Let another adapter take the label of one that is unloaded, if there is no free one.

        Until then its count stays: loaded again, it is counted on.
        """
        if name in self._adapters:
            self._unloaded[name] = None

    def _give_label_back(self, name: str) -> None:
        """Count the requests of an unloaded adapter among the others', so that no sum falls."""
        del self._unloaded[name]
        self._adapters.remove(name)
        [family] = self._adapter.collect()
        labels = {"model_name": self._model_name, "adapter": name}
        count = next(s.value for s in family.samples if s.labels == labels)
        self._adapter.remove(self._model_name, name)
        self._adapter.labels(self._model_name, OTHER_ADAPTERS).inc(count)

    def refuse(self, reason: str, message: str) -> None:
        """Count a refused request."""
        self.refused(reason).inc()
        refusal = RefusalGroup(reason, message[:MAX_MESSAGE_LENGTH], time.time())
        if self.refusals and self.refusals[-1].reason == reason:
            refusal.count += self.refusals.pop().count
        self.refusals.append(refusal)

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return prometheus_client.generate_latest(Scrape(self.registry.collect(), self._prefix))

    def _made(self, kind: type[M], name: str, **more: Any) -> M:
        names = ["model_name", *ABOUT[name].labels]
        return kind(PREFIX + name, ABOUT[name].help, names, registry=self.registry, **more)

    def _counter(self, name: str) -> Callable[..., Counter]:
        counter = self._made(Counter, name)
        # Kept: each token asks, and looking a child up takes longer than counting.
        return functools.cache(lambda *values: counter.labels(self._model_name, *values))

    def _histogram(self, name: str) -> Histogram:
        buckets = BUCKETS[ABOUT[name].buckets]
        return self._made(Histogram, name, buckets=buckets).labels(self._model_name)


class InFlight:
    """One of the requests in flight, until it ends. It ends once.

    Args:
        metrics: the server's metrics.
        slo: the request's latency bounds, or the server's where it has none.
    """

    def __init__(self, metrics: ServerMetrics, slo: Slo) -> None:
        self.slo = slo
        """Its latency bounds; a call's are the server's until its headers are read."""
        self._metrics = metrics
        self._open = True

    def refuse(self, reason: str, message: str, *, overload: bool) -> None:
        """Count it as refused, unless it has ended.

        Args:
            reason: why, for a program.
            message: why, for a person.
            overload: true if a good request was refused, which misses its SLO; no SLO covers the
                client's mistakes.
        """
        if self._end():
            self._metrics.refuse(reason, message)
            if overload:
                self._miss_all()

    def _end(self) -> bool:
        """End it; return whether it was in flight."""
        was_open, self._open = self._open, False
        if was_open:
            self._metrics.in_flight.dec()
        return was_open

    def _miss_all(self) -> None:
        """Count every bound of a request that was not served as missed."""
        for name in self.slo.bounds:
            self._metrics.slo_requests(name, "missed").inc()


class CallMetrics(InFlight):
    """A call that asks for answers (`http.calls.Call`).

    Args:
        metrics: the server's metrics, which count the call.
    """

    def __init__(self, metrics: ServerMetrics) -> None:
        super().__init__(metrics, metrics.slo)
        self.arrival = time.monotonic()
        self.headers: Mapping[str, str] = {}
        self.key: int | None = None
        self.on_parsed: Callable[[], None] = lambda: None
        metrics.received.inc()
        metrics.in_flight.inc()

    def admit(self, prompts: Sequence[list[int]]) -> "Sequence[RequestMetrics]":
        """See `Call.admit`."""
        assert self._open
        self._open = False
        self._metrics.received.inc(len(prompts) - 1)
        self._metrics.in_flight.inc(len(prompts) - 1)
        return [RequestMetrics(self._metrics, self.arrival, len(p), self.slo) for p in prompts]

    def abort(self, reason: str) -> None:
        """See `Call.abort`."""
        if self._end():
            self._metrics.aborted(reason).inc()


class RequestMetrics(InFlight):
    """Records the metrics of one request in flight.

    Args:
        metrics: the server's metrics.
        arrival: time of arrival.
        prompt_tokens: number of prompt tokens.
        slo: the request's latency bounds, or the server's where it has none.
    """

    def __init__(
        self, metrics: ServerMetrics, arrival: float, prompt_tokens: int, slo: Slo
    ) -> None:
        super().__init__(metrics, slo)
        self._arrival = arrival
        self._prompt_tokens = self._new_tokens = prompt_tokens
        self._output_tokens = 0
        self._first: float | None = None
        self._last = self._due = arrival
        self._longest_gap = 0.0

    def tokens(self, count: int, now: float, cached: int | None, due: float | None = None) -> None:
        """Count tokens that arrived together, as one gap followed by gaps of 0; see
        `CountedRequest.tokens`."""
        due = now if due is None else due
        metrics = self._metrics
        metrics.counts.tokens += count
        self._output_tokens += count
        if self._first is None:
            self._first = now
            self._new_tokens -= cached or 0
            metrics.prompt.inc(self._prompt_tokens)
            metrics.ttft.observe(now - self._arrival)
        else:
            gap = now - self._last
            metrics.counts.gap(gap, self.slo.tbt)
            metrics.counts.due.add(max(0.0, due - self._due))
            if gap > self._longest_gap:
                self._longest_gap = gap
        if count > 1:
            metrics.counts.gap(0.0, self.slo.tbt, count - 1)
        self._last, self._due = now, due

    def finish(self, reason: FinishReason, now: float, times: Times | None) -> None:
        """Count a completed answer."""
        if not self._end():
            return
        metrics = self._metrics
        metrics.success(reason).inc()
        metrics.prompt_size.observe(self._prompt_tokens)
        metrics.output_size.observe(self._output_tokens)
        metrics.e2e.observe(now - self._arrival)
        tpot = 0.0
        if self._first is not None and self._output_tokens > 1:
            tpot = (now - self._first) / (self._output_tokens - 1)
            metrics.tpot.observe(tpot)
        if times is not None:
            self._observe_times(times)
        first = (self._first or now) - self._arrival
        self._judge("ttft", self.slo.first_token(self._new_tokens), first)
        self._judge("tbt", self.slo.tbt, self._longest_gap)
        self._judge("tpot", self.slo.tpot, tpot)

    def fail(self, reason: str) -> None:
        """Count a request that the server aborted, unless it has ended."""
        if self._end():
            self._metrics.aborted(reason).inc()
            self._miss_all()

    def give_up(self, reason: str, now: float) -> None:
        """Count a request that the client aborted, unless it has ended.

        What was late by then is missed; of what was not, nobody knows.
        """
        if not self._end():
            return
        self._metrics.aborted(reason).inc()
        slo, bound = self.slo, self.slo.first_token(self._new_tokens)
        if self._first is not None:
            self._judge("ttft", bound, self._first - self._arrival)
        elif bound is not None and now - self._arrival > bound:
            self._metrics.slo_requests("ttft", "missed").inc()
        longest = max(self._longest_gap, now - self._last) if self._first is not None else 0.0
        if slo.tbt is not None and longest > slo.tbt:
            self._metrics.slo_requests("tbt", "missed").inc()

    def _judge(self, name: str, bound: float | None, seconds: float) -> None:
        if bound is not None:
            self._metrics.slo_requests(name, "met" if seconds <= bound else "missed").inc()

    def _observe_times(self, times: Times) -> None:
        metrics = self._metrics
        parts = (
            (metrics.queue, times.queue),
            (metrics.prefill, times.prefill),
            (metrics.decode, times.decode),
        )
        for histogram, seconds in parts:
            if seconds is not None:
                histogram.observe(seconds)
        if times.prefill is not None and times.decode is not None:
            metrics.inference.observe(times.prefill + times.decode)
