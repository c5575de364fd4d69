import math
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twolane.common.errors import FieldError
from twolane.lanes.cpu.sampler import Adjustment, SampleRow, exponentials, sample, score
from twolane.sampling import MAX_BIASED_TOKENS, MAX_STOP_TOKEN_IDS, SamplingParams

DRAWS = 2000
LOGITS = torch.tensor([2.0, -1.0, 0.5, 2.0, -3.0, 1.0, 0.0, -0.5, 1.5, -6.0])


def draws(logits: torch.Tensor, params: SamplingParams, count: int = DRAWS) -> np.ndarray:
    """Counts of each token over many positions of one request."""
    rows = [SampleRow(params, 7, position) for position in range(count)]
    tokens = sample(logits.expand(count, -1), rows)
    return np.bincount(tokens.numpy(), minlength=len(logits))


def p_value(counts: np.ndarray, expected: np.ndarray) -> float:
    """Of Pearson's chi-square test: how likely counts this far off are."""
    statistic = ((counts - expected) ** 2 / expected).sum()
    half = torch.tensor([(len(counts) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def exact(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """Probabilities by vLLM's definitions, spelled out: temperature, min-p, top-k, top-p."""
    p = torch.softmax(logits.double() / params.temperature, 0).numpy().copy()
    p[p < params.min_p * p.max()] = 0.0
    order = np.argsort(-p, kind="stable")
    if params.top_k > 0:
        p[p < p[order[min(params.top_k, len(p)) - 1]]] = 0.0
    p /= p.sum()
    mass = 0.0
    for token in order:
        if mass >= params.top_p - 1e-12:
            p[token] = 0.0
        mass += p[token]
    return p / p.sum()


FILTERS = {
    "none": {},
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 3},
    "top_k beyond the vocabulary": {"top_k": 1000},
    "top_k one": {"top_k": 1},
    "top_p": {"top_p": 0.8},
    "top_p tiny": {"top_p": 1e-6},
    "min_p": {"min_p": 0.2},
    "top_k, top_p": {"top_k": 5, "top_p": 0.7},
    "min_p, top_p": {"min_p": 0.3, "top_p": 0.9},
    "all": {"temperature": 1.5, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
}


@pytest.mark.parametrize("name", FILTERS)
def test_distribution(name):
    params = SamplingParams(**FILTERS[name])
    counts, p = draws(LOGITS, params), exact(LOGITS, params)
    assert (counts[p == 0.0] == 0).all()
    kept = p > 0
    if kept.sum() > 1:
        assert p_value(counts[kept], DRAWS * p[kept]) > 0.01


def test_distribution_of_a_large_vocabulary():
    """As many candidates as real models have; grouped into bins for the test."""
    logits = torch.randn(49_152, generator=torch.Generator().manual_seed(0)) * 2
    for filters in ({}, {"top_p": 0.95}, {"top_k": 2000}, {"min_p": 0.01}):
        params = SamplingParams(**filters)
        counts, p = draws(logits, params, 300), exact(logits, params)
        assert (counts[p == 0.0] == 0).all()
        bins = np.arange(len(p)) % 16
        got, want = np.bincount(bins, counts), np.bincount(bins, p)
        assert p_value(got, 300 * want) > 0.01


def test_the_numbers_are_exponential_and_independent():
    ids = torch.arange(100)
    grid = np.array([[exponentials(s, p, ids).numpy() for p in range(30)] for s in range(30)])
    uniform = 1 - np.exp(-grid.astype(np.float64))
    assert (grid > 0).all()
    assert p_value(np.histogram(uniform, 50, (0, 1))[0], np.full(50, grid.size / 50)) > 0.01
    assert p_value(np.histogram(uniform * 500 % 1, 50, (0, 1))[0], np.full(50, 1800)) > 0.01
    for axis in range(3):  # neighbours in seed, position, token
        one, other = np.delete(uniform, -1, axis), np.delete(uniform, 0, axis)
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.01
    assert len(np.unique(grid)) > 0.99 * grid.size  # 24 digits
    assert (exponentials(-1, 0, ids) == exponentials(2**64 - 1, 0, ids)).all()
    assert (exponentials(5, 6, ids.flip(0)) == exponentials(5, 6, ids).flip(0)).all()


def test_rounding_hardly_ever_changes_a_draw():
    """As when a batch of another shape computes the logits; an inverse CDF would fail here."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(400, 8, generator=generator)
    rounded = hidden * (1 + 1e-4 * torch.randn(400, 8, generator=generator))
    weight = 0.7 * torch.randn(8, 49_152, generator=generator)
    rows = [SampleRow(SamplingParams(temperature=1.5), 3, p) for p in range(400)]
    assert sample(hidden @ weight, rows).tolist() == sample(rounded @ weight, rows).tolist()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", "0.5"), ("max_tokens", "5"), ("top_p", None), ("min_tokens", None)),
        *(("logit_bias", {"5": 1.0}), ("logit_bias", [(5, 1.0)]), ("stop_token_ids", 5)),
    ],
)
def test_values_that_cannot_be_compared_name_their_field(field, value):
    with pytest.raises(FieldError, match=f"{field} has the wrong type: Expected"):
        SamplingParams(**{field: value})


def test_a_share_of_zero_keeps_the_most_likely_token():
    rows = [SampleRow(SamplingParams(top_p=0.0, temperature=2.0), seed, 0) for seed in range(20)]
    assert sample(LOGITS.expand(20, -1), rows).tolist() == [int(LOGITS.argmax())] * 20


def test_greedy_takes_the_lowest_of_the_best():
    logits = torch.zeros(3, 100)
    logits[0, [40, 7, 99]] = 5.0
    logits[1, 99] = 1.0
    row = SampleRow(SamplingParams(temperature=0.0), 1, 2)
    assert sample(logits, [row] * 3).tolist() == [7, 99, 0]


def test_banned_tokens_are_never_chosen():
    logits = LOGITS.repeat(DRAWS, 1)
    params = SamplingParams()
    rows = [SampleRow(params, 3, i, banned=(0, 3)) for i in range(DRAWS)]
    counts = np.bincount(sample(logits, rows).numpy(), minlength=10)
    p = exact(LOGITS, params)
    p[[0, 3]] = 0
    assert counts[0] == counts[3] == 0
    kept = p > 0
    assert p_value(counts[kept], DRAWS * p[kept] / p.sum()) > 0.01
    greedy = SampleRow(SamplingParams(temperature=0.0), 0, 0, banned=(0,))
    assert sample(LOGITS[None].clone(), [greedy]).tolist() == [3]


def test_top_k_keeps_ties_and_top_p_the_earlier_of_ties():
    flat = torch.zeros(8)
    assert (draws(flat, SamplingParams(top_k=2)) > 0).all()
    assert (np.flatnonzero(draws(flat, SamplingParams(top_p=0.3))) == [0, 1, 2]).all()


filters = st.builds(
    SamplingParams,
    temperature=st.one_of(st.just(0.0), st.floats(0.01, 5.0)),
    top_p=st.floats(0.01, 1.0),
    top_k=st.integers(-1, 40),
    min_p=st.floats(0.0, 1.0),
    repetition_penalty=st.sampled_from([1.0, 1.0, 2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    logit_bias=st.sampled_from([{}, {4: 2.0}]),
)
row = st.builds(SampleRow, filters, st.integers(-(2**63), 2**63 - 1), st.integers(0, 10_000))


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(row, min_size=1, max_size=8), data=st.data())
def test_a_row_depends_on_nothing_else_in_the_batch(rows, data):
    logits = torch.randn(len(rows), 37, generator=torch.Generator().manual_seed(len(rows)))
    rows = [
        replace(
            r,
            banned=(i,) if i % 3 == 2 else (),
            adjustment=Adjustment(r.params, [i], [3, 3]) if i % 2 else None,
        )
        for i, r in enumerate(rows)
    ]
    together = sample(logits.clone(), rows)
    alone = [int(sample(logits[i : i + 1].clone(), [r])) for i, r in enumerate(rows)]
    assert together.tolist() == alone
    order = data.draw(st.permutations(range(len(rows))))
    shuffled = sample(logits[list(order)], [rows[i] for i in order])
    assert shuffled.tolist() == [alone[i] for i in order]


@given(params=filters, seed=st.integers(0, 2**32), scale=st.floats(0.1, 30.0))
def test_the_chosen_token_passes_every_filter(params, seed, scale):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(50, generator=generator) * scale
    token = int(sample(logits[None], [SampleRow(params, seed, 5)]))
    if params.greedy:
        assert token == int(logits.argmax())
        return
    p = torch.softmax(logits.double() / params.temperature, 0)
    better = p[p > p[token] * (1 + 1e-5)]
    assert float(p[token]) >= params.min_p * float(p.max()) * (1 - 1e-4)
    assert params.top_k <= 0 or len(better) < params.top_k
    allowed = p[p >= params.min_p * p.max() * (1 + 1e-4)].sum()
    assert (
        params.top_k > 0
        or float(better.sum()) < params.top_p * float(allowed) + 1e-4
        or (math.isclose(float(p[token]), float(p.max())))
    )


def adjusted(logits: torch.Tensor, params: SamplingParams, prompt, output) -> torch.Tensor:
    logits = logits.clone()
    Adjustment(params, prompt, output).apply(logits)
    return logits


def test_repetition_counts_prompt_and_output_the_others_count_output():
    """Positive logits are divided, negative ones multiplied (Keskar et al., 2019, as in HF)."""
    ones = torch.tensor([2.0, 2.0, 2.0, -2.0, -2.0])
    both = SamplingParams(repetition_penalty=4.0)
    assert adjusted(ones, both, [0, 3], [1, 1]).tolist() == [0.5, 0.5, 2.0, -8.0, -2.0]
    presence = SamplingParams(presence_penalty=0.5)
    assert adjusted(ones, presence, [0, 3], [1, 1, 4]).tolist() == [2.0, 1.5, 2.0, -2.0, -2.5]
    frequency = SamplingParams(frequency_penalty=0.5)
    assert adjusted(ones, frequency, [0, 3], [1, 1, 4]).tolist() == [2.0, 1.0, 2.0, -2.0, -2.5]


def test_bias_comes_before_penalties():
    """As in vLLM: a token that its bias has lifted above zero is divided."""
    params = SamplingParams(repetition_penalty=2.0, logit_bias={0: 5.0})
    assert adjusted(torch.tensor([-1.0, 3.0]), params, [0], []).tolist() == [2.0, 3.0]


def test_tokens_are_remembered_as_they_come():
    """One by one or all at once; more of them than fit the first arrays."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(500, generator=generator)
    tokens = torch.randint(0, 500, (900,), generator=generator).tolist()
    params = SamplingParams(repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=-0.2)
    grown = Adjustment(params, tokens[:100], [])
    for token in tokens[100:]:
        grown.add(token)
    expected = logits.clone()
    for token in set(tokens):
        value, times = logits[token], tokens[100:].count(token)
        expected[token] = value / 1.3 if value > 0 else value * 1.3
        expected[token] -= -0.2 * times + 0.7 * (times > 0)
    grown.apply(logits)
    torch.testing.assert_close(logits, expected)


extreme = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-5, 1.0, 100.0]),
    top_p=st.sampled_from([5e-324, 0.5, 1.0]),
    top_k=st.sampled_from([-1, 1, 2**63 - 1]),
    min_p=st.sampled_from([0.0, 5e-324, 1.0]),
    repetition_penalty=st.sampled_from([5e-324, 1e-30, 1.0, 1e30, 1e308]),
    presence_penalty=st.sampled_from([-2.0, 2.0]),
    frequency_penalty=st.sampled_from([-2.0, 2.0]),
    logit_bias=st.sampled_from([{}, {0: -100.0, 3: 100.0}]),
)


@settings(max_examples=200, deadline=None)
@given(params=extreme, scale=st.sampled_from([0.0, 1.0, 1e30, 3e38]), seed=st.integers(0, 99))
def test_nothing_overflows(params, scale, seed):
    """A token that is allowed comes out whatever the parameters."""
    logits = torch.linspace(-1, 1, 12) * scale
    adjustment = Adjustment(params, [0, 5, 11], [11, 6, 6])
    row = SampleRow(params, seed, 4, banned=(11, 7), adjustment=adjustment)
    assert int(sample(logits[None], [row])) in set(range(11)) - {7}


def test_logits_that_are_no_numbers_give_some_token():
    """A model that has overflowed must not take the engine with it."""
    for value in (torch.nan, torch.inf, -torch.inf):
        logits = torch.full((1, 9), value)
        for params in (SamplingParams(), SamplingParams(top_k=3, top_p=0.5, min_p=0.1)):
            assert int(sample(logits, [SampleRow(params, 1, 1)])) in range(9)


def test_scores():
    """Ranks count the tokens that are at least as likely, as vLLM's do."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 30, generator=generator)
    logits[2, 5] = logits[2, 9]
    tokens = torch.tensor([3, int(logits[1].argmax()), 5, 0])
    expected = torch.log_softmax(logits, -1)
    scores, tops = score(logits, tokens, [0, 3, 20, 99]), [0, 3, 20, 30]
    for got, row, token, top in zip(scores, expected, tokens.tolist(), tops, strict=True):
        assert got.token == token
        assert got.logprob == pytest.approx(float(row[token]), abs=1e-6)
        assert got.rank == int((row >= row[token]).sum())
        best = row.topk(top)
        assert [logprob for _, logprob in got.top] == pytest.approx(best.values.tolist(), abs=1e-6)
        assert [float(row[token]) for token, _ in got.top] == best.values.tolist()
    assert score(logits, tokens, [1] * 4)[1].rank == 1


def test_what_a_row_lists_hardly_adds_to_its_work():
    """Others' tokens are sampled in the same step: 32 rows with all lists that are walked for each
    token, at their bounds, against rows without. All of it takes 1.3 times as long with AVX-512 and
    1.9 times without vectors, a loop over the biases alone more than 20 times."""
    vocab, count = 150_000, 32
    plain = SampleRow(SamplingParams(temperature=0.0), 0, 0)
    biases = dict.fromkeys(range(MAX_BIASED_TOKENS), 1.0)
    params = SamplingParams(temperature=0.0, logit_bias=biases)
    allowed = bytes(1) + b"\xff" * (vocab // 8 - 1)
    banned = tuple(range(9, 9 + MAX_STOP_TOKEN_IDS))
    full = SampleRow(params, 0, 0, banned, Adjustment(params, (), ()), allowed)
    logits = torch.randn(count, vocab)

    def seconds(row: SampleRow) -> float:
        taken = []
        for _ in range(7):
            began = time.process_time()
            sample(logits, [row] * count)
            taken.append(time.process_time() - began)
        return min(taken)

    without = seconds(plain)
    assert seconds(full) < 3 * without
