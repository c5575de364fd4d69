"""Launches of few_rows.cu: norm, router and routing of few rows in one kernel, on Hopper."""

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from twolane.kernels.activations import Activations, Quantised
from twolane.kernels.experts.routing import ActiveRows, Routing
from twolane.kernels.experts.rule import RoutingRule
from twolane.kernels.fused import Norm, parts
from twolane.kernels.runtime import nvrtc

MAX_ROWS = 16
"""Rows that the kernel routes at most, which are those of one tile of the products that follow."""
_WARPS = 8
_COLUMNS = 256
"""Numbers of a row that a warp reads at a time."""


def serves(rows: int, entries: int, router: Tensor) -> bool:
    """Return whether the kernel routes `rows` rows by this router, [logits, hidden], on Hopper."""
    hidden = router.shape[1]
    # Numbers of a row whose part of the router the registers of a warp hold.
    sizes = hidden % _COLUMNS == 0 and hidden <= 4096 and entries <= 32
    kinds = router.dtype in (torch.bfloat16, torch.float16) and router.is_contiguous()
    return rows <= MAX_ROWS and sizes and kinds


class FewRowsArguments(ctypes.Structure):
    """As in the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows_in", "norm", "router", "bias")),
        *((name, ctypes.c_void_p) for name in ("marks", "logits")),
        *((name, ctypes.c_void_p) for name in ("x", "x_scales", "weights", "positions", "groups")),
        *((name, ctypes.c_int) for name in ("rows", "least")),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
    )


def norm_and_route(
    rows_in: Tensor,
    norm: Norm | None,
    router: Tensor,
    active: ActiveRows,
    logits: Tensor,
    x: Activations,
    routing: Routing,
    rule: RoutingRule,
    bias: Tensor | None = None,
) -> None:
    """Normalise few rows (`serves`), multiply them with the router, and choose their experts.

    Args:
        rows_in: [T, hidden].
        norm: Norm to apply to the rows first; None if they are normalised.
        router: [rule.logits, hidden].
        active: the T rows.
        logits: [T, rule.logits], which is filled.
        x: [T, hidden], where the normalised rows go; the rows themselves if the next products
            can take them as they are.
        routing: buffers of T tokens, of which weights, positions and groups are filled. Each expert
            has one group, whose fourth number is a mask of its rows of `x`.
        rule: How experts are chosen.
        bias: float32 [rule.experts], if the rule has one.
    """
    flags = options(router, rule, x, norm=norm is not None)
    kernel = nvrtc.load(source(), flags, "few_rows", 0, rows_in.device.index)
    packed = arguments(rows_in, norm, router, active, logits, x, routing, rule, bias)
    kernel.launch(blocks(*logits.shape), 32 * _WARPS, 0, packed, early=True)


def blocks(rows: int, logits: int) -> int:
    """Return the number of blocks for `rows` rows."""
    # Rows that have blocks of their own; with more, a block has several.
    return -(-logits // _WARPS) * min(rows, 8)


@cache
def source() -> str:
    """Return the CUDA C++."""
    return nvrtc.with_hopper(Path(__file__).with_name("few_rows.cu"))


def options(router: Tensor, rule: RoutingRule, x: Activations, *, norm: bool) -> tuple[str, ...]:
    """Return the compiler's options."""
    told = {name.upper(): int(value) for name, value in rule._asdict().items() if name != "scale"}
    values = {
        "HIDDEN": router.shape[1],
        **told,
        "NORM": int(norm),
        "FP8": int(isinstance(x, Quantised)),
        "HALF": int(router.dtype == torch.float16),
    }
    return tuple(f"-D{name}={value}" for name, value in values.items())


def arguments(
    rows_in: Tensor,
    norm: Norm | None,
    router: Tensor,
    active: ActiveRows,
    logits: Tensor,
    x: Activations,
    routing: Routing,
    rule: RoutingRule,
    bias: Tensor | None,
) -> FewRowsArguments:
    """Return the kernel's arguments; see `norm_and_route`."""
    filled = (logits, *parts(x), routing.weights, routing.positions, routing.groups)
    weight, eps = (None, 0.0) if norm is None else (norm.weight.data_ptr(), norm.eps)
    read = (router, router if bias is None else bias, active.marks)
    pointers = (tensor.data_ptr() for tensor in (*read, *filled))
    numbers = len(rows_in), active.least, eps, rule.scale
    return FewRowsArguments(rows_in.data_ptr(), weight, *pointers, *numbers)
