"""Products of rows sorted by expert, each with its expert's matrix.

Few rows go through the project's own kernel on Hopper (`skinny_gemm.cu`, grouped), which deals the
tiles of the active experts out to the lane's SMs and reads each expert's weights once. Many go
through PyTorch's grouped product, which reads where the experts end on the device. Other GPUs and
types have a kernel in Triton, and so have matrices of four bits.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from twolane.kernels import fused
from twolane.kernels.activations import Activations, Quantised
from twolane.kernels.experts import few_rows, grouped_gemm, mxfp4_gemm
from twolane.kernels.experts.routing import (
    MIN_GROUP,
    ActiveRows,
    Combination,
    Routing,
    gather,
    route,
)
from twolane.kernels.experts.rule import RoutingRule
from twolane.kernels.fused import Norm
from twolane.kernels.products import skinny_gemm
from twolane.kernels.products.dispatch import GpuProducts, Stored, factors, sm_carveout
from twolane.kernels.products.skinny_gemm import INT4_GROUPS
from twolane.kernels.runtime import nvrtc

OWN_MEANS = {16: 8.0, 32: 16.0}
"""Rows of an expert, on average, up to which the own kernel with this many rows in a tile is the
fastest of all on an H200."""
TRITON_MEANS = {torch.bfloat16: 256.0, torch.float8_e4m3fn: 256.0}
"""Rows of an expert, on average, up to which the Triton kernel is the fastest, by the type of the
matrices; beyond that PyTorch's is."""
FOUR_BIT_SCHEMES = (*INT4_GROUPS, mxfp4_gemm.SCHEME)
"""Schemes of four bits, which Triton multiplies with."""
FOUR_BIT_MEANS = {16: 8.0, 64: 64.0}
"""Rows of an expert, on average, up to which tiles with this many rows serve matrices of four bits;
beyond that the largest do."""
Kernel = Literal["own", "torch", "triton"]


@dataclass(frozen=True, slots=True)
class ExpertWay:
    """A way to multiply one batch with the experts' matrices."""

    kernel: Kernel
    rows: int
    """The most rows of a group."""
    spread: bool = False
    """Whether the own kernel's rows are those of the batch; masks tell which an expert has."""


@dataclass(frozen=True, slots=True)
class Epilogues:
    """What follows the products of experts: an activation, and biases if there are any."""

    activation: str = "silu"
    """See `ModelSpec.activation`."""
    gate_up: Tensor | None = None
    """[experts * 2 * intermediate], or None."""
    down: Tensor | None = None
    """[experts * hidden], or None."""

    @property
    def plain(self) -> bool:
        """Whether all kernels have them: SiLU without biases."""
        return self.activation == "silu" and self.gate_up is None and self.down is None


PLAIN = Epilogues()
"""SiLU without biases."""


@dataclass(frozen=True, slots=True)
class ExpertBuffers:
    """A lane's buffers for the experts of T tokens; rows are entries, T * per_token."""

    routing: Routing
    logits: Tensor
    """The router's, [T, rule.logits]."""
    x: Activations
    """[entries, hidden], rounded as the first product wants it."""
    gate_up: Tensor
    """[entries, 2 * intermediate]"""
    act: Activations
    """[entries, intermediate], rounded as the second product wants it."""
    outs: Tensor
    """[entries, hidden]"""


def way(entries: int, experts: int, gate_up: Stored, epilogues: Epilogues = PLAIN) -> ExpertWay:
    """Return the way for this many rows that are spread over the experts; the own kernel computes
    SiLU without biases alone, and PyTorch's adds no biases."""
    device, dtype = gate_up.values.device, gate_up.values.dtype
    hopper, mean = device.type == "cuda" and nvrtc.available(device), entries / experts
    own, hopper = hopper and epilogues.plain, hopper and epilogues.gate_up is None
    if gate_up.scheme in FOUR_BIT_SCHEMES:
        fitting = (rows for rows, most in FOUR_BIT_MEANS.items() if mean <= most)
        return ExpertWay("triton", next(fitting, grouped_gemm.FOUR_BIT_ROWS[-1]))
    if own and skinny_gemm.serves(gate_up.values, gate_up.scheme, gated=True):
        for rows, most in OWN_MEANS.items():
            if mean <= most:
                return ExpertWay("own", rows)
    if hopper and mean > TRITON_MEANS.get(dtype, math.inf):
        return ExpertWay("torch", MIN_GROUP)
    return ExpertWay("triton", grouped_gemm.ROWS[0])


def combined(
    x: Tensor,
    active: ActiveRows,
    gate_up: Stored,
    down: Stored,
    buffers: ExpertBuffers,
    products: GpuProducts,
    rule: RoutingRule,
    bias: Tensor | None,
    epilogues: Epilogues = PLAIN,
) -> Combination:
    """Compute the experts of each active row of `x` [T, hidden].

    Args:
        x: the normalised rows.
        active: rows that count; the others have no experts.
        gate_up: [experts * 2 * intermediate, hidden], of each expert the rows of the gate first.
        down: [experts * hidden, intermediate].
        buffers: Buffers for T tokens, which hold the router's logits already.
        products: The products of the lane.
        rule: How experts are chosen.
        bias: float32 [experts], if the rule has one.
        epilogues: What follows the products.
    """
    chosen = way(len(buffers.x), buffers.routing.experts, gate_up, epilogues)
    route(buffers.logits, active, buffers.routing, chosen.rows, rule, bias)
    gather(x, buffers.routing, buffers.x)
    return _multiplied(chosen, buffers.x, gate_up, down, buffers, products, epilogues)


def routes_few(
    rows: int, rule: RoutingRule, router: Stored, gate_up: Stored, epilogues: Epilogues = PLAIN
) -> bool:
    """Return whether `norm_and_combined` serves this many rows."""
    own = epilogues.plain and gate_up.scheme not in INT4_GROUPS
    own = own and skinny_gemm.serves(gate_up.values, gate_up.scheme, gated=True)
    return own and few_rows.serves(rows, rule.entries, router.values)


def norm_and_combined(
    rows_in: Tensor,
    norm: Norm | None,
    router: Stored,
    active: ActiveRows,
    gate_up: Stored,
    down: Stored,
    x: Activations,
    buffers: ExpertBuffers,
    products: GpuProducts,
    rule: RoutingRule,
    bias: Tensor | None,
) -> Combination:
    """Normalise few rows (`routes_few`) of the residual stream, and compute their experts.

    Args:
        rows_in: [T, hidden].
        norm: Norm to apply to the rows first; None if they are normalised.
        router: [rule.logits, hidden].
        x: [T, hidden], where the normalised rows go, rounded if the experts' matrices are; the rows
            themselves if they come normalised and are not rounded.
        active, gate_up, down, buffers, products, rule, bias: as in `combined`, without logits.
    """
    rows = rows_in, norm, router.values, active
    few_rows.norm_and_route(*rows, buffers.logits, x, buffers.routing, rule, bias)
    chosen = ExpertWay("own", few_rows.MAX_ROWS, spread=True)
    return _multiplied(chosen, x, gate_up, down, buffers, products)


def _multiplied(
    chosen: ExpertWay,
    x: Activations,
    gate_up: Stored,
    down: Stored,
    buffers: ExpertBuffers,
    products: GpuProducts,
    epilogues: Epilogues = PLAIN,
) -> Combination:
    """Multiply the sorted entries, or the batch's rows if `chosen` spreads them, twice."""
    routing, outs = buffers.routing, buffers.outs
    if chosen.kernel == "own":
        act = buffers.act
        if isinstance(act, Quantised):
            rows, inner = act.values.shape
            wide = buffers.gate_up.flatten()[: rows * inner].view(rows, inner)
            _few_rows(x, gate_up, wide, routing, chosen, products, following=down)
            fused.quantise(wide, act)
        else:
            _few_rows(x, gate_up, act, routing, chosen, products, following=down)
        _few_rows(act, down, outs, routing, chosen, products)
    elif chosen.kernel == "torch":
        fused.act_mul(_many_rows(x, gate_up, routing, products), buffers.act, epilogues.activation)
        outs = _many_rows(buffers.act, down, routing, products)
    else:
        tiles = chosen.rows, products.units
        first, second = epilogues.gate_up, epilogues.down
        grouped_gemm.grouped_gemm(x, gate_up, routing, buffers.gate_up, *tiles, first)
        fused.act_mul(buffers.gate_up, buffers.act, epilogues.activation)
        grouped_gemm.grouped_gemm(buffers.act, down, routing, outs, *tiles, second)
    return Combination(outs, routing)


def _few_rows(
    x: Activations,
    weight: Stored,
    out: Tensor,
    routing: Routing,
    chosen: ExpertWay,
    products: GpuProducts,
    *,
    following: Stored | None = None,
) -> None:
    """Multiply by the own kernel: gate and up if `following`, the next product's matrices, are
    given; otherwise that next product."""
    gated = following is not None
    wide = 256 if products.units <= 48 else 128
    values, scales = factors(x, weight)
    variant = skinny_gemm.Variant(
        wide,
        chosen.rows,
        swap=True,
        gated=gated,
        dtype=values.dtype,
        grouped=True,
        spread=chosen.spread and gated,
    )
    skinny_gemm.launch(
        variant,
        products.units,
        values,
        weight.values,
        None,
        out,
        products.scratch(out.device),
        scales=scales,
        groups=skinny_gemm.Groups(
            routing.groups,
            routing.experts,
            known=following is None,
            following=None if following is None else following.values,
        ),
    )


def _many_rows(x: Activations, weight: Stored, routing: Routing, products: GpuProducts) -> Tensor:
    """PyTorch's grouped product, [entries, rows of an expert]."""
    values, scales = factors(x, weight)
    each = weight.values.view(routing.experts, -1, values.shape[1]).transpose(1, 2)
    with sm_carveout(products.units):
        if scales is None:
            out: Tensor = torch._grouped_mm(values, each, offs=routing.ends)
        else:
            out = torch._scaled_grouped_mm(
                values,
                each,
                scales[0].flatten(),
                scales[1].view(routing.experts, -1),
                offs=routing.ends,
                out_dtype=torch.bfloat16,
                use_fast_accum=True,
            )
    return out
