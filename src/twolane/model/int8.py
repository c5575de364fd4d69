"""Numbers of eight bits with a scale for each row, and activations as two of them.

Products of such numbers are sums of integers, which are exact: a row's product is the same to the
last bit beside any other rows, and whichever kernel computes it.
"""

import torch
from torch import Tensor

LARGEST = 127
"""The largest magnitude of a number: -128 is left out, so that signs are symmetric."""
_LEAST = 1e-30
"""The scale of a row of zeros, times `LARGEST`."""


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 values [n, k] and scales, float32 [n], of the rows of `x` [n, k]."""
    wide = x.float()
    scales = wide.abs().amax(dim=1).clamp_(min=_LEAST).div_(LARGEST)
    return (wide / scales[:, None]).round_().to(torch.int8), scales


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return activations as numbers of 15 bits, each in two halves of eight bits.

    Eight bits alone would cost a small model several percent of its perplexity.

    Args:
        x: float32 [T, k].

    Returns:
        int8 [2 * T, k], upper halves, then lower ones, and the steps, float32 [T, 1]: a number is
        step * (upper + lower / `LARGEST`), rounded towards zero.
    """
    steps = x.abs().amax(dim=1, keepdim=True).clamp_(min=_LEAST).mul_(1 / LARGEST)
    upper = x / steps
    lower = upper.frac().mul_(LARGEST)
    return torch.cat((upper, lower)).to(torch.int8), steps


def joined(products: Tensor, steps: Tensor) -> Tensor:
    """Return the products [T, n] of activations from those of their halves, [2 * T, n], without
    the steps."""
    rows = len(steps)
    return torch.add(products[:rows], products[rows:], alpha=1 / LARGEST)


def pack(values: Tensor) -> Tensor:
    """Return int8 values [n, k] in oneDNN's own layout, of shape [k, n]."""
    packed: Tensor = torch.ops.onednn.qlinear_prepack(values, None)
    return packed


def unpack(packed: Tensor) -> Tensor:
    """Return the int8 values [n, k] of what `pack` made."""
    return packed.to_dense().t().contiguous()


def multiply(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    """Return float32 [T, n] of the products of int8 `x` [T, k] with the rows of a matrix, times
    their scales.

    Args:
        x: int8 [T, k].
        packed: The result of `pack`.
        scales: The scale of each row of the matrix, float32 [n].
    """
    out: Tensor = torch.ops.onednn.qlinear_pointwise.default(
        x, 1.0, 0, packed, scales, _NO_ZERO_POINT, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return out


_NO_ZERO_POINT = torch.zeros(1, dtype=torch.int64)


def is_fast() -> bool:
    """Return whether this CPU multiplies numbers of eight bits, and does so exactly.

    Processors without such instructions add pairs of products in 16 bits, which saturate.
    """
    try:
        able = torch.cpu.get_capabilities()
        if not any(able.get(name) for name in ("avx512_vnni", "avx_vnni", "amx_int8")):
            return False
        largest = torch.full((64, 256), LARGEST, dtype=torch.int8)
        products = multiply(largest[:3], pack(largest), torch.ones(64))
    except (AttributeError, RuntimeError):  # PyTorch is older, or has no oneDNN
        return False
    return bool((products == 256 * LARGEST**2).all())
