"""The sum over ranks of few rows, residual and RMS norm in one launch; see reduce_norm.cu."""

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from twolane.kernels.runtime import nvrtc

BLOCKS = 32
"""Most blocks of a launch: 16 SMs hold them all, whatever the width of a row."""
VECTOR_BYTES = 16
"""Bytes that a thread has of a row."""
WARP, MAX_THREADS = 32, 1024


def flag_bytes(ranks: int) -> int:
    """Return the bytes of a rank's flags, which are zero before the first launch."""
    return 4 * BLOCKS * ranks


def served(partial: Tensor, out: Tensor) -> bool:
    """Return whether the kernel serves such rows and such a result."""
    threads, rest = divmod(partial.shape[1] * partial.element_size(), VECTOR_BYTES)
    return (
        partial.dtype == out.dtype
        and partial.dtype in (torch.bfloat16, torch.float32)
        and not rest
        and threads % WARP == 0
        and threads <= MAX_THREADS
        and out.is_contiguous()
        and nvrtc.available(partial.device)
    )


def reduce_norm(
    rank: int,
    partials: Sequence[int],
    flags: Sequence[int],
    residual: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    *,
    blocks: int = BLOCKS,
    early: bool = True,
) -> None:
    """`residual` += the sum over ranks, then `out` = its RMS norm; both [T, hidden].

    All ranks launch it at once, with as many rows. Partial sums are lost.

    Args:
        rank: The rank of this process.
        partials: addresses of each rank's partial sums [T, hidden].
        flags: addresses of each rank's flags.
        residual: the same on all ranks.
        weight: Weight of the norm, [hidden].
        eps: Epsilon of the norm.
        out: the result.
        blocks: most blocks of the launch, the same on all ranks.
        early: Whether the kernel may start before the one that precedes it has ended.
    """
    (rows, width), ranks = residual.shape, len(partials)
    options = f"-DHIDDEN={width}", f"-DRANKS={ranks}", f"-DEARLY={int(early)}"
    wide = f"-DFLOAT={int(residual.dtype == torch.float32)}"
    kernel = nvrtc.load(source(), (*options, wide), "reduce_norm", 0, residual.device.index or 0)
    pointers = ctypes.c_uint64 * ranks
    given = _arguments(ranks)(
        *(pointers(*partials), pointers(*flags)),
        *(tensor.data_ptr() for tensor in (residual, out, weight)),
        *(rows, rank, eps),
    )
    groups = -(-rows // ranks)
    threads = width * residual.element_size() // VECTOR_BYTES
    kernel.launch(min(blocks, groups), threads, 0, given, early=early)


@cache
def source() -> str:
    """Return the CUDA C++."""
    return nvrtc.with_hopper(Path(__file__).with_name("reduce_norm.cu"))


@cache
def _arguments(ranks: int) -> type[ctypes.Structure]:
    """Return the kernel's parameter."""

    class ReduceNormArguments(ctypes.Structure):
        _fields_ = (
            ("partial", ctypes.c_uint64 * ranks),
            ("flags", ctypes.c_uint64 * ranks),
            ("residual", ctypes.c_uint64),
            ("out", ctypes.c_uint64),
            ("weight", ctypes.c_uint64),
            ("rows", ctypes.c_int),
            ("rank", ctypes.c_int),
            ("eps", ctypes.c_float),
        )

    return ReduceNormArguments
