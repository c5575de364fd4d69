"""Grammars' masks on the device: what may not be chosen is taken out of the logits."""

import triton
import triton.language as tl
from torch import Tensor

from twolane.kernels.runtime.launch import launch

_BLOCK = 4096
"""Tokens that one program masks."""
_WARPS = 8


@triton.jit
def _allow_only(
    logits, stride, board, VOCAB: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    place = board + tl.program_id(0).to(tl.int64) * (WORDS + 1)
    row = logits + tl.load(place).to(tl.int64) * stride
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < VOCAB
    allowed = (tl.load(place + 1 + ids // 32, mask=inside, other=0) >> (ids % 32)) & 1
    sound = tl.load(row + ids, mask=inside, other=0.0) < float("inf")
    tl.store(row + ids, float("-inf"), mask=inside & (allowed == 0) & sound)


def allow_only(logits: Tensor, board: Tensor) -> None:
    """Make the logits of all tokens that a mask does not allow minus infinity, in place.

    NaN and plus infinity stay, so that the sampler finds a row that the model has broken.

    Args:
        logits: float32 [R, vocab]; a row's are dense.
        board: int32 [M, 1 + ceil(vocab / 32)]: a row of the logits, and a bit for each token, the
            lowest first, whether it may be chosen.
    """
    vocab = logits.shape[1]
    grid = len(board), triton.cdiv(vocab, _BLOCK)
    launch(
        _allow_only, grid, logits, logits.stride(0), board,
        VOCAB=vocab, WORDS=board.shape[1] - 1, BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip
