"""Weights of four bits as bfloat16, some rows at a time, for the products of passes.

A library multiplies what this writes. Reading and writing it again takes a GPU less time than a
product of a few hundred rows, and decode has a kernel of its own.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from twolane.kernels.products.skinny_gemm import INT4_RUN
from twolane.kernels.runtime.launch import launch

WIDE_BYTES = 64 << 20
"""Bytes of widened weights at a time, so that they take little memory and a product still fills a
GPU."""
_ROWS, _COLUMNS = 8, 512
"""Rows and columns of a program."""


@triton.jit
def _widen(
    words, scales, out, n, first, count, columns,
    GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < count) & (column < columns)
    source = (first + row).to(tl.int64)
    # As in `twolane.model.int4.for_registers`: a run of 128 columns is 16 words, 4 of each thread.
    word = column // 128 * 16 + column // 2 % 4 * 4 + column // 32 % 4
    shift = 4 * (column % 2 * 4 + column // 16 % 2 * 2 + column // 8 % 2)
    number = (tl.load(words + source * (columns // 8) + word, mask=inside, other=0) >> shift) & 15
    both = tl.load(scales + column // GROUP * n + source, mask=inside, other=0)
    scale = (both << 16).to(tl.float32, bitcast=True)
    point = (both & -65536).to(tl.float32, bitcast=True) - 128.0
    value = (number.to(tl.float32) - point) * scale
    tl.store(out + row.to(tl.int64) * columns + column, value.to(out.dtype.element_ty), mask=inside)


def parts(n: int, k: int) -> Iterator[slice]:
    """Return the slices of rows of a matrix [n, k] that are widened at a time."""
    most = max(WIDE_BYTES // (2 * k) // 128 * 128, 128)
    return (slice(first, min(first + most, n)) for first in range(0, n, most))


def widen(values: Tensor, scales: Tensor, rows: slice) -> Tensor:
    """bfloat16 [r, k], r rows of a matrix of an `int4_gpu` scheme, on torch's current stream.

    Args:
        values: uint8 [n, k / 2].
        scales: int32 [groups, n].
        rows: which.
    """
    n, columns = len(values), 2 * values.shape[1]
    assert columns % INT4_RUN == 0, "matrices of four bits have whole runs of columns"
    count, group = rows.stop - rows.start, columns // len(scales)
    out = torch.empty(count, columns, dtype=torch.bfloat16, device=values.device)
    sizes = values.view(torch.int32), scales, out, n, rows.start, count, columns
    grid = triton.cdiv(count, _ROWS), triton.cdiv(columns, _COLUMNS)
    launch(_widen, grid, *sizes, GROUP=group, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=4)
    return out
