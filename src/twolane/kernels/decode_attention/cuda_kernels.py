"""Launches of decode_attention.cu: bfloat16 and float16 on Hopper, over pools of these or e4m3."""

import ctypes
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from twolane.kernels.decode_attention.row_scores import LOG2E, RowScores
from twolane.kernels.pool import E4M3, Pool, RoundedPool, exponents_of, values_of
from twolane.kernels.runtime import nvrtc

MAX_WORKERS = 12
"""Most warps of a block; there is one block an SM."""
_HALF_BYTES = 8192
"""Bytes of keys or of values that one copy brings."""
_POWERS = 128
"""Bytes of the exponents of a tile of a rounded pool."""
_LINE = 128
"""Bytes of a token that the copy engine puts on a line of shared memory."""
_SHARED = 227 * 1024 - 1024
"""Bytes of shared memory that a block may have, less those that the kernel takes statically."""


@dataclass(frozen=True)
class Tuning:
    """The kernel's settings that are tuned to a level."""

    warps: int
    """Workers an SM."""
    stages: int
    """Half tiles (8 KB) in flight a worker."""


class _AttentionArguments(ctypes.Structure):
    """As in the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "tables", "slots", "lengths", "out")),
        *((name, ctypes.c_void_p) for name in ("partial", "exponents", "cuts", "sinks")),
        *((name, ctypes.c_int) for name in ("rows", "kv_heads", "group")),
        *((name, ctypes.c_uint) for name in ("q_stride", "table_stride")),
        ("window", ctypes.c_int),
        ("scale", ctypes.c_float),
    )


def serves(q: Tensor, pool: Pool) -> bool:
    """Return whether the kernel exists for these queries and this pool."""
    dims = (_LINE,) if isinstance(pool, RoundedPool) else (64, 128)
    known = q.dtype in (torch.bfloat16, torch.float16) and q.shape[2] in dims
    return known and values_of(pool).is_contiguous() and nvrtc.available(q.device)


def place_floats(dim: int) -> int:
    """Return the number of float32 of one partial result."""
    return 16 * dim + 32


def tuning(units: int) -> Tuning:
    """Return the settings that measurements chose for a level."""
    return Tuning(12, 2) if units <= 40 else Tuning(8, 2)


def options(
    dtype: torch.dtype,
    dim: int,
    page: int,
    group: int,
    tuned: Tuning,
    rounded: bool = False,
    sinks: bool = False,
) -> tuple[str, ...]:
    """Options of the compiler."""
    values = {
        "T_BF16": int(dtype == torch.bfloat16),
        "FP8": int(rounded),
        "DIM": dim,
        "PAGE": page,
        "TILES_N": 1 if group <= 8 else 2,
        "WARPS": tuned.warps,
        "STAGES": tuned.stages,
        "SINKS": int(sinks),
    }
    return tuple(f"-D{name}={value}" for name, value in values.items())


@cache
def source() -> str:
    """Return the CUDA C++."""
    return nvrtc.with_hopper(Path(__file__).with_name("decode_attention.cu"))


def arguments(
    q: Tensor,
    kv_heads: int,
    tables: Tensor,
    slots: Tensor,
    lengths: Tensor,
    out: Tensor,
    partial: Tensor,
    cuts: Tensor,
    *,
    window: int,
    scale: float,
    exponents: Tensor | None = None,
    sinks: Tensor | None = None,
) -> ctypes.Structure:
    """Return the second parameter; `scale` and `sinks` are base e, `exponents` those of a rounded
    pool."""
    tensors = (
        q,
        tables,
        slots,
        lengths,
        out,
        partial,
        cuts if exponents is None else exponents,
        cuts,
        cuts if sinks is None else sinks,
    )
    return _AttentionArguments(
        *(t.data_ptr() for t in tensors),
        *(q.shape[0], kv_heads, q.shape[1] // kv_heads),
        *(q.stride(0) * q.element_size(), tables.stride(0)),
        window,
        scale * LOG2E,
    )


class _TensorMap(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * 128),)


@lru_cache(maxsize=1024)
def _tensor_map(address: int, rows: int, dim: int, box: int, dtype: torch.dtype) -> _TensorMap:
    """Return the copy engine's descriptor of a pool: [lines of a row, rows, 128 bytes], boxes of
    `box` rows, swizzled."""
    from cuda.bindings import driver

    types = driver.CUtensorMapDataType
    kind = {
        torch.bfloat16: types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        torch.float16: types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        E4M3: types.CU_TENSOR_MAP_DATA_TYPE_UINT8,
    }[dtype]
    line = _LINE // dtype.itemsize
    encoded = nvrtc.cuda_checked(
        driver.cuTensorMapEncodeTiled(
            *(kind, 3, address),
            [driver.cuuint64_t(n) for n in (line, rows, dim // line)],
            [driver.cuuint64_t(n) for n in (dtype.itemsize * dim, _LINE)],
            [driver.cuuint32_t(n) for n in (line, box, dim // line)],
            [driver.cuuint32_t(1)] * 3,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return _TensorMap.from_buffer_copy(ctypes.string_at(encoded.getPtr(), 128))


def tensor_map(pool: Tensor) -> _TensorMap:
    """Return the kernel's first parameter."""
    page, dim = pool.shape[3:]
    box = min(page, _HALF_BYTES // (dim * pool.element_size()))
    return _tensor_map(pool.data_ptr(), pool.numel() // dim, dim, box, pool.dtype)


def attend(
    q: Tensor,
    pool: Pool,
    *rest: Tensor,
    units: int,
    scores: RowScores,
    tuned: Tuning,
    extra: tuple[str, ...] = (),
) -> None:
    """`decode_attention` of checked arguments, with the tensors of a `DecodeScratch`.

    Args:
        q: Queries, as `decode_attention` takes them.
        pool: KV pool of the layer.
        rest: the other tensors, as `arguments` takes them.
        units: Number of SMs of the lane.
        scores: What a row sees.
        tuned: warps and stages.
        extra: options of the compiler, for measurements.
    """
    values, rounded = values_of(pool), isinstance(pool, RoundedPool)
    kv_heads, page, device = values.shape[1], values.shape[3], q.device.index or 0
    group = q.shape[1] // kv_heads
    has_sinks = scores.sinks is not None
    chosen = options(q.dtype, q.shape[2], page, group, tuned, rounded, has_sinks) + extra
    kernel = nvrtc.load(source(), chosen, "decode_attention", _SHARED, device)
    combine = nvrtc.load(source(), chosen, "combine", 0, device)
    halves = tuned.warps * tuned.stages
    shared = halves * (_HALF_BYTES + (_POWERS if rounded else 0)) + 2 * 4 * q.shape[0]
    seen = {**scores._asdict(), "exponents": exponents_of(pool)}
    given = arguments(q, kv_heads, *rest, **seen)
    parameters = tensor_map(values), given
    kernel.launch(units, tuned.warps * 32, shared, *parameters, early=True)
    # Blocks that combine the runs of one block of attention, as in the source.
    combine.launch(4 * units, tuned.warps * 32, 0, *parameters, early=True)
