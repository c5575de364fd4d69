"""Whole numbers of four bits with a scale, and at will a zero point, for a group of columns."""

import torch
from torch import Tensor

MIDDLE = 8
"""The zero point of symmetric schemes: stored numbers 0 to 15 mean -8 to 7."""


def pack(numbers: Tensor) -> Tensor:
    """uint8 [n, k / 2] of numbers from 0 to 15, [n, k]; even columns are in the low half."""
    small = numbers.to(torch.uint8)
    return small[:, ::2] | (small[:, 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """uint8 [n, k], the numbers from 0 to 15 of what `pack` made."""
    return torch.stack((packed & 15, packed >> 4), dim=2).flatten(1)


def quantise(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Packed numbers and scales, float32 [n, k / group], of `x` [n, k], symmetric about 0."""
    groups = x.float().reshape(len(x), -1, group)
    scales = groups.abs().amax(dim=2).clamp(min=1e-12) / 7.0
    numbers = (groups / scales[..., None]).round().clamp(-MIDDLE, 7) + MIDDLE
    return pack(numbers.flatten(1)), scales


def dequantise(packed: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """float32 [n, k] of packed numbers [n, k / 2].

    Args:
        packed: what `pack` made.
        scales: [n, groups].
        zeros: uint8 [n, groups], the number that means 0; None: `MIDDLE`.
    """
    groups = unpack(packed).float().view(*scales.shape, -1)
    zero = MIDDLE if zeros is None else zeros.float()[..., None]
    return ((groups - zero) * scales[..., None]).flatten(1)
