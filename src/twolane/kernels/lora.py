"""LoRA products: x @ A.T @ B.T with each row's own adapter.

The rows of a pass are dealt into tiles of one adapter each, on the device, so that a graph of a
pass serves whatever adapters its rows have (`RowTiles.arrange`). A product then takes two kernels.
The first (*shrink*) multiplies a tile with parts of its adapter's A and keeps their sums apart; it
goes in front of the base's product, which loads its weights meanwhile. The second (*expand*) adds
these sums times B to what that product has written. Both read an adapter's matrices once for all
rows of a tile, and return where a tile has no rows or its adapter no part in the product. Sums are
made in an order that no other row has a part in.

As in `fused.py`, kernels start early on Hopper. Adapters and tiles are read before the wait: the
first are written while no launch names them, and `arrange` ends with a kernel that is launched
plainly.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from twolane.kernels.activations import Activations, Quantised
from twolane.kernels.fused import launch_options
from twolane.kernels.runtime.launch import launch, power_of_2

MIN_RANK = 16
"""Least rank that a pool has room for, because matrix units multiply that many numbers at once."""
_STEP_ROWS = 128
"""The most rows of a pass that is taken for a decode step, in which many rows have an adapter of
their own."""
_FEW, _SMALL, _LARGE = 4, 16, 64
"""Rows of a tile."""
_TILE_ROWS = ((_STEP_ROWS, _FEW), (1024, _SMALL))
"""Rows of a tile, for passes of up to this many rows; `_LARGE` in larger ones."""
_SPLITS = ((_STEP_ROWS, 32), (1024, 4), (2048, 2))
"""The most parts that the inputs of a product are cut into, for passes of up to this many rows;
those of larger ones are not cut."""
_NO_END = 1 << 30
"""More rows than any pass has, a multiple of 16 as all limits are: one compiled kernel serves."""


@dataclass(frozen=True, slots=True)
class AdapterMatrices:
    """The matrices of all adapters of a pool that add to one product."""

    a: Tensor
    """[slots, sections * rank, inputs], contiguous, of the activations' type"""
    b: Tensor
    """[slots, rank, outputs], contiguous, scaled"""
    ranks: Tensor
    """The largest rank of each slot's sections, int32 [slots]; 0: it adds nothing here."""
    ends: tuple[int, ...]
    """The output after the last one of each section; up to three sections."""

    @property
    def rank(self) -> int:
        """Room for the rank of a section, a power of two."""
        return self.b.shape[1]

    @property
    def outputs(self) -> int:
        """Outputs of the product."""
        return self.b.shape[2]


@dataclass(frozen=True, slots=True)
class RowTiles:
    """The rows of a pass by adapter, and room for the sums between two kernels."""

    rows: Tensor
    """Rows of each tile, int32 [tiles, tile_rows]; -1: none."""
    owners: Tensor
    """Adapter slot of each tile, int32 [tiles]; -1: the tile is empty; the number of slots: its
    rows have no adapter."""
    sums: Tensor
    """float32 [count, most sections * rank, splits], flat."""
    count: int
    """Rows of the pass."""
    slots: int
    """Adapter slots."""
    first: int = 0
    """The row of the pass that is the first one of what is multiplied."""
    end: int = _NO_END
    """The row after the last one, a multiple of 16."""

    @classmethod
    def of(cls, count: int, slots: int, width: int, device: torch.device) -> "RowTiles":
        """Room for a pass of at most `count` rows.

        Args:
            count: the most rows.
            slots: adapter slots.
            width: the most of a product's sections times the pool's rank.
            device: where.
        """
        sizes = {count, *(min(count, rows) for rows in (*dict(_TILE_ROWS), *dict(_SPLITS)))}
        rows = max(_tiles(size, slots) * _tile_rows(size) for size in sizes)
        tiles = max(_tiles(size, slots) for size in sizes)

        def ints(size: int) -> Tensor:
            return torch.empty(size, dtype=torch.int32, device=device)

        most = max(_max_splits(size) * size for size in sizes)
        sums = torch.empty(most * width, dtype=torch.float32, device=device)
        return cls(ints(rows), ints(tiles), sums, count, slots)

    def of_first(self, count: int) -> "RowTiles":
        """Return these buffers cut to a pass of `count` rows."""
        tiles = _tiles(count, self.slots)
        rows = self.rows.flatten()[: tiles * _tile_rows(count)].view(tiles, -1)
        return RowTiles(rows, self.owners[:tiles], self.sums, count, self.slots)

    def part(self, rows: slice) -> "RowTiles":
        """Return the tiles with only these rows multiplied; both ends are multiples of 16, or the
        second is that of the pass."""
        end = _NO_END if rows.stop == self.count else rows.stop
        return RowTiles(self.rows, self.owners, self.sums, self.count, self.slots, rows.start, end)

    def arrange(self, slots: Tensor, adapters: Tensor) -> None:
        """Deal the rows into tiles.

        Args:
            slots: the request slot of each row, int32 [count].
            adapters: the adapter slot of each request slot, int32; -1: none.
        """
        launch(
            _arrange, (self.slots + 1,), slots, adapters, self.rows, self.owners, self.count,
            ROWS=self.rows.shape[1],
            BLOCK=min(1024, power_of_2(max(self.count, 2 * self.rows.shape[1]))),
        )  # fmt: skip
        self.owners.clamp_(max=self.slots)  # no change, but kernels that start early wait for it


def _block(tile_rows: int, matrices: AdapterMatrices) -> int:
    """Outputs of a program of the second kernel."""
    few = tile_rows < _LARGE and matrices.rank <= 32
    return (256 if few else 128) * 2 // matrices.b.itemsize


def _tile_rows(count: int) -> int:
    return next((size for rows, size in _TILE_ROWS if count <= rows), _LARGE)


def _tiles(count: int, slots: int) -> int:
    """Tiles of a pass: every adapter, and having none, may leave one that is not full."""
    return slots + 1 + count // _tile_rows(count)


def _columns(tile_rows: int, matrices: AdapterMatrices) -> int:
    """Columns of A.T that a program of the first kernel multiplies with."""
    return matrices.rank if tile_rows == _FEW else power_of_2(matrices.a.shape[1])


def _max_splits(count: int) -> int:
    return next((splits for rows, splits in _SPLITS if count <= rows), 1)


def _cut(count: int, matrices: AdapterMatrices) -> tuple[int, int, int]:
    """Parts of a product's inputs, steps of a part, and inputs of a step."""
    size, inputs = _tile_rows(count), matrices.a.shape[2]
    # The fewest inputs of such a part.
    part = max(256, -(-inputs // _max_splits(count)))
    # Bytes of A that a program multiplies at a time, where few rows leave it room.
    most = 32_768 // (_columns(size, matrices) * matrices.a.itemsize)
    block = min(most, 128 if size == _LARGE else 512, power_of_2(part))
    steps = -(-part // block)
    return -(-inputs // (steps * block)), steps, block


@triton.jit
def _arrange(slots, adapters, rows, owners, count, ROWS: tl.constexpr, BLOCK: tl.constexpr) -> None:
    own = tl.program_id(0)  # an adapter slot; the last program has the rows without adapter
    none = tl.num_programs(0) - 1
    step = tl.arange(0, BLOCK)
    before = 0
    mine = 0
    for start in range(0, count, BLOCK):
        at = start + step
        slot = tl.load(slots + at, mask=at < count, other=0)
        adapter = tl.load(adapters + slot, mask=at < count, other=none + 1)
        adapter = tl.where(adapter < 0, none, adapter)
        before += tl.sum((adapter < own).to(tl.int32), axis=0)
        mine += tl.sum((adapter == own).to(tl.int32), axis=0)
    # With one tile to spare for each adapter before it, none of them overlap.
    first = own + before // ROWS
    end = own + 1 + (before + mine) // ROWS
    place = first * ROWS
    for start in range(0, count, BLOCK):
        at = start + step
        slot = tl.load(slots + at, mask=at < count, other=0)
        adapter = tl.load(adapters + slot, mask=at < count, other=none + 1)
        ours = (tl.where(adapter < 0, none, adapter) == own).to(tl.int32)
        where = place + tl.cumsum(ours, axis=0) - ours
        tl.store(rows + where, at, mask=ours > 0)
        place += tl.sum(ours, axis=0)
    tl.store(rows + place + step, -1, mask=place + step < end * ROWS)
    full = first + (mine + ROWS - 1) // ROWS
    for start in range(first, end, BLOCK):
        tile = start + step
        tl.store(owners + tile, tl.where(tile < full, own, -1), mask=tile < end)


@triton.jit
def _owner_of(owners, ranks, tile, SLOTS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Adapter slot of a tile (see `RowTiles.owners`), and its rank; 0: nothing is added."""
    owner = tl.load(owners + tile)
    return owner, tl.load(ranks + owner, mask=(owner >= 0) & (owner < SLOTS), other=0)


@triton.jit
def _rows_of(rows, tile, first, end, ROWS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Rows of a tile within what is multiplied, and which of them there are; both [ROWS, 1]."""
    row = tl.load(rows + tile * ROWS + tl.arange(0, ROWS)[:, None])
    there = (row >= first) & (row < end)
    return (row - first).to(tl.int64), there


@triton.jit
def _shrink(
    x, scales, a, ranks, rows, owners, sums, first, end, x_stride,
    K: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr, SLOTS: tl.constexpr,
    ROWS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    tile = tl.program_id(0)
    split = tl.program_id(1)
    owner, rank = _owner_of(owners, ranks, tile, SLOTS)
    if EARLY:
        gdc_launch_dependents()
    if rank == 0:
        if EARLY:
            gdc_wait()
        return
    row, there = _rows_of(rows, tile, first, end, ROWS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    kept = (column < WIDTH) & (column % RANK < rank)
    begin = split * STEPS * BLOCK
    k = begin + tl.arange(0, BLOCK)
    matrix = a + owner.to(tl.int64) * WIDTH * K + column * K + k[:, None]
    place = x + row * x_stride + k[None, :]
    weight = tl.load(matrix, mask=kept & (k < K)[:, None], other=0.0)
    if EARLY:
        gdc_wait()
    value = tl.load(place, mask=there & (k < K)[None, :], other=0.0).to(weight.dtype)
    total = tl.dot(value, weight, input_precision="ieee")
    if GROUPS > 1:  # a scale for each row and so many inputs, which BLOCK divides
        total *= tl.load(scales + row * GROUPS + begin // (K // GROUPS), mask=there, other=0.0)
    for step in range(1, STEPS):
        done = step * BLOCK
        weight = tl.load(matrix + done, mask=kept & (k + done < K)[:, None], other=0.0)
        value = tl.load(place + done, mask=there & (k + done < K)[None, :], other=0.0)
        value = value.to(weight.dtype)
        if GROUPS > 1:
            group = (begin + done) // (K // GROUPS)
            scale = tl.load(scales + row * GROUPS + group, mask=there, other=0.0)
            total += tl.dot(value, weight, input_precision="ieee") * scale
        else:
            total = tl.dot(value, weight, total, input_precision="ieee")
    if GROUPS == 1:
        total *= tl.load(scales + row, mask=there, other=0.0)
    kept_at = sums + (row * WIDTH + column) * tl.num_programs(1) + split
    tl.store(kept_at, total, mask=there & (column < WIDTH))


@triton.jit
def _weights(b, column, stop, rank, OUTPUTS: tl.constexpr, RANK: tl.constexpr) -> tl.tensor:
    """B of some outputs, [RANK, outputs]; zeros from `stop` and from the adapter's rank on."""
    r = tl.arange(0, RANK)[:, None]
    mask = (column[None, :] < stop) & (r < rank)
    return tl.load(b + r * OUTPUTS + column[None, :], mask=mask, other=0.0)


@triton.jit
def _added(
    sums, row, there, weight,
    WIDTH: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr, MAX_SPLITS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return a section's addend for the rows of a tile, float32 [ROWS, outputs]; `sums` begins with
    the section's."""
    place = sums + (row * WIDTH + tl.arange(0, RANK)[None, :])[:, :, None] * SPLITS
    split = tl.arange(0, MAX_SPLITS)[None, None, :]
    mask = there[:, :, None] & (split < SPLITS)
    total = tl.sum(tl.load(place + split, mask=mask, other=0.0), axis=2)
    return tl.dot(total.to(weight.dtype), weight, input_precision="ieee")


@triton.jit
def _expand(
    sums, b, ranks, rows, owners, out, first, end, out_stride,
    END0: tl.constexpr, END1: tl.constexpr, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr,
    RANK: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
    MAX_SPLITS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    block = tl.program_id(0)
    tile = tl.program_id(1)
    owner, rank = _owner_of(owners, ranks, tile, SLOTS)
    if EARLY:
        gdc_launch_dependents()
    if rank == 0:
        if EARLY:
            gdc_wait()
        return
    blocks0: tl.constexpr = (END0 + BLOCK - 1) // BLOCK
    blocks1: tl.constexpr = (END1 - END0 + BLOCK - 1) // BLOCK
    section = (block >= blocks0).to(tl.int32) + (block >= blocks0 + blocks1).to(tl.int32)
    begin = tl.where(section == 0, 0, tl.where(section == 1, END0, END1))
    stop = tl.where(section == 0, END0, tl.where(section == 1, END1, OUTPUTS))
    before = tl.where(section == 0, 0, tl.where(section == 1, blocks0, blocks0 + blocks1))
    column = begin + (block - before) * BLOCK + tl.arange(0, BLOCK)
    weight = _weights(b + owner.to(tl.int64) * OUTPUTS * RANK, column, stop, rank, OUTPUTS, RANK)
    row, there = _rows_of(rows, tile, first, end, ROWS)
    if EARLY:
        gdc_wait()
    own = sums + section * RANK * SPLITS
    added = _added(own, row, there, weight, WIDTH, RANK, SPLITS, MAX_SPLITS)
    place = out + row * out_stride + column[None, :]
    mask = there & (column < stop)[None, :]
    value = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    tl.store(place, value + added, mask=mask)


@triton.jit
def _expand_silu(
    sums, b, ranks, rows, owners, gate_up, out, first, end,
    INNER: tl.constexpr, RANK: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr,
    SPLITS: tl.constexpr, MAX_SPLITS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    tile = tl.program_id(1)
    owner, rank = _owner_of(owners, ranks, tile, SLOTS)
    if EARLY:
        gdc_launch_dependents()
    if owner < 0:
        if EARLY:
            gdc_wait()
        return
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    matrix = b + owner.to(tl.int64) * 2 * INNER * RANK
    of_gate = _weights(matrix, column, INNER, rank, 2 * INNER, RANK)
    of_up = _weights(matrix + INNER, column, INNER, rank, 2 * INNER, RANK)
    row, there = _rows_of(rows, tile, first, end, ROWS)
    if EARLY:
        gdc_wait()
    place = gate_up + row * 2 * INNER + column[None, :]
    mask = there & (column < INNER)[None, :]
    gate = tl.load(place, mask=mask, other=0.0)
    up = tl.load(place + INNER, mask=mask, other=0.0)
    if rank > 0:
        rest: tl.constexpr = 2 * RANK
        added = _added(sums, row, there, of_gate, rest, RANK, SPLITS, MAX_SPLITS)
        gate = (gate.to(tl.float32) + added).to(gate.dtype)
        sums_of_up = sums + RANK * SPLITS
        added = _added(sums_of_up, row, there, of_up, rest, RANK, SPLITS, MAX_SPLITS)
        up = (up.to(tl.float32) + added).to(gate.dtype)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    product = (silu * up.to(tl.float32)).to(gate.dtype)
    tl.store(out + row * INNER + column[None, :], product, mask=mask)


def shrink(x: Activations, matrices: AdapterMatrices, tiles: RowTiles) -> None:
    """Keep x @ A.T of each row's adapter in `tiles.sums`, for `expand` or `expand_silu`.

    Args:
        x: [T, inputs], the rows `tiles.first` on; e4m3 as it is, times its scales.
        matrices: The adapters' matrices of this product.
        tiles: The tiles of the pass.
    """
    values, scales = (x.values, x.scales) if isinstance(x, Quantised) else (x, x)
    groups = scales.shape[1] if isinstance(x, Quantised) else 0
    size, inputs, width = tiles.rows.shape[1], values.shape[1], matrices.a.shape[1]
    splits, steps, block = _cut(tiles.count, matrices)
    columns = _columns(size, matrices)
    if groups > 1 and block > inputs // groups:
        steps, block = steps * block * groups // inputs, inputs // groups
    launch(
        _shrink, (len(tiles.owners), splits, -(-width // columns)), values, scales, matrices.a,
        matrices.ranks, tiles.rows, tiles.owners, tiles.sums, tiles.first, tiles.end,
        values.stride(0),
        K=inputs, WIDTH=width, RANK=matrices.rank, SLOTS=tiles.slots, ROWS=size, STEPS=steps,
        BLOCK=block, COLUMNS=columns, GROUPS=groups, num_warps=4, **launch_options(values.device),
    )  # fmt: skip


def expand(matrices: AdapterMatrices, tiles: RowTiles, out: Tensor) -> None:
    """`out` [T, outputs] += what `shrink` has kept, times B; its rows may lie apart."""
    size, outputs = tiles.rows.shape[1], matrices.outputs
    splits, _, _ = _cut(tiles.count, matrices)
    ends = (*matrices.ends, outputs, outputs)
    block = _block(size, matrices)
    parts = (ends[0], ends[1] - ends[0], outputs - ends[1])
    blocks = sum(-(-part // block) for part in parts)
    launch(
        _expand, (blocks, len(tiles.owners)), tiles.sums, matrices.b, matrices.ranks, tiles.rows,
        tiles.owners, out, tiles.first, tiles.end, out.stride(0),
        END0=ends[0], END1=ends[1], OUTPUTS=outputs, WIDTH=matrices.a.shape[1], RANK=matrices.rank,
        SLOTS=tiles.slots, ROWS=size, SPLITS=splits, MAX_SPLITS=power_of_2(splits), BLOCK=block,
        num_warps=4, **launch_options(out.device),
    )  # fmt: skip


def expand_silu(matrices: AdapterMatrices, tiles: RowTiles, gate_up: Tensor, out: Tensor) -> None:
    """`out` [T, inner] = silu(gate) * up of all rows, with what `shrink` has kept added to both.

    Args:
        matrices: The adapters' matrices of this product, whose sections are gate and up.
        tiles: The tiles of the pass.
        gate_up: the product, [T, 2 * inner], the gate first.
        out: [T, inner], contiguous.
    """
    size, inner = tiles.rows.shape[1], out.shape[1]
    splits, _, _ = _cut(tiles.count, matrices)
    block = _block(size, matrices)
    launch(
        _expand_silu, (-(-inner // block), len(tiles.owners)), tiles.sums, matrices.b,
        matrices.ranks, tiles.rows, tiles.owners, gate_up, out, tiles.first, tiles.end,
        INNER=inner, RANK=matrices.rank, SLOTS=tiles.slots, ROWS=size, SPLITS=splits,
        MAX_SPLITS=power_of_2(splits), BLOCK=block, num_warps=4, **launch_options(out.device),
    )  # fmt: skip
