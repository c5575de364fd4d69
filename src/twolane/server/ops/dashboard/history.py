"""History of the dashboard: /metrics, second by second, over the last 15 minutes.

Every figure is a difference of two readings of the counters and histograms of
docs/guides/metrics.md, so the page and Prometheus cannot disagree. Two rings of readings bound the
memory: a second apart over a minute, ten seconds apart over a quarter of an hour.
"""

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge

from twolane.engine.lateness import LATE_BUCKETS
from twolane.engine.messages import Stats
from twolane.server.ops.metrics import GAP_BUCKETS, PREFIX, START_BUCKETS, ServerMetrics

Window = Literal["minute", "quarter"]
"""Span of a chart."""
WINDOWS = {"now": 5.0, "minute": 60.0, "quarter": 900.0}
"""Span of each window in seconds."""
FINE_SECONDS, COARSE_SECONDS = 1.0, 10.0
QUANTILES = (0.5, 0.9, 0.99)
LATENCIES = {
    "ttft": (f"{PREFIX}time_to_first_token_seconds_bucket", START_BUCKETS),
    "tbt": (f"{PREFIX}inter_token_latency_seconds_bucket", GAP_BUCKETS),
    "late": (f"{PREFIX}delivery_lateness_seconds_bucket", LATE_BUCKETS),
}
TOTALS = {
    f"{PREFIX}requests_received_total": "received",
    f"{PREFIX}request_success_total": "finished",
    f"{PREFIX}requests_refused_total": "refused",
    f"{PREFIX}requests_aborted_total": "aborted",
    f"{PREFIX}prompt_tokens_total": "prompt_tokens",
    f"{PREFIX}generation_tokens_total": "output_tokens",
}
SLO_REQUESTS = f"{PREFIX}slo_requests_total"
HISTOGRAMS = {series: name for name, (series, _) in LATENCIES.items()}
NAMES = (*HISTOGRAMS, *TOTALS, SLO_REQUESTS)


@dataclass(frozen=True, slots=True)
class Reading:
    """The counters at one moment."""

    at: float
    """Seconds, monotonic."""
    stats: Stats
    """The engine's counters."""
    totals: dict[str, float]
    """Totals by the names of `TOTALS`, and "ttft met", "ttft missed" … of requests with bounds."""
    buckets: "dict[str, array[float]]"
    """Cumulative counts up to each bound, the last one infinite, by latency."""
    idle: bool
    """Whether no request was in flight."""


class Reader:
    """Reads the counters that the dashboard shows.

    Args:
        metrics: the counters.
        stats: returns the engine's latest.
        clock: seconds, monotonic.
    """

    def __init__(
        self, metrics: ServerMetrics, stats: Callable[[], Stats], clock: Callable[[], float]
    ) -> None:
        self._metrics = metrics
        self._stats = stats
        self._clock = clock
        self._last: Reading | None = None

    def __call__(self) -> Reading:
        """Return the current reading."""
        stats, now, last = self._stats(), self._clock(), self._last
        received, in_flight = value_of(self._metrics.received), value_of(self._metrics.in_flight)
        # With nothing in flight then and nothing received since, nothing else was counted.
        if last and last.idle and last.stats is stats and last.totals["received"] == received:
            self._last = replace(last, at=now)
        else:
            self._last = read(self._metrics.registry, stats, now, idle=not in_flight)
        return self._last


def value_of(metric: Counter | Gauge) -> float:
    """Return the value of a metric with one series."""
    return sum(sample.value for family in metric.collect() for sample in family.samples)


def read(registry: CollectorRegistry, stats: Stats, at: float, *, idle: bool) -> Reading:
    """Read all counters."""
    totals = dict.fromkeys(TOTALS.values(), 0.0)
    buckets = {name: array("d") for name in LATENCIES}
    for family in registry.restricted_registry(NAMES).collect():
        for sample in family.samples:
            if sample.name in HISTOGRAMS:
                buckets[HISTOGRAMS[sample.name]].append(sample.value)
            elif sample.name == SLO_REQUESTS:
                totals[f"{sample.labels['slo']} {sample.labels['outcome']}"] = sample.value
            else:
                totals[TOTALS[sample.name]] += sample.value
    return Reading(at, stats, totals, buckets, idle)


def quantile(q: float, bounds: Sequence[float], counts: Sequence[float]) -> float | None:
    """Return the q-quantile (0 to 1) of cumulative counts, like Prometheus' `histogram_quantile`.

    Linear within a bucket; beyond the last finite bound it is that bound. None: nothing counted.
    """
    total = counts[-1]
    if total <= 0:
        return None
    wanted = q * total
    below, low = 0.0, 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if count >= wanted:
            inside = count - below
            return bound if inside <= 0 else low + (bound - low) * (wanted - below) / inside
        below, low = count, bound
    return bounds[-1]


class Span:
    """The differences between two readings."""

    def __init__(self, first: Reading, last: Reading) -> None:
        self.seconds = max(last.at - first.at, 1e-9)
        self._first, self._last = first, last

    def total(self, name: str) -> float:
        """Return the increase of a counter."""
        return self._last.totals.get(name, 0.0) - self._first.totals.get(name, 0.0)

    def quantiles(self, latency: str) -> list[float | None]:
        """Return the `QUANTILES` of one of `LATENCIES`, in seconds."""
        before, after = (r.buckets[latency] for r in (self._first, self._last))
        counts = [b - a for a, b in zip(before, after, strict=True)]
        return [quantile(q, LATENCIES[latency][1], counts) for q in QUANTILES]

    def attainment(self, slo: str) -> float | None:
        """Return the attainment of a bound by the requests that ended; None: none had it."""
        met, missed = self.total(f"{slo} met"), self.total(f"{slo} missed")
        return met / (met + missed) if met + missed else None

    def prefix_hits(self) -> float | None:
        """Return the hit rate of the prefix cache in tokens; None: none were looked up."""
        first, last = self._first.stats, self._last.stats
        queries = last.prefix_queries - first.prefix_queries
        return (last.prefix_hits - first.prefix_hits) / queries if queries else None

    def lanes(self) -> list[tuple[str, int, float]]:
        """Return tuples of lane, units, and share of the time that the lane worked on them."""
        before = {(lane, units): spent for lane, units, spent in self._first.stats.seconds}
        shares = (
            (lane, units, (spent - before.get((lane, units), 0.0)) / self.seconds)
            for lane, units, spent in self._last.stats.seconds
        )
        return sorted(share for share in shares if share[2] > 0)

    def figures(self) -> dict[str, Any]:
        """Return the figures of a window."""
        return {
            "seconds": self.seconds,
            "ttft": self.quantiles("ttft"),
            "tbt": self.quantiles("tbt"),
            "late": self.quantiles("late"),
            "attainment": {slo: self.attainment(slo) for slo in ("ttft", "tbt", "tpot")},
            "totals": {name: self.total(name) for name in TOTALS.values()},
            "prefix_hits": self.prefix_hits(),
            "preemptions": self._last.stats.preemptions - self._first.stats.preemptions,
            "lanes": self.lanes(),
        }

    def point(self) -> dict[str, float | None]:
        """Return the point of the charts for a step."""
        ttft, tbt, stats = self.quantiles("ttft"), self.quantiles("tbt"), self._last.stats
        return {
            "at": self._last.at,
            "ttft50": ttft[0],
            "ttft99": ttft[-1],
            "tbt50": tbt[0],
            "tbt99": tbt[-1],
            "prompt": self.total("prompt_tokens") / self.seconds,
            "output": self.total("output_tokens") / self.seconds,
            "decoding": stats.running,
            "prefilling": stats.prefilling,
            "waiting": stats.waiting,
        }


class Ring:
    """Readings at a fixed distance, and the chart points between them.

    Args:
        step: seconds between two readings.
        span: seconds that are kept.
    """

    def __init__(self, step: float, span: float) -> None:
        self._step = step
        self.readings: deque[Reading] = deque(maxlen=round(span / step) + 1)
        self.points: deque[dict[str, float | None]] = deque(maxlen=round(span / step))

    def add(self, reading: Reading) -> None:
        """Add a reading if one is due."""
        if self.readings:
            span = Span(self.readings[-1], reading)
            if span.seconds < self._step - FINE_SECONDS / 2:
                return
            self.points.append(span.point())
        self.readings.append(reading)

    def before(self, at: float) -> Reading:
        """Return the latest reading up to a time, or else the first."""
        earlier = self.readings[0]
        for reading in self.readings:
            if reading.at > at:
                break
            earlier = reading
        return earlier


class History:
    """Readings of the last 15 minutes.

    Args:
        read: reads the counters now.
    """

    def __init__(self, read: Callable[[], Reading]) -> None:
        self._read = read
        self._rings: dict[Window, Ring] = {
            "minute": Ring(FINE_SECONDS, WINDOWS["minute"]),
            "quarter": Ring(COARSE_SECONDS, WINDOWS["quarter"]),
        }
        self.tick()

    def tick(self) -> None:
        """Add a reading; called every second."""
        reading = self._read()
        for ring in self._rings.values():
            ring.add(reading)

    def windows(self) -> dict[str, dict[str, Any]]:
        """Return the figures of each of `WINDOWS` up to now."""
        now = self._read()
        fine, coarse = self._rings["minute"], self._rings["quarter"]
        return {
            name: Span((fine if seconds <= 60 else coarse).before(now.at - seconds), now).figures()
            for name, seconds in WINDOWS.items()
        }

    def attainment(self, slo: str) -> float | None:
        """Return `Span.attainment` of the last minute's readings."""
        readings = self._rings["minute"].readings
        return Span(readings[0], readings[-1]).attainment(slo)

    def points(self, window: Window) -> dict[str, list[float | None]]:
        """Return the points of a window's charts by column."""
        points = self._rings[window].points
        return {name: [point[name] for point in points] for name in (points[0] if points else ())}
