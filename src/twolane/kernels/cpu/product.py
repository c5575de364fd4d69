"""Single products with matrices of tiles."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from twolane.kernels.cpu.formats import ACTIVATION_BYTES, COLUMNS, ROWS, TileFormat
from twolane.kernels.cpu.passes import PassField
from twolane.kernels.cpu.team import Ints, own_team

ZEROS = np.zeros(ROWS, np.float32)
"""What products are added to where nothing else is."""


def linear(x: Tensor, tiles: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """Return the products, float32 [T, rows], of `x` [T, columns] with a matrix of tiles.

    Args:
        x: The rows.
        tiles: The matrix.
        norm: Weights, float32 [columns], of the RMS norm of the rows; None: they have none.
        eps: What the norm adds to the mean of squares.
    """
    x = x.float().contiguous()
    team, (rows, columns) = own_team(), x.shape
    blocks = torch.empty(bytes_of_blocks(rows, columns), dtype=torch.uint8)
    scratch = torch.empty(team.threads * columns)
    out, factors = torch.empty(rows, tiles.shape[0] * ROWS), np.array([eps], np.float32)
    values = {
        PassField.ROWS: rows,
        PassField.COLUMNS: columns,
        PassField.SOURCE: x.data_ptr(),
        PassField.SOURCE_NORM: 0 if norm is None else norm.data_ptr(),
        PassField.FACTORS: factors.ctypes.data,
        PassField.SCRATCH: scratch.data_ptr(),
        PassField.SCRATCH_BYTES: 4 * columns,
        PassField.INPUT: blocks.data_ptr(),
        PassField.ZEROS: ZEROS.ctypes.data,
        PassField.MATRIX: tiles.data_ptr(),
        PassField.FORM: TileFormat.of(tiles.shape[2]),
        PassField.OUT: out.data_ptr(),
        PassField.OUT_WIDTH: out.shape[1],
    }
    team.run_product(table_of(values))
    return out


def table_of(values: Mapping[PassField, int]) -> Ints:
    """Return the table of a pass with these fields."""
    return np.array([values.get(field, 0) for field in _FIELDS], np.int64)


_FIELDS = [*PassField][: PassField.SIZE]


def bytes_of_blocks(rows: int, columns: int) -> int:
    """Return the bytes of activations [rows, columns], each in two blocks (`PassField.INPUT`)."""
    return 2 * rows * (columns // COLUMNS) * ACTIVATION_BYTES
