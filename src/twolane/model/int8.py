"""Numbers of eight bits with a scale for each row, and activations as two of them.

Products of such numbers are sums of integers, which are exact: a row's product is the same to the
last bit beside any other rows, and whichever kernel computes it.
"""

import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

P = ParamSpec("P")
T = TypeVar("T")

LARGEST = 127
"""The largest magnitude of a number: -128 is left out, so that signs are symmetric."""
_LEAST = 1e-30
"""The scale of a row of zeros, times `LARGEST`."""
# TorchScript reads no numbers of a module: scripted functions below repeat these two.


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 values [n, k] and scales, float32 [n], of the rows of `x` [n, k]."""
    wide = x.float()
    scales = wide.abs().amax(dim=1).clamp_(min=_LEAST).div_(LARGEST)
    return (wide / scales[:, None]).round_().to(torch.int8), scales


def scripted(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function compiled by TorchScript, which runs a sequence of operations without
    Python between them and without its lock; as it is where that is not possible."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            compiled: Callable[P, T] = torch.jit.script(function)
    except (AttributeError, OSError, RuntimeError):  # no TorchScript, or no source
        return function
    return compiled


@scripted
def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return activations as numbers of 15 bits, each in two halves of eight bits.

    Eight bits alone would cost a small model several percent of its perplexity.

    Args:
        x: float32 [T, k].

    Returns:
        int8 [2 * T, k], upper halves, then lower ones, and the steps, float32 [T, 1]: a number is
        step * (upper + lower / `LARGEST`), rounded towards zero.
    """
    steps = x.abs().amax(dim=1, keepdim=True).clamp_(min=1e-30).mul_(1.0 / 127.0)
    upper = x / steps
    return torch.cat((upper, upper.frac().mul_(127.0))).to(torch.int8), steps


def pack(values: Tensor) -> Tensor:
    """Return int8 values [n, k] in oneDNN's own layout, of shape [k, n]."""
    packed: Tensor = torch.ops.onednn.qlinear_prepack(values, None)
    return packed


def unpack(packed: Tensor) -> Tensor:
    """Return the int8 values [n, k] of what `pack` made."""
    return packed.to_dense().t().contiguous()


@scripted
def multiply(x: Tensor, packed: Tensor, scales: Tensor, zero_point: Tensor) -> Tensor:
    """Return float32 [T, n] of the products of int8 `x` [T, k] with the rows of a matrix, times
    their scales.

    Args:
        x: int8 [T, k].
        packed: The result of `pack`.
        scales: The scale of each row of the matrix, float32 [n].
        zero_point: `ZERO_POINT`.
    """
    out: Tensor = torch.ops.onednn.qlinear_pointwise(
        x, 1.0, 0, packed, scales, zero_point, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return out


@scripted
def _product(
    x: Tensor, packed: Tensor, scales: Tensor, zero_point: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the products [T, n] of float32 `x` [T, k] without its steps, and these, [T, 1]."""
    halves, steps = split(x)
    products, rows = multiply(halves, packed, scales, zero_point), x.size(0)
    return torch.add(products[:rows], products[rows:], alpha=1.0 / 127.0), steps


@scripted
def linear(
    x: Tensor, packed: Tensor, scales: Tensor, bias: Tensor | None, zero_point: Tensor
) -> Tensor:
    """Return the products [T, n] of float32 `x` [T, k] with a matrix, plus a bias [n]; see
    `multiply`."""
    products, steps = _product(x, packed, scales, zero_point)
    return products.mul_(steps) if bias is None else torch.addcmul(bias, products, steps)


@scripted
def add_linear(
    residual: Tensor, x: Tensor, packed: Tensor, scales: Tensor, zero_point: Tensor
) -> Tensor:
    """Return `residual` [T, n] plus the products of float32 `x` [T, k] with a matrix; see
    `multiply`."""
    products, steps = _product(x, packed, scales, zero_point)
    return torch.addcmul(residual, products, steps)


@scripted
def project_layer(
    hidden: Tensor,
    norm: Tensor,
    eps: float,
    qkv: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    zero_point: Tensor,
    qk_norm: Tensor | None,
    qk_eps: float,
    turn: Tensor,
    rotated: int,
) -> Tensor:
    """Return queries, keys and values [T, heads, head_dim] of the residual stream `hidden`
    [T, hidden], of which the first `rotated` heads are normalised and turned."""
    x = torch.rms_norm(hidden, norm.shape, norm, eps)
    dim = 2 * turn.size(2)
    heads = linear(x, qkv, scales, bias, zero_point).view(x.size(0), -1, dim)
    qk = heads[:, :rotated]
    if qk_norm is not None:
        qk.copy_(torch.rms_norm(qk, [dim], None, qk_eps) * qk_norm)
    torch.view_as_complex(qk.view(x.size(0), rotated, -1, 2)).mul_(turn)
    return heads


@scripted
def finish_layer(
    hidden: Tensor,
    attended: Tensor,
    norm: Tensor,
    eps: float,
    o: tuple[Tensor, Tensor],
    gate_up: tuple[Tensor, Tensor],
    down: tuple[Tensor, Tensor],
    zero_point: Tensor,
) -> Tensor:
    """Return the residual stream [T, hidden] after attention's output [T, q_size] and the MLP;
    matrices are packed numbers and their scales."""
    hidden = add_linear(hidden, attended, o[0], o[1], zero_point)
    x = torch.rms_norm(hidden, norm.shape, norm, eps)
    gate, up = linear(x, gate_up[0], gate_up[1], None, zero_point).chunk(2, dim=1)
    return add_linear(hidden, functional.silu(gate).mul_(up), down[0], down[1], zero_point)


ZERO_POINT = torch.zeros(1, dtype=torch.int64)
"""The zero point of a matrix's numbers."""


def is_fast() -> bool:
    """Return whether this CPU multiplies numbers of eight bits, and does so exactly.

    Processors without such instructions add pairs of products in 16 bits, which saturate.
    """
    try:
        able = torch.cpu.get_capabilities()
        if not any(able.get(name) for name in ("avx512_vnni", "avx_vnni", "amx_int8")):
            return False
        largest = torch.full((64, 256), LARGEST, dtype=torch.int8)
        products = multiply(largest[:3], pack(largest), torch.ones(64), ZERO_POINT)
    except (AttributeError, RuntimeError):  # PyTorch is older, or has no oneDNN
        return False
    return bool((products == 256 * LARGEST**2).all())
