"""Matrix products on a CPU, each by the fastest kernel for the scheme of its matrix."""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from twolane.model import fp8, int8
from twolane.model.matrix import Matrix


class _Kernel(Protocol):
    """Products of activations with matrices of one scheme."""

    def linear(self, x: Tensor, matrix: Matrix, bias: Tensor | None) -> Tensor:
        """See `Products.linear`."""

    def add_linear(
        self, residual: Tensor, x: Tensor, matrix: Matrix, bias: Tensor | None
    ) -> Tensor:
        """See `Products.add_linear`."""


class Products:
    """x @ matrix.T + bias for x [T, columns], dispatched on the matrix's scheme.

    With e4m3, activations are rounded to e4m3 as well: per row of x, or per 1 x 128 block where the
    matrix has blocks. With whole numbers of eight bits, they are rounded to 15 bits per row.
    """

    def __init__(self) -> None:
        onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        self._plain: _Kernel = _Plain()
        self._float32: _Kernel = _OneDNN() if onednn else self._plain
        self._kernels: dict[str, _Kernel] = {
            "float32": self._float32,
            "fp8_channel": _Fp8Channel(self._float32),
            "fp8_block128": _Fp8Blocks(self._float32),
            "fp8_row128": _Fp8Blocks(self._float32),
            "int8_channel": _Int8(),
            "tiles": _Tiles(),
            **{f"int4_g{size}": _FourBits(self._float32) for size in (32, 64, 128)},
            "mxfp4": _FourBits(self._float32),
        }

    def linear(self, x: Tensor, matrix: Matrix, bias: Tensor | None = None) -> Tensor:
        """Return the product, [T, rows]."""
        return self._kernel(matrix).linear(x, matrix, bias)

    def add_linear(
        self, residual: Tensor, x: Tensor, matrix: Matrix, bias: Tensor | None
    ) -> Tensor:
        """`residual` [T, rows] plus the product; `residual` is left as it is."""
        return self._kernel(matrix).add_linear(residual, x, matrix, bias)

    def _kernel(self, matrix: Matrix) -> _Kernel:
        if matrix.values.device.type != "cpu":
            return self._plain
        return self._kernels.get(matrix.scheme, self._plain)


class _Plain:
    """PyTorch's own products."""

    def linear(self, x: Tensor, matrix: Matrix, bias: Tensor | None) -> Tensor:
        return functional.linear(x, matrix.values, bias)

    def add_linear(
        self, residual: Tensor, x: Tensor, matrix: Matrix, bias: Tensor | None
    ) -> Tensor:
        return functional.linear(x, matrix.values, bias).add_(residual)


class _OneDNN:
    """oneDNN in float32. `functional.linear` takes MKL, which is half as fast on AMD cores."""

    def linear(self, x: Tensor, matrix: Matrix, bias: Tensor | None) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, matrix.values, bias, "none", [], "")
        return out

    def add_linear(
        self, residual: Tensor, x: Tensor, matrix: Matrix, bias: Tensor | None
    ) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            x, residual, matrix.values, bias, "add"
        )
        return out


class _Dequantising:
    """Products in float32 of what activations and matrix mean.

    Args:
        kernel: multiplies float32.
    """

    def __init__(self, kernel: _Kernel) -> None:
        self._float32 = kernel

    def _product(self, x: Tensor, matrix: Matrix) -> Tensor:
        """float32 [T, rows]"""
        raise NotImplementedError

    def linear(self, x: Tensor, matrix: Matrix, bias: Tensor | None) -> Tensor:
        out = self._product(x, matrix)
        return (out if bias is None else out.add_(bias)).to(x.dtype)

    def add_linear(
        self, residual: Tensor, x: Tensor, matrix: Matrix, bias: Tensor | None
    ) -> Tensor:
        return self.linear(x, matrix, bias).add_(residual)


class _Fp8Channel(_Dequantising):
    """e4m3 activations and weights, both with a scale for each row.

    PyTorch's `_scaled_mm` computes the same, and takes several times as long on a CPU.
    """

    def _product(self, x: Tensor, matrix: Matrix) -> Tensor:
        assert matrix.scales is not None
        rounded, scales = fp8.quantise_rows(x)
        wide = Matrix.plain(fp8.widen(matrix.values))
        return self._float32.linear(rounded.float(), wide, None).mul_(scales).mul_(matrix.scales)


class _Fp8Blocks(_Dequantising):
    """e4m3 activations and weights with scales for blocks of 128 columns."""

    def _product(self, x: Tensor, matrix: Matrix) -> Tensor:
        rounded, scales = fp8.quantise_row_blocks(x)
        meant = fp8.scaled_blocks(rounded.float(), scales)
        return self._float32.linear(meant, Matrix.plain(matrix.dequantised()), None)


class _FourBits(_Dequantising):
    """Weights of four bits; activations are not rounded."""

    def _product(self, x: Tensor, matrix: Matrix) -> Tensor:
        return self._float32.linear(x.float(), Matrix.plain(matrix.dequantised()), None)


class _Int8:
    """Weights of eight bits and activations of 15, whose sums of products are exact."""

    def linear(self, x: Tensor, matrix: Matrix, bias: Tensor | None) -> Tensor:
        assert matrix.scales is not None
        return int8.linear(x, matrix.values, matrix.scales, bias, int8.ZERO_POINT)

    def add_linear(
        self, residual: Tensor, x: Tensor, matrix: Matrix, bias: Tensor | None
    ) -> Tensor:
        assert matrix.scales is not None
        out = int8.add_linear(residual, x, matrix.values, matrix.scales, int8.ZERO_POINT)
        return out if bias is None else out.add_(bias)


class _Tiles(_Dequantising):
    """Weights of four or eight bits and activations of two times eight, in compiled code.

    A row's product is the same to the last bit beside any other rows.
    """

    def __init__(self) -> None:
        """Multiply without another kernel."""

    def _product(self, x: Tensor, matrix: Matrix) -> Tensor:
        from twolane.kernels.cpu.product import linear

        return linear(x, matrix.values)
