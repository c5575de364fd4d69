"""Matrix products, each by the fastest kernel that the device has."""

from typing import Protocol

import torch
from torch.nn import functional


class Products(Protocol):
    """x @ weight.T + bias, for x [T, in] and weight [out, in], without and with a residual."""

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[T, out]"""
        ...

    def add_linear(
        self,
        residual: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """`residual` [T, out] plus the product; `residual` is left as it is."""
        ...


def products_for(weight: torch.Tensor) -> Products:
    """The kernels for weights of this device and dtype."""
    onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if onednn and weight.device.type == "cpu" and weight.dtype == torch.float32:
        return _OneDNN()
    return _Plain()


class _Plain:
    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return functional.linear(x, weight, bias)

    def add_linear(
        self,
        residual: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        return functional.linear(x, weight, bias).add_(residual)


class _OneDNN:
    """oneDNN in float32. `functional.linear` takes MKL, which is half as fast on AMD cores."""

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out

    def add_linear(
        self,
        residual: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            x, residual, weight, bias, "add"
        )
        return out
