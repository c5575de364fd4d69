"""Single products with matrices of tiles."""

import numpy as np
import torch
from torch import Tensor

from twolane.kernels.cpu.formats import ACTIVATION_BYTES, COLUMNS, ROWS, TileFormat
from twolane.kernels.cpu.passes import PassField
from twolane.kernels.cpu.team import own_team

ZEROS = np.zeros(ROWS, np.float32)
"""What products are added to where nothing else is."""


def linear(x: Tensor, tiles: Tensor) -> Tensor:
    """Return the products, float32 [T, rows], of `x` [T, columns] with a matrix of tiles."""
    x = x.float().contiguous()
    team, (rows, columns) = own_team(), x.shape
    blocks = blocks_of(rows, columns)
    out = torch.empty(rows, tiles.shape[0] * ROWS)
    table = np.zeros(PassField.SIZE, np.int64)
    table[PassField.ROWS], table[PassField.SOURCE], table[PassField.COLUMNS] = (
        rows,
        x.data_ptr(),
        columns,
    )
    table[PassField.INPUT], table[PassField.ZEROS] = blocks.data_ptr(), ZEROS.ctypes.data
    table[PassField.MATRIX], table[PassField.FORM] = tiles.data_ptr(), TileFormat.of(tiles.shape[2])
    table[PassField.OUT], table[PassField.OUT_WIDTH] = out.data_ptr(), out.shape[1]
    team.run_product(table)
    return out


def blocks_of(rows: int, columns: int) -> Tensor:
    """Return memory for blocks of activations [rows, columns]."""
    return torch.empty(rows * (columns // COLUMNS) * ACTIVATION_BYTES, dtype=torch.uint8)
