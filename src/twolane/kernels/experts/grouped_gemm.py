"""Products grouped by expert in Triton, which run on every GPU."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from twolane.kernels.activations import Activations
from twolane.kernels.experts.mxfp4_gemm import SCHEME, grouped_mxfp4
from twolane.kernels.experts.routing import Routing
from twolane.kernels.products.dispatch import Stored, factors
from twolane.kernels.products.skinny_gemm import INT4_GROUPS, INT4_RUN
from twolane.kernels.runtime.launch import launch

ROWS = (64, 128)
"""Rows of x in a tile, which are the most rows of a group."""
FOUR_BIT_ROWS = (16, *ROWS)
"""The same where the matrices have four bits."""
_COLUMNS, _DEPTH = 128, 64
_BITS_OF_128 = 0x43000000
"""The bits of 128 in float32: with a number of four bits at bit 16 they are those of 128 more."""


@triton.jit
def _grouped_gemm(
    x, w, x_scales, w_scales, bias, groups, out,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, SCALED: tl.constexpr, BIASED: tl.constexpr,
) -> None:  # fmt: skip
    tiles: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    m = tl.arange(0, ROWS)
    k = tl.arange(0, DEPTH)
    for tile in range(tl.program_id(0), tl.load(groups) * tiles, tl.num_programs(0)):
        group = groups + 4 + 4 * (tile // tiles)
        expert = tl.load(group).to(tl.int64)
        first = tl.load(group + 1).to(tl.int64)
        rows = tl.load(group + 2)
        n = tile % tiles * COLUMNS + tl.arange(0, COLUMNS)
        x_at = x + (first + m)[:, None] * K + k[None, :]
        w_at = w + (expert * N + n)[None, :] * K + k[:, None]
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, K, DEPTH):
            deep = start + k < K
            a = tl.load(x_at + start, mask=(m < rows)[:, None] & deep[None, :], other=0.0)
            b = tl.load(w_at + start, mask=(n < N)[None, :] & deep[:, None], other=0.0)
            total = tl.dot(a, b, total, input_precision="ieee")
        if SCALED:
            of_x = tl.load(x_scales + first + m, mask=m < rows, other=0.0)
            of_w = tl.load(w_scales + expert * N + n, mask=n < N, other=0.0)
            total = total * of_x[:, None] * of_w[None, :]
        if BIASED:
            own = tl.load(bias + expert * N + n, mask=n < N, other=0.0)
            total += own.to(tl.float32)[None, :]
        at = out + (first + m)[:, None] * N + n[None, :]
        tl.store(at, total.to(out.dtype.element_ty), mask=(m < rows)[:, None] & (n < N)[None, :])


@triton.jit
def _number(words, scale, less, bits, P: tl.constexpr) -> tl.tensor:
    """Number P of each word, plus 128, times `scale` plus `less`: exact but for the last step.

    `bits` are those of 128 in float32. An argument of the kernel: two constants would take the GPU
    two instructions.
    """
    moved = words << (16 - 4 * P) if P < 4 else words >> (4 * P - 16)
    lifted = ((moved & 0xF0000) | bits).to(tl.float32, bitcast=True)
    return (lifted * scale + less).to(tl.bfloat16)


@triton.jit
def _numbers(words, scale, less, bits) -> tl.tensor:
    """[rows, 8 * words]: the numbers of each word, in their order; see `_number`."""
    even = tl.join(
        tl.join(_number(words, scale, less, bits, 0), _number(words, scale, less, bits, 4)),
        tl.join(_number(words, scale, less, bits, 2), _number(words, scale, less, bits, 6)),
    )
    odd = tl.join(
        tl.join(_number(words, scale, less, bits, 1), _number(words, scale, less, bits, 5)),
        tl.join(_number(words, scale, less, bits, 3), _number(words, scale, less, bits, 7)),
    )
    return tl.reshape(tl.join(even, odd), (words.shape[0], 8 * words.shape[1]))


@triton.jit
def _grouped_int4(
    x, words, scales, bias, groups, out, lines, bits,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BIASED: tl.constexpr,
) -> None:  # fmt: skip
    tiles: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    RUN: tl.constexpr = 128
    GROUPS: tl.constexpr = RUN // GROUP
    WORDS: tl.constexpr = 4 // GROUPS
    m = tl.arange(0, ROWS)
    word = tl.arange(0, RUN // 8)
    place = tl.arange(0, RUN)
    # As in `twolane.model.int4.for_registers`: number p of word w has the column 32 * (w % 4) +
    # 2 * (w // 4) + 16 * (p // 2 % 2) + 8 * (p % 2) + p // 4. `_numbers` has it at 8 * w + p.
    w = place // 8
    p = place % 8
    k = w % 4 * 32 + w // 4 * 2 + p // 2 % 2 * 16 + p % 2 * 8 + p // 4
    for tile in range(tl.program_id(0), tl.load(groups) * tiles, tl.num_programs(0)):
        group = groups + 4 + 4 * (tile // tiles)
        expert = tl.load(group).to(tl.int64)
        first = tl.load(group + 1).to(tl.int64)
        rows = tl.load(group + 2)
        n = tile % tiles * COLUMNS + tl.arange(0, COLUMNS)
        line = expert * N + n
        x_at = x + k[:, None] + (first + m)[None, :] * K
        words_at = words + line[:, None] * (K // 8) + word[None, :]
        scales_at = scales + line[:, None] + tl.arange(0, GROUPS)[None, :] * lines
        total = tl.zeros((COLUMNS, ROWS), tl.float32)
        for run in range(0, K // RUN):
            packed = tl.load(words_at + run * (RUN // 8), mask=(n < N)[:, None], other=0)
            both_at = scales_at + run * GROUPS * lines
            both = tl.load(both_at, mask=(n < N)[:, None], other=0)
            b = tl.load(x_at + run * RUN, mask=(m < rows)[None, :], other=0.0)
            if GROUPS > 1:  # word w has numbers of the columns 32 * (w % 4) to 32 * (w % 4) + 31
                both = tl.broadcast_to(both[:, None, :, None], (COLUMNS, 4, GROUPS, WORDS))
                both = tl.reshape(both, (COLUMNS, RUN // 8))
            scale = (both << 16).to(tl.float32, bitcast=True)
            less = (both & -65536).to(tl.float32, bitcast=True) * -scale
            total = tl.dot(_numbers(packed, scale, less, bits), b, total)
        if BIASED:
            total += tl.load(bias + line, mask=n < N, other=0.0).to(tl.float32)[:, None]
        at = out + (first + m)[None, :] * N + n[:, None]
        tl.store(at, total.to(out.dtype.element_ty), mask=(m < rows)[None, :] & (n < N)[:, None])


def grouped_gemm(
    x: Activations,
    weight: Stored,
    routing: Routing,
    out: Tensor,
    rows: int,
    units: int,
    bias: Tensor | None = None,
) -> None:
    """`out` [entries, n] = each row of x [entries, k] times its expert's matrix, plus its bias.

    Args:
        x: sorted by expert.
        weight: [experts * n, k], one expert's rows after the other's.
        routing: lists the groups.
        out: rows beyond the last group stay as they are.
        rows: the most rows of a group, of `ROWS` or `FOUR_BIT_ROWS`.
        units: SMs of torch's current stream.
        bias: [experts * n], or None.
    """
    if weight.scheme in INT4_GROUPS:
        assert isinstance(x, Tensor), "matrices of four bits take x as it is"
        _launch_int4(x, weight, routing, out, rows, units, bias)
    elif weight.scheme == SCHEME:
        assert isinstance(x, Tensor), "matrices of four bits take x as it is"
        grouped_mxfp4(x, weight, routing, out, rows, units, bias)
    else:
        _launch_plain(x, weight, routing, out, rows, units, bias)


def _launch_plain(
    x: Activations,
    weight: Stored,
    routing: Routing,
    out: Tensor,
    rows: int,
    units: int,
    bias: Tensor | None,
) -> None:
    """See `grouped_gemm`."""
    (values, scales), w = factors(x, weight), weight.values
    n, k = out.shape[1], w.shape[1]
    wide = w.dtype == torch.float32
    of_x, of_w = (values, w) if scales is None else scales
    launch(
        _grouped_gemm, (2 * units if rows == ROWS[0] else units,), values, w, of_x, of_w,
        w if bias is None else bias, routing.groups, out,
        N=n, K=k, ROWS=rows, COLUMNS=_COLUMNS // (2 if wide else 1), DEPTH=_DEPTH * 2 // w.itemsize,
        SCALED=scales is not None, BIASED=bias is not None, num_warps=rows // 16, num_stages=3,
    )  # fmt: skip


def _launch_int4(
    x: Tensor,
    weight: Stored,
    routing: Routing,
    out: Tensor,
    rows: int,
    units: int,
    bias: Tensor | None,
) -> None:
    """See `grouped_gemm`. Weights become bfloat16 in registers, and each is read once a tile."""
    assert weight.scales is not None and weight.shape[1] % INT4_RUN == 0
    launch(
        _grouped_int4, (units if rows == FOUR_BIT_ROWS[-1] else 2 * units,), x,
        weight.values.view(torch.int32), weight.scales, out if bias is None else bias,
        routing.groups, out, weight.shape[0], _BITS_OF_128,
        N=out.shape[1], K=weight.shape[1], GROUP=INT4_GROUPS[weight.scheme], ROWS=rows,
        COLUMNS=_COLUMNS, BIASED=bias is not None, num_warps=8, num_stages=3,
    )  # fmt: skip
