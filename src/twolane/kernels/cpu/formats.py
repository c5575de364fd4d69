"""How matrices of few bits, and activations beside them, lie in memory for the CPU's kernels.

A *tile* is 16 rows of a matrix; in it, a *block* is 32 columns of these rows: first the numbers, of
each group of four columns those of one row after the other, so that a register holds 16 rows, then
the scale of each row, then its minimum. With four bits, the low halves of the bytes are columns 0
to 15 and the high halves columns 16 to 31. A number means scale * number + minimum; of eight bits,
scale * (number - 128).
"""

from enum import IntEnum

ROWS, COLUMNS = 16, 32
"""Rows of a tile and columns of a block."""
ACTIVATION_BYTES = 48
"""Bytes of a block of activations: its numbers, scale, scale * sum, and -128 * sum, padded."""
LARGEST = 127
"""The largest magnitude of an activation's number."""


class TileFormat(IntEnum):
    """The numbers of a block and the type of its scales."""

    FOUR_HALF = 0
    """Four bits; float16 scales and minima."""
    FOUR = 1
    """Four bits; float32 scales and minima."""
    EIGHT = 2
    """Eight bits; float32 scales."""

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return (320, 384, 576)[self]

    @classmethod
    def of(cls, nbytes: int) -> "TileFormat":
        """Return the format whose blocks have so many bytes."""
        return next(each for each in cls if each.nbytes == nbytes)
