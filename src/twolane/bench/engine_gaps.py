"""Gaps between tokens as the server's engine counts them.

A client over HTTP also waits for what stands between engine and client: detokenising, JSON, the
server's event loop. What that adds must not be called scheduling. Servers with Prometheus metrics
count gaps in a histogram (vLLM by the clock of its engine, Twolane where its API process delivers
tokens); the counts of a run are the difference of two looks.
"""

import math
from collections.abc import Mapping
from itertools import pairwise

import msgspec
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from twolane.bench import http
from twolane.results.result import EngineGaps

HISTOGRAMS = (
    "twolane:inter_token_latency_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:time_per_output_token_seconds",
    "sglang:inter_token_latency_seconds",
)
"""Names of servers' histograms of gaps between tokens; the first that exists is used.

vLLM has the second from 0.11 on and the third, of the same gaps, before.
"""
DUE = "twolane:due_gap_seconds"
"""Name of the histogram of gaps as the engine's pacing wants them, before they are delivered."""
TIMEOUT = 10.0
"""Seconds that a server may take to answer for its metrics."""
TAIL = 0.99
"""Quantile of the gaps that is reported."""


class GapHistogram(msgspec.Struct, frozen=True):
    """A histogram of gaps at one time."""

    name: str
    counts: dict[float, float]
    """Number of gaps that lasted at most the key, in seconds."""
    seconds: float
    """Sum of all gaps in seconds."""
    due: "GapHistogram | None" = None
    """The gaps between due times; None: the server has no such histogram."""


async def look(base_url: str, headers: Mapping[str, str]) -> GapHistogram | None:
    """Read a server's histogram of gaps; None: it has none, or no metrics."""
    try:
        status, page = await http.get(base_url.rstrip("/") + "/metrics", headers, TIMEOUT)
        return parse(page.decode()) if status == 200 else None
    except (http.HTTPError, TimeoutError, ValueError):  # a page of another kind
        return None


def parse(page: str) -> GapHistogram | None:
    """Return the histogram of gaps in a page of metrics, summed over its labels; None: there is
    none."""
    families = {family.name: family for family in text_string_to_metric_families(page)}
    name = next((name for name in HISTOGRAMS if name in families), None)
    if name is None:
        return None
    due = _histogram(families[DUE]) if DUE in families else None
    return msgspec.structs.replace(_histogram(families[name]), due=due)


def _histogram(family: Metric) -> GapHistogram:
    counts: dict[float, float] = {}
    seconds = 0.0
    for sample in family.samples:
        if sample.name.endswith("_bucket"):
            edge = float(sample.labels["le"])
            counts[edge] = counts.get(edge, 0.0) + sample.value
        elif sample.name.endswith("_sum"):
            seconds += sample.value
    return GapHistogram(family.name, dict(sorted(counts.items())), seconds)


def between(before: GapHistogram | None, after: GapHistogram | None) -> EngineGaps | None:
    """Return the gaps counted between two readings; None without both, or without a gap."""
    if before is None or after is None or before.name != after.name:
        return None
    counts = {edge: count - before.counts.get(edge, 0.0) for edge, count in after.counts.items()}
    count = counts.get(math.inf, 0.0)
    if count < 1:
        return None
    edges = [0.0, *counts]
    above, within = next(
        (low, high) for low, high in pairwise(edges) if counts[high] >= TAIL * count
    )
    mean = (after.seconds - before.seconds) / count
    due = between(before.due, after.due)
    return EngineGaps(after.name, round(count), mean, above, within, due)
