"""Products of experts in MXFP4, whose four bits become numbers in a tile's registers (Triton)."""

import torch
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
_PROGRAMS = {16: 4, 64: 3, 128: 1}
"""Programs of an SM, by the rows of a tile: as many as its registers hold."""


_TO_BFLOAT16 = tl.constexpr("""{
    .reg .b32 twice, low, high, sign;
    prmt.b32 twice, $2, 0, 0x1100;
    shl.b32 sign, twice, 4;
    and.b32 sign, sign, 0x80008000;
    shl.b32 low, twice, 6;
    lop3.b32 low, low, 0x01C001C0, sign, 0xEA;
    and.b32 sign, twice, 0x80008000;
    shl.b32 high, twice, 2;
    lop3.b32 high, high, 0x01C001C0, sign, 0xEA;
    mul.rn.bf16x2 $0, low, $3;
    mul.rn.bf16x2 $1, high, $4;
}""")
"""PTX that makes the lower and the higher numbers of two bytes times two scales of each."""


@triton.jit
def _meant(
    both: tl.tensor, low: tl.tensor, high: tl.tensor, dtype: tl.constexpr, PTX: tl.constexpr
) -> tl.tuple:
    """Return what the lower and the higher numbers of four bits in bytes [rows, columns] mean with
    the stored exponents [rows] of each.

    Put at the end of the exponent of a float32 or bfloat16, the three bits of an e2m1 number are it
    times 2 ** -126, whether it is subnormal or not.
    """
    if PTX:
        of_low = ((low.to(tl.int16) + 126) << 7).to(tl.bfloat16, bitcast=True)
        of_high = ((high.to(tl.int16) + 126) << 7).to(tl.bfloat16, bitcast=True)
        scales = tl.broadcast_to(of_low[:, None], both.shape)
        others = tl.broadcast_to(of_high[:, None], both.shape)
        return tl.inline_asm_elementwise(
            _TO_BFLOAT16,
            "=r,=r,r,r,r",
            [both, scales, others],
            (tl.bfloat16, tl.bfloat16),
            True,
            2,
        )
    numbers = both.to(tl.int32)
    return _widened(numbers, low).to(dtype), _widened(numbers >> 4, high).to(dtype)


@triton.jit
def _widened(numbers: tl.tensor, stored: tl.tensor) -> tl.tensor:
    """Return what numbers [rows, columns] mean in float32."""
    bits = ((numbers & 8) << 28) | ((numbers & 7) << 22)
    scale = ((stored.to(tl.int32) + 126) << 23).to(tl.float32, bitcast=True)
    return bits.to(tl.float32, bitcast=True) * scale[:, None]


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
    PTX: tl.constexpr,
) -> None:
    tiles: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    HALF: tl.constexpr = 32
    BLOCKS: tl.constexpr = (K + 2 * HALF - 1) // (2 * HALF)
    WORDS: tl.constexpr = (BLOCKS + 1) // 2  # a row's exponents, those of two blocks in each
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
        for word in range(0, WORDS):
            stored = tl.load(scales + line * WORDS + word, mask=inside, other=0)
            for half in tl.static_range(2):
                block = 2 * word + half
                at = values + (block * lines + line)[:, None] * HALF + k[None, :]
                known = inside[:, None] & (block < BLOCKS)
                both = tl.load(at, mask=known, other=0)
                low, high = (stored >> 16 * half) & 255, (stored >> (16 * half + 8)) & 255
                first_half, second_half = _meant(both, low, high, x.dtype.element_ty, PTX)
                start = block * 2 * HALF
                seen = (m < rows)[None, :] & (start + k < K)[:, None]
                a = tl.load(x_at + start, mask=seen, other=0.0)
                total = tl.dot(first_half, a, total, input_precision="ieee")
                seen = (m < rows)[None, :] & (start + HALF + k < K)[:, None]
                a = tl.load(x_at + start + HALF, mask=seen, other=0.0)
                total = tl.dot(second_half, a, total, input_precision="ieee")
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
        (_PROGRAMS[rows] * units,),
        x,
        weight.values,
        weight.scales.view(torch.int32),
        out if bias is None else bias,
        routing.groups,
        out,
        weight.shape[0],
        N=out.shape[1],
        K=x.shape[1],
        ROWS=rows,
        COLUMNS=_COLUMNS if x.itemsize < 4 else _COLUMNS // 2,
        BIASED=bias is not None,
        PTX=x.dtype == torch.bfloat16 and x.is_cuda,
        num_warps=8 if rows == 128 else 4,
        num_stages=3,
    )
