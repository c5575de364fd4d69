"""Matrix products of a layer, for a lane's share of the SMs."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Products:
    """x @ weight.T (+ bias) by cuBLAS, without allocating; weights are [out, in], rows dense.

    Args:
        units: SMs of the lane.
    """

    units: int

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """`out` [T, out] = x [T, in] @ weight.T + bias."""
        if bias is None:
            torch.mm(x, weight.t(), out=out)
        else:
            torch.addmm(bias, x, weight.t(), out=out)

    def logits(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """`out`, float32 [R, vocab] = x @ weight.T, not rounded to x's type on the way."""
        if x.dtype == out.dtype:
            torch.mm(x, weight.t(), out=out)
        else:
            torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)

    def add_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, into: Tensor) -> None:
        """`into` [T, out] += x [T, in] @ weight.T + bias."""
        into.addmm_(x, weight.t())
        if bias is not None:
            into.add_(bias)


def products_on(units: int) -> Products:
    """The products of a lane on so many SMs."""
    return Products(units)
