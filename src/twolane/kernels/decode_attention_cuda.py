"""Launches of decode_attention.cu: bfloat16 and float16 on Hopper."""

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from twolane.kernels import nvrtc

LOG2E = 1.4426950408889634
HEAD_DIMS = (64, 128)
MAX_WORKERS = 12
"""Most warps of a block; there is one block an SM."""
_HALF_BYTES = 4 * (2048 + 32)
_SHARED = 227 * 1024 - 1024
"""What a block may have, less what the kernel takes statically."""


@dataclass(frozen=True)
class Tuning:
    """What may be tuned to a level."""

    warps: int = 8
    """Workers an SM."""
    stages: int = 3
    """Half tiles (8 KB) in flight a worker."""


class _Arguments(ctypes.Structure):
    """As in the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "pool", "tables", "slots", "lengths", "out")),
        *((name, ctypes.c_void_p) for name in ("partial", "cuts")),
        *((name, ctypes.c_int) for name in ("rows", "kv_heads", "group")),
        *((name, ctypes.c_uint) for name in ("q_stride", "head_stride", "table_stride")),
        ("page_stride", ctypes.c_ulonglong),
        ("window", ctypes.c_int),
        ("scale", ctypes.c_float),
    )


@cache
def available(device: torch.device) -> bool:
    """Whether the device is a Hopper GPU and cuda-bindings can compile for it."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    try:
        import cuda.bindings.nvrtc  # noqa: F401
    except ImportError:
        return False
    return True


def serves(q: torch.Tensor) -> bool:
    """Whether the kernel exists for these queries."""
    types = torch.bfloat16, torch.float16
    return q.dtype in types and q.shape[2] in HEAD_DIMS and available(q.device)


def place_floats(dim: int) -> int:
    """float32 numbers of one partial result."""
    return 16 * dim + 32


def tuning(units: int) -> Tuning:
    """What measurements chose for a level."""
    del units
    return Tuning()


def options(dtype: torch.dtype, dim: int, page: int, group: int, tuned: Tuning) -> tuple[str, ...]:
    """Of the compiler."""
    values = {
        "T_BF16": int(dtype == torch.bfloat16),
        "DIM": dim,
        "PAGE": page,
        "TILES_N": 1 if group <= 8 else 2,
        "WARPS": tuned.warps,
        "STAGES": tuned.stages,
    }
    return tuple(f"-D{name}={value}" for name, value in values.items())


@cache
def source() -> str:
    """The CUDA C++."""
    return Path(__file__).with_name("decode_attention.cu").read_text()


def arguments(
    q: torch.Tensor,
    pool: torch.Tensor,
    tables: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    partial: torch.Tensor,
    cuts: torch.Tensor,
    *,
    window: int,
    scale: float,
) -> ctypes.Structure:
    """The kernel's parameter; `scale` is base e."""
    (rows, heads, _), kv_heads, size = q.shape, pool.shape[1], q.element_size()
    tensors = q, pool, tables, slots, lengths, out, partial, cuts
    strides = q.stride(0) * size, pool.stride(1) * size, tables.stride(0), pool.stride(0) * size
    return _Arguments(
        *(t.data_ptr() for t in tensors),
        *(rows, kv_heads, heads // kv_heads),
        *strides,
        window,
        scale * LOG2E,
    )


def attend(
    q: torch.Tensor,
    pool: torch.Tensor,
    *rest: torch.Tensor,
    units: int,
    window: int,
    scale: float,
    tuned: Tuning,
    extra: tuple[str, ...] = (),
) -> None:
    """`decode_attention` of checked arguments, with the tensors of a `DecodeScratch`.

    Args:
        q: as there.
        pool: as there.
        rest: the other tensors, as `arguments` takes them.
        units: as there.
        window: as there.
        scale: as there.
        tuned: warps and stages.
        extra: options of the compiler, for measurements.
    """
    group = q.shape[1] // pool.shape[1]
    chosen = options(q.dtype, q.shape[2], pool.shape[3], group, tuned) + extra
    device = q.device.index or 0
    kernel = nvrtc.load(source(), chosen, "decode_attention", _SHARED, device)
    combine = nvrtc.load(source(), chosen, "combine", 0, device)
    shared = tuned.warps * tuned.stages * _HALF_BYTES + 2 * 4 * q.shape[0]
    parameter = arguments(q, pool, *rest, window=window, scale=scale)
    kernel.launch(units, tuned.warps * 32, shared, parameter)
    combine.launch(units * tuned.warps, 4 * 32, 0, parameter)
