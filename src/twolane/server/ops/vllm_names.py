"""Metrics under vLLM's names, for dashboards, scaling rules and gateways written for vLLM.

Every series is made from one of ours at the moment of the scrape, so that both have the same value.
What vLLM has no counterpart of keeps its name.
"""

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from twolane.server.options import MetricsPrefix

OURS, THEIRS = "twolane:", "vllm:"
ENGINE = MappingProxyType({"engine": "0"})
"""Label of vLLM's metrics besides the model's name: the engine's number."""
SAME_NAMES = (
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"),
    *("prefix_cache_queries", "prefix_cache_hits", "num_preemptions"),
    *("prompt_tokens", "generation_tokens", "request_prompt_tokens", "request_generation_tokens"),
    *("time_to_first_token_seconds", "inter_token_latency_seconds"),
    *("request_time_per_output_token_seconds", "e2e_request_latency_seconds"),
    *("request_queue_time_seconds", "request_prefill_time_seconds"),
    *("request_decode_time_seconds", "request_inference_time_seconds"),
)
"""Metrics with the same name, meaning and labels in vLLM."""
OLD_NAMES: Mapping[str, str] = {
    "kv_cache_usage_perc": "gpu_cache_usage_perc",
    "prefix_cache_queries": "gpu_prefix_cache_queries",
    "prefix_cache_hits": "gpu_prefix_cache_hits",
    "inter_token_latency_seconds": "time_per_output_token_seconds",
}
"""Names of the same metrics in earlier versions of vLLM, which rules still use."""
ENDS: Mapping[str, str] = {
    "disconnect": "abort",
    "shutdown": "abort",
    "engine": "error",
    "model": "error",
}
"""vLLM's `finished_reason` for each `reason` of `requests_aborted`; `request_success` counts these
requests in vLLM, too."""


class Scrape(Collector):
    """Metrics of a collector under the names that `prefix` asks for."""

    def __init__(self, metrics: Iterable[Metric], prefix: MetricsPrefix) -> None:
        self._metrics = metrics
        self._prefix = prefix

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, in the order of the collector."""
        metrics = list(self._metrics)
        theirs = {} if self._prefix == "twolane" else _by_source(metrics)
        for metric in metrics:
            if self._prefix != "vllm" or metric.name not in theirs:
                yield metric
            yield from theirs.get(metric.name, ())


def _by_source(metrics: list[Metric]) -> dict[str, list[Metric]]:
    """Return vLLM's metrics by the name of our metric that each replaces."""
    ours = {metric.name.removeprefix(OURS): metric for metric in metrics}
    theirs = {
        OURS + name: [_renamed(ours[name], THEIRS + name)] for name in SAME_NAMES if name in ours
    }
    for name, old in OLD_NAMES.items():
        theirs[OURS + name].append(_renamed(ours[name], THEIRS + old))
    theirs[f"{OURS}request_success"] = [_ends(ours["request_success"], ours["requests_aborted"])]
    return theirs


def _renamed(metric: Metric, name: str) -> Metric:
    renamed = Metric(name, metric.documentation, metric.type)
    renamed.samples = [
        sample._replace(
            name=name + sample.name.removeprefix(metric.name), labels={**sample.labels, **ENGINE}
        )
        for sample in metric.samples
    ]
    return renamed


def _ends(success: Metric, aborted: Metric) -> Metric:
    """Return vLLM's count of requests by outcome, aborted ones included."""
    family = _renamed(success, f"{THEIRS}request_success")
    counts: dict[tuple[str, str], float] = {}
    for sample in aborted.samples:
        key = sample.labels["model_name"], ENDS[sample.labels["reason"]]
        counts[key] = counts.get(key, 0.0) + sample.value
    for (model, reason), count in counts.items():
        labels = {"model_name": model, "finished_reason": reason, **ENGINE}
        family.samples.append(Sample(f"{family.name}_total", labels, count))
    return family
