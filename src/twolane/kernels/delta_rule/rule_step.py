"""The gated delta rule of decode steps in CUDA C++, for heads of 128; see rule_step.cu."""

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from twolane.kernels.delta_rule.rule import DeltaRule
from twolane.kernels.runtime import nvrtc

SIZE = 128
"""Dimensions of keys and values."""
THREADS = 256
STAGES, BLOCKS = 1, 2
"""States of a block that are in shared memory or on their way, and blocks of an SM: a block copies
its next state while it computes, and what one waits for the other fills."""
_FEW_UNITS, _FEW_ROWS = 32, 16
"""SMs up to which Triton's tiles are faster, but with this many rows, by measurement."""
_STATE_BYTES = 4 * SIZE * SIZE
_FIXED_BYTES = 23_552
"""Bytes of shared memory besides states and the list of rows."""
MAX_ROWS = 1024


class RuleStepArguments(ctypes.Structure):
    """The kernel's parameter."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("mixed", "rates", "decay", "shift", "states")),
        *((name, ctypes.c_uint64) for name in ("slots", "lengths", "out", "gates", "norm")),
        *((name, ctypes.c_int) for name in ("rows", "rate_stride", "gate_stride")),
        ("eps", ctypes.c_float),
    )


def serves(delta: DeltaRule, x: Tensor, units: int) -> bool:
    """Return whether the kernel serves such heads and rows, and is the fastest on this many SMs."""
    if units <= _FEW_UNITS and len(x) > _FEW_ROWS:
        return False
    square = delta.key_dim == delta.value_dim == SIZE
    fits = square and x.dtype == torch.bfloat16 and len(x) <= MAX_ROWS
    return fits and nvrtc.available(x.device)


def launch(
    delta: DeltaRule, arguments: RuleStepArguments, device: torch.device, units: int
) -> None:
    """`out` [R, value_size] = gated reads of the states of R rows, which move on; see
    `decode.decode_step`."""
    shared = STAGES * _STATE_BYTES + _FIXED_BYTES + 8 * arguments.rows
    most = STAGES * _STATE_BYTES + _FIXED_BYTES + 8 * MAX_ROWS
    kernel = nvrtc.load(source(), options(delta), "rule_step", most, device.index or 0)
    kernel.launch(BLOCKS * units, THREADS, shared, arguments, early=True)


@cache
def source() -> str:
    """Return the CUDA C++."""
    return nvrtc.with_hopper(Path(__file__).with_name("rule_step.cu"))


def options(delta: DeltaRule, stages: int = STAGES) -> tuple[str, ...]:
    """Return the compiler's options."""
    heads = f"-DKEY_HEADS={delta.key_heads}", f"-DVALUE_HEADS={delta.value_heads}"
    return *heads, f"-DSTAGES={stages}", "-DHALF=0"
