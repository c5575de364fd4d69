"""Matrices of few bits in the layout that compiled CPU kernels multiply with (`kernels/cpu`)."""

import torch
from torch import Tensor

from twolane.kernels.cpu.formats import COLUMNS, ROWS, TileFormat


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


def _by_row(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the inverse of `_by_tile`, [rows, blocks, values of a block]."""
    parts = data.contiguous().view(dtype).view(*data.shape[:2], -1, ROWS).permute(0, 3, 1, 2)
    rows: Tensor = parts.reshape(len(data) * ROWS, data.shape[1], -1)
    return rows


def dequantised(tiles: Tensor) -> Tensor:
    """Return the matrix that tiles mean, float32 [rows, columns]."""
    form = TileFormat.of(tiles.shape[2])
    size = 512 if form == TileFormat.EIGHT else 256
    numbers = _by_row(tiles[..., :size], torch.int32).view(torch.uint8)
    if form == TileFormat.EIGHT:
        scales = _by_row(tiles[..., size:], torch.float32)
        return ((numbers.float() - 128.0) * scales).flatten(1)
    kind = torch.float16 if form == TileFormat.FOUR_HALF else torch.float32
    factors = _by_row(tiles[..., size:], kind).float()
    wide = torch.cat([numbers & 15, numbers >> 4], dim=2).float()
    return (wide * factors[..., :1] + factors[..., 1:]).flatten(1)
