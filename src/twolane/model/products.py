"""Matrix products on a CPU, each by the fastest kernel for the scheme of its matrix."""

from typing import Protocol

import torch
from torch.nn import functional

from twolane.model.matrix import Matrix


class _Kernel(Protocol):
    """Products with matrices of one scheme."""

    def linear(self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None) -> torch.Tensor:
        """See `Products.linear`."""
        ...

    def add_linear(
        self, residual: torch.Tensor, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """See `Products.add_linear`."""
        ...


class Products:
    """x @ matrix.T + bias for x [T, columns], dispatched on the matrix's scheme."""

    def __init__(self) -> None:
        onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        self._plain: _Kernel = _Plain()
        self._float32: _Kernel = _OneDNN() if onednn else self._plain

    def linear(
        self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The product, [T, rows]."""
        return self._kernel(matrix).linear(x, matrix, bias)

    def add_linear(
        self, residual: torch.Tensor, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """`residual` [T, rows] plus the product; `residual` is left as it is."""
        return self._kernel(matrix).add_linear(residual, x, matrix, bias)

    def _kernel(self, matrix: Matrix) -> _Kernel:
        on_cpu = matrix.values.device.type == "cpu"
        return self._float32 if on_cpu and matrix.scheme == "float32" else self._plain


class _Plain:
    """PyTorch's own products."""

    def linear(self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None) -> torch.Tensor:
        return functional.linear(x, matrix.values, bias)

    def add_linear(
        self, residual: torch.Tensor, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return functional.linear(x, matrix.values, bias).add_(residual)


class _OneDNN:
    """oneDNN in float32. `functional.linear` takes MKL, which is half as fast on AMD cores."""

    def linear(self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, matrix.values, bias, "none", [], ""
        )
        return out

    def add_linear(
        self, residual: torch.Tensor, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None
    ) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            x, residual, matrix.values, bias, "add"
        )
        return out
