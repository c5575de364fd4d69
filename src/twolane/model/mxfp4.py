"""Numbers of four bits (e2m1) with a power of two for each 32 columns of a row (MXFP4).

Source: OCP Microscaling Formats (MX) v1.0, sections 5.2 and 6.3.
"""

import torch
from torch import Tensor
from torch.nn import functional

from twolane.model import int4

GROUP = 32
"""Columns of a group."""
BIAS = 127
"""What is added to the base-2 logarithm of a scale where it is stored (e8m0)."""
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the lower three bits of a number mean; the upper one is its sign."""
_BORDERS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Where rounding goes from one value to the next."""
LARGEST_ON_GPU = 128
"""Largest stored exponent of a scale that a GPU's kernel multiplies with: 2, as numbers of weights
are far below."""
_RUNS = 4
"""Numbers in a word of 16 bits."""
_SHIFT = 126
"""What a GPU's exponents are above stored ones."""
_LARGEST = 2
"""Exponent of the largest value."""


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return `x` [n, k] as packed numbers, uint8 [n, k / 2] (see `int4.pack`), and stored exponents
    of the scales, uint8 [n, k / 32]."""
    groups = x.float().reshape(len(x), -1, GROUP)
    powers = torch.frexp(groups.abs().amax(dim=2)).exponent - 1 - _LARGEST
    powers = powers.clamp(-BIAS, BIAS)
    scaled = torch.ldexp(groups, -powers[..., None])
    borders = torch.tensor(_BORDERS, device=x.device)
    numbers = torch.bucketize(scaled.abs(), borders) + 8 * (scaled < 0)
    return int4.pack(numbers.flatten(1)), (powers + BIAS).to(torch.uint8)


def for_gpu(packed: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor]:
    """Return packed numbers [n, k / 2] and exponents [n, k / 32] as a GPU's kernel reads them.

    A block of 64 columns, two groups, is 16 words of 16 bits of a row, and in memory the rows of a
    block follow each other, so that a tile is one run. Word i has columns i, 16 + i, 32 + i and 48
    + i, the bits of each where `_placed` says. The last block may be half of zeros. Exponents of a
    row are whole words of four, and 126 more than stored ones: with them as its exponent, a
    bfloat16 number is the scale times 2 ** 126.

    Returns:
        uint8 [blocks, n * 32] and [n, 4 * ceil(blocks / 2)].
    """
    rows, groups = exponents.shape
    odd = groups % 2
    numbers = functional.pad(int4.unpack(packed), (0, odd * GROUP)).view(rows, -1, _RUNS, 16)
    words = torch.zeros_like(numbers[:, :, 0], dtype=torch.int16)
    for run in range(_RUNS):
        words |= _placed(numbers[:, :, run].short(), run)
    words = words.transpose(0, 1).contiguous()
    scales = functional.pad(exponents + _SHIFT, (0, -groups % 4)).contiguous()
    return words.view(torch.uint8).view(-1, rows * GROUP), scales


def _placed(numbers: Tensor, run: int) -> Tensor:
    """Return int16 numbers with their bits where the word of 16 bits has those of this run.

    The first three runs are moved 3 bits each, from where bfloat16 has a sign and the ends of
    exponent and fraction (15 and 8 to 6), to the right; the last one is in what is left.
    """
    if run == _RUNS - 1:
        return ((numbers & 12) << 11) | ((numbers & 3) << 10)
    return ((numbers & 8) << (12 - 3 * run)) | ((numbers & 7) << (6 - 3 * run))


def from_gpu(values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inverse of `for_gpu`, with a last block of zeros if it has one."""
    blocks, rows = len(values), len(scales)
    words = values.view(torch.int16).view(blocks, rows, 16).transpose(0, 1)
    moved = [words << (3 * run) for run in range(_RUNS - 1)]
    numbers = [((each >> 12) & 8) | ((each >> 6) & 7) for each in moved]
    numbers.append(((words >> 11) & 12) | ((words >> 10) & 3))
    packed = int4.pack(torch.stack(numbers, dim=2).flatten(1))
    return packed, scales[:, : 2 * blocks] - _SHIFT


def dequantise(packed: Tensor, exponents: Tensor) -> Tensor:
    """Return float32 [n, k] of packed numbers [n, k / 2] and exponents [n, k / 32]."""
    values = torch.tensor([*_VALUES, *(-each for each in _VALUES)], device=packed.device)
    groups = values[int4.unpack(packed).int()].view(*exponents.shape, GROUP)
    return torch.ldexp(groups, exponents.int()[..., None] - BIAS).flatten(1)
