"""Prefill attention in Triton: any group size, head dimension, page size, window and dtype.

Bounds and layouts are as in `prefill_attention.py`, which launches these kernels; the merge serves
FlashInfer's split tiles, too.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from twolane.kernels.pool import Pool, RoundedPool, exponents_of, values_of
from twolane.kernels.prefill_attention.batch import AttentionBatch, NewKV, upload
from twolane.kernels.prefill_attention.schedule import Costs, schedule, tiles
from twolane.kernels.runtime.launch import launch, power_of_2

_MERGE_ROWS = 4


@dataclass(frozen=True)
class Tiling:
    """Shape of a block's work."""

    rows: int
    """Queries of a block: new tokens times the query heads that share a KV head."""
    keys: int
    """Keys computed together."""
    warps: int
    stages: int
    """Depth of the pipeline of loads."""
    blocks: int
    """Resident on one SM."""
    item: int = 256
    """Cost of an item beside its keys, in keys."""
    split: int = 512
    """Cost of splitting, in keys."""

    @property
    def costs(self) -> Costs:
        """Costs for the schedule."""
        return Costs(self.keys, self.item, self.split)


def tiling(rows: int, dim: int, dtype: torch.dtype) -> Tiling:
    """Return the tiling for a longest segment of `rows` rows (new tokens x group)."""
    if dim > 256:
        wide = dtype == torch.float32
        return Tiling(16 if wide or rows <= 16 else 32, 16 if wide else 32, 4, 1 if wide else 2, 1)
    if dtype == torch.float32:
        return Tiling(16 if rows <= 16 else 32, 32, 4, 2, 2 if dim <= 128 else 1)
    if rows <= 16:
        return Tiling(16, 64, 4, 3, 2 if dim <= 128 else 1)
    if rows <= 64 or dim > 128:
        return Tiling(64, 64, 4, 3 if dim <= 128 else 2, 2 if dim <= 128 else 1)
    return Tiling(128, 64 if dim > 64 else 128, 8, 3, 1)


@triton.jit
def scaled(values, exponents, dtype: tl.constexpr) -> tl.tensor:
    """Return e4m3 values [tokens, dim] scaled by exponents [tokens]; exact in bfloat16."""
    factor = ((exponents.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return (values.to(tl.float32) * factor[:, None]).to(dtype)


@triton.jit
def _attend(
    acc, total, top, block, query, pool, exponents, pages, position, low, stop, high, scale,
    HEAD_RUN: tl.constexpr, PAGE_RUN: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
    ROUNDED: tl.constexpr, PRECISION: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Fold the keys [low, stop) into the running softmax of a tile; nothing is read from `high` on.

    Without a mask every key is seen by every row. `position` is each row's place in its sequence,
    `pool` and `exponents` point at the head's part of page 0. `block` holds the pages of the keys
    at `low`, and comes back with those at `stop`: loaded one step ahead, they do not stand between
    the pipelined loads and their addresses.
    """
    dims = tl.arange(0, WIDTH)
    for start in range(low, stop, KEYS):
        key = start + tl.arange(0, KEYS)
        line = block.to(tl.int64) * (PAGE_RUN // DIM) + tl.minimum(key, high - 1) % PAGE
        places = pool + line[:, None] * DIM + dims[None, :]
        if WIDTH > DIM:
            k = tl.load(places, mask=(dims < DIM)[None, :], other=0.0)
        else:
            k = tl.load(places)
        if ROUNDED:
            k = scaled(k, tl.load(exponents + line), query.dtype)
        score = tl.dot(query, k.T, input_precision=PRECISION)
        block = tl.load(pages + tl.minimum(key + KEYS, high - 1) // PAGE)
        if MASKED:
            seen = (key[None, :] <= position[:, None]) & (key < high)[None, :]
            if WINDOW > 0:
                seen = seen & (key[None, :] > position[:, None] - WINDOW)
            score = tl.where(seen, score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1) * scale)
        # Rows that see none of the masked keys so far have no maximum yet.
        base = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
        shrink = tl.math.exp2(top - base)
        weight = tl.math.exp2(score * scale - base[:, None])
        total = total * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None]
        if WIDTH > DIM:
            v = tl.load(places + HEAD_RUN, mask=(dims < DIM)[None, :], other=0.0)
        else:
            v = tl.load(places + HEAD_RUN)
        if ROUNDED:
            v = scaled(v, tl.load(exponents + line + HEAD_RUN // DIM), query.dtype)
        acc = tl.dot(weight.to(v.dtype), v, acc, input_precision=PRECISION)
        top = new_top
    return acc, total, top, block


@triton.jit
def prefill_kernel(
    q, q_stride, pool, exponents, out, out_stride, lse, slot_out, slot_lse, pages, items, bounds,
    sinks, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    ROUNDED: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Compute the items [bounds[b], bounds[b + 1]) of `items` in program b.

    A tile's rows are its tokens times the `GROUP` query heads of one KV head, heads fastest, so
    that the group shares each key that is loaded. `scale` is log2(e) times that of the scores.
    """
    KV_HEADS: tl.constexpr = HEADS // GROUP
    HEAD_RUN: tl.constexpr = PAGE * DIM
    PAGE_RUN: tl.constexpr = KV_HEADS * 2 * PAGE * DIM
    program = tl.program_id(0)
    row = tl.arange(0, ROWS)
    dims = tl.arange(0, WIDTH)
    token = row // GROUP
    for index in range(tl.load(bounds + program), tl.load(bounds + program + 1)):
        item = items + index * 8
        first = tl.load(item).to(tl.int64)
        tokens = tl.load(item + 1)
        start = tl.load(item + 2)
        table = pages + tl.load(item + 3)
        low = tl.load(item + 4)
        high = tl.load(item + 5)
        head = tl.load(item + 6)
        slot = tl.load(item + 7)

        valid = token < tokens
        query_head = head * GROUP + row % GROUP
        inside = valid[:, None] & (dims < DIM)[None, :]
        places = (first + token)[:, None] * q_stride + query_head[:, None] * DIM + dims[None, :]
        query = tl.load(q + places, mask=inside, other=0.0)
        head_pool = pool + head.to(tl.int64) * 2 * HEAD_RUN
        powers = exponents + head * 2 * PAGE
        position = start + token

        acc = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
        total = tl.zeros([ROWS], dtype=tl.float32)
        top = tl.full([ROWS], float("-inf"), dtype=tl.float32)
        block = tl.load(table + tl.minimum(low + tl.arange(0, KEYS), high - 1) // PAGE)
        # Keys before `left` are out of some row's window, those from `right` in some row's future.
        left = low
        right = tl.maximum(low, tl.minimum(start + 1, high) // KEYS * KEYS)
        if WINDOW > 0:
            left = tl.maximum(start + tokens - WINDOW, low)
            left = tl.minimum((left + KEYS - 1) // KEYS * KEYS, right)
            acc, total, top, block = _attend(
                acc, total, top, block, query, head_pool, powers, table, position, low, left, high,
                scale, HEAD_RUN, PAGE_RUN, KEYS, PAGE, DIM, WIDTH, WINDOW, True, ROUNDED, PRECISION,
            )  # fmt: skip
        acc, total, top, block = _attend(
            acc, total, top, block, query, head_pool, powers, table, position, left, right, high,
            scale, HEAD_RUN, PAGE_RUN, KEYS, PAGE, DIM, WIDTH, WINDOW, False, ROUNDED, PRECISION,
        )  # fmt: skip
        acc, total, top, block = _attend(
            acc, total, top, block, query, head_pool, powers, table, position, right, high, high,
            scale, HEAD_RUN, PAGE_RUN, KEYS, PAGE, DIM, WIDTH, WINDOW, True, ROUNDED, PRECISION,
        )  # fmt: skip

        if SINKS:  # once for a tile: its end has it, not the pieces of its front
            sink = tl.load(sinks + query_head) * 1.4426950408889634
            total += tl.where(slot < 0, tl.math.exp2(sink - top), 0.0)
        acc = acc / total[:, None]
        if slot >= 0:
            base = slot.to(tl.int64) * ROWS
            to = (base + row)[:, None] * DIM + dims[None, :]
            tl.store(slot_out + to, acc.to(slot_out.dtype.element_ty), mask=inside)
            tl.store(slot_lse + base + row, top + tl.math.log2(total), mask=valid)
        else:
            to = (first + token)[:, None] * out_stride + query_head[:, None] * DIM + dims[None, :]
            tl.store(out + to, acc.to(out.dtype.element_ty), mask=inside)
            if slot == -2:
                to_lse = (first + token) * HEADS + query_head
                tl.store(lse + to_lse, top + tl.math.log2(total), mask=valid)


@triton.jit
def merge_kernel(
    out, out_stride, lse, slot_out, slot_lse, merges,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, FIRST_PLACE: tl.constexpr, LSE_STRIDE: tl.constexpr,
    LSE_SHIFT: tl.constexpr, PART: tl.constexpr, SLOTS: tl.constexpr,
) -> None:  # fmt: skip
    """Combine the slots of one split tile with its tail, `PART` rows a program.

    A few rows and `SLOTS` slots at a time: all of them wait for memory together, not in turn.

    With p = FIRST_PLACE + s, slot s of head h has its rows at p * ROWS of `slot_out` [, DIM], and
    its log-sum-exps at (p - LSE_SHIFT * h) * ROWS of `slot_lse` [, LSE_STRIDE], in column
    LSE_SHIFT * h.
    """
    merge = merges + tl.program_id(0) * 5
    first = tl.load(merge).to(tl.int64)
    tokens = tl.load(merge + 1)
    if tokens == 0:  # a graph has as many programs as any batch needs
        return
    head = tl.load(merge + 2)
    slot = tl.load(merge + 3).to(tl.int64)
    slots = tl.load(merge + 4)
    row = tl.program_id(1) * PART + tl.arange(0, PART)
    dims = tl.arange(0, WIDTH)
    token = row // GROUP
    valid = token < tokens
    inside = valid[:, None] & (dims < DIM)[None, :]
    query_head = head * GROUP + row % GROUP
    to = out + (first + token)[:, None] * out_stride + query_head[:, None] * DIM + dims[None, :]
    top = tl.load(lse + (first + token) * HEADS + query_head, mask=valid, other=0.0)
    total = tl.full([PART], 1.0, dtype=tl.float32)
    acc = tl.load(to, mask=inside, other=0.0).to(tl.float32)
    for begin in range(0, slots, SLOTS):
        nth = begin + tl.arange(0, SLOTS)
        place = FIRST_PLACE + slot + nth
        there = (nth < slots)[:, None] & valid[None, :]
        from_lse = ((place - LSE_SHIFT * head) * ROWS)[:, None] + row[None, :]
        from_lse = from_lse * LSE_STRIDE + LSE_SHIFT * head
        weight = tl.load(slot_lse + from_lse, mask=there, other=float("-inf"))
        source = ((place * ROWS)[:, None] + row[None, :])[:, :, None] * DIM + dims[None, None, :]
        there_too = there[:, :, None] & (dims < DIM)[None, None, :]
        value = tl.load(slot_out + source, mask=there_too, other=0.0).to(tl.float32)
        new_top = tl.maximum(top, tl.max(weight, 0))
        shrink = tl.math.exp2(top - new_top)
        share = tl.math.exp2(weight - new_top[None, :])
        acc = acc * shrink[:, None] + tl.sum(value * share[:, :, None], 0)
        total = total * shrink + tl.sum(share, 0)
        top = new_top
    tl.store(to, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def gather_kernel(
    q, q_stride, slot_q, pieces,
    DIM: tl.constexpr, ROWS: tl.constexpr, FIRST_PLACE: tl.constexpr, PART: tl.constexpr,
) -> None:  # fmt: skip
    """Copy the queries of each piece of a front to its slot, `PART` rows a program."""
    piece = pieces + tl.program_id(0) * 8
    first = tl.load(piece).to(tl.int64)
    tokens = tl.load(piece + 1)
    if tokens == 0:  # as in `merge_kernel`
        return
    head = tl.load(piece + 6)
    row = tl.program_id(1) * PART + tl.arange(0, PART)
    dims = tl.arange(0, DIM)
    inside = (row < tokens)[:, None]
    source = (first + row)[:, None] * q_stride + head * DIM + dims[None, :]
    value = tl.load(q + source, mask=inside, other=0.0)
    place = (FIRST_PLACE + tl.load(piece + 7).to(tl.int64)) * ROWS
    tl.store(slot_q + (place + row)[:, None] * DIM + dims[None, :], value)


@triton.jit
def sink_kernel(
    out, out_stride, lse, sinks,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """Add the sinks of all heads to the attention of one token, and to its log-sum-exps."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK)
    dims = tl.arange(0, WIDTH)
    there = head < HEADS
    at = lse + token * HEADS + head
    old = tl.load(at, mask=there, other=0.0)
    sink = tl.load(sinks + head, mask=there, other=0.0) * 1.4426950408889634
    top = tl.maximum(old, sink)
    total = top + tl.math.log2(tl.math.exp2(old - top) + tl.math.exp2(sink - top))
    inside = there[:, None] & (dims < DIM)[None, :]
    places = out + token * out_stride + head[:, None] * DIM + dims[None, :]
    value = tl.load(places, mask=inside, other=0.0)
    share = tl.math.exp2(old - total)
    tl.store(places, (value.to(tl.float32) * share[:, None]).to(value.dtype), mask=inside)
    tl.store(at, total, mask=there)


def add_sinks(batch: AttentionBatch, out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Add sinks, float32 [heads], to attention without them.

    Args:
        batch: The batch, none of whose rows belongs to no segment.
        out: Its attention [T, heads, dim], which is scaled in place.
        lse: Base-2 log-sum-exps, float32 [T, heads], which get those of the sinks.
        sinks: Scores, base e.
    """
    launch(
        sink_kernel, (batch.tokens,), out, out.stride(0), lse, sinks,
        HEADS=batch.heads, DIM=batch.dim, BLOCK=power_of_2(batch.heads),
        WIDTH=power_of_2(batch.dim), num_warps=8,
    )  # fmt: skip


@triton.jit
def unpack_kernel(
    pool, exponents, pages, count, out, TOKENS: tl.constexpr, DIM: tl.constexpr
) -> None:
    """Widen one head's keys and values of one page, `TOKENS` lines, to the type of `out`."""
    place = tl.program_id(0)
    if place >= tl.load(count):  # a graph has as many programs as any batch needs
        return
    page = tl.load(pages + place).to(tl.int64)
    line = tl.arange(0, TOKENS)
    first = (page * tl.num_programs(1) + tl.program_id(1)) * TOKENS
    dims = tl.arange(0, DIM)
    values = tl.load(pool + (first + line)[:, None] * DIM + dims[None, :])
    wide = scaled(values, tl.load(exponents + first + line), out.dtype.element_ty)
    to = (place.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * TOKENS + line
    tl.store(out + to[:, None] * DIM + dims[None, :], wide)


@dataclass(frozen=True)
class Merge:
    """Combines the slots of split tiles with their tails; see `merge_kernel` for the layout."""

    merges: Tensor
    """The merges of `Schedule`, flat, on the device."""
    count: int
    rows: int
    """Rows of a tile."""
    group: int
    """Query heads of a tile."""
    lse: Tensor
    slot_out: Tensor
    slot_lse: Tensor
    first_place: int
    lse_stride: int
    lse_shift: int

    def run(self, batch: AttentionBatch, out: Tensor) -> None:
        """Launch it."""
        launch(
            merge_kernel, (self.count, self.rows // _MERGE_ROWS), out, out.stride(0), self.lse,
            self.slot_out, self.slot_lse, self.merges,
            HEADS=batch.heads, GROUP=self.group, DIM=batch.dim, WIDTH=power_of_2(batch.dim),
            ROWS=self.rows, FIRST_PLACE=self.first_place, LSE_STRIDE=self.lse_stride,
            LSE_SHIFT=self.lse_shift, PART=_MERGE_ROWS, SLOTS=8,
        )  # fmt: skip


@dataclass(frozen=True)
class TritonProgram:
    """A batch's attention by `prefill_kernel` on a lane's SMs."""

    batch: AttentionBatch
    tiling: Tiling
    blocks: int
    items: Tensor
    bounds: Tensor
    merge: Merge
    """Merge buffers, which are passed where nothing is split, too."""

    @classmethod
    def plan(
        cls, batch: AttentionBatch, units: int, shape: Tiling | None = None
    ) -> "TritonProgram":
        """Deal the batch's tiles to `units` SMs; `shape` None: `tiling` chooses."""
        longest = int(batch.segments.new.max()) * batch.group
        shape = shape or tiling(longest, batch.dim, batch.dtype)
        costs, blocks = shape.costs, units * shape.blocks
        tokens = shape.rows // batch.group
        items, cost = tiles(batch.segments, tokens, batch.kv_heads, batch.window, costs)
        plan = schedule(
            items, cost, blocks, costs, shape.keys, own_launch=False, split=batch.window is None
        )
        lists = (plan.main.items, plan.main.bounds, plan.merges)
        _, (listed, bounds, merges) = upload(lists, batch.workspace.device)
        take, float32 = batch.workspace.take, torch.float32
        merge = Merge(
            merges,
            len(plan.merges),
            shape.rows,
            batch.group,
            take("lse", batch.tokens * batch.heads if plan.slots else 0, float32),
            take("slot_out", plan.slots * shape.rows * batch.dim, batch.dtype),
            take("slot_lse", plan.slots * shape.rows, float32),
            first_place=0,
            lse_stride=1,
            lse_shift=0,
        )
        return cls(batch, shape, blocks, listed, bounds, merge)

    def run(
        self, q: Tensor, pool: Pool, out: Tensor, new: NewKV | None, sinks: Tensor | None
    ) -> None:
        """Launch it; as `prefill_attention`."""
        batch, merge = self.batch, self.merge
        launch(
            prefill_kernel, (self.blocks,), q, q.stride(0), values_of(pool), exponents_of(pool),
            out, out.stride(0), merge.lse, merge.slot_out, merge.slot_lse, batch.pages, self.items,
            self.bounds, merge.lse if sinks is None else sinks, batch.scale * math.log2(math.e),
            HEADS=batch.heads, GROUP=batch.group, DIM=batch.dim, WIDTH=power_of_2(batch.dim),
            PAGE=batch.page_size, WINDOW=batch.window or 0, ROWS=self.tiling.rows,
            KEYS=self.tiling.keys, ROUNDED=isinstance(pool, RoundedPool), SINKS=sinks is not None,
            PRECISION="ieee" if batch.dtype == torch.float32 else "tf32",
            num_warps=self.tiling.warps, num_stages=self.tiling.stages,
        )  # fmt: skip
        if merge.count:
            merge.run(batch, out)
