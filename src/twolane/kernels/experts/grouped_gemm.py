"""Products grouped by expert in Triton, which run on every GPU."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from twolane.kernels.activations import Activations
from twolane.kernels.experts.routing import Routing
from twolane.kernels.products.dispatch import Stored, factors
from twolane.kernels.runtime.launch import launch

ROWS = (64, 128)
"""Rows of x in a tile, which are the most rows of a group."""
_COLUMNS, _DEPTH = 128, 64


@triton.jit
def _grouped_gemm(
    x: tl.tensor,
    w: tl.tensor,
    x_scales: tl.tensor,
    w_scales: tl.tensor,
    groups: tl.tensor,
    out: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SCALED: tl.constexpr,
) -> None:
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
        at = out + (first + m)[:, None] * N + n[None, :]
        tl.store(at, total.to(out.dtype.element_ty), mask=(m < rows)[:, None] & (n < N)[None, :])


def grouped_gemm(
    x: Activations, weight: Stored, routing: Routing, out: Tensor, rows: int, units: int
) -> None:
    """`out` [entries, n] = each row of x [entries, k] times the matrix of its expert.

    Args:
        x: sorted by expert.
        weight: [experts * n, k], one expert's rows after the other's.
        routing: lists the groups.
        out: rows beyond the last group stay as they are.
        rows: the most rows of a group, of `ROWS`.
        units: SMs of torch's current stream.
    """
    (values, scales), w = factors(x, weight), weight.values
    n, k = out.shape[1], w.shape[1]
    wide = w.dtype == torch.float32
    of_x, of_w = (values, w) if scales is None else scales
    launch(
        _grouped_gemm,
        (2 * units if rows == ROWS[0] else units,),
        values,
        w,
        of_x,
        of_w,
        routing.groups,
        out,
        N=n,
        K=k,
        ROWS=rows,
        COLUMNS=_COLUMNS // (2 if wide else 1),
        DEPTH=_DEPTH * 2 // w.itemsize,
        SCALED=scales is not None,
        num_warps=rows // 16,
        num_stages=3,
    )
