"""Gaps that a server's engine counts, from its page of metrics."""

import pytest

from twolane.bench.engine_gaps import between, parse

PAGE = """# HELP vllm:inter_token_latency_seconds Histogram of inter-token latency in seconds.
# TYPE vllm:inter_token_latency_seconds histogram
vllm:inter_token_latency_seconds_bucket{{engine="0",le="0.01",model_name="m"}} {0}
vllm:inter_token_latency_seconds_bucket{{engine="0",le="0.025",model_name="m"}} {1}
vllm:inter_token_latency_seconds_bucket{{engine="0",le="+Inf",model_name="m"}} {2}
vllm:inter_token_latency_seconds_count{{engine="0",model_name="m"}} {2}
vllm:inter_token_latency_seconds_sum{{engine="0",model_name="m"}} {3}
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="m"}} 3.0
"""


def page(*values):
    return parse(PAGE.format(*values))


def test_the_gaps_of_a_run_are_the_difference_of_two_looks():
    gaps = between(page(10, 10, 10, 0.05), page(90, 110, 110, 0.85))
    assert gaps.metric == "vllm:inter_token_latency_seconds"
    assert gaps.count == 100
    assert gaps.mean == pytest.approx(0.008)
    assert (gaps.above, gaps.within) == (0.01, 0.025)


def test_a_p99_beyond_the_last_edge_has_no_upper_one():
    gaps = between(page(0, 0, 0, 0.0), page(90, 95, 100, 9.0))
    assert (gaps.above, gaps.within) == (0.025, float("inf"))


def test_several_engines_count_together():
    lines = PAGE.format(1, 2, 3, 0.1).splitlines(keepends=True)
    more = [line.replace('"0"', '"1"') for line in lines if line.startswith("vllm:inter")]
    both = parse("".join([*lines[:7], *more, *lines[7:]]))
    assert both.counts == {0.01: 2, 0.025: 4, float("inf"): 6}


def test_a_server_that_counts_no_gaps_has_none():
    assert parse("# TYPE requests_total counter\nrequests_total 3.0\n") is None
    assert between(None, page(1, 1, 1, 0.1)) is None
    assert between(page(1, 1, 1, 0.1), page(1, 1, 1, 0.1)) is None
