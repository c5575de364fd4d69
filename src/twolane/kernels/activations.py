"""Inputs of matrix products: rows in 16 or 32 bits, or rounded to e4m3."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Quantised:
    """Rows [T, k] in e4m3, each with a scale of its own."""

    values: Tensor
    """e4m3 [T, k], contiguous."""
    scales: Tensor
    """The factor of each row's values, float32 [T, 1]."""

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: slice) -> "Quantised":
        return Quantised(self.values[rows], self.scales[rows])


Activations = Tensor | Quantised
"""Rows [T, k] that a matrix is multiplied with, as the scheme of the matrix wants them."""
