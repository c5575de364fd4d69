"""The part of a layer behind its attention. A layer does not know which kind of MLP it has."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor
from torch.nn import functional

from twolane.model.matrix import Matrix
from twolane.model.products import Products

if TYPE_CHECKING:  # it imports Triton, which only a GPU needs
    from twolane.kernels.products.dispatch import Operation
    from twolane.kernels.products.dispatch import Products as GpuProducts

MLP_ROWS = 8192
"""Rows that go through the MLP at a time on a GPU, which bounds the size of its workspace."""


class Buffers(Protocol):
    """Where a GPU's lane has room for activations."""

    def get(self, name: str, rows: int) -> Tensor:
        """The buffer [rows, its width] of that name."""
        ...


class Mlp(Protocol):
    """The multilayer perceptron of one layer."""

    def add(self, residual: Tensor, x: Tensor, products: Products) -> Tensor:
        """`residual` [T, hidden] plus the MLP of the normalised rows `x` [T, hidden], on a CPU.

        Neither argument changes.
        """
        ...

    def add_into(
        self, residual: Tensor, x: Tensor, buffers: Buffers, products: "GpuProducts"
    ) -> None:
        """Add the MLP of `x` [T, hidden] to `residual` [T, hidden] in place, on a GPU."""
        ...

    def matrices(self) -> "Mapping[Operation, Matrix]":
        """The matrices by the operation that multiplies with them, in their order."""
        ...


@dataclass(frozen=True, eq=False)
class DenseMlp:
    """down(silu(gate(x)) * up(x)), where gate and up are one matrix."""

    gate_up: Matrix
    """[2 * intermediate, hidden], the rows of the gate first."""
    gate_up_bias: Tensor | None
    """[2 * intermediate] or None."""
    down: Matrix
    """[hidden, intermediate]"""
    down_bias: Tensor | None
    """[hidden] or None."""

    def add(self, residual: Tensor, x: Tensor, products: Products) -> Tensor:
        """See `Mlp.add`."""
        gate, up = products.linear(x, self.gate_up, self.gate_up_bias).chunk(2, dim=1)
        act = functional.silu(gate).mul_(up)
        return products.add_linear(residual, act, self.down, self.down_bias)

    def add_into(
        self, residual: Tensor, x: Tensor, buffers: Buffers, products: "GpuProducts"
    ) -> None:
        """See `Mlp.add_into`."""
        for first in range(0, len(x), MLP_ROWS):
            rows = slice(first, min(first + MLP_ROWS, len(x)))
            count = rows.stop - rows.start
            gate_up, act = buffers.get("gate_up", count), buffers.get("act", count)
            products.gate_up_silu(x[rows], self.gate_up, self.gate_up_bias, gate_up, act)
            products.add_linear(act, self.down, self.down_bias, residual[rows])

    def matrices(self) -> "Mapping[Operation, Matrix]":
        """See `Mlp.matrices`."""
        return {"gate_up_silu": self.gate_up, "add_linear": self.down}
