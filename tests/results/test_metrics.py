import pytest

from twolane.results.metrics import (
    Distribution,
    attain,
    gap_attainment,
    keeps,
    max_concurrent,
    max_output_rate,
    measure,
)
from twolane.results.record import Record


def record(index=0, *, sent=0.0, tokens=(1.0, 1.1, 1.3), ended=None, outcome="ok", **fields):
    end = ended if ended is not None else max(tokens, default=sent)
    base = {
        "index": index,
        "asked_prompt": 10,
        "asked_output": 3,
        "scheduled": sent,
        "waited": 0.0,
        "usage_prompt": 10,
        "usage_output": len(tokens),
    }
    times = tuple(tokens)
    return Record(**{**base, **fields}, sent=sent, ended=end, outcome=outcome, token_times=times)


def test_one_request_by_formula():
    one = record(sent=0.5, tokens=(1.0, 1.1, 1.3), ended=1.5)
    assert one.ttft == pytest.approx(0.5)
    assert one.gaps == pytest.approx([0.1, 0.2])
    assert one.e2e == pytest.approx(1.0)
    assert one.tpot == pytest.approx(0.25)


def test_tpot_counts_tokens_where_gaps_count_chunks():
    one = record(sent=0.0, tokens=(1.0, 2.0), ended=2.0, usage_output=5)
    assert one.tpot == pytest.approx(0.25)
    assert one.gaps == [1.0]
    assert measure([one], 2.0, {}).tokens_per_chunk == 2.5


def test_lag_is_what_the_bound_on_concurrency_does_not_explain():
    one = record(sent=5.0, scheduled=1.0, waited=3.5)
    assert one.lag == pytest.approx(0.5)


def test_distribution():
    values = Distribution.of([1.0, 2.0, 3.0, 4.0], (50.0, 99.0))
    assert (values.count, values.mean, values.median, values.max) == (4, 2.5, 2.5, 4.0)
    assert values.std == pytest.approx(1.25**0.5)
    assert values.percentiles == {50.0: 2.5, 99.0: pytest.approx(3.97)}


def test_the_bound_on_ttft_may_grow_with_the_new_tokens():
    """1 s, and half a second for each 1,024 tokens that are not in the prefix cache."""
    slos = {"ttft": 1.0, "ttft_per_1k": 0.5}
    late = {"tokens": (1.9,), "usage_prompt": 2048, "usage_output": 1}
    attained = attain([record(**late), record(**late, usage_cached=1024)], slos)
    assert attained.requests == {"ttft": 0.5}
    assert attained.good == 1


def test_an_empty_run_has_no_statistics():
    metrics = measure([], 0.0, {"ttft": 1.0, "tbt": 1.0})
    assert metrics.ttft == Distribution(0, None, None, None, None, dict.fromkeys((90, 95, 99)))
    assert metrics.per_second(metrics.completed) is None
    assert metrics.attainment.requests == {"ttft": None, "tbt": None}
    assert (metrics.attainment.together, metrics.attainment.gaps) == (None, None)


def test_failed_requests_are_out_of_latency_and_in_attainment():
    good = record(0)
    slow = record(1, tokens=(9.0, 9.1, 9.2))
    refused = record(2, tokens=(), outcome="status_429", usage_output=None)
    broken = record(3, tokens=(0.1, 0.2), outcome="disconnect")
    metrics = measure([good, slow, refused, broken], 10.0, {"ttft": 2.0, "tbt": 0.15})
    assert (metrics.sent, metrics.completed) == (4, 2)
    assert metrics.outcomes == {"ok": 2, "status_429": 1, "disconnect": 1}
    assert metrics.ttft.mean == pytest.approx(5.0)
    assert (metrics.input_tokens, metrics.output_tokens) == (20, 6)
    assert metrics.attainment.requests == {"ttft": 0.25, "tbt": 0.25}
    assert (metrics.attainment.together, metrics.attainment.good) == (0.0, 0)
    # Gaps met: 1 of good's 2, both of slow's; the failed owe 2 each and met none.
    assert metrics.attainment.gaps == pytest.approx(3 / 8)


def test_gaps_owed():
    one_token = record(tokens=(1.0,), asked_output=1)
    assert gap_attainment([one_token], 0.1) is None
    refused_one = record(tokens=(), outcome="status_429", asked_output=1)
    assert gap_attainment([refused_one], 0.1) is None
    chatty = record(tokens=(1.0, 1.1, 1.2, 1.3, 1.4), outcome="stream_error", asked_output=2)
    assert gap_attainment([chatty], 1.0) == 0.0
    assert gap_attainment([record(), chatty], 1.0) == pytest.approx(2 / 6)


def test_single_tokens_miss_no_tbt_or_tpot_and_bounds_are_inclusive():
    one = record(tokens=(1.0,), ended=1.5)
    assert keeps(one, "tbt", 1e-9)
    assert keeps(one, "tpot", 1e-9)
    assert keeps(one, "ttft", 1.0)
    assert not keeps(one, "ttft", 0.999)
    assert keeps(one, "e2el", 1.5)
    assert not keeps(one, "e2el", 1.499)


def test_no_slo_means_no_attainment():
    assert attain([record()], {}).together is None
    assert attain([record()], {}).good == 0


def test_peaks():
    first = record(0, sent=0.0, tokens=(0.5, 1.2, 1.9), ended=2.0, usage_output=6)
    second = record(1, sent=1.0, tokens=(1.5,), ended=1.6)
    third = record(2, sent=1.6, tokens=(3.0,), ended=3.0)
    assert max_concurrent([first, second, third]) == 2
    assert max_output_rate([first, second, third]) == 5.0
    assert max_output_rate([]) == 0.0


def test_answers_without_usage_are_counted_by_chunks():
    metrics = measure([record(usage_output=None, usage_prompt=None)], 2.0, {})
    assert (metrics.output_tokens, metrics.input_tokens, metrics.uncounted) == (3, 10, 1)
