"""The metrics under vLLM's names: the same figures, and nothing that vLLM does not have.

`test_metrics.py` compares both names under traffic of every kind.
"""

import re

import pytest

from twolane.engine.messages import Stats
from twolane.frontend.liveness import Liveness
from twolane.server.ops.metrics import RequestMetrics, ServerMetrics
from twolane.slo import Slo

VLLM = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "gpu_cache_usage_perc": "gauge",
    "cache_config_info": "gauge",
    "prefix_cache_queries_total": "counter",
    "prefix_cache_hits_total": "counter",
    "gpu_prefix_cache_queries_total": "counter",
    "gpu_prefix_cache_hits_total": "counter",
    "num_preemptions_total": "counter",
    "prompt_tokens_total": "counter",
    "generation_tokens_total": "counter",
    "request_success_total": "counter",
    "request_prompt_tokens": "histogram",
    "request_generation_tokens": "histogram",
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "time_per_output_token_seconds": "histogram",
    "request_time_per_output_token_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "request_queue_time_seconds": "histogram",
    "request_prefill_time_seconds": "histogram",
    "request_decode_time_seconds": "histogram",
    "request_inference_time_seconds": "histogram",
}
"""Names and types as vLLM's documentation has them, those of earlier versions too."""


def rendered(prefix):
    """What a server with one good request and one of each break has to say."""
    stats = Stats(running=2, prefilling=1, waiting=3, kv_pages=100, kv_pages_free=40)
    metrics = ServerMetrics(lambda: stats, Liveness(), "model", Slo(), 16, prefix, "fp8")
    good = RequestMetrics(metrics, 0.0, 30, Slo())
    good.tokens(3, 1.0, 16)
    good.finish("stop", 2.0, None)
    for reason in ("engine", "model"):
        RequestMetrics(metrics, 0.0, 30, Slo()).fail(reason)
    RequestMetrics(metrics, 0.0, 30, Slo()).give_up("disconnect", 1.0)
    return metrics.render().decode()


def types(text, prefix):
    return dict(re.findall(rf"# TYPE {prefix}:(\S+) (\w+)", text))


def test_by_default_no_metric_has_a_name_of_vllm():
    assert "vllm:" not in rendered("twolane")


def test_names_and_types_are_those_of_vllm_s_documentation():
    assert types(rendered("vllm"), "vllm") == VLLM
    assert types(rendered("both"), "vllm") == VLLM


def test_what_vllm_does_not_have_keeps_its_name():
    ours, renamed = (types(rendered(prefix), "twolane") for prefix in ("twolane", "vllm"))
    assert ours == types(rendered("both"), "twolane")
    assert renamed.items() <= ours.items()
    assert set(ours) - set(renamed) == set(ours) & set(VLLM)
    assert {"requests_received_total", "slo_requests_total", "lane_busy_seconds_total"} <= set(
        renamed
    )


@pytest.mark.parametrize(
    "line",
    [
        'vllm:num_requests_running{engine="0",model_name="model"} 3.0',
        'vllm:num_requests_waiting{engine="0",model_name="model"} 3.0',
        'vllm:kv_cache_usage_perc{engine="0",model_name="model"} 0.6',
        'vllm:request_success_total{engine="0",finished_reason="stop",model_name="model"} 1.0',
        'vllm:request_success_total{engine="0",finished_reason="length",model_name="model"} 0.0',
        'vllm:request_success_total{engine="0",finished_reason="abort",model_name="model"} 1.0',
        'vllm:request_success_total{engine="0",finished_reason="error",model_name="model"} 2.0',
        'vllm:time_per_output_token_seconds_count{engine="0",model_name="model"} 2.0',
        'vllm:cache_config_info{block_size="16",cache_dtype="fp8",enable_prefix_caching="True",'
        'engine="0",model_name="model",num_gpu_blocks="100"} 1.0',
    ],
)
def test_a_series_has_the_labels_that_vllm_gives_it(line):
    assert line in [sorted_labels(each) for each in rendered("vllm").splitlines()]


def sorted_labels(line):
    name, brace, rest = line.partition("{")
    labels, end, value = rest.partition("}")
    return name + brace + ",".join(sorted(labels.split(","))) + end + value
