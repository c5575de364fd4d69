"""Products of rows sorted by expert, each with its expert's matrix.

Few rows go through the project's own kernel on Hopper (`skinny_gemm.cu`, grouped), which deals the
tiles of the active experts out to the lane's SMs and reads each expert's weights once. Many go
through PyTorch's grouped product, which reads where the experts end on the device. Other GPUs and
types have a kernel in Triton.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from twolane.kernels import fused
from twolane.kernels.experts import grouped_gemm
from twolane.kernels.experts.routing import (
    LEAST_GROUP,
    ActiveRows,
    Routing,
    combine,
    route_and_gather,
)
from twolane.kernels.products import skinny_gemm
from twolane.kernels.products.dispatch import Products, Stored, sm_carveout
from twolane.kernels.runtime import nvrtc

OWN_MEANS = {16: 8.0, 32: 16.0}
"""Rows of an expert, on average, up to which the own kernel with this many rows in a tile is the
fastest of all on an H200."""
TRITON_MEAN = 256.0
"""The same of the kernel in Triton; beyond it PyTorch's is."""
Kernel = Literal["own", "torch", "triton"]


@dataclass(frozen=True, slots=True)
class Way:
    """How one batch is multiplied."""

    kernel: Kernel
    rows: int
    """The most rows of a group."""


@dataclass(frozen=True, slots=True)
class Buffers:
    """Where a lane has room for the experts of T tokens; rows are entries, T * per_token."""

    routing: Routing
    logits: Tensor
    """The router's, [T, experts]."""
    x: Tensor
    """[entries, hidden]"""
    gate_up: Tensor
    """[entries, 2 * intermediate]"""
    act: Tensor
    """[entries, intermediate]"""
    outs: Tensor
    """[entries, hidden]"""


def way(entries: int, experts: int, gate_up: Stored, down: Stored) -> Way:
    """The way for this many rows that are spread over the experts."""
    device, dtype = gate_up.values.device, gate_up.values.dtype
    hopper, mean = device.type == "cuda" and nvrtc.available(device), entries / experts
    if hopper and skinny_gemm.serves(gate_up.values, gated=True):
        for rows, most in OWN_MEANS.items():
            if mean <= most:
                return Way("own", rows)
    if hopper and dtype == torch.bfloat16 and mean > TRITON_MEAN:
        return Way("torch", LEAST_GROUP)
    return Way("triton", grouped_gemm.ROWS[0])


def add_experts(
    residual: Tensor,
    x: Tensor,
    active: ActiveRows,
    gate_up: Stored,
    down: Stored,
    buffers: Buffers,
    products: Products,
    *,
    normalised: bool,
) -> None:
    """Add the experts of each active row of `x` [T, hidden] to `residual` [T, hidden] in place.

    Args:
        residual: changed.
        x: the normalised rows.
        active: rows that count; the others stay as they are.
        gate_up: [experts * 2 * intermediate, hidden], of each expert the rows of the gate first.
        down: [experts * hidden, intermediate].
        buffers: of T tokens, where the router's logits are already.
        products: of the lane.
        normalised: whether the weights of a token's experts are divided by their sum.
    """
    routing = buffers.routing
    chosen = way(len(buffers.x), routing.experts, gate_up, down)
    how = (routing, buffers.x, chosen.rows)
    route_and_gather(buffers.logits, active, x, *how, normalised=normalised)
    if chosen.kernel == "own":
        _few_rows(buffers.x, gate_up, buffers.act, routing, chosen, products, gated=True)
        _few_rows(buffers.act, down, buffers.outs, routing, chosen, products, gated=False)
        outs = buffers.outs
    elif chosen.kernel == "torch":
        fused.silu_mul(_many_rows(buffers.x, gate_up, routing, products), buffers.act)
        outs = _many_rows(buffers.act, down, routing, products)
    else:
        tiles = chosen.rows, products.units
        grouped_gemm.grouped_gemm(buffers.x, gate_up.values, routing, buffers.gate_up, *tiles)
        fused.silu_mul(buffers.gate_up, buffers.act)
        grouped_gemm.grouped_gemm(buffers.act, down.values, routing, buffers.outs, *tiles)
        outs = buffers.outs
    combine(outs, routing, residual)


def _few_rows(
    x: Tensor,
    weight: Stored,
    out: Tensor,
    routing: Routing,
    chosen: Way,
    products: Products,
    *,
    gated: bool,
) -> None:
    """The own kernel."""
    wide = 256 if products.units <= 48 else 128
    variant = skinny_gemm.Variant(
        wide, chosen.rows, swap=True, gated=gated, dtype=x.dtype, grouped=True
    )
    skinny_gemm.launch(
        variant,
        products.units,
        x,
        weight.values,
        None,
        out,
        products.scratch(x.device),
        groups=routing.groups,
    )


def _many_rows(x: Tensor, weight: Stored, routing: Routing, products: Products) -> Tensor:
    """PyTorch's grouped product, [entries, rows of an expert]."""
    each = weight.values.view(routing.experts, -1, x.shape[1]).transpose(1, 2)
    with sm_carveout(products.units):
        out: Tensor = torch._grouped_mm(x, each, offs=routing.ends)
    return out
