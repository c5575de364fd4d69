"""Paged decode attention in Triton: float32, bfloat16 and float16, any GPU.

The schedule is `decode_attention`'s; a tile is one page. A worker is a program of one warp, several
to an SM: what one waits for, the others fill. A second kernel combines the runs that were cut.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from twolane.kernels.decode_attention.row_scores import LOG2E, RowScores
from twolane.kernels.pool import Pool, RoundedPool, exponents_of, values_of
from twolane.kernels.prefill_attention.triton_kernels import scaled

MAX_WORKERS = 12
"""Most programs an SM."""


@dataclass(frozen=True)
class TritonTuning:
    """The kernel's settings that are tuned to a device."""

    workers: int
    """Programs an SM, all resident at once."""
    warps: int
    """Warps of a program."""
    stages: int
    """Stages of its pipeline; page numbers take about half of them, pages the rest."""


def tuning(tile_bytes: int) -> TritonTuning:
    """Return settings for 227 KB of shared memory an SM and this size of a KV head's pages."""
    if tile_bytes <= 8 << 10:
        return TritonTuning(workers=12, warps=1, stages=6)
    if tile_bytes <= 16 << 10:
        return TritonTuning(workers=6, warps=1, stages=6)
    if tile_bytes <= 32 << 10:
        return TritonTuning(workers=4, warps=2, stages=2)
    if tile_bytes <= 64 << 10:
        return TritonTuning(workers=2, warps=4, stages=3)
    return TritonTuning(workers=1, warps=4, stages=2)


@triton.jit
def _tiles(lengths, row, rows, window, PAGE: tl.constexpr) -> tl.tuple:
    """Return for each row its tokens, the first page that is seen, and the pages that are seen."""
    length = tl.load(lengths + row, mask=row < rows, other=0)
    first = tl.maximum(length - window, 0) // PAGE
    return length, first, (length + PAGE - 1) // PAGE - first


@triton.jit
def _begin(worker, total, workers) -> tl.tensor:
    """First tile of a worker."""
    return (worker.to(tl.int64) * total // workers).to(tl.int32)


@triton.jit
def _owner(position, total, workers) -> tl.tensor:
    """Worker of a tile."""
    return (((position.to(tl.int64) + 1) * workers - 1) // total).to(tl.int32)


@triton.jit
def _with_sink(
    total_weight, maximum, sinks, head, group, members, SINKS: tl.constexpr
) -> tl.tensor:
    """Return the sums of weights of a group's heads with that of their sinks."""
    if SINKS:
        sink = tl.load(sinks + head * group + members, mask=members < group, other=0.0)
        total_weight += tl.exp2(sink * 1.4426950408889634 - maximum)
    return total_weight


@triton.jit(do_not_specialize=["rows"])
def _attend(
    q, pool, exponents, tables, slots, lengths, sinks, out, partial, sums, rows, kv_heads, group,
    q_stride, page_stride, head_stride, table_stride, window, scale,
    HEAD: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr, ROUNDED: tl.constexpr, SINKS: tl.constexpr,
) -> None:  # fmt: skip
    worker = tl.program_id(0)
    row_ids = tl.arange(0, ROWS)
    length_of, first_of, count_of = _tiles(lengths, row_ids, rows, window, PAGE)
    end_of = tl.cumsum(count_of, 0) * kv_heads
    total = tl.sum(count_of, 0) * kv_heads
    workers = tl.maximum(tl.minimum(tl.num_programs(0), total), 1)
    position = _begin(worker, total, workers)
    stop = tl.where(worker < workers, _begin(worker + 1, total, workers), position)

    members = tl.arange(0, GROUP)
    dims = tl.arange(0, DIM)
    keys = tl.arange(0, PAGE)
    inside = keys[:, None] * HEAD + dims[None, :]
    while position < stop:
        row = tl.sum((end_of <= position).to(tl.int32), 0)
        here = row_ids == row
        count = tl.sum(tl.where(here, count_of, 0), 0)
        length = tl.sum(tl.where(here, length_of, 0), 0)
        first = tl.sum(tl.where(here, first_of, 0), 0)
        offset = position - tl.sum(tl.where(here, end_of, 0), 0) + count * kv_heads
        head = offset // count
        start = offset - head * count
        tiles = tl.minimum(count - start, stop - position)

        q_at = q + row.to(tl.int64) * q_stride + (head * group + members)[:, None] * HEAD
        q_mask = (members[:, None] < group) & (dims[None, :] < HEAD)
        query = tl.load(q_at + dims[None, :], mask=q_mask, other=0.0)
        table = tables + tl.load(slots + row).to(tl.int64) * table_stride
        maximum = tl.full([GROUP], float("-inf"), tl.float32)
        total_weight = tl.zeros([GROUP], tl.float32)
        accumulated = tl.zeros([GROUP, DIM], tl.float32)
        for page in tl.range(first + start, first + start + tiles, num_stages=STAGES):
            at = tl.load(table + page).to(tl.int64) * page_stride + head * head_stride
            token = page * PAGE + keys
            # What lies beyond the last token was perhaps never written, and may be NaN.
            written = token[:, None] < length
            if DIM != HEAD:
                written &= dims[None, :] < HEAD
            k = tl.load(pool + at + inside, mask=written, other=0.0, eviction_policy="evict_first")
            v = tl.load(
                pool + at + PAGE * HEAD + inside,
                mask=written,
                other=0.0,
                eviction_policy="evict_first",
            )
            if ROUNDED:
                line = exponents + at // HEAD + keys
                known = token < length
                k = scaled(k, tl.load(line, mask=known, other=0), query.dtype)
                v = scaled(v, tl.load(line + PAGE, mask=known, other=0), query.dtype)
            scores = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
            seen = (token < length) & (token >= length - window)
            scores = tl.where(seen[None, :], scores, float("-inf"))
            peak = tl.maximum(maximum, tl.max(scores, 1))
            weights = tl.exp2(scores - peak[:, None])
            fade = tl.exp2(maximum - peak)
            total_weight = total_weight * fade + tl.sum(weights, 1)
            accumulated = accumulated * fade[:, None]
            accumulated = tl.dot(weights.to(v.dtype), v, accumulated, input_precision="ieee")
            maximum = peak

        if tiles == count:
            out_at = out + ((row * kv_heads + head) * group + members).to(tl.int64)[:, None] * HEAD
            total_weight = _with_sink(total_weight, maximum, sinks, head, group, members, SINKS)
            result = accumulated / total_weight[:, None]
            tl.store(out_at + dims[None, :], result.to(out.dtype.element_ty), mask=q_mask)
        else:
            place = worker * 2 + (start + tiles < count).to(tl.int32)
            at = place * GROUP + members
            tl.store(partial + at[:, None] * DIM + dims[None, :], accumulated)
            tl.store(sums + at * 2, maximum)
            tl.store(sums + at * 2 + 1, total_weight)
        position += tiles


@triton.jit(do_not_specialize=["rows"])
def _combine(
    lengths, sinks, out, partial, sums, rows, kv_heads, group, window, workers,
    HEAD: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, SINKS: tl.constexpr,
) -> None:  # fmt: skip
    run = tl.program_id(0)
    row = run // kv_heads
    row_ids = tl.arange(0, ROWS)
    _, _, count_of = _tiles(lengths, row_ids, rows, window, PAGE)
    count = tl.sum(tl.where(row_ids == row, count_of, 0), 0)
    total = tl.sum(count_of, 0) * kv_heads
    workers = tl.minimum(workers, total)
    begin = tl.sum(tl.where(row_ids < row, count_of, 0), 0) * kv_heads
    begin += (run - row * kv_heads) * count
    if count > 0:
        first = _owner(begin, total, workers)
        last = _owner(begin + count - 1, total, workers)
        if first < last:
            members = tl.arange(0, GROUP)
            dims = tl.arange(0, DIM)
            maximum = tl.full([GROUP], float("-inf"), tl.float32)
            total_weight = tl.zeros([GROUP], tl.float32)
            accumulated = tl.zeros([GROUP, DIM], tl.float32)
            for worker in range(first, last + 1):
                at = (worker * 2 + (worker < last).to(tl.int32)) * GROUP + members
                part_maximum = tl.load(sums + at * 2)
                peak = tl.maximum(maximum, part_maximum)
                fade = tl.exp2(maximum - peak)
                gain = tl.exp2(part_maximum - peak)
                total_weight = total_weight * fade + tl.load(sums + at * 2 + 1) * gain
                part = tl.load(partial + at[:, None] * DIM + dims[None, :])
                accumulated = accumulated * fade[:, None] + part * gain[:, None]
                maximum = peak
            out_at = out + (run * group + members).to(tl.int64)[:, None] * HEAD
            mask = (members[:, None] < group) & (dims[None, :] < HEAD)
            total_weight = _with_sink(
                total_weight, maximum, sinks, run - row * kv_heads, group, members, SINKS
            )
            result = accumulated / total_weight[:, None]
            tl.store(out_at + dims[None, :], result.to(out.dtype.element_ty), mask=mask)


def attend(
    q: Tensor,
    pool: Pool,
    tables: Tensor,
    slots: Tensor,
    lengths: Tensor,
    out: Tensor,
    partial: Tensor,
    sums: Tensor,
    *,
    units: int,
    scores: RowScores,
    tuned: TritonTuning,
) -> None:
    """`decode_attention` of checked arguments, with the tensors of a `DecodeScratch`."""
    values = values_of(pool)
    (rows, heads, head_dim), kv_heads, page = q.shape, values.shape[1], values.shape[3]
    shape = {
        "HEAD": head_dim,
        "DIM": triton.next_power_of_2(head_dim),
        "PAGE": page,
        "GROUP": 16,
        "ROWS": triton.next_power_of_2(rows),
        "SINKS": scores.sinks is not None,
    }
    sinks = lengths if scores.sinks is None else scores.sinks
    group, workers = heads // kv_heads, units * tuned.workers
    strides = q.stride(0), values.stride(0), values.stride(1), tables.stride(0)
    _attend[(workers,)](
        *(
            q,
            values,
            exponents_of(pool),
            tables,
            slots,
            lengths,
            sinks,
            out,
            partial,
            sums,
            rows,
            kv_heads,
            group,
            *strides,
        ),
        scores.window,
        scores.scale * LOG2E,
        **shape,
        STAGES=tuned.stages,
        ROUNDED=isinstance(pool, RoundedPool),
        num_warps=tuned.warps,
    )
    combined = rows, kv_heads, group, scores.window, workers
    given = lengths, sinks, out, partial, sums
    _combine[(rows * kv_heads,)](*given, *combined, **shape, num_warps=1)
