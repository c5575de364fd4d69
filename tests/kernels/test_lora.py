"""What adapters add, against PyTorch row by row."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.kernels.interpreter import run_without
from tests.model.adapters import make_adapter
from tests.model.checkpoints import load_decoder, make_checkpoint
from twolane.kernels.activations import Quantised
from twolane.kernels.lora import AdapterMatrices, RowTiles, expand, expand_silu, shrink
from twolane.kernels.products.dispatch import GpuProducts
from twolane.model.gpu_lora import GpuAdaptedProducts, GpuAdapterPool, pool_bytes
from twolane.model.load.hub import resolve
from twolane.model.load.peft import read_adapter
from twolane.model.load.weights import load_weights
from twolane.model.lora import AdapterPool, places

SLOTS = 3


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def matrices(
    inputs: int, widths: list[int], rank: int, device: str, dtype: torch.dtype = torch.float32
) -> AdapterMatrices:
    """Of adapters of three ranks: none, half of the pool's and all of it."""
    room = max(16, rank)
    ranks = torch.tensor([0, max(1, rank // 2), rank], dtype=torch.int32)
    a = random(SLOTS, len(widths) * room, inputs, dtype=dtype) * inputs**-0.5
    b = random(SLOTS, room, sum(widths), dtype=dtype) * rank**-0.5
    a.view(SLOTS, len(widths), room, inputs)[:, :, rank:] = torch.nan  # what no adapter has
    ends = torch.tensor(widths).cumsum(0).tolist()
    return AdapterMatrices(a.to(device), b.to(device), ranks.to(device), tuple(ends))


def added(x: torch.Tensor, adapters: list[int], m: AdapterMatrices) -> torch.Tensor:
    """x @ A.T @ B.T, row by row."""
    rows = []
    for row, slot in zip(x, adapters, strict=True):
        out = torch.zeros(m.outputs, dtype=torch.float64, device=x.device)
        rank, first = 0 if slot < 0 else int(m.ranks[slot]), 0
        for section, end in enumerate(m.ends):
            start = section * m.rank
            if rank:
                a = m.a[slot, start : start + rank].double()
                out[first:end] = m.b[slot, :rank, first:end].double().T @ (a @ row.double())
            first = end
        rows.append(out)
    return torch.stack(rows)


def tiled(count: int, m: AdapterMatrices, device: str) -> tuple[RowTiles, list[int]]:
    """Rows of request slots that have adapters in turn, and these."""
    table = [2, -1, 1, 0, 2, -1]
    slots = torch.randint(0, 6, (count,), generator=torch.Generator().manual_seed(count))
    tiles = RowTiles.of(2 * count, SLOTS, 3 * m.rank, torch.device(device)).of_first(count)
    table_there = torch.tensor(table, dtype=torch.int32, device=device)
    tiles.arrange(slots.int().to(device), table_there)
    return tiles, [table[slot] for slot in slots.tolist()]


@pytest.mark.parametrize("count", [1, 5, 16, 40, 256, 300, 1100])
def test_every_row_is_in_one_tile_of_its_adapter(count: int, device: str) -> None:
    m = matrices(16, [8], 16, device)
    tiles, adapters = tiled(count, m, device)
    found = {}
    for owner, rows in zip(tiles.owners.tolist(), tiles.rows.tolist(), strict=True):
        there = [row for row in rows if row >= 0]
        assert bool(there) == (owner >= 0) and there == sorted(there) == rows[: len(there)]
        for row in there:
            assert row not in found
            found[row] = -1 if owner == SLOTS else owner
    assert [found[row] for row in range(count)] == adapters


@pytest.mark.parametrize("rank", [1, 16, 64])
@pytest.mark.parametrize(
    ("count", "inputs", "widths"),
    [(1, 64, [40]), (9, 600, [300, 20, 20]), (70, 200, [136, 24, 24]), (1100, 32, [16, 8])],
)
def test_products(count: int, inputs: int, widths: list[int], rank: int, device: str) -> None:
    m = matrices(inputs, widths, rank, device)
    tiles, adapters = tiled(count, m, device)
    x, base = (random(count, n, seed=1).to(device) for n in (inputs, sum(widths)))
    wide = torch.empty(count, sum(widths) + 16, device=device)
    out = wide[:, : sum(widths)]
    out.copy_(base)
    shrink(x, m, tiles)
    expand(m, tiles, out)
    torch.testing.assert_close(out.double(), base + added(x, adapters, m), atol=1e-4, rtol=1e-4)
    without = [row for row, slot in enumerate(adapters) if slot <= 0]
    assert torch.equal(out[without], base[without])


@pytest.mark.parametrize("count", [3, 70, 1100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_of_what_is_added_to(count: int, dtype: torch.dtype, device: str) -> None:
    inner = 140
    m = matrices(64, [inner, inner], 16, device, dtype)
    tiles, adapters = tiled(count, m, device)
    x, base = (random(count, n, seed=1, dtype=dtype).to(device) for n in (64, 2 * inner))
    out = torch.full((count, inner), torch.nan, dtype=dtype, device=device)
    shrink(x, m, tiles)
    expand_silu(m, tiles, base, out)
    gate, up = (base.double() + added(x, adapters, m)).chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    bound = 1e-4 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(out.double(), expected, atol=bound, rtol=bound)


ACTED_OUT = (
    *("7 512 512 16", "12 1000 320,48,48 16", "12 4096 272,272 12 --silu", "9 12288 256 16"),
    *("9 1024 256 64", "9 1024 256,256 33 --silu", "140 256 256,64,64 16"),
)


@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    ["7 512 256,256 16 --silu", *(pytest.param(c, marks=pytest.mark.full) for c in ACTED_OUT)],
)
def test_what_the_compiler_makes_for_hopper_computes_the_same(case: str, tmp_path: Path) -> None:
    """In bfloat16, in steps and, with 140 rows, in a larger pass."""
    assert float(run_without("acting_out.py", tmp_path, *case.split())) < 6e-3


@pytest.mark.parametrize("groups", [1, 2])
def test_rows_in_e4m3_count_with_their_scales(groups: int, device: str) -> None:
    count, inputs = 20, 256
    m = matrices(inputs, [48], 16, device, torch.bfloat16)
    tiles, adapters = tiled(count, m, device)
    values = random(count, inputs).to(torch.float8_e4m3fn).to(device)
    scales = random(count, groups, seed=2).abs().to(device)
    meant = values.float() * scales.repeat_interleave(inputs // groups, dim=1)
    out = torch.zeros(count, 48, device=device)
    shrink(Quantised(values, scales), m, tiles)
    expand(m, tiles, out)
    expected = added(meant, adapters, m)
    assert (out - expected).norm() < 1e-2 * expected.norm()


def test_parts_of_a_pass(device: str) -> None:
    """As the MLP multiplies the rows of a long pass."""
    m = matrices(32, [24], 16, device)
    tiles, adapters = tiled(40, m, device)
    x, base = (random(40, n, seed=1).to(device) for n in (32, 24))
    out = base.clone()
    for rows in (slice(0, 16), slice(16, 40)):
        part = tiles.part(rows)
        shrink(x[rows], m, part)
        expand(m, part, out[rows])
    torch.testing.assert_close(out.double(), base + added(x, adapters, m), atol=1e-4, rtol=1e-4)


def test_a_row_does_not_depend_on_the_others(device: str) -> None:
    m = matrices(64, [40], 16, device)
    table = torch.tensor([2, 1], dtype=torch.int32, device=device)
    x = random(24, 64, seed=3).to(device)
    outs = []
    for others in (0, 1):
        slots = torch.full((24,), others, dtype=torch.int32, device=device)
        slots[7] = 0
        tiles = RowTiles.of(24, SLOTS, m.rank, torch.device(device)).of_first(24)
        tiles.arrange(slots, table)
        out = torch.zeros(24, 40, device=device)
        shrink(x, m, tiles)
        expand(m, tiles, out)
        outs.append(out[7])
    assert torch.equal(*outs)


def test_nothing_is_left_of_an_adapter_whose_slot_another_takes(
    tmp_path: Path, device: str
) -> None:
    """That one has a smaller rank, and some modules of some layers."""
    source = resolve(str(make_checkpoint("qwen3", tmp_path / "base", seed=1, layers=2)))
    decoder = load_decoder(source)
    shard, weights = decoder.shard, decoder.weights
    _, weights_there = load_weights(source, dtype="float32", device=device)
    there, here = GpuAdapterPool(shard, weights_there, 2, 20), AdapterPool(weights, 2)
    held = [t for m in there.matrices.values() for t in (m.a, m.b)]
    assert sum(t.nbytes for t in held) == pool_bytes(shard, 2, 20, decoder.dtype.itemsize)
    some = {"rank": 3, "modules": ["self_attn.v_proj", "mlp.down_proj"], "layers": [1], "seed": 1}
    slots, x = np.array([0, -1, 0]), random(3, 256)
    for name, kind in (("first", {"rank": 20}), ("second", some)):
        path = make_adapter(tmp_path / "base", tmp_path / name, **kind)
        adapter = read_adapter(path, shard, decoder.dtype)
        here.put(0, adapter)
        there.put(0, adapter)
        tiles = there.tiles(3).of_first(3)
        tiles.arrange(torch.arange(3).int().to(device), torch.from_numpy(slots).int().to(device))
        products = GpuAdaptedProducts(GpuProducts(1), there, tiles)
        right = here.products(decoder.products, slots)
        for (mine, _), (theirs, _) in zip(places(weights), places(weights_there), strict=True):
            rows = x[:, : mine.shape[1]]
            out = torch.empty(3, mine.shape[0], device=device)
            products.linear(rows.to(device), theirs, None, out)
            expected = right.linear(rows, mine)
            torch.testing.assert_close(out.cpu(), expected, atol=1e-4, rtol=1e-4)
