"""Numbers of eight bits (e4m3) with scales: one per row, or one per block of 128 columns."""

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
BLOCK = 128
"""Columns, and for weights rows, that share a scale in block schemes."""


def widen(values: Tensor) -> Tensor:
    """float32 of e4m3 values without NaN, several times as fast as PyTorch's own conversion.

    The bits of e4m3, shifted, are those of the float16 that is smaller by 2 ** 8.
    """
    if values.device.type != "cpu":
        return values.float()
    bits = values.view(torch.int8).to(torch.int16)
    return ((bits << 7) & ~0x4000).view(torch.float16).float().mul_(256.0)


def scale_of(largest: Tensor) -> Tensor:
    """Return the float32 scale that maps this largest magnitude onto e4m3's largest number."""
    # The largest number of e4m3 is 448; zeros get the scale of a small magnitude.
    return largest.float().clamp(min=1e-12) / 448.0


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 values [T, k] and scales, float32 [T, 1], of the rows of `x` [T, k]."""
    wide = x.float()
    scales = scale_of(wide.abs().amax(dim=1, keepdim=True))
    return (wide / scales).to(E4M3), scales


def quantise_row_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 values [T, k] and scales, float32 [T, ceil(k / 128)], of 1 x 128 blocks of `x`."""
    blocks = _padded(x.float(), BLOCK).view(len(x), -1, BLOCK)
    scales = scale_of(blocks.abs().amax(dim=2))
    return (blocks / scales[..., None]).flatten(1)[:, : x.shape[1]].to(E4M3), scales


def quantise_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 values [n, k] and scales, float32 [ceil(n / 128), ceil(k / 128)], of a matrix `x`."""
    rows, columns = x.shape
    tall = torch.nn.functional.pad(_padded(x.float(), BLOCK), (0, 0, 0, -rows % BLOCK))
    blocks = tall.view(-(-rows // BLOCK), BLOCK, -1, BLOCK)
    scales = scale_of(blocks.abs().amax(dim=(1, 3)))
    values = (blocks / scales[:, None, :, None]).view(tall.shape)[:rows, :columns]
    return values.to(E4M3), scales


def quantise_heads(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 values [..., k] and exponents, int8 [...], of heads [..., k]: numbers are value times 2
    to the exponent.

    The exponent is the least with which 448 is not less than the largest number, but at least -100.
    """
    wide = x.float()
    bits = wide.abs().amax(dim=-1).view(torch.int32)
    exponents = (((bits + 0x1FFFFF) >> 23) - 135).clamp(min=-100)
    return torch.ldexp(wide, -exponents[..., None]).to(E4M3), exponents.to(torch.int8)


def dequantise_heads(values: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of `quantise_heads`, [..., k], exact in bfloat16 and everything wider."""
    return torch.ldexp(widen(values), exponents[..., None].int()).to(dtype)


def scaled_blocks(wide: Tensor, scales: Tensor) -> Tensor:
    """`wide` [T, k] times the scales [T, ceil(k / 128)] of its 1 x 128 blocks, float32."""
    return wide * scales.repeat_interleave(BLOCK, dim=1)[:, : wide.shape[1]]


def _padded(x: Tensor, multiple: int) -> Tensor:
    """`x` with columns of zeros up to the next multiple."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % multiple))
