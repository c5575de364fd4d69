import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twolane.common.errors import FieldError
from twolane.workload.arrivals import arrivals
from twolane.workload.lengths import PERCENT, TABLES
from twolane.workload.prompts import PromptMaker, TokenRange, as_text
from twolane.workload.spec import WorkloadSpec
from twolane.workload.traces import TraceRequest, read_trace, scale_lengths

PUBLIC = Path(__file__).parents[3] / "shared" / "traces"
rates = st.floats(0.01, 1e4)
shapes = st.floats(0.1, 20) | st.just(math.inf)
seeds = st.integers(0, 2**64)


@given(st.integers(0, 200), rates, shapes, seeds)
def test_arrivals_ascend_meet_the_rate_and_repeat(count, rate, burstiness, seed):
    times = arrivals(count, rate, burstiness=burstiness, seed=seed)
    assert len(times) == count
    assert all(a <= b for a, b in itertools.pairwise(times))
    assert times == arrivals(count, rate, burstiness=burstiness, seed=seed)
    if count:
        assert times[0] >= 0
        assert times[-1] == pytest.approx(count / rate)


@given(rates, rates, seeds)
def test_another_rate_is_the_same_pattern(slow, fast, seed):
    times = np.array(arrivals(20, slow, seed=seed))
    assert np.array(arrivals(20, fast, seed=seed)) == pytest.approx(times * slow / fast)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0, math.inf])
def test_gaps_have_the_spread_of_their_gamma_distribution(burstiness):
    gaps = np.diff(arrivals(20000, 5.0, burstiness=burstiness, seed=1))
    variation = gaps.std() / gaps.mean()
    assert variation == pytest.approx(1 / math.sqrt(burstiness), rel=0.05, abs=1e-6)


def test_infinite_rate_and_bad_rates():
    assert arrivals(3, math.inf) == [0.0, 0.0, 0.0]
    for rate, burstiness in ((0.0, 1.0), (-1.0, 1.0), (math.nan, 1.0), (1.0, 0.0)):
        with pytest.raises(ValueError, match="positive"):
            arrivals(3, rate, burstiness=burstiness)


requests_with_blocks = st.tuples(
    st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(1, 512)
).map(lambda t: TraceRequest(0.0, (len(t[0]) - 1) * 512 + t[1], 1, tuple(t[0])))


@given(requests_with_blocks, requests_with_blocks, st.floats(0.01, 1.5), seeds)
def test_shared_ids_are_shared_tokens(one, two, factor, seed):
    one, two = scale_lengths([one, two], factor)
    maker = PromptMaker(TokenRange(100, 5000), seed)
    first, second = maker.token_ids(0, one), maker.token_ids(1, two)
    assert (len(first), len(second)) == (one.prompt_tokens, two.prompt_tokens)
    assert all(100 <= token < 5000 for token in first + second)
    size = one.block_tokens
    for i, a in enumerate(one.hash_ids):
        for j, b in enumerate(two.hash_ids):
            left, right = first[i * size : (i + 1) * size], second[j * size : (j + 1) * size]
            both = min(len(left), len(right))
            if a == b:
                assert left[:both] == right[:both]
            elif both >= 16:
                assert left[:both] != right[:both]


def test_a_range_without_tokens_makes_no_prompts():
    for low, high in ((5, 5), (6, 5), (-1, 5)):
        with pytest.raises(ValueError, match=f"{low}:{high}"):
            PromptMaker(TokenRange(low, high))


@given(st.integers(1, 3000), seeds)
def test_prompts_without_blocks_share_nothing_and_repeat(length, seed):
    maker = PromptMaker(TokenRange(), seed)
    request = TraceRequest(None, length, 1)
    ids = maker.token_ids(3, request)
    assert len(ids) == length
    assert ids == PromptMaker(TokenRange(), seed).token_ids(3, request)
    if length >= 16:
        assert ids[:16] != maker.token_ids(4, request)[:16]
        assert ids[:16] != PromptMaker(TokenRange(), seed + 1).token_ids(3, request)[:16]


def test_text_keeps_length_and_sharing():
    assert len(as_text([5, 6, 7]).split()) == 3
    assert as_text([5, 6, 7, 8]).startswith(as_text([5, 6, 7]))


@given(st.sampled_from(sorted(TABLES)), st.integers(0, 300), seeds)
def test_sampled_lengths_stay_in_the_table_and_repeat(name, count, seed):
    table = TABLES[name]
    drawn = table.draw(count, seed)
    assert drawn == table.draw(count + 7, seed)[:count]
    for request in drawn:
        assert table.prompt[0] <= request.prompt_tokens <= table.prompt[-1]
        assert table.output[0] <= request.output_tokens <= table.output[-1]
        assert request.arrival is None


@pytest.mark.parametrize("name", sorted(TABLES))
def test_sampled_quantiles_are_those_of_the_table(name):
    table = TABLES[name]
    drawn = table.draw(200_000, seed=3)
    for column, values in (
        (table.prompt, [r.prompt_tokens for r in drawn]),
        (table.output, [r.output_tokens for r in drawn]),
    ):
        assert list(column) == sorted(column)
        for percent, value in zip(PERCENT, column, strict=True):
            if 5 <= percent <= 99:
                low, high = np.percentile(values, [percent - 0.5, percent + 0.5])
                assert low <= value <= high


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("azure-code", "AzureLLMInferenceTrace_code_2023.csv"),
        ("azure-conv", "AzureLLMInferenceTrace_conv_2023.csv"),
        ("sharegpt", "sharegpt_lengths.csv.gz"),
    ],
)
def test_tables_are_the_quantiles_of_their_sources(name, file):
    if not (PUBLIC / file).exists():
        pytest.skip("the public traces are not here")
    requests = read_trace(PUBLIC / file)
    for column, values in (
        (TABLES[name].prompt, [r.prompt_tokens for r in requests]),
        (TABLES[name].output, [r.output_tokens for r in requests]),
    ):
        assert list(column) == np.rint(np.percentile(values, PERCENT)).tolist()


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace"
    rows = [f"2023-11-16 18:00:{t:02d},{100 + t},{10 + t}" for t in range(0, 50, 5)]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows))
    return str(path)


def test_spec_replays_a_trace_at_its_own_times(trace):
    spec = WorkloadSpec(dataset=trace, trace_offset=10, trace_duration=20, scale_rate=2)
    built = spec.build()
    assert [(r.arrival, r.prompt_tokens) for r in built] == [
        (0.0, 110), (2.5, 115), (5.0, 120), (7.5, 125),
    ]  # fmt: skip


@pytest.mark.parametrize("burstiness", [1.0, 4.0])
def test_spec_sends_a_trace_at_a_rate(trace, burstiness):
    settings = {"num_prompts": 4, "request_rate": 2, "burstiness": burstiness, "seed": 9}
    built = WorkloadSpec(dataset=trace, **settings).build()
    assert [r.arrival for r in built] == arrivals(4, 2.0, burstiness=burstiness, seed=9)
    assert [r.prompt_tokens for r in built] == [100, 105, 110, 115]


def test_spec_of_fixed_and_drawn_lengths():
    built = WorkloadSpec(num_prompts=3, random_input_len=7, random_output_len=5).build()
    assert built == [TraceRequest(0.0, 7, 5)] * 3
    assert WorkloadSpec().build() == [TraceRequest(0.0, 1024, 128)] * 1000
    drawn = WorkloadSpec(
        dataset="azure-conv", num_prompts=50, scale_lengths=0.1, max_input_len=64, max_output_len=9
    ).build()
    assert max(r.prompt_tokens for r in drawn) == 64
    assert max(r.output_tokens for r in drawn) == 9


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("dataset", {"dataset": "no-such-thing"}),
        ("num_prompts", {"num_prompts": 0}),
        ("num_prompts", {"dataset": "TRACE", "num_prompts": 11}),
        ("request_rate", {"request_rate": 0.0}),
        ("request_rate", {"request_rate": math.nan}),
        ("burstiness", {"burstiness": 2.0}),
        ("burstiness", {"burstiness": -1.0, "request_rate": 1.0}),
        ("burstiness", {"dataset": "TRACE", "burstiness": 2.0}),
        ("seed", {"seed": -1}),
        ("random_input_len", {"dataset": "sharegpt", "random_input_len": 5}),
        ("random_output_len", {"dataset": "TRACE", "random_output_len": 5}),
        ("trace_offset", {"trace_offset": 1.0}),
        ("trace_offset", {"dataset": "TRACE", "trace_offset": 1e6}),
        ("trace_duration", {"dataset": "sharegpt", "trace_duration": 1.0}),
        ("trace_duration", {"dataset": "TRACE", "trace_duration": math.inf}),
        ("trace_offset", {"dataset": "UNTIMED", "trace_offset": 1.0}),
        ("trace_duration", {"dataset": "UNTIMED", "trace_duration": 1.0}),
        ("scale_rate", {"scale_rate": 2.0}),
        ("scale_rate", {"dataset": "TRACE", "scale_rate": 2.0, "request_rate": 1.0}),
        ("scale_rate", {"dataset": "UNTIMED", "scale_rate": 2.0}),
        ("scale_lengths", {"scale_lengths": 0.0}),
        ("max_input_len", {"max_input_len": 0}),
    ],
)
def test_contradictions_are_refused_by_name(field, settings, trace, tmp_path):
    untimed = tmp_path / "untimed"
    untimed.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n,5,5\n")
    names = {"TRACE": trace, "UNTIMED": str(untimed)}
    if "dataset" in settings:
        settings = {**settings, "dataset": names.get(settings["dataset"], settings["dataset"])}
    with pytest.raises(FieldError, match=f"^{field} "):
        WorkloadSpec(**settings).build()
