"""Paged decode attention: one new token a row against its sequence's keys and values.

Made for a share of the GPU. Decode attention is reading the KV cache, and a lane on few SMs gets
the bandwidth only if each of its SMs has many bytes in flight all the time. So the grid is made for
the SMs of the lane, and the schedule, which the device works out from the lengths in every launch,
gives each of them the same number of tokens:

- The work is cut into *tiles*, a page (or a fixed number of tokens) of one KV head of one row, in
  the order rows, heads, tiles. The tiles of one head of one row are a *run*.
- *Worker* w of W (the tiles' number, if there are fewer tiles) takes the tiles
  [w * tiles // W, (w + 1) * tiles // W), whatever runs they belong to.
- A run inside one worker is written at once. Of a run that is cut, each worker leaves a partial
  result (maximum, sum of weights, weighted sum of values), two a worker at most: at place 1 of a
  run that goes on after it, at place 0 of one that began before it and ends with it. A second
  kernel combines them in the order of the workers, so results do not depend on timing.

No plan on the host, no data-dependent allocation: it lives in a CUDA graph.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from twolane.kernels.decode_attention import cuda_kernels as hopper
from twolane.kernels.decode_attention import triton_kernels as portable
from twolane.kernels.decode_attention.row_scores import RowScores
from twolane.kernels.pool import E4M3, Pool, RoundedPool, values_of

MAX_GROUP = 16
"""Most query heads that share a KV head."""
MAX_ROWS = 1024
"""Number of rows that one call serves."""
PAGE_SIZES = (16, 32, 64)


@dataclass(frozen=True)
class DecodeScratch:
    """The workspace of one lane's decode attention; launches that share it must be ordered."""

    rows: int
    heads: int
    dim: int
    units: int
    partial: Tensor
    """Weighted sums of values of runs that were cut, float32."""
    sums: Tensor
    """Their maxima (base 2) and sums of weights, float32."""
    cuts: Tensor
    """For each worker, the unfinished run that it began and the last worker of that run, int32."""


def decode_scratch(
    rows: int, heads: int, dim: int, units: int, device: torch.device | str
) -> DecodeScratch:
    """Return a workspace for up to `rows` rows, `heads` query heads and `units` SMs."""
    workers = units * max(portable.MAX_WORKERS, hopper.MAX_WORKERS)
    width = max(16, 1 << (dim - 1).bit_length())
    sizes = 2 * workers * hopper.place_floats(width), 2 * workers * MAX_GROUP * 2
    partial, sums = (torch.empty(n, dtype=torch.float32, device=device) for n in sizes)
    cuts = torch.empty(workers, 2, dtype=torch.int32, device=device)
    return DecodeScratch(rows, heads, dim, units, partial, sums, cuts)


def decode_attention(
    q: Tensor,
    pool: Pool,
    tables: Tensor,
    slots: Tensor,
    lengths: Tensor,
    out: Tensor,
    scratch: DecodeScratch,
    *,
    units: int,
    window: int | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Write softmax(q · Kᵀ * scale) · V of every row to `out`, on torch's current stream.

    Args:
        q: [R, heads, dim], float32, bfloat16 or float16; rows may be strided. heads is a multiple,
            1 to 16, of kv_heads: query heads [g * i, g * (i + 1)) share KV head i.
        pool: [pages, kv_heads, 2, page_size, dim], keys then values, of q's type or rounded;
            page_size is 16, 32 or 64.
        tables: int32 [slots, max_pages], the physical pages of the sequence in each slot.
        slots: int32 [R], the slot of each row.
        lengths: int32 [R], tokens in the KV cache, the new one included. A row of length 0 is
            padding: it reads nothing and `out` keeps what it had.
        out: [R, heads, dim], contiguous, of q's type.
        scratch: Buffers of `decode_scratch`, for at least these rows, heads and units.
        units: SMs that the launch is made for.
        window: only the last `window` tokens are seen; None: all.
        scale: Factor of the scores; None: dim ** -0.5.
        sinks: float32 [heads], the score of one more token of value 0 that each head sees; None:
            there is none.

    Raises:
        ValueError: an argument is none of the above; it is named.
    """
    _check(q, pool, tables, slots, lengths, out)
    _check_scratch(scratch, q, units)
    scores = _scores(q, window, scale, sinks)
    rest = tables, slots, lengths, out, scratch.partial
    if hopper.serves(q, pool):
        tuned = hopper.tuning(units)
        hopper.attend(q, pool, *rest, scratch.cuts, units=units, scores=scores, tuned=tuned)
    else:
        chosen = portable.tuning(values_of(pool)[0, 0].numel() * q.element_size())
        portable.attend(q, pool, *rest, scratch.sums, units=units, scores=scores, tuned=chosen)


def _scores(q: Tensor, window: int | None, scale: float | None, sinks: Tensor | None) -> RowScores:
    heads, dim = q.shape[1:]
    if window is not None and window < 1:
        raise ValueError(f"window={window}: at least 1")
    if sinks is not None and (sinks.dtype != torch.float32 or sinks.shape != (heads,)):
        raise ValueError(f"sinks: must be float32 [{heads}]")
    # Tokens of a window that hides nothing.
    return RowScores(window or 1 << 30, dim**-0.5 if scale is None else scale, sinks)


def _check(
    q: Tensor, pool: Pool, tables: Tensor, slots: Tensor, lengths: Tensor, out: Tensor
) -> None:
    rows, heads, dim = q.shape
    values, kind = values_of(pool), E4M3 if isinstance(pool, RoundedPool) else q.dtype
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"q: {rows} rows, 1 to {MAX_ROWS} are served")
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"q: {q.dtype} is not served")
    if q.stride()[1:] != (dim, 1):
        raise ValueError("q: heads and dimensions of a row must be contiguous")
    if values.ndim != 5 or values.shape[2] != 2 or values.shape[4] != dim or values.dtype != kind:
        raise ValueError(f"pool: {values.dtype} {tuple(values.shape)} does not fit q")
    if values.shape[3] not in PAGE_SIZES:
        raise ValueError(f"pool: page size {values.shape[3]}, not one of {PAGE_SIZES}")
    if values.stride()[2:] != (values.shape[3] * dim, dim, 1):
        raise ValueError("pool: keys and values of one head of a page must be contiguous")
    kv_heads = values.shape[1]
    if heads % kv_heads or heads // kv_heads > MAX_GROUP:
        raise ValueError(f"q: {heads} heads over {kv_heads} KV heads, groups of 1 to {MAX_GROUP}")
    if tables.dtype != torch.int32 or tables.ndim != 2 or tables.stride(1) != 1:
        raise ValueError("tables: int32 [slots, max_pages], rows contiguous")
    for name, tensor in (("slots", slots), ("lengths", lengths)):
        if tensor.dtype != torch.int32 or tensor.shape != (rows,) or not tensor.is_contiguous():
            raise ValueError(f"{name}: must be int32 [{rows}], contiguous")
    if out.shape != q.shape or out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError("out: must have q's shape and type, contiguous")


def _check_scratch(scratch: DecodeScratch, q: Tensor, units: int) -> None:
    rows, heads, dim = q.shape
    asked = {"rows": rows, "heads": heads, "dim": dim, "units": units}
    short = [name for name, value in asked.items() if getattr(scratch, name) < value]
    if units < 1 or short:
        raise ValueError(f"scratch: too small for {asked}: {', '.join(short) or 'units'}")
