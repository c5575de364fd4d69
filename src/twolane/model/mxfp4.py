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

    A block of 64 columns, two groups, is 32 bytes of a row, and in memory the rows of a block
    follow each other, so that a tile is one run. Column i of the first group shares a byte with
    column i of the second. The last block may be half of zeros. Exponents of a row are whole words
    of four.

    Returns:
        uint8 [blocks, n * 32] and [n, 4 * ceil(blocks / 2)].
    """
    rows, groups = exponents.shape
    odd = groups % 2
    numbers = functional.pad(int4.unpack(packed), (0, odd * GROUP)).view(rows, -1, 2, GROUP)
    both = numbers[:, :, 0] | (numbers[:, :, 1] << 4)
    scales = functional.pad(exponents, (0, -groups % 4)).contiguous()
    return both.transpose(0, 1).contiguous().view(-1, rows * GROUP), scales


def from_gpu(values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inverse of `for_gpu`, with a last block of zeros if it has one."""
    blocks, rows = len(values), len(scales)
    both = values.view(blocks, rows, GROUP).transpose(0, 1)
    numbers = torch.stack((both & 15, both >> 4), dim=2).flatten(1)
    return int4.pack(numbers), scales[:, : 2 * blocks]


def dequantise(packed: Tensor, exponents: Tensor) -> Tensor:
    """Return float32 [n, k] of packed numbers [n, k / 2] and exponents [n, k / 32]."""
    values = torch.tensor([*_VALUES, *(-each for each in _VALUES)], device=packed.device)
    groups = values[int4.unpack(packed).int()].view(*exponents.shape, GROUP)
    return torch.ldexp(groups, exponents.int()[..., None] - BIAS).flatten(1)
