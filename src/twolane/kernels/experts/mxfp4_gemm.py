"""Products of experts in MXFP4, whose four bits become numbers in a tile's registers (Triton)."""

import triton
import triton.language as tl
from torch import Tensor

from twolane.kernels.experts.routing import Routing
from twolane.kernels.products.dispatch import Stored
from twolane.kernels.runtime.launch import launch

SCHEME = "mxfp4_gpu"
"""Scheme of the matrices; see `model.matrix.Scheme`."""
BLOCK = 64
"""Columns of a block, which are two groups."""
_COLUMNS = 128


@triton.jit
def _meant(numbers: tl.tensor, stored: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Return what numbers of four bits [rows, columns] mean with the stored exponents [rows].

    Put at the end of a float32's exponent, the three bits of an e2m1 number are it times 2 ** -126,
    whether it is subnormal or not.
    """
    bits = ((numbers & 8) << 28) | ((numbers & 7) << 22)
    scale = ((stored.to(tl.int32) + 126) << 23).to(tl.float32, bitcast=True)
    return (bits.to(tl.float32, bitcast=True) * scale[:, None]).to(dtype)


@triton.jit
def _grouped_mxfp4(
    x: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    groups: tl.tensor,
    out: tl.tensor,
    lines: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BIASED: tl.constexpr,
) -> None:
    tiles: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    HALF: tl.constexpr = 32
    m = tl.arange(0, ROWS)
    k = tl.arange(0, HALF)
    for tile in range(tl.program_id(0), tl.load(groups) * tiles, tl.num_programs(0)):
        group = groups + 4 + 4 * (tile // tiles)
        expert = tl.load(group).to(tl.int64)
        first = tl.load(group + 1).to(tl.int64)
        rows = tl.load(group + 2)
        n = tile % tiles * COLUMNS + tl.arange(0, COLUMNS)
        line = expert * N + n
        inside = n < N
        x_at = x + (first + m)[None, :] * K + k[:, None]
        total = tl.zeros((COLUMNS, ROWS), tl.float32)
        for block in range(0, (K + 2 * HALF - 1) // (2 * HALF)):
            at = values + (block * lines + line)[:, None] * HALF + k[None, :]
            both = tl.load(at, mask=inside[:, None], other=0).to(tl.int32)
            low = tl.load(scales + 2 * block * lines + line, mask=inside, other=0)
            high = tl.load(scales + (2 * block + 1) * lines + line, mask=inside, other=0)
            start = block * 2 * HALF
            seen = (m < rows)[None, :] & (start + k < K)[:, None]
            a = tl.load(x_at + start, mask=seen, other=0.0)
            total = tl.dot(_meant(both, low, a.dtype), a, total, input_precision="ieee")
            seen = (m < rows)[None, :] & (start + HALF + k < K)[:, None]
            a = tl.load(x_at + start + HALF, mask=seen, other=0.0)
            total = tl.dot(_meant(both >> 4, high, a.dtype), a, total, input_precision="ieee")
        if BIASED:
            total += tl.load(bias + line, mask=inside, other=0.0).to(tl.float32)[:, None]
        to = out + (first + m)[None, :] * N + n[:, None]
        tl.store(to, total.to(out.dtype.element_ty), mask=(m < rows)[None, :] & inside[:, None])


def grouped_mxfp4(
    x: Tensor,
    weight: Stored,
    routing: Routing,
    out: Tensor,
    rows: int,
    units: int,
    bias: Tensor | None,
) -> None:
    """`out` [entries, n] = each row of x [entries, k] times its expert's matrix, plus its bias.

    Args:
        x: Sorted by expert.
        weight: [experts * n, k], one expert's rows after the other's, in `SCHEME`.
        routing: Lists the groups.
        out: Rows beyond the last group stay as they are.
        rows: The most rows of a group: 16, 64 or 128.
        units: SMs of torch's current stream.
        bias: [experts * n], or None.
    """
    assert weight.scales is not None
    launch(
        _grouped_mxfp4,
        (units if rows == 128 else 2 * units,),
        x,
        weight.values,
        weight.scales,
        out if bias is None else bias,
        routing.groups,
        out,
        weight.shape[0],
        N=out.shape[1],
        K=x.shape[1],
        ROWS=rows,
        COLUMNS=_COLUMNS if x.itemsize < 4 else _COLUMNS // 2,
        BIASED=bias is not None,
        num_warps=8,
        num_stages=4,
    )
