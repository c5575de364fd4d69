"""The sampler of the decode graph against the CPU's, which its tokens must equal."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from twolane.kernels import sampling
from twolane.lanes.cpu.sampler import SampleRow, exponentials, sample
from twolane.sampling import SamplingParams

VOCAB = 700
POSITION = 30


def draw(
    logits: torch.Tensor,
    params: list[SamplingParams],
    banned: tuple[int, ...] = (),
    candidates: int = 512,
) -> list[int]:
    """One token a row, on the device; row r draws with seed r - 1 at `POSITION` + r."""
    rows, vocab = logits.shape
    slots = torch.arange(rows, dtype=torch.int32, device=logits.device).flip(0)
    words = sampling.new_params(rows, logits.device)
    for row, p in enumerate(params):
        packed = sampling.pack_params(
            temperature=0.0 if p.greedy else p.temperature,
            top_k=p.top_k,
            top_p=p.top_p,
            min_p=p.min_p,
            seed=row - 1,
            limit=POSITION + 1,
            banned=banned,
        )
        words[int(slots[row])] = torch.from_numpy(packed).to(logits.device)
    positions = torch.arange(rows, dtype=torch.int32, device=logits.device) + POSITION - 1
    sampler = sampling.Sampler(rows, vocab, logits.device, chunk=256, candidates=candidates)
    out = torch.full((rows,), -1, device=logits.device)
    ones = torch.ones_like(slots)
    return sampler.sample(logits, slots, positions, ones, words, out).tolist()


def expected(
    logits: torch.Tensor, params: list[SamplingParams], banned: tuple[int, ...] = ()
) -> list[int]:
    rows = [
        # Banned before POSITION + 1: the first row only.
        SampleRow(p, row - 1, POSITION + row, banned if row == 0 else ())
        for row, p in enumerate(params)
    ]
    return sample(logits.float().cpu(), rows).tolist()


def noise(rows: int, scale: float = 1.0, vocab: int = VOCAB) -> torch.Tensor:
    return scale * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab + rows))


FILTERS = {
    "none": {},
    "cold": {"temperature": 0.3},
    "min_p": {"min_p": 0.1},
    "top_k": {"top_k": 20},
    "top_k one": {"top_k": 1},
    "top_k beyond the candidates": {"top_k": 600},
    "top_k beyond the vocabulary": {"top_k": 5000},
    "top_k beyond what min_p leaves": {"top_k": 50, "min_p": 0.5},
    "top_p": {"top_p": 0.9},
    "top_p almost all": {"top_p": 0.9999},
    "top_p tiny": {"top_p": 1e-6, "temperature": 2.0},
    "top_k, top_p": {"top_k": 30, "top_p": 0.7},
    "all": {"temperature": 1.5, "top_k": 100, "top_p": 0.9, "min_p": 0.05},
}


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS.keys())
def test_equals_the_cpu_sampler(filters: dict[str, float], device: str) -> None:
    params = [SamplingParams(**filters)] * 2
    logits = torch.cat([noise(1, 3.0), noise(1, 0.2)])
    assert draw(logits.to(device), params) == expected(logits, params)


TIES = {
    "none": {},
    "greedy": {"temperature": 0.0},
    "top_p": {"top_p": 0.5},
    "top_k": {"top_k": 3},
    "top_k, top_p": {"top_k": 600, "top_p": 0.35},
}


@pytest.mark.parametrize("filters", TIES.values(), ids=TIES.keys())
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.full), torch.bfloat16]
)
def test_ties_go_to_the_lowest_ids(
    filters: dict[str, float], dtype: torch.dtype, device: str
) -> None:
    """More tokens at the cut than candidates, and few."""
    logits = torch.zeros(2, VOCAB)
    logits[1, 100:600] = noise(1, 1.0, 500)
    logits[1] = (2 * logits[1]).round() / 2
    logits = logits.to(device, dtype)
    params = [SamplingParams(**filters)] * 2
    assert draw(logits, params) == expected(logits, params)


def test_rows_of_all_kinds_together(device: str) -> None:
    kinds = [{"temperature": 0.0}, {}, {"top_p": 0.8}, {"temperature": 0.0}, {"top_k": 7}]
    params = [SamplingParams(**kind) for kind in kinds]
    logits = noise(len(params), 2.0)
    assert draw(logits.to(device), params) == expected(logits, params)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bans_hold_before_their_limit(temperature: float, device: str) -> None:
    """Both rows want the same three tokens, in different chunks; the first may have none."""
    logits = noise(2)
    banned = (3, 300, 699)
    logits[:, banned] = torch.tensor([20.0, 21.0, 20.5])
    params = [SamplingParams(temperature=temperature, top_p=0.95)] * 2
    tokens = draw(logits.to(device), params, banned)
    assert tokens == expected(logits, params, banned)
    assert tokens[0] not in banned
    assert tokens[1] in banned


def test_rows_that_pad_are_skipped(device: str) -> None:
    """Whatever their slot and logits; and rows may lie apart."""
    logits = noise(4).to(device)[1::2]
    best = int(logits[0].argmax())
    slots = torch.tensor([0, 2**30], dtype=torch.int32, device=device)
    lengths = torch.tensor([1, 0], dtype=torch.int32, device=device)
    zeros = torch.zeros_like(slots)
    out = torch.tensor([-7, -7], device=device)
    words = sampling.new_params(1, device)
    sampling.Sampler(2, VOCAB, device, chunk=256).sample(logits, slots, zeros, lengths, words, out)
    assert out.tolist() == [best, -7]


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_broken_row_still_gives_an_id(value: float, device: str) -> None:
    logits = torch.full((3, 300), value).to(device)
    kinds = [{"temperature": 0.0}, {}, {"top_p": 0.9}]
    tokens = draw(logits, [SamplingParams(**kind) for kind in kinds])
    assert all((token if value < 0 else ~token) in range(300) for token in tokens)


KINDS = [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 5}]


@pytest.mark.parametrize(
    ("value", "dtype"), [(float("nan"), torch.float32), (float("inf"), torch.bfloat16)]
)
def test_a_row_with_one_broken_logit_is_told_and_the_others_are_as_ever(
    value: float, dtype: torch.dtype, device: str
) -> None:
    """Wherever it lies, in a chunk that nothing is drawn from and at a token that is banned."""
    for first, place in enumerate((256, VOCAB - 1)):
        params = [SamplingParams(**kind) for kind in KINDS]
        logits = noise(len(KINDS), 3.0).to(device, dtype)
        whole = draw(logits, params, banned=(place,))
        logits[first::2, place] = value
        tokens = draw(logits, params, banned=(place,))
        assert all(token < 0 for token in tokens[first::2])
        assert tokens[1 - first :: 2] == whole[1 - first :: 2]
        valid = sampling.chosen(torch.tensor(tokens)).tolist()
        assert all(token in range(VOCAB) for token in valid)


def test_minus_infinity_is_no_fault(device: str) -> None:
    logits = noise(1).to(device)
    logits[0, ::2] = -torch.inf
    assert draw(logits, [SamplingParams(temperature=0.0)])[0] == int(logits[0].argmax())


def test_the_numbers_are_those_of_the_cpu(device: str) -> None:
    @triton.jit  # here, where the interpreter is on
    def numbers(seed: tl.tensor, position: tl.tensor, out: tl.tensor) -> None:
        ids = tl.arange(0, 1024)
        tl.store(out + ids, sampling._exponentials(tl.load(seed), tl.load(position), ids))

    ids = torch.arange(1024)
    for seed, position in [(0, 0), (-1, 131_071), (2**63 - 1, 2**31), (-(2**63), 5), (12345, 77)]:
        out = torch.empty(1024, device=device)
        numbers[(1,)](torch.tensor(seed, device=device), torch.tensor(position, device=device), out)
        torch.testing.assert_close(
            out.cpu(), exponentials(seed, position, ids), rtol=4e-6, atol=0.0
        )


def test_too_many_bans_are_refused() -> None:
    with pytest.raises(ValueError, match="banned: 9 token ids"):
        sampling.pack_params(banned=range(9))


def test_what_is_beyond_32_bits_means_no_less() -> None:
    """A `top_k` of all tokens and more, a `min_tokens` beyond any context."""
    largest = 2**31 - 1
    words = sampling.pack_params(top_k=2**62, limit=2**62)
    assert np.array_equal(words, sampling.pack_params(top_k=largest, limit=largest))


def test_params_are_words_of_64_bits() -> None:
    words = sampling.pack_params(seed=2**64 - 2, top_p=0.25)
    assert words.shape == (sampling.WORDS,)
    assert words.dtype == np.int64
    assert words[0] == -2
    assert words.view(np.float64)[1] == 0.25
