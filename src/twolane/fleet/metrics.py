"""Metrics of a fleet: its replicas, outcomes of requests, and the router's predictions."""

from collections import Counter as Count
from collections.abc import Callable, Iterable, Iterator
from typing import get_args

import msgspec
import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from twolane.fleet.pool import Member, Phase
from twolane.server.ops.metrics import START_BUCKETS

PREFIX = "twolane:fleet_"


class _ErrorCode(msgspec.Struct):
    code: str


class _ErrorAnswer(msgspec.Struct):
    error: _ErrorCode


def outcome_of(status: int, body: bytes) -> str:
    """Return the outcome of a request that a server answered: `answered`, or its error's code."""
    if status < 400:
        return "answered"
    try:
        return msgspec.json.decode(body, type=_ErrorAnswer).error.code
    except msgspec.DecodeError:
        return f"http_{status}"


class ReplicaCollector(Collector):
    """Collects the gauges of the replicas.

    Args:
        members: returns all of them.
    """

    def __init__(self, members: Callable[[], Iterable[Member]]) -> None:
        self._members = members

    def collect(self) -> Iterator[Metric]:
        """Yield the number of replicas by phase, and the load of each."""
        members = list(self._members())
        phases = Count(member.phase for member in members)
        replicas = GaugeMetricFamily(f"{PREFIX}replicas", "Replicas", labels=["phase"])
        for phase in get_args(Phase):
            replicas.add_metric([phase], phases[phase])
        yield replicas
        opened = GaugeMetricFamily(
            f"{PREFIX}open_requests", "Requests sent that have not ended", labels=["replica"]
        )
        queued = GaugeMetricFamily(
            f"{PREFIX}queued_prompt_tokens", "Prompt tokens to compute", labels=["replica"]
        )
        for member in members:
            opened.add_metric([member.name], member.open)
            queued.add_metric([member.name], member.state.queued.tokens)
        yield opened
        yield queued


class FleetMetrics:
    """The fleet's metrics.

    Args:
        members: returns all replicas.
    """

    def __init__(self, members: Callable[[], Iterable[Member]]) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.registry.register(ReplicaCollector(members))
        self.requests = Counter(
            f"{PREFIX}requests",
            "Requests by what came of them: answered, redirected, broken_off, disconnect, or the "
            "code of the error; retried counts beside these",
            ["outcome"],
            registry=self.registry,
        )
        self.first_events = self._seconds("time_to_first_event", "Until a request's first event")
        self.predicted = self._seconds("predicted_ttft", "Time to first token by prediction")
        self.choosing = self._seconds("choosing", "Until a request's replica was chosen")

    def _seconds(self, name: str, about: str) -> Histogram:
        return Histogram(
            f"{PREFIX}{name}_seconds", about, buckets=START_BUCKETS, registry=self.registry
        )

    def count(self, outcome: str) -> None:
        """Count a request by its outcome."""
        self.requests.labels(outcome).inc()

    def render(self) -> bytes:
        """Return the answer of /metrics."""
        return prometheus_client.generate_latest(self.registry)
