"""Grammars' masks on the device, against the CPU's, which they must equal."""

import numpy as np
import pytest
import torch

from twolane.kernels.token_masks import allow_only
from twolane.lanes.cpu.sampler import broken_rows, token_mask


@pytest.mark.parametrize("vocab", [31, 700, 4096, 9001])
def test_what_no_mask_allows_cannot_be_chosen(device: torch.device, vocab: int) -> None:
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(vocab)).to(device)
    words, rows = -(-vocab // 32), [2, 0]
    bits = np.random.default_rng(vocab).integers(-(2**31), 2**31, (2, words), np.int32)
    given = logits.clone()
    board = np.concatenate([np.array(rows, np.int32)[:, None], bits], axis=1)
    allow_only(logits, torch.from_numpy(board).to(device))
    for row, allowed in zip(rows, bits, strict=True):
        mask = token_mask(allowed.tobytes(), vocab).to(device)
        assert torch.equal(logits[row], given[row].masked_fill(~mask, -torch.inf))
    assert torch.equal(logits[1::2], given[1::2])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_broken_row_stays_one(device: torch.device, value: float) -> None:
    """Wherever the model gave no number, allowed or not."""
    logits = torch.zeros(2, 100, device=device)
    logits[0, 70] = value
    board = torch.tensor([[0, 1, 0, 0, 0], [1, 1, 0, 0, 0]], dtype=torch.int32, device=device)
    allow_only(logits, board)
    assert broken_rows(logits) == [0]
    assert logits[1].isfinite().sum() == 1
