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
_COLUMNS = 128
_PROGRAMS = {16: 5, 64: 2, 128: 2}
"""Programs of an SM, by the rows of a tile: as many as its registers hold, and with few rows one
more, which takes what is left when another ends."""


_TO_BFLOAT16 = tl.constexpr("""{
    .reg .b32 here, bits;
    and.b32 here, $4, 0x81C081C0;
    mul.rn.bf16x2 $0, here, $5;
    shl.b32 here, $4, 3;
    and.b32 here, here, 0x81C081C0;
    mul.rn.bf16x2 $1, here, $5;
    shl.b32 here, $4, 6;
    and.b32 here, here, 0x81C081C0;
    mul.rn.bf16x2 $2, here, $7;
    shl.b32 here, $4, 1;
    and.b32 here, here, 0x80008000;
    shr.u32 bits, $4, 5;
    lop3.b32 here, bits, 0x01000100, here, 0xEA;
    shr.u32 bits, $4, 4;
    lop3.b32 here, bits, 0x00C000C0, here, 0xEA;
    mul.rn.bf16x2 $3, here, $7;
}""")
"""PTX that makes the four runs of two words, times a scale for each two runs."""
_SCALES = tl.constexpr("""{
    prmt.b32 $0, $4, 0, 0x0404;
    shr.u32 $0, $0, 1;
    prmt.b32 $1, $4, 0, 0x1414;
    shr.u32 $1, $1, 1;
    prmt.b32 $2, $4, 0, 0x2424;
    shr.u32 $2, $2, 1;
    prmt.b32 $3, $4, 0, 0x3434;
    shr.u32 $3, $3, 1;
}""")
"""PTX that makes each of four exponents a pair of equal bfloat16 numbers."""


@triton.jit
def _scales(stored, PTX: tl.constexpr) -> tl.tuple:
    """Return what `_meant` takes of the four exponents in words."""
    if PTX:
        kinds: tl.constexpr = (tl.int32, tl.int32, tl.int32, tl.int32)
        return tl.inline_asm_elementwise(_SCALES, "=r,=r,=r,=r,r", [stored], kinds, True, 1)
    return stored & 255, (stored >> 8) & 255, (stored >> 16) & 255, (stored >> 24) & 255


@triton.jit
def _meant(words, low, high, dtype: tl.constexpr, PTX: tl.constexpr) -> tl.tensor:
    """Return what words [rows, 16] mean, [rows, 64], with a scale [rows] for each 32 columns.

    Put at the end of the exponent of a float32 or bfloat16, the three bits of an e2m1 number are it
    times 2 ** -126, whether it is subnormal or not.
    """
    lows = tl.broadcast_to(low[:, None], words.shape)
    highs = tl.broadcast_to(high[:, None], words.shape)
    if PTX:
        kinds: tl.constexpr = (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16)
        given: tl.constexpr = "=r,=r,=r,=r,r,r,r,r,r"
        runs = tl.inline_asm_elementwise(_TO_BFLOAT16, given, [words, lows, highs], kinds, True, 2)
        return _side(_side(runs[0], runs[1]), _side(runs[2], runs[3]))
    bits = words.to(tl.int32)
    last = ((bits << 1) & 0x8000) | ((bits >> 5) & 0x100) | ((bits >> 4) & 0xC0)
    first_half = _side(_widened(bits, lows, dtype), _widened(bits << 3, lows, dtype))
    return _side(first_half, _side(_widened(bits << 6, highs, dtype), _widened(last, highs, dtype)))


@triton.jit
def _widened(bits, exponents, dtype: tl.constexpr) -> tl.tensor:
    """Return numbers, whose bits lie where bfloat16 has them, times their scales."""
    scale = (exponents << 23).to(tl.float32, bitcast=True)
    return (((bits & 0x81C0) << 16).to(tl.float32, bitcast=True) * scale).to(dtype)


@triton.jit
def _side(first, second) -> tl.tensor:
    """Return two tensors [rows, columns] beside each other."""
    both = tl.permute(tl.join(first, second), (0, 2, 1))
    return tl.reshape(both, (first.shape[0], 2 * first.shape[1]))


@triton.jit
def _grouped_mxfp4(
    x, values, scales, bias, groups, out, lines,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BIASED: tl.constexpr, PTX: tl.constexpr,
) -> None:  # fmt: skip
    tiles: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    BLOCK: tl.constexpr = 64
    BLOCKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    WORDS: tl.constexpr = (BLOCKS + 1) // 2  # a row's exponents, those of two blocks in each
    m = tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK)
    for tile in range(tl.program_id(0), tl.load(groups) * tiles, tl.num_programs(0)):
        group = groups + 4 + 4 * (tile // tiles)
        first, rows = tl.load(group + 1).to(tl.int64), tl.load(group + 2)
        n = tile % tiles * COLUMNS + tl.arange(0, COLUMNS)
        line, inside = tl.load(group).to(tl.int64) * N + n, n < N
        x_at = x + (first + m)[None, :] * K + k[:, None]
        total = tl.zeros((COLUMNS, ROWS), tl.float32)
        for word in range(0, WORDS):
            stored = tl.load(scales + line * WORDS + word, mask=inside, other=0)
            of_each = _scales(stored, PTX)
            for half in tl.static_range(2):
                block = 2 * word + half
                at = values + (block * lines + line)[:, None] * 16 + tl.arange(0, 16)[None, :]
                packed = tl.load(at, mask=inside[:, None] & (block < BLOCKS), other=0)
                low, high = of_each[2 * half], of_each[2 * half + 1]
                weight = _meant(packed, low, high, x.dtype.element_ty, PTX)
                seen = (m < rows)[None, :] & (block * BLOCK + k < K)[:, None]
                a = tl.load(x_at + block * BLOCK, mask=seen, other=0.0)
                total = tl.dot(weight, a, total, input_precision="ieee")
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
        _grouped_mxfp4, (_PROGRAMS[rows] * units,), x, weight.values.view(torch.int16),
        weight.scales.view(torch.int32), out if bias is None else bias, routing.groups, out,
        weight.shape[0],
        N=out.shape[1], K=x.shape[1], ROWS=rows,
        COLUMNS=_COLUMNS if x.itemsize < 4 else _COLUMNS // 2, BIASED=bias is not None,
        PTX=x.dtype == torch.bfloat16 and x.is_cuda, num_warps=4, num_stages=3,
    )  # fmt: skip
