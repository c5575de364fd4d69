"""MLPs, the part of a layer after its attention. A layer does not know which kind it has."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from twolane.kernels.experts.rule import SWIGLU_ALPHA, SWIGLU_LIMIT, RoutingRule
from twolane.model.matrix import Matrix
from twolane.model.products import Products
from twolane.model.routing import route

if TYPE_CHECKING:  # these import Triton, which only a GPU needs
    from twolane.kernels.activations import Activations
    from twolane.kernels.experts.products import Epilogues, ExpertBuffers
    from twolane.kernels.experts.routing import ActiveRows, Combination
    from twolane.kernels.fused import Norm
    from twolane.kernels.products.dispatch import GpuProducts, Operation


def _clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return gate * torch.sigmoid(SWIGLU_ALPHA * gate) * (up + 1.0)


ACTIVATIONS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": lambda gate, up: functional.silu(gate).mul_(up),
    "gelu_pytorch_tanh": lambda gate, up: functional.gelu(gate, approximate="tanh").mul_(up),
    "clamped_swiglu": _clamped_swiglu,
}
"""What gate and up become on a CPU, by the names of `ModelSpec.activation`."""
MLP_ROWS = 8192
"""Rows that go through the MLP at a time on a GPU, which bounds the size of its workspace."""


class MlpBuffers(Protocol):
    """A GPU lane's buffers for activations."""

    def get(self, name: str, rows: int) -> Tensor:
        """Return the buffer [rows, its width] of that name."""

    def narrow(self, name: str, rows: int, width: int) -> Tensor:
        """Return the memory of the buffer as [rows, width], which may be less."""

    def input(self, name: str, rows: int, scheme: str, width: int | None = None) -> "Activations":
        """Return the buffer in the form of an input of a matrix of this scheme, [rows, its width],
        or narrower."""

    def experts(self, rows: int, scheme: str) -> "ExpertBuffers":
        """Return buffers for the experts of this many tokens, whose matrices have this scheme."""


@dataclass(frozen=True, eq=False)
class DenseMlp:
    """down(activation(gate(x)) * up(x)), where gate and up are one matrix."""

    gate_up: Matrix
    """[2 * intermediate, hidden], the rows of the gate first."""
    gate_up_bias: Tensor | None
    """[2 * intermediate] or None."""
    down: Matrix
    """[hidden, intermediate]"""
    down_bias: Tensor | None
    """[hidden] or None."""
    activation: str
    """See `ModelSpec.activation`."""

    @property
    def scheme(self) -> str:
        """The scheme of the matrices that the normalised rows are multiplied with."""
        return self.gate_up.scheme

    def add(self, residual: Tensor, x: Tensor, products: Products) -> Tensor:
        """Return `residual` [T, hidden] plus the MLP of the normalised rows `x` [T, hidden], on a
        CPU.

        Neither argument changes.
        """
        gate, up = products.linear(x, self.gate_up, self.gate_up_bias).chunk(2, dim=1)
        act = ACTIVATIONS[self.activation](gate, up)
        return products.add_linear(residual, act, self.down, self.down_bias)

    def add_into(
        self,
        residual: Tensor,
        norm: "Norm",
        active: "ActiveRows",
        buffers: MlpBuffers,
        products: "GpuProducts",
    ) -> None:
        """Add the MLP of the active rows of `residual` [T, hidden], normalised, to these in place,
        on a GPU.

        What becomes of the other rows does not matter. What is returned, if anything, still has to
        be added.
        """
        from twolane.kernels.fused import rms_norm

        room = buffers.input("norm", len(residual), self.scheme)
        x = rms_norm(residual, norm.weight, norm.eps, room)
        for rows, act in self._activated(x, buffers, products):
            products.part(rows).add_linear(act, self.down, self.down_bias, residual[rows])

    def write_into(
        self,
        out: Tensor,
        x: "Activations",
        active: "ActiveRows",
        buffers: MlpBuffers,
        products: "GpuProducts",
    ) -> None:
        """Write the MLP of the normalised rows `x` [T, hidden], for `scheme`, to `out` [T, hidden];
        see `add_into`."""
        for rows, act in self._activated(x, buffers, products):
            products.part(rows).linear(act, self.down, self.down_bias, out[rows])

    def _activated(
        self, x: "Activations", buffers: MlpBuffers, products: "GpuProducts"
    ) -> "Iterator[tuple[slice, Activations]]":
        """Yield activation(gate(x)) * up(x) of rows after rows, in one buffer that all share."""
        for first in range(0, len(x), MLP_ROWS):
            rows = slice(first, min(first + MLP_ROWS, len(x)))
            count = rows.stop - rows.start
            inner = self.gate_up.shape[0] // 2
            gate_up = buffers.narrow("gate_up", count, 2 * inner)
            act = buffers.input("act", count, self.down.scheme, inner)
            part = products.part(rows)
            bias, kind = self.gate_up_bias, self.activation
            part.gate_up(x[rows], self.gate_up, bias, gate_up, act, kind)
            yield rows, act

    def matrices(self) -> "Sequence[tuple[Operation, Matrix]]":
        """Return the matrices and the operations that multiply with them, in their order."""
        first: Operation = "gate_up" if self.activation == "silu" else "linear"
        return (first, self.gate_up), ("add_linear", self.down)


@dataclass(frozen=True, eq=False)
class ExpertBiases:
    """Biases of a router and its experts, in the order of the rows of their matrices."""

    router: Tensor
    """[rule.logits]"""
    gate_up: Tensor
    """[rule.stored * 2 * intermediate]"""
    down: Tensor
    """[rule.stored * hidden]; zeros on ranks other than 0."""

    def of_expert(self, number: int, experts: int) -> tuple[Tensor, Tensor]:
        """Return the biases of one of so many experts, of gate and up and of the way back."""
        return self.gate_up.view(experts, -1)[number], self.down.view(experts, -1)[number]


@dataclass(frozen=True, eq=False)
class Experts:
    """A mixture of experts: each token goes to the few that a router chooses."""

    router: Matrix
    """[rule.logits, hidden]"""
    gate_up: Matrix
    """[rule.stored * 2 * intermediate, hidden]; of each expert, the rows of the gate first."""
    down: Matrix
    """[rule.stored * hidden, intermediate]"""
    rule: RoutingRule
    """How experts are chosen."""
    bias: Tensor | None
    """What is added to scores where experts are chosen, float32 [rule.experts], or None."""
    activation: str
    """See `ModelSpec.activation`."""
    biases: ExpertBiases | None = None
    """The biases of the matrices."""

    @property
    def scheme(self) -> str:
        """See `Mlp.scheme`."""
        return self.router.scheme

    def add(
        self, residual: Tensor, x: Tensor, products: Products, routed: Tensor | None = None
    ) -> Tensor:
        """See `Mlp.add`. A row's experts are summed by rank, whatever other rows there are.

        `routed`: The rows that the router reads, [T, hidden]; None: `x`.
        """
        biases, stored = self.biases, self.rule.stored
        of_router = None if biases is None else biases.router
        logits = products.linear(x if routed is None else routed, self.router, of_router)
        weights, chosen = route(logits, self.rule, self.bias)
        outs = x.new_empty(len(x), self.rule.entries, x.shape[1])
        for number in sorted(set(chosen.flatten().tolist())):
            gate_up, down = (self._of_expert(m, number) for m in (self.gate_up, self.down))
            first, last = biases.of_expert(number, stored) if biases else (None, None)
            rows, ranks = (chosen == number).nonzero(as_tuple=True)
            gate, up = products.linear(x[rows], gate_up, first).chunk(2, dim=1)
            outs[rows, ranks] = products.linear(ACTIVATIONS[self.activation](gate, up), down, last)
        return residual + (outs * weights[..., None]).sum(dim=1).to(residual.dtype)

    def add_into(
        self,
        residual: Tensor,
        norm: "Norm",
        active: "ActiveRows",
        buffers: MlpBuffers,
        products: "GpuProducts",
    ) -> "Combination | None":
        """See `Mlp.add_into`. What all rows fit the buffers for is added by the next norm."""
        from twolane.kernels.experts.products import norm_and_combined
        from twolane.kernels.fused import rms_norm

        count = len(residual)
        if not self._few(count):
            x = rms_norm(residual, norm.weight, norm.eps, buffers.get("norm", count))
            return self._add_into(residual, x, active, buffers, products)
        return norm_and_combined(
            residual,
            norm,
            self.router,
            active,
            self.gate_up,
            self.down,
            buffers.input("norm", count, self.gate_up.scheme),
            buffers.experts(count, self.gate_up.scheme),
            products,
            self.rule,
            self.bias,
        )

    def _few(self, rows: int) -> bool:
        """Return whether one kernel normalises and routes this many rows."""
        from twolane.kernels.experts.products import routes_few

        return routes_few(rows, self.rule, self.router, self.gate_up, self._epilogues)

    def _add_into(
        self,
        residual: Tensor,
        x: Tensor,
        active: "ActiveRows",
        buffers: MlpBuffers,
        products: "GpuProducts",
        routed: Tensor | None = None,
    ) -> "Combination | None":
        """Add the experts of the normalised rows `x` [T, hidden]; see `add_into`."""
        if len(x) <= MLP_ROWS:
            return self._combined(x, active, buffers, products, routed)
        for first in range(0, len(x), MLP_ROWS):  # the buffers are used again
            rows = slice(first, min(first + MLP_ROWS, len(x)))
            own = None if routed is None else routed[rows]
            pending = self._combined(x[rows], active.part(rows), buffers, products, own)
            pending.add_into(residual[rows])
        return None

    def _combined(
        self,
        x: Tensor,
        active: "ActiveRows",
        buffers: MlpBuffers,
        products: "GpuProducts",
        routed: Tensor | None = None,
    ) -> "Combination":
        """Compute the experts of the normalised rows `x` [T, hidden], with the lane's buffers."""
        from twolane.kernels.activations import Quantised
        from twolane.kernels.experts.products import combined, norm_and_combined

        count, room = len(x), buffers.experts(len(x), self.gate_up.scheme)
        weights = self.gate_up, self.down
        if routed is None and self._few(count):
            rounded = room.x[:count] if isinstance(room.x, Quantised) else x
            rows = x, None, self.router, active, *weights, rounded
            return norm_and_combined(*rows, room, products, self.rule, self.bias)
        of_router = None if self.biases is None else self.biases.router
        products.linear(x if routed is None else routed, self.router, of_router, room.logits)
        after = self._epilogues
        return combined(x, active, *weights, room, products, self.rule, self.bias, after)

    def write_into(
        self,
        out: Tensor,
        x: "Activations",
        active: "ActiveRows",
        buffers: MlpBuffers,
        products: "GpuProducts",
        routed: Tensor | None = None,
    ) -> None:
        """See `Mlp.write_into`; `routed` as in `add`."""
        assert isinstance(x, Tensor), "the router's scheme is plain"
        if len(x) > MLP_ROWS:
            self._add_into(out.zero_(), x, active, buffers, products, routed)
        else:
            self._combined(x, active, buffers, products, routed).write_into(out)

    def matrices(self) -> "Sequence[tuple[Operation, Matrix]]":
        """See `Mlp.matrices`."""
        return ("linear", self.router), ("experts", self.gate_up), ("experts", self.down)

    @property
    def _epilogues(self) -> "Epilogues":
        from twolane.kernels.experts.products import Epilogues

        biases = self.biases
        both = (None, None) if biases is None else (biases.gate_up, biases.down)
        return Epilogues(self.activation, *both)

    def _of_expert(self, matrix: Matrix, number: int) -> Matrix:
        """Return the rows of one expert."""
        rows = matrix.shape[0] // self.rule.stored
        return matrix.part(number * rows, (number + 1) * rows)


Mlp = DenseMlp | Experts
"""The multilayer perceptron of one layer; `DenseMlp` describes the methods of both."""
