"""Weight matrices as they are stored."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from twolane.kernels.cpu import tiles
from twolane.model import fp8, int4, int8, mxfp4

PlainScheme = Literal["float32", "bf16", "float16", "float64"]
Fp8Scheme = Literal["fp8_channel", "fp8_block128", "fp8_row128"]
Int4Scheme = Literal["int4_g32", "int4_g64", "int4_g128"]
Int4GpuScheme = Literal["int4_gpu32", "int4_gpu64", "int4_gpu128"]
Scheme = (
    PlainScheme
    | Fp8Scheme
    | Int4Scheme
    | Int4GpuScheme
    | Literal["int8_channel", "int4_min32", "tiles", "mxfp4", "mxfp4_gpu"]
)
"""Storage scheme of a matrix [rows, columns].

- Plain schemes: numbers without scales.
- `fp8_channel`: e4m3 with a float32 scale for each row; scales are [rows].
- `fp8_block128`: e4m3 with one for each 128 x 128; scales are [ceil(rows / 128), ceil(columns /
  128)]. What lies beyond the last whole block has a block of its own.
- `fp8_row128`: e4m3 with one for each 1 x 128, which `fp8_block128` becomes where rows of different
  blocks are mixed; scales are [rows, ceil(columns / 128)].
- `int4_g32`, `int4_g64`, `int4_g128`: numbers of four bits, packed as in `int4.pack`, with a scale
  and at will a zero point for that many columns of a row; scales and zeros are [rows, groups].
- `int4_gpu32`, `int4_gpu64`, `int4_gpu128`: the same as a GPU's kernels read it, in the order of
  `int4.for_registers`; scales are `int4.join_zeros`'s [groups, rows], and hold the zeros.
- `int8_channel`: whole numbers of eight bits in the layout of `int8.pack`, which a CPU multiplies
  with, and a float32 scale for each row; scales are [rows].
- `int4_min32`: numbers of four bits in the order of `tiles.of_four_bits`, with a scale and a
  minimum for each 32 columns of a row, which are [rows, groups]; zeros are the minima, in floats.
- `tiles`: numbers of four or eight bits with scales, as a CPU's compiled kernels read them
  (`kernels/cpu/formats.py`).
- `mxfp4`: e2m1 numbers of four bits, packed as in `int4.pack`, with a power of two for each 32
  columns of a row; scales are its exponents, uint8 [rows, groups], as `mxfp4.quantise` stores them.
- `mxfp4_gpu`: the same as a GPU's kernel reads it, in the order of `mxfp4.for_gpu`, of whole blocks
  of 64 columns.
"""

PLAIN: dict[torch.dtype, PlainScheme] = {
    torch.float32: "float32",
    torch.bfloat16: "bf16",
    torch.float16: "float16",
    torch.float64: "float64",
}
"""The schemes without scales, by the type of their values."""
GROUPS: dict[int, Int4Scheme] = {32: "int4_g32", 64: "int4_g64", 128: "int4_g128"}
"""The schemes of four bits, by the columns of a group."""


@dataclass(frozen=True, eq=False)
class Matrix:
    """A weight matrix [rows, columns]; a product multiplies activations with its transpose."""

    values: Tensor
    """The stored values: [rows, columns], or [rows, columns / 2] in schemes of four bits."""
    scheme: Scheme
    """Scheme by which values, scales and zeros make the matrix."""
    scales: Tensor | None = None
    """The scales that values are multiplied with, or None in plain schemes."""
    zeros: Tensor | None = None
    """uint8 zero points of asymmetric schemes of four bits, shaped like the scales, or None; the
    minima of `int4_min32`."""

    @classmethod
    def plain(cls, values: Tensor) -> "Matrix":
        """Return a matrix without scales, of the scheme that belongs to the type of its values.

        Raises:
            KeyError: no plain scheme has values of this type.
        """
        return cls(values, PLAIN[values.dtype])

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix, however its values are packed."""
        if self.scheme == "tiles":
            return tiles.shape(self.values)
        rows, columns = self.values.shape
        if self.scheme == "int8_channel":
            return columns, rows
        if self.scheme == "mxfp4_gpu":
            return columns // mxfp4.GROUP, rows * 2 * mxfp4.GROUP
        return rows, columns * self._packed

    @property
    def _packed(self) -> int:
        """Numbers in one of `values`."""
        return 2 if self.scheme.startswith(("int4", "mxfp4")) else 1

    @property
    def nbytes(self) -> int:
        """Bytes of values, scales and zeros together."""
        parts = (self.values, self.scales, self.zeros)
        return sum(part.nbytes for part in parts if part is not None)

    def to(self, device: torch.device) -> "Matrix":
        """Return a copy of the matrix on a device."""
        others = (self.scales, self.zeros)
        moved = [None if t is None else t.to(device, copy=True) for t in others]
        return Matrix(self.values.to(device, copy=True), self.scheme, *moved)

    def dequantised(self) -> Tensor:
        """Return the dequantised matrix [rows, columns]: float32, or a plain scheme's values."""
        if self.scheme == "tiles":
            return tiles.dequantised(self.values)
        if self.scales is None:
            return self.values
        if self.scheme == "int4_min32":
            return tiles.dequantised(in_tiles(self).values)
        if self.scheme.startswith("int4_gpu"):
            return int4.dequantise(int4.from_registers(self.values), *int4.split_zeros(self.scales))
        if self.scheme.startswith("int4"):
            return int4.dequantise(self.values, self.scales, self.zeros)
        if self.scheme == "mxfp4_gpu":
            return mxfp4.dequantise(*mxfp4.from_gpu(self.values, self.scales))
        if self.scheme == "mxfp4":
            return mxfp4.dequantise(self.values, self.scales)
        if self.scheme == "fp8_channel":
            return fp8.widen(self.values) * self.scales[:, None]
        if self.scheme == "int8_channel":
            return int8.unpack(self.values) * self.scales[:, None]
        return fp8.scaled_blocks(fp8.widen(self.values), _each_row(self))

    def part(self, first: int, last: int) -> "Matrix":
        """Return rows `first:last`, whose values share this matrix's memory."""
        rows = slice(first, last)
        if self.scheme == "fp8_block128":
            if first % fp8.BLOCK or (last % fp8.BLOCK and last != len(self.values)):
                return _by_rows(self).part(first, last)
            blocks = slice(first // fp8.BLOCK, -(-last // fp8.BLOCK))
        else:
            blocks = rows
        scales = None if self.scales is None else self.scales[blocks]
        zeros = None if self.zeros is None else self.zeros[rows]
        return Matrix(self.values[rows], self.scheme, scales, zeros)

    def columns(self, first: int, last: int) -> "Matrix":
        """Return columns `first:last`, whose values share this matrix's memory.

        Raises:
            ValueError: they would cut columns that share a scale.
        """
        width = _shared_columns(self.scheme)
        cut = first % width or (last % width and last != self.shape[1])
        if cut or self.scheme.startswith("int4_gpu"):
            raise ValueError(f"columns {first} to {last} cut groups of {width} of {self.scheme}")
        values = self.values[:, first // self._packed : -(-last // self._packed)]
        if self.scales is None or self.scheme == "fp8_channel":
            return replace(self, values=values)
        groups = slice(first // width, -(-last // width))
        zeros = None if self.zeros is None else self.zeros[:, groups]
        return Matrix(values, self.scheme, self.scales[:, groups], zeros)

    def fitting(self, columns: int) -> "Matrix":
        """Return the matrix with groups that divide a number of columns, if four bits have such.

        Groups of fewer columns have the scales and zero points of the wider ones.
        """
        width = _shared_columns(self.scheme)
        size = next((g for g in sorted(GROUPS, reverse=True) if columns % g == 0 == width % g), 0)
        if self.scheme not in GROUPS.values() or size in (0, width):
            return self
        parts = self.scales, self.zeros
        each = [None if p is None else p.repeat_interleave(width // size, dim=1) for p in parts]
        return Matrix(self.values, GROUPS[size], *each)

    def contiguous(self) -> "Matrix":
        """Return the matrix in memory of its own, where it shares another one's."""
        parts = (self.scales, self.zeros)
        held = [None if part is None else part.contiguous() for part in parts]
        return Matrix(self.values.contiguous(), self.scheme, *held)

    def times(self, factor: float) -> "Matrix":
        """Return the matrix with every number multiplied by a factor."""
        if self.scales is None:
            return replace(self, values=self.values * factor)
        if self.scheme == "mxfp4":
            return quantised(self.dequantised() * factor, self.scheme)
        if self.scheme == "int4_min32" and self.zeros is not None:
            return replace(self, scales=self.scales * factor, zeros=self.zeros * factor)
        return replace(self, scales=self.scales * factor)

    def reordered(self, order: Tensor) -> "Matrix":
        """Return the matrix with its rows in another order, int64 [rows]."""
        if self.scheme == "fp8_block128":
            blocks = order // fp8.BLOCK
            firsts = blocks[:: fp8.BLOCK]  # of rows that stay together, the block they come from
            if bool((blocks == firsts.repeat_interleave(fp8.BLOCK)[: len(blocks)]).all()):
                assert self.scales is not None
                return replace(self, values=self.values[order], scales=self.scales[firsts])
            return _by_rows(self).reordered(order)
        chosen = [None if t is None else t[order] for t in (self.scales, self.zeros)]
        return Matrix(self.values[order], self.scheme, *chosen)


def _shared_columns(scheme: Scheme) -> int:
    """Return how many neighbouring columns of a row share a scale; 1 if all or none do."""
    if scheme in ("fp8_block128", "fp8_row128"):
        return fp8.BLOCK
    if scheme == "mxfp4":
        return mxfp4.GROUP
    return next((size for size, name in GROUPS.items() if name == scheme), 1)


def in_registers(matrix: Matrix) -> Matrix:
    """Return a matrix of four bits as a GPU's kernels read it. Integers have whole runs of 128
    columns, and their scales are rounded to bfloat16."""
    assert matrix.scales is not None
    if matrix.scheme == "mxfp4":
        return Matrix(*_mxfp4_on_gpu(matrix.values, matrix.scales))
    scheme = _ON_GPU[matrix.scheme]
    joined = int4.join_zeros(matrix.scales, matrix.zeros)
    return Matrix(int4.for_registers(matrix.values), scheme, joined)


def in_tiles(matrix: Matrix) -> Matrix:
    """Return a matrix as a CPU's compiled kernels read it: four bits with groups of whole blocks as
    they are, others rounded to eight bits."""
    if (group := _shared_columns(matrix.scheme)) and matrix.scheme in GROUPS.values():
        assert matrix.scales is not None
        zeros = float(int4.MIDDLE) if matrix.zeros is None else matrix.zeros.float()
        each = (matrix.scales, -zeros * matrix.scales)
        scales, minima = (part.repeat_interleave(group // 32, dim=1) for part in each)
        numbers = int4.unpack(matrix.values).view(len(matrix.values), -1, 2, 16)
        ordered = (numbers[:, :, 0] | (numbers[:, :, 1] << 4)).flatten(1)
        return Matrix(tiles.of_four_bits(ordered, scales, minima), "tiles")
    if matrix.scheme == "int4_min32":
        assert matrix.scales is not None
        assert matrix.zeros is not None
        four = tiles.of_four_bits(matrix.values, matrix.scales, matrix.zeros)
        return Matrix(four, "tiles")
    return Matrix(tiles.of_eight_bits(matrix.dequantised()), "tiles")


def in_eight_bits(matrix: Matrix) -> Matrix:
    """Return a matrix rounded to eight bits, as a CPU's products read it."""
    values, scales = int8.quantise_rows(matrix.dequantised())
    return Matrix(int8.pack(values), "int8_channel", scales)


def _mxfp4_on_gpu(values: Tensor, scales: Tensor) -> tuple[Tensor, Scheme, Tensor]:
    ordered, exponents = mxfp4.for_gpu(values, scales)
    return ordered, "mxfp4_gpu", exponents


_ON_GPU: dict[Scheme, Scheme] = {
    "int4_g32": "int4_gpu32",
    "int4_g64": "int4_gpu64",
    "int4_g128": "int4_gpu128",
}


def concatenated(matrices: Sequence[Matrix]) -> Matrix:
    """Return the rows of several matrices of one scheme and equal columns, one after the other.

    Raises:
        ValueError: they have different schemes.
    """
    schemes = {each.scheme for each in matrices}
    whole = all(len(each.values) % fp8.BLOCK == 0 for each in matrices[:-1])
    if schemes == {"fp8_block128", "fp8_row128"} or (schemes == {"fp8_block128"} and not whole):
        matrices, schemes = [_by_rows(each) for each in matrices], {"fp8_row128"}
    if len(schemes) > 1:
        raise ValueError(f"matrices of {', '.join(sorted(schemes))} cannot be one matrix")

    if any(each.zeros is not None for each in matrices):
        matrices = [_with_zeros(each) for each in matrices]

    def joined(parts: Sequence[Tensor | None]) -> Tensor | None:
        present = [part for part in parts if part is not None]
        return torch.cat(present) if present else None

    values = torch.cat([each.values for each in matrices])
    scales, zeros = joined([m.scales for m in matrices]), joined([m.zeros for m in matrices])
    return Matrix(values, matrices[0].scheme, scales, zeros)


def _with_zeros(matrix: Matrix) -> Matrix:
    """Return a matrix of four bits with a zero point for each group, the middle by default."""
    if matrix.zeros is not None:
        return matrix
    assert matrix.scales is not None
    return replace(matrix, zeros=torch.full_like(matrix.scales, int4.MIDDLE, dtype=torch.uint8))


def quantised(values: Tensor, scheme: Scheme) -> Matrix:
    """Return `values` [rows, columns] rounded to the nearest numbers of a scheme with scales.

    Raises:
        ValueError: the scheme has no scales, or its groups do not divide the columns.
    """
    if scheme == "fp8_channel":
        rounded, scales = fp8.quantise_rows(values)
        return Matrix(rounded, scheme, scales.flatten())
    if scheme == "fp8_block128":
        rounded, scales = fp8.quantise_blocks(values)
        return Matrix(rounded, scheme, scales)
    group = _shared_columns(scheme) if scheme in (*GROUPS.values(), "mxfp4") else 0
    if not group or values.shape[1] % group:
        raise ValueError(f"{values.shape[1]} columns cannot be stored as {scheme}")
    four_bits = mxfp4.quantise(values) if scheme == "mxfp4" else int4.quantise(values, group)
    rounded, scales = four_bits
    return Matrix(rounded, scheme, scales)


def _each_row(matrix: Matrix) -> Tensor:
    """Return the scales of a block scheme for each row, [rows, blocks of columns]."""
    assert matrix.scales is not None
    if matrix.scheme == "fp8_row128":
        return matrix.scales
    return matrix.scales.repeat_interleave(fp8.BLOCK, dim=0)[: len(matrix.values)]


def _by_rows(matrix: Matrix) -> Matrix:
    """Return a matrix of a block scheme as `fp8_row128`."""
    return Matrix(matrix.values, "fp8_row128", _each_row(matrix).contiguous())
