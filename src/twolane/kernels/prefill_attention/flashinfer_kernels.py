"""Prefill attention by FlashInfer's FA3 kernel for Hopper, under a plan of our own.

FlashInfer's planner deals tiles to as many lists as the device has SMs, one a block, and its
launcher starts that many blocks. We write the lists ourselves, for the SMs of the lane, and leave
those of the further blocks empty: they end as soon as they are scheduled. Its kernel computes whole
tiles. To split one, its front runs without causal mask in a launch before, with copies of the
queries, one a piece, because a piece's results go where its queries came from; a merge of our own
follows. A batch without reused tokens needs no pages: where the caller has the new keys and values
at hand, FA3 for dense ones reads them by TMA, faster than the gather from pages. Written against
FlashInfer 0.6.13 (`PrefillSM90Plan` and `batch_prefill_sm90.cu`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twolane.kernels.pool import Pool, RoundedPool
from twolane.kernels.prefill_attention.batch import AttentionBatch, NewKV, upload
from twolane.kernels.prefill_attention.schedule import (
    COLUMNS,
    HEAD,
    HIGH,
    LOW,
    MERGE_COLUMNS,
    ROW,
    SLOT,
    TABLE,
    TOKENS,
    BlockSchedule,
    Costs,
    Ints,
    Schedule,
    Segments,
    schedule,
    tiles,
)
from twolane.kernels.prefill_attention.triton_kernels import (
    Merge,
    add_sinks,
    gather_kernel,
    unpack_kernel,
)
from twolane.kernels.runtime.launch import launch
from twolane.kernels.sizes import EMPTY_KEYS, FILLED, tile_tokens

_PAGED = Costs(block=96, item=288, split=1200)
_DENSE = Costs(block=128, item=288, split=0)
_MAX_BLOCKS = 511
"""Blocks that its launcher may start: a list for each, so more than any device has SMs."""
_NHD, _HND = 0, 1
_FULL, _CAUSAL = 0, 1
_PART = 32
_SEGMENTS = 64
"""Prompts of a pass that a graph's lists have room for."""


def filled(batch: AttentionBatch) -> float:
    """Return the share of the rows of a batch's tiles that have a token, weighted by their keys."""
    new, keys = batch.segments.new, batch.segments.reused + batch.segments.new
    rows = -(-new // tile_tokens(batch.dim)) * tile_tokens(batch.dim)
    return float((new * keys).sum() / (rows * keys).sum())


def problem(dtype: torch.dtype, dim: int, device: torch.device) -> str | None:
    """Why FA3 cannot be used here; None if it can."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"FA3 has no {dtype}"
    if dim not in (64, 128):
        return f"FA3 is used for heads of 64 and 128, not {dim}"
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return "FA3 needs a Hopper GPU (sm_90)"
    return _load(dtype, dim)[1]


@lru_cache
def _load(dtype: torch.dtype, dim: int) -> tuple[Any, str | None]:
    """FlashInfer's module for a type and a head, or why there is none. May compile for minutes."""
    try:
        generate = import_module("flashinfer.jit.attention").gen_batch_prefill_module
        types = (dtype, dtype, dtype, torch.int32)
        no_rope, plain = 0, (False, False, False)  # no window, no soft cap, no fp16 scores
        return generate("fa3", *types, dim, dim, no_rope, *plain).build_and_load(), None
    except ImportError as error:
        return None, f"FlashInfer is not installed ({error})"
    except Exception as error:  # whatever its compilation raises
        text = str(error).strip().splitlines() or [""]
        return None, f"FlashInfer cannot load FA3: {type(error).__name__}: {text[0][:200]}"


@dataclass(frozen=True)
class _Launch:
    """Work lists of one launch, in FlashInfer's order."""

    lists: Tensor
    """FlashInfer's integer workspace."""
    plan_info: list[int]
    """Byte offsets of the lists in it, and that heads do not share them."""

    def paged(
        self,
        module: Any,
        batch: AttentionBatch,
        q: Tensor,
        pool: Tensor,
        out: Tensor,
        lse: Tensor | None,
        mask: int,
    ) -> None:
        """Attend to the pages; `lse` is float32 [rows of q, heads], in base 2."""
        unused = self.lists
        kv = pool[:, :, 0], pool[:, :, 1]
        # qo_indptr, paged_kv_indptr and paged_kv_last_page_len: the lists have them.
        where = unused, unused, batch.pages, unused
        common = self._common(batch, out, lse, mask, _HND)
        module.paged_run(unused, self.lists, self.plan_info, q, *kv, *where, *common)

    def dense(
        self,
        module: Any,
        batch: AttentionBatch,
        q: Tensor,
        new: NewKV,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Attend to keys and values in the order of the rows; see `paged`."""
        unused = self.lists
        common = self._common(batch, out, lse, _CAUSAL, _NHD)
        module.ragged_run(unused, self.lists, self.plan_info, q, *new, unused, unused, *common)

    @staticmethod
    def _common(
        batch: AttentionBatch, out: Tensor, lse: Tensor | None, mask: int, layout: int
    ) -> tuple[Any, ...]:
        no_dependent_launch = False
        # Prefix lengths, positions and longest item of multi-item scoring; scales of v.
        tensors = None, None, None, None
        soft_cap, v_scale, item_length = 0.0, 1.0, 0
        scalars = soft_cap, batch.scale, v_scale, item_length
        return out, lse, mask, layout, -1, no_dependent_launch, *tensors, *scalars


def _lse(batch: AttentionBatch) -> Tensor:
    """Return room in the batch's workspace for log-sum-exps, float32 [T, heads]."""
    lse = batch.workspace.take("lse", batch.tokens * batch.heads, torch.float32)
    return lse[: batch.tokens * batch.heads].view(-1, batch.heads)


@dataclass(frozen=True)
class _Fronts:
    """The launch of the split tiles' fronts, and what goes around it."""

    launch: _Launch
    pieces: Tensor
    slots: int
    slot_q: Tensor
    """[rows, heads, dim]. Slot s of head h lies at row (first_place + s - h) * tile rows; heads are
    one slot apart, so they overlap, and each slot is used by the one that it was made for."""
    slot_out: Tensor
    """Alike."""
    slot_lse: Tensor
    """[rows, heads], contiguous."""
    merge: Merge

    @classmethod
    def of(
        cls, batch: AttentionBatch, pieces: int, merges: int, buffer: Tensor, sent: Sequence[Tensor]
    ) -> "_Fronts":
        """`sent`: the lists of the launch, the pieces, the merges."""
        heads, rows = batch.heads, tile_tokens(batch.dim)
        slots = pieces + heads - 1
        shape, strides = (slots * rows, heads, batch.dim), (batch.dim, rows * batch.dim, 1)
        storage = (slots + heads) * rows * batch.dim
        take = batch.workspace.take
        slot_q = take("slot_q", storage, batch.dtype).as_strided(shape, strides)
        slot_out = take("slot_out", storage, batch.dtype).as_strided(shape, strides)
        slot_lse = take("slot_lse", slots * rows * heads, torch.float32)
        slot_lse = slot_lse[: slots * rows * heads].view(-1, heads)
        lse = _lse(batch)
        layout = {"first_place": heads - 1, "lse_stride": heads, "lse_shift": 1}
        merge = Merge(sent[-1], merges, rows, 1, lse, slot_out, slot_lse, **layout)
        launch = _Launch(buffer, _plan_info(sent[:_LISTS]))
        return cls(launch, sent[_LISTS], pieces, slot_q, slot_out, slot_lse, merge)

    def run(self, module: Any, batch: AttentionBatch, q: Tensor, pool: Tensor) -> None:
        """Fill the slots."""
        merge = self.merge
        launch(
            gather_kernel, (self.slots, merge.rows // _PART), q, q.stride(0), self.slot_q,
            self.pieces,
            DIM=batch.dim, ROWS=merge.rows, FIRST_PLACE=merge.first_place, PART=_PART,
        )  # fmt: skip
        self.launch.paged(module, batch, self.slot_q, pool, self.slot_out, self.slot_lse, _FULL)


@dataclass(frozen=True)
class FlashInferProgram:
    """A batch's attention by FA3 on a lane's SMs."""

    batch: AttentionBatch
    module: Any
    main: _Launch
    fronts: _Fronts | None

    @classmethod
    def plan(cls, batch: AttentionBatch, units: int) -> "FlashInferProgram":
        """Deal the batch's tiles to `units` SMs, splitting some where that is faster."""
        plan = _paged(batch, units)
        buffer, sent = upload(_parts(batch, plan), batch.workspace.device)
        module, _ = _load(batch.dtype, batch.dim)
        fronts = None
        if plan.slots:
            fronts = _Fronts.of(batch, plan.slots, len(plan.merges), buffer, sent[_LISTS:])
        return cls(batch, module, _Launch(buffer, _plan_info(sent[:_LISTS])), fronts)

    def run(
        self, q: Tensor, pool: Pool, out: Tensor, new: NewKV | None, sinks: Tensor | None
    ) -> None:
        """Launch it; as `prefill_attention`, with a pool that is not rounded."""
        assert isinstance(pool, Tensor)
        batch, fronts = self.batch, self.fronts
        if fronts is not None:
            fronts.run(self.module, batch, q, pool)
        lse = None if fronts is None and sinks is None else _lse(batch)
        self.main.paged(self.module, batch, q, pool, out, lse, _CAUSAL)
        if sinks is not None and lse is not None:
            add_sinks(batch, out, lse, sinks)
        if fronts is not None:
            fronts.merge.run(batch, out)


UNPACKED_TOKENS = 32_768
"""Most tokens of a batch, reused and new, whose keys and values are widened for FA3: 134 MB of
scratch memory for 8 KV heads of 128."""


def unpackable(batch: AttentionBatch) -> bool:
    """Return whether the scratch memory for a batch's widened pages is small enough."""
    return len(batch.pages) * batch.page_size <= UNPACKED_TOKENS


@dataclass(frozen=True)
class Unpacked:
    """Room for the pages of a batch in its own type, which FA3 reads in the order of its lists."""

    pages: Tensor
    """int32 0, 1, 2, …: where each page of the lists is in the room."""
    count: Tensor
    """The number of pages in the room, int32 [1]."""
    room: Tensor
    """[pages, kv_heads, 2, page_size, dim]"""

    @classmethod
    def of(cls, batch: AttentionBatch, count: int) -> "Unpacked":
        """Room for this many pages, in the batch's workspace."""
        shape = count, batch.kv_heads, 2, batch.page_size, batch.dim
        room = batch.workspace.take("unpacked", math.prod(shape), batch.dtype)
        most = UNPACKED_TOKENS // batch.page_size
        numbers = torch.arange(max(count, most) + 1, dtype=torch.int32, device=room.device)
        return cls(numbers[:-1], numbers[count:][:1], room[: math.prod(shape)].view(shape))

    def fill(self, pool: RoundedPool, pages: Tensor, count: Tensor) -> None:
        """Widen the first `count`, int32 [1], of these pages of the pool."""
        _, kv_heads, _, page_size, dim = self.room.shape
        launch(
            unpack_kernel, (len(self.room), kv_heads), pool.values, pool.exponents, pages, count,
            self.room,
            TOKENS=2 * page_size, DIM=dim,
        )  # fmt: skip


@dataclass(frozen=True)
class UnpackingProgram:
    """A batch's attention by FA3 over a rounded pool, whose pages it widens before."""

    pages: Tensor
    """The batch's pages of the pool."""
    unpacked: Unpacked
    program: FlashInferProgram

    @classmethod
    def plan(cls, batch: AttentionBatch, units: int) -> "UnpackingProgram":
        """As `FlashInferProgram.plan`."""
        unpacked = Unpacked.of(batch, len(batch.pages))
        inner = FlashInferProgram.plan(replace(batch, pages=unpacked.pages), units)
        return cls(batch.pages, unpacked, inner)

    def run(
        self, q: Tensor, pool: Pool, out: Tensor, new: NewKV | None, sinks: Tensor | None
    ) -> None:
        """Launch it; as `prefill_attention`."""
        assert isinstance(pool, RoundedPool)
        self.unpacked.fill(pool, self.pages, self.unpacked.count)
        self.program.run(q, self.unpacked.room, out, new, sinks)


class Replayed:
    """Attention by FA3 in CUDA graphs: all that differs between batches is read at fixed places.

    One batch's at a time: what is written there and what was captured of `run` are for the same
    stream.

    Args:
        batch: any of these heads, of this type, in these pages; nobody else takes of its workspace.
        units: SMs.
        rows: Number of rows of the largest pass.
        rounded: the pool is a `RoundedPool`.
    """

    def __init__(self, batch: AttentionBatch, units: int, rows: int, rounded: bool = False) -> None:
        self._units, self._module = units, _load(batch.dtype, batch.dim)[0]
        items = batch.heads * (rows // tile_tokens(batch.dim) + _SEGMENTS)
        self._merges = 2 * units  # the most tiles that are split
        self._pieces = self._merges + units
        fronts = [*_list_sizes(self._pieces), COLUMNS * self._pieces, MERGE_COLUMNS * self._merges]
        self.sizes = [*_list_sizes(items), *fronts]
        """Largest sizes of the lists that `parts` makes."""
        self._batch = replace(batch, tokens=rows)
        self._memory = self._pages = self._count = batch.pages
        self._lists: Sequence[Tensor] = ()
        most = UNPACKED_TOKENS // batch.page_size
        self._unpacked = Unpacked.of(batch, most) if rounded else None
        self._listed = batch.pages
        self.max_pages = most if rounded else None
        """Most pages of a batch, where there is a bound."""

    def read(self, memory: Tensor, lists: Sequence[Tensor], pages: Tensor, count: Tensor) -> None:
        """Set where a batch's lists, pages and their number, int32 [1], will be, as views of
        `memory`, for all that is captured."""
        self._memory, self._lists, self._listed, self._count = memory, lists, pages, count
        self._pages = pages if self._unpacked is None else self._unpacked.pages
        self._program(True, self._batch.tokens)  # the workspace is as large as any needs it

    def parts(self, segments: Segments) -> tuple[list[Ints], bool] | None:
        """Return a batch's lists, and whether tiles are split; None if they do not fit or Triton is
        faster.

        Its pages go where `Segments.tables` has them.
        """
        batch = replace(self._batch, segments=segments)
        plan = _paged(batch, self._units)
        parts = _parts(batch, plan)
        if any(part.size > size for part, size in zip(parts, self.sizes, strict=False)):
            return None
        if filled(batch) < FILLED and _keys(plan) > EMPTY_KEYS * self._units:
            return None
        nothing = [_NOTHING] * (len(self.sizes) - len(parts))
        return [*parts, *nothing], plan.slots > 0

    def run(self, split: bool, q: Tensor, pool: Pool, out: Tensor) -> None:
        """Launch it, for a graph; q and out [rows of the pass, heads, dim]. Rows that are of no
        segment stay as they are in `out`."""
        if self._unpacked is not None:
            assert isinstance(pool, RoundedPool)
            self._unpacked.fill(pool, self._listed, self._count)
            pool = self._unpacked.room
        self._program(split, len(q)).run(q, pool, out, None, None)

    def _program(self, split: bool, rows: int) -> "FlashInferProgram":
        batch, lists = replace(self._batch, tokens=rows, pages=self._pages), self._lists
        main, fronts = _Launch(self._memory, _plan_info(lists[:_LISTS])), None
        if split:
            fronts = _Fronts.of(batch, self._pieces, self._merges, self._memory, lists[_LISTS:])
        return FlashInferProgram(batch, self._module, main, fronts)


@dataclass(frozen=True)
class DenseProgram:
    """Attention of a batch without reused tokens by FA3, on keys and values outside the pool."""

    batch: AttentionBatch
    module: Any
    launch: _Launch

    @classmethod
    def plan(cls, batch: AttentionBatch, units: int) -> "DenseProgram":
        """Deal the batch's tiles to `units` SMs."""
        # A sequence's keys are found by its first row, as if by pages of one token.
        segments = replace(batch.segments, tables=batch.segments.rows)
        items, cost = tiles(segments, tile_tokens(batch.dim), batch.heads, None, _DENSE)
        plan = schedule(items, cost, units, _DENSE, _DENSE.block, own_launch=True, split=False)
        buffer, sent = upload(_lists(plan.main, 1), batch.workspace.device)
        module, _ = _load(batch.dtype, batch.dim)
        return cls(batch, module, _Launch(buffer, _plan_info(sent)))

    def run(
        self, q: Tensor, pool: Pool, out: Tensor, new: NewKV | None, sinks: Tensor | None
    ) -> None:
        """Launch it; as `prefill_attention`."""
        assert new is not None
        lse = None if sinks is None else _lse(self.batch)
        self.launch.dense(self.module, self.batch, q, new, out, lse)
        if sinks is not None and lse is not None:
            add_sinks(self.batch, out, lse, sinks)


_LISTS = 7
_NOTHING = np.zeros(0, dtype=np.int64)


def _paged(batch: AttentionBatch, units: int) -> Schedule:
    """Schedule the batch's tiles on `units` SMs, some split where that is faster."""
    items, cost = tiles(batch.segments, tile_tokens(batch.dim), batch.heads, None, _PAGED)
    granule = math.lcm(_PAGED.block, batch.page_size)
    return schedule(items, cost, units, _PAGED, granule, own_launch=True, split=True)


def _parts(batch: AttentionBatch, plan: Schedule) -> list[Ints]:
    """Return a plan's lists to upload: of the tiles, and of fronts, pieces and merges if any."""
    parts = _lists(plan.main, batch.page_size)
    if plan.fronts is not None:
        pieces, rows = plan.fronts.items.copy(), tile_tokens(batch.dim)
        # Their queries are in the slots.
        pieces[:, ROW] = (pieces[:, SLOT] + batch.heads - 1 - pieces[:, HEAD]) * rows
        parts += _lists(BlockSchedule(pieces, plan.fronts.bounds), batch.page_size)
        parts += [plan.fronts.items, plan.merges]
    return parts


def _keys(plan: Schedule) -> int:
    """Return the number of keys that all items read, those of fronts included."""
    works = [plan.main] if plan.fronts is None else [plan.main, plan.fronts]
    return sum(int((work.items[:, HIGH] - work.items[:, LOW]).sum()) for work in works)


def _list_sizes(items: int) -> list[int]:
    """Sizes of the lists that `_lists` makes."""
    return [items, items, items, items, items, _MAX_BLOCKS + 1, items]


def _lists(work: BlockSchedule, page_size: int) -> list[Ints]:
    """Rows, pages, tokens, keys and heads of the items, bounds of the blocks' lists, and zeros."""
    items = work.items
    bounds = np.full(_MAX_BLOCKS + 1, work.bounds[-1])
    bounds[: len(work.bounds)] = work.bounds
    pages = items[:, TABLE] + items[:, LOW] // page_size
    keys = items[:, HIGH] - items[:, LOW]
    zeros = np.zeros_like(keys)
    return [items[:, ROW], pages, items[:, TOKENS], keys, items[:, HEAD], bounds, zeros]


def _plan_info(lists: Sequence[Tensor]) -> list[int]:
    """`PrefillPlanSM90Info`: byte offsets of the lists, and whether all heads share them.

    Each item is a sequence of one tile, so the tile's index in its sequence is 0 in all of them; so
    is the sequence's in the batch, which this kernel does not read.
    """
    rows, pages, tokens, keys, heads, bounds, zeros = (4 * int(t.storage_offset()) for t in lists)
    return [zeros, rows, pages, tokens, keys, heads, bounds, zeros, 0]
