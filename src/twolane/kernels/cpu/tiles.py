"""Matrices of few bits in the layout that compiled CPU kernels multiply with (`kernels/cpu`)."""

import contextlib
import mmap
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twolane.kernels.cpu.formats import COLUMNS, ROWS, TileFormat

Bytes = npt.NDArray[np.uint8]
_LARGE_PAGE = 2 * 2**20
"""Bytes of a large page of memory."""


def move_together(matrices: Sequence[Tensor]) -> None:
    """Move matrices of tiles, in place, to memory of large pages where Linux has them.

    A pass reads all of it, and a processor remembers where 2,000 pages are: 8 MB in small ones.
    """
    if not matrices:
        return
    sizes = [-(-matrix.nbytes // 64) * 64 for matrix in matrices]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, -(-sum(sizes) // _LARGE_PAGE) * _LARGE_PAGE + _LARGE_PAGE, flags)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    free = torch.frombuffer(memory, dtype=torch.uint8)
    free = free[-free.data_ptr() % _LARGE_PAGE :]
    for matrix, size in zip(matrices, sizes, strict=True):
        moved = free[: matrix.nbytes].view(matrix.shape).copy_(matrix)
        matrix.set_(moved)  # type: ignore[call-overload]
        free = free[size:]


def fits(rows: int, columns: int) -> bool:
    """Return whether a matrix consists of whole tiles and blocks."""
    return rows % ROWS == 0 and columns % COLUMNS == 0


def shape(tiles: Tensor) -> tuple[int, int]:
    """Return rows and columns of the matrix that tiles mean."""
    return tiles.shape[0] * ROWS, tiles.shape[1] * COLUMNS


def of_four_bits(numbers: Tensor, scales: Tensor, minima: Tensor) -> Tensor:
    """Return tiles of the matrix scales * numbers + minima.

    Args:
        numbers: uint8 [rows, columns / 2]: of each 32 columns 16 bytes, whose low halves are the
            first 16 of them, as GGUF's files have them.
        scales: [rows, columns / 32].
        minima: The same.

    Returns:
        uint8 [rows / 16, columns / 32, bytes of a block]
    """
    factors = scales, minima
    halves = [each.half() for each in factors]
    if all(
        torch.equal(half.float(), each.float()) for half, each in zip(halves, factors, strict=True)
    ):
        parts = halves
    else:
        parts = [each.float() for each in factors]
    blocks = scales.shape[1]
    words = numbers.contiguous().view(torch.int32)
    return torch.cat([_by_tile(each, blocks) for each in (words, *parts)], dim=2)


def of_eight_bits(values: Tensor) -> Tensor:
    """Return tiles of a matrix [rows, columns], rounded to eight bits with a scale for each 32
    columns of a row."""
    blocks = values.float().reshape(len(values), -1, COLUMNS)
    scales = blocks.abs().amax(dim=2).clamp_(min=1e-30).div_(127.0)
    numbers = (blocks / scales[..., None]).round_().add_(128.0).to(torch.uint8)
    words = numbers.flatten(1).view(torch.int32)
    return torch.cat([_by_tile(each, scales.shape[1]) for each in (words, scales)], dim=2)


def _by_tile(values: Tensor, blocks: int) -> Tensor:
    """Return the bytes of values [rows, ...] by tiles and blocks, those of 16 rows side by side."""
    parts = values.reshape(len(values) // ROWS, ROWS, blocks, -1).permute(0, 2, 3, 1)
    return parts.contiguous().view(torch.uint8).flatten(2)


def rows(tiles: Tensor, which: Tensor) -> Tensor:
    """Return rows, int64 [N], of the matrix that tiles mean, float32 [N, columns]."""
    form = TileFormat.of(tiles.shape[2])
    size = 512 if form == TileFormat.EIGHT else 256
    kind = np.float16 if form == TileFormat.FOUR_HALF else np.float32
    # NumPy's calls take a fifth of PyTorch's, and a decode step has but a row or a few.
    data, where = tiles.numpy(), which.numpy()
    numbers, factors = (
        _lane(data[..., :size], where, 4),
        _lane(data[..., size:], where, kind(0).nbytes),
    )
    factors = factors.view(kind).astype(np.float32)
    if form == TileFormat.EIGHT:
        meant = (numbers.astype(np.float32) - np.float32(128.0)) * factors
    else:
        wide = np.concatenate([numbers & 15, numbers >> 4], axis=2).astype(np.float32)
        meant = wide * factors[..., :1] + factors[..., 1:]
    return torch.from_numpy(meant.reshape(len(where), -1))


def _lane(data: Bytes, which: npt.NDArray[np.int64], nbytes: int) -> Bytes:
    """Return what rows have in a part of each block, [N, blocks, bytes], by pieces of `nbytes`."""
    by_row = data.reshape(*data.shape[:2], -1, ROWS, nbytes)
    found: Bytes = by_row[which // ROWS, :, :, which % ROWS]
    return found.reshape(len(which), data.shape[1], -1)


def dequantised(tiles: Tensor) -> Tensor:
    """Return the matrix that tiles mean, float32 [rows, columns]."""
    return rows(tiles, torch.arange(tiles.shape[0] * ROWS))
