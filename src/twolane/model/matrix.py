"""Weight matrices as they are stored."""

from dataclasses import dataclass
from typing import Literal

import torch

Scheme = Literal["float32", "bf16", "float16", "float64"]
"""How the values of a matrix are stored."""

PLAIN: dict[torch.dtype, Scheme] = {
    torch.float32: "float32",
    torch.bfloat16: "bf16",
    torch.float16: "float16",
    torch.float64: "float64",
}
"""The schemes without scales, by the type of their values."""


@dataclass(frozen=True, eq=False)
class Matrix:
    """A weight matrix [rows, columns]; a product multiplies activations with its transpose."""

    values: torch.Tensor
    """The stored values; [rows, columns] in every scheme that does not pack them."""
    scheme: Scheme
    """How values and scales make the matrix."""
    scales: torch.Tensor | None = None
    """The scales that the scheme multiplies values with, or None for a scheme without scales."""

    @classmethod
    def plain(cls, values: torch.Tensor) -> "Matrix":
        """A matrix without scales, of the scheme that belongs to the type of its values.

        Raises:
            KeyError: no plain scheme has values of this type.
        """
        return cls(values, PLAIN[values.dtype])

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix that is meant, however its values are packed."""
        rows, columns = self.values.shape
        return rows, columns

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales together."""
        return self.values.nbytes + (0 if self.scales is None else self.scales.nbytes)
