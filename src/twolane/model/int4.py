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


def for_registers(packed: Tensor) -> Tensor:
    """Return the numbers of `pack`'s result, uint8 [n, k / 2], in another order within 128 columns.

    A thread of a GPU that multiplies 64 rows by 16 columns of them at a time (`wgmma`, with its
    left factor in registers) has the columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of each 16, for a t
    from 0 to 3. So the 16 bytes of each t are next to one another, in words of 32 columns, in whose
    halves the two numbers of a pair lie at the same place.
    """
    split = unpack(packed).view(len(packed), -1, 4, 2, 2, 4, 2)  # words, 16s, 8s, threads, pairs
    return pack(split.permute(0, 1, 5, 2, 6, 3, 4).reshape(len(packed), -1))


def from_registers(ordered: Tensor) -> Tensor:
    """Return the inverse of `for_registers`."""
    split = unpack(ordered).view(len(ordered), -1, 4, 4, 2, 2, 2)
    return pack(split.permute(0, 1, 3, 5, 6, 2, 4).reshape(len(ordered), -1))


def join_zeros(scales: Tensor, zeros: Tensor | None) -> Tensor:
    """int32 [groups, n] of scales and zeros [n, groups]: the lower half of each is the bits of a
    bfloat16 scale, the upper half those of 128 plus the zero point."""
    points = torch.full_like(scales, MIDDLE) if zeros is None else zeros.float()
    pairs = torch.stack((scales.t(), points.t() + 128), dim=2).bfloat16()
    return pairs.contiguous().view(torch.int32).squeeze(2)


def split_zeros(joined: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and zeros, float32 [n, groups], of what `join_zeros` made."""
    scales, points = joined[..., None].view(torch.bfloat16).float().permute(2, 1, 0)
    return scales, points - 128


def dequantise(packed: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """float32 [n, k] of packed numbers [n, k / 2].

    Args:
        packed: Packed numbers, from `pack`.
        scales: [n, groups].
        zeros: uint8 [n, groups], the number that means 0; None: `MIDDLE`.
    """
    groups = unpack(packed).float().view(*scales.shape, -1)
    zero = MIDDLE if zeros is None else zeros.float()[..., None]
    return ((groups - zero) * scales[..., None]).flatten(1)
