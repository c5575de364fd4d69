"""Prefill attention: kernels against float32 attention, schedules against their promises."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twolane.kernels.pool import RoundedPool
from twolane.kernels.prefill_attention import flashinfer_kernels as fa3
from twolane.kernels.prefill_attention.batch import AttentionBatch, Block
from twolane.kernels.prefill_attention.dispatch import (
    PrefillPlan,
    PrefillWorkspace,
    prefill_attention,
)
from twolane.kernels.prefill_attention.schedule import (
    HEAD,
    HIGH,
    LOW,
    POSITION,
    ROW,
    SLOT,
    TAIL,
    TOKENS,
    WHOLE,
    Costs,
    Segments,
    schedule,
    tiles,
)
from twolane.kernels.prefill_attention.triton_kernels import TritonProgram, add_sinks, tiling
from twolane.model import fp8

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1.5e-3}


def make(segments, heads, kv_heads, dim, page_size, dtype, device, seed=0):
    """Random queries, a pool in random page order whose unused slots are NaN, and the tables."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-(reused + new) // page_size) for reused, new in segments]
    order = (torch.randperm(sum(counts), generator=generator) + 1).tolist()
    tables = [[order.pop() for _ in range(count)] for count in counts]
    shape = (sum(counts) + 2, kv_heads, 2, page_size, dim)
    pool = torch.randn(shape, generator=generator)
    written = torch.zeros(shape[0], page_size, dtype=torch.bool)
    for (reused, new), table in zip(segments, tables, strict=True):
        for place in range(reused + new):
            written[table[place // page_size], place % page_size] = True
    pool.masked_fill_(~written[:, None, None, :, None], torch.nan)
    rows = sum(new for _, new in segments)
    q = torch.randn((rows, heads, dim), generator=generator)
    return q.to(dtype).to(device), pool.to(dtype).to(device), tables


def reference(segments, q, pool, tables, window, sinks=None):
    """Attention in float32, one segment at a time."""
    _, kv_heads, _, page_size, dim = pool.shape
    out, row = torch.empty(q.shape), 0
    for (reused, new), table in zip(segments, tables, strict=True):
        used = pool[table[: -(-(reused + new) // page_size)]].float().cpu()
        kv = used.permute(2, 1, 0, 3, 4).reshape(2, kv_heads, -1, dim)[:, :, : reused + new]
        query = q[row : row + new].float().cpu().transpose(0, 1)
        k, v = kv.repeat_interleave(q.shape[1] // kv_heads, 1)
        place, key = torch.arange(reused, reused + new)[:, None], torch.arange(reused + new)
        seen = key <= place
        if window is not None:
            seen &= key > place - window
        score = (query @ k.transpose(1, 2) * dim**-0.5).masked_fill(~seen, -torch.inf)
        if sinks is not None:
            score = torch.cat([score, sinks.cpu()[:, None, None].expand(-1, new, 1)], dim=2)
        out[row : row + new] = (score.softmax(-1)[:, :, : len(key)] @ v).transpose(0, 1)
        row += new
    return out


def check(plan, q, pool, segments, tables, window=None, new=None, sinks=None):
    out = torch.full(q.shape, torch.nan, dtype=q.dtype, device=q.device)
    # A dense plan does not read the pool.
    prefill_attention(plan, q, torch.full_like(pool, torch.nan) if new else pool, out, new, sinks)
    expected = reference(segments, q, pool, tables, window, sinks)
    error = (out.float().cpu() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() <= TOLERANCE[q.dtype], error.max()


@pytest.mark.parametrize(
    ("segments", "heads", "kv_heads", "dim", "page_size", "dtype", "window"),
    [
        ([(0, 40)], 4, 2, 64, 16, torch.float32, None),
        ([(0, 1)], 2, 2, 64, 32, torch.float32, None),
        ([(37, 1), (0, 70), (100, 33), (64, 64)], 4, 1, 64, 32, torch.float32, None),
        ([(50, 30), (0, 90)], 6, 2, 64, 16, torch.float32, 24),
        ([(130, 5), (3, 3)], 16, 1, 128, 64, torch.float32, None),
        ([(200, 2), (90, 1)], 5, 1, 128, 32, torch.float32, 64),
        ([(20, 50)], 3, 3, 80, 16, torch.float32, None),
        ([(20, 50)], 7, 1, 96, 32, torch.float32, 33),
        ([(64, 70), (0, 140)], 2, 1, 64, 32, torch.float16, None),
        ([(64, 70), (10, 130)], 4, 1, 128, 64, torch.float16, 100),
        ([(7, 9)], 2, 1, 256, 16, torch.float16, None),
        ([(64, 70), (0, 140)], 2, 1, 128, 32, torch.bfloat16, None),
    ],
)
@pytest.mark.parametrize("units", [1, 3])
def test_the_triton_kernel_equals_float32_attention(
    segments, heads, kv_heads, dim, page_size, dtype, window, units, device
):
    q, pool, tables = make(segments, heads, kv_heads, dim, page_size, dtype, device)
    plan = PrefillPlan.build(
        segments,
        tables,
        page_size=page_size,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        dtype=dtype,
        units=units,
        workspace=PrefillWorkspace(device),
        window=window,
        backend="triton",
    )
    check(plan, q, pool, segments, tables, window)


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("segments", [[(37, 1), (0, 70)], [(1500, 40)]], ids=["whole", "split"])
def test_sinks(segments, window, device):
    """Far below and far above all scores; of tiles that are split into pieces, too."""
    q, pool, tables = make(segments, 6, 2, 64, 32, torch.float32, device)
    shape = {"page_size": 32, "heads": 6, "kv_heads": 2, "dim": 64, "dtype": torch.float32}
    lane = {"units": 12, "workspace": PrefillWorkspace(device), "window": window}
    plan = PrefillPlan.build(segments, tables, **shape, **lane, backend="triton")
    assert bool(plan._program.merge.count) == (segments[0][0] == 1500 and window is None)
    sinks = torch.tensor([-9.0, 0.0, 4.0, 1.0, 9.0, -1.0], device=device)
    check(plan, q, pool, segments, tables, window, sinks=sinks)
    with pytest.raises(ValueError, match="sinks must be"):
        check(plan, q, pool, segments, tables, window, sinks=sinks[:2])


def test_sinks_are_added_to_attention_without_them(device):
    """As after FA3, whose log-sum-exps a merge wants, too."""
    segments = [(0, 9), (30, 5)]
    q, pool, tables = make(segments, 6, 2, 80, 16, torch.float32, device)
    batch = AttentionBatch.build(
        segments, tables, 16, 6, 2, 80, torch.float32, None, PrefillWorkspace(device)
    )
    sinks = torch.tensor([-9.0, 0.0, 4.0, 1.0, 9.0, -1.0], device=device)
    out = reference(segments, q, pool, tables, None).to(device)
    lse = log2_sums(segments, q, pool, tables)
    wanted = torch.logaddexp2(lse, sinks.cpu() / np.log(2.0))
    given = lse.to(device)
    add_sinks(batch, out, given, sinks)
    torch.testing.assert_close(given.cpu(), wanted)
    torch.testing.assert_close(out.cpu(), reference(segments, q, pool, tables, None, sinks))


def log2_sums(segments, q, pool, tables):
    """Base-2 log-sum-exps of all scores [T, heads], from attention whose values are all ones."""
    ones, many = pool.clone(), torch.full((q.shape[1],), 30.0)
    ones[:, :, 1] = 1.0
    shares = reference(segments, q, ones, tables, None, many)[:, :, 0]  # lse / (lse + sink)
    return ((shares / (1 - shares)).log() + 30.0) / np.log(2.0)


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.float32), (80, torch.bfloat16)])
def test_a_rounded_pool_means_what_it_holds(dim, dtype, window, device):
    """To the bit what a pool of the same numbers in the queries' type gives."""
    segments, heads, kv_heads = [(37, 1), (0, 70), (100, 33)], 4, 2
    q, pool, tables = make(segments, heads, kv_heads, dim, 16, dtype, device)
    values, exponents = fp8.quantise_heads(pool)
    meant = torch.ldexp(values.float(), exponents[..., None].int()).to(dtype)
    shape = {"page_size": 16, "heads": heads, "kv_heads": kv_heads, "dim": dim, "dtype": dtype}
    lane = {"units": 2, "workspace": PrefillWorkspace(device), "window": window}
    outs = []
    for seen in (meant, RoundedPool(values, exponents)):
        rounded = isinstance(seen, RoundedPool)
        plan = PrefillPlan.build(
            segments, tables, **shape, **lane, backend="triton", rounded=rounded
        )
        outs.append(torch.empty_like(q))
        prefill_attention(plan, q, seen, outs[-1])
        with pytest.raises(ValueError, match="pool is"):
            prefill_attention(plan, q, meant if rounded else RoundedPool(values, exponents), q)
    assert torch.equal(*outs) and outs[0].isfinite().all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_fa3_reads_a_rounded_pool_as_triton_does(device):
    """Long prompts on prefixes; tiles split and not."""
    for segments, units in (([(500, 700), (0, 300)], 40), ([(3000, 200)], 132)):
        q, pool, tables = make(segments, 8, 2, 128, 32, torch.bfloat16, device)
        rounded = RoundedPool(*fp8.quantise_heads(pool))
        shape = {"page_size": 32, "heads": 8, "kv_heads": 2, "dim": 128, "dtype": torch.bfloat16}
        lane = {"units": units, "workspace": PrefillWorkspace(device), "rounded": True}
        plans = [
            PrefillPlan.build(segments, tables, **shape, **lane, backend=backend)
            for backend in ("flashinfer", "triton")
        ]
        outs = [torch.empty_like(q) for _ in plans]
        for plan, out in zip(plans, outs, strict=True):
            prefill_attention(plan, q, rounded, out)
        assert [plan.backend for plan in plans] == ["flashinfer", "triton"]
        one, other = (out.float() for out in outs)
        assert (one - other).norm() / other.norm() < 8e-3


def test_pages_are_widened_in_their_order(device):
    """As FA3 is given them; and no more than are counted."""
    draw = torch.Generator().manual_seed(0)
    pool = torch.randn(6, 2, 2, 16, 64, generator=draw).to(device)
    values, exponents = fp8.quantise_heads(pool)
    shape = (16, 4, 2, 64, torch.bfloat16, None, PrefillWorkspace(device))
    batch = AttentionBatch.build([(40, 5)], [[4, 1, 5]], *shape)
    assert fa3.unpackable(batch)
    unpacked = fa3.Unpacked.of(batch, 3)
    unpacked.fill(RoundedPool(values, exponents), batch.pages, unpacked.count)
    meant = torch.ldexp(values.float(), exponents[..., None].int()).bfloat16()
    assert torch.equal(unpacked.room, meant[[4, 1, 5]])
    unpacked.room.fill_(9.0)
    unpacked.fill(RoundedPool(values, exponents), batch.pages, unpacked.count - 1)
    assert torch.equal(unpacked.room[:2], meant[[4, 1]]) and (unpacked.room[2] == 9).all()
    assert unpacked.pages[:3].tolist() == [0, 1, 2]


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (3, 1, 80)])
def test_split_tiles_are_merged(heads, kv_heads, dim, device):
    segments = [(500, 10), (450, 17)]
    q, pool, tables = make(segments, heads, kv_heads, dim, 32, torch.float32, device)
    plan = PrefillPlan.build(
        segments,
        tables,
        page_size=32,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        dtype=torch.float32,
        units=8,
        workspace=PrefillWorkspace(device),
        backend="triton",
    )
    # Splitting these few keys never pays, so cut them as if launches were free.
    shape = replace(tiling(10 * heads // kv_heads, dim, torch.float32), item=0, split=0)
    program = TritonProgram.plan(plan.batch, 8, shape)
    assert program.merge.count
    check(replace(plan, _program=program), q, pool, segments, tables)


class Fa3:
    """What FlashInfer's FA3 kernel does with a plan, block by block, in PyTorch.

    As `batch_prefill_sm90.cu` reads its arguments and `BatchPrefillPersistentTileScheduler` the
    lists; `blocks` is the SMs that its launcher sees.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks

    def paged_run(self, _float, lists, info, q, k, v, _rows, _used, pages, _last, *rest):
        def read(cache, first, count, head):
            size = cache.shape[2]
            used = pages[first : first - (-count // size)].long()
            return cache[used, head].reshape(-1, cache.shape[3])[:count]

        assert rest[3] == 1
        self._run(lists, info, q, k, v, read, k.shape[1], *rest)

    def ragged_run(self, _float, lists, info, q, k, v, _rows, _used, *rest):
        def read(tensor, first, count, head):
            return tensor[first : first + count, head]

        assert rest[3] == 0
        self._run(lists, info, q, k, v, read, k.shape[1], *rest)

    def _run(self, lists, info, q, k, v, read, kv_heads, out, lse, mask, _layout, window, *rest):
        assert (window, info[8]) == (-1, 0)
        assert all(offset % 16 == 0 for offset in info[:8])
        tile, row, first, tokens, keys, head, bounds = (lists[o // 4 :].tolist() for o in info[:7])
        for i in range(bounds[0], bounds[self.blocks]):
            assert tile[i] == 0
            kv_head = head[i] // (q.shape[1] // kv_heads)
            key, value = (read(tensor, first[i], keys[i], kv_head) for tensor in (k, v))
            place = slice(row[i], row[i] + tokens[i])
            score = q[place, head[i]] @ key.T * rest[-3]
            if mask == 1:
                last = torch.arange(tokens[i])[:, None] + keys[i] - tokens[i]
                score = score.masked_fill(torch.arange(keys[i]) > last, -torch.inf)
            out[place, head[i]] = score.softmax(-1) @ value
            if lse is not None:
                lse[place, head[i]] = score.logsumexp(-1) / np.log(2)


@pytest.mark.parametrize(
    ("segments", "heads", "kv_heads", "dim", "page_size", "units", "splits"),
    [
        ([(0, 300), (40, 1), (129, 131)], 4, 2, 64, 16, 3, False),
        ([(0, 300)], 2, 2, 128, 32, 8, False),
        ([(800, 130)], 2, 1, 128, 32, 3, True),
        ([(600, 100), (800, 200)], 2, 1, 64, 64, 10, True),
        ([(900, 20), (0, 50)], 1, 1, 128, 16, 7, True),
    ],
)
def test_fa3_computes_attention_under_our_plan(
    segments, heads, kv_heads, dim, page_size, units, splits, device, monkeypatch
):
    if device != "cpu":
        pytest.skip("FlashInfer itself is there: the kernel's benchmark checks it")
    q, pool, tables = make(segments, heads, kv_heads, dim, page_size, torch.float32, device)
    monkeypatch.setattr(fa3, "_load", lambda dtype, dim: (Fa3(132), None))
    if splits:  # few keys: as if launches and items were free
        monkeypatch.setattr(fa3, "_PAGED", replace(fa3._PAGED, item=0, split=0))
    plan = PrefillPlan.build(
        segments,
        tables,
        page_size=page_size,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        dtype=torch.float32,
        units=1,
        workspace=PrefillWorkspace(device),
    )
    program = fa3.FlashInferProgram.plan(plan.batch, units)
    assert (program.fronts is not None) == splits
    check(replace(plan, _program=program), q, pool, segments, tables)


def test_fa3_is_replayed_with_batch_after_batch(device, monkeypatch):
    """What a graph captured once serves batches that are sent later, behind decode rows."""
    if device != "cpu":
        pytest.skip("FlashInfer itself is there: tests/gpu/test_logits.py replays it")
    monkeypatch.setattr(fa3, "_load", lambda dtype, dim: (Fa3(132), None))
    shape = (64, 2, 1, 64, torch.float32, None, PrefillWorkspace(device))
    most = 256
    first = AttentionBatch.build([(0, 1)], [[0]], *shape)
    replayed = fa3.Replayed(first, 10, most)
    block = Block([3, *replayed.sizes, 40, 1], torch.device(device))
    replayed.read(block.memory, block.lists[1:-2], *block.lists[-2:])
    batches = [
        ([(600, 100), (800, 150)], 5, True),
        ([(0, 30), (64, 1)], 0, False),
        ([(700, 140)], 100, True),
        ([(0, 256)], 0, False),
    ]
    for segments, decoding, splits in batches:
        # few keys: as if launches and items were free, or splitting never paid
        costs = {"item": 0, "split": 0} if splits else {"split": 10**9}
        monkeypatch.setattr(fa3, "_PAGED", replace(fa3._PAGED, **costs))
        q, pool, tables = make(segments, 2, 1, 64, 64, torch.float32, device)
        batch = AttentionBatch.build(segments, tables, *shape, first_row=decoding)
        rows = decoding + len(q)
        padded = torch.full((most, 2, 64), torch.nan)
        padded[decoding:rows] = q
        out = torch.full_like(padded, -1.0)
        parts = replayed.parts(batch.segments)
        assert parts is not None and parts[1] is splits
        pages = batch.pages.numpy()
        block.send([np.array([7]), *parts[0], pages, np.array([len(pages)])])
        replayed.run(splits, padded, pool, out)
        expected = reference(segments, q, pool, tables, None)
        torch.testing.assert_close(out[decoding:rows], expected, atol=2e-6, rtol=2e-6)
        assert (out[:decoding] == -1).all() and (out[rows:] == -1).all()


def test_what_does_not_fit_a_graph_is_not_sent(device, monkeypatch):
    if device != "cpu":
        pytest.skip("FlashInfer itself is there: tests/gpu/test_logits.py replays it")
    monkeypatch.setattr(fa3, "_load", lambda dtype, dim: (Fa3(132), None))
    shape = (64, 2, 1, 64, torch.float32, None, PrefillWorkspace(device))
    first = AttentionBatch.build([(0, 1)], [[0]], *shape)
    replayed = fa3.Replayed(first, 2, 256)

    def splits(segments):
        tables = [[*range(-(-(reused + new) // 64))] for reused, new in segments]
        parts = replayed.parts(AttentionBatch.build(segments, tables, *shape).segments)
        return None if parts is None else parts[1]

    assert splits([(0, 1)] * 20) is False
    assert splits([(960, 192)]) is False
    monkeypatch.setattr(fa3, "EMPTY_KEYS", 960)
    assert splits([(960, 192)]) is False
    assert splits([(960, 1)]) is None  # a tile with a token, and Triton would not wait for graphs
    monkeypatch.setattr(fa3, "_SEGMENTS", 3)
    replayed = fa3.Replayed(first, 2, 256)
    assert splits([(0, 1)] * 4) is False
    assert splits([(0, 1)] * 5) is None  # items
    monkeypatch.setattr(fa3, "_PAGED", replace(fa3._PAGED, item=0, split=0))
    monkeypatch.setattr(fa3, "EMPTY_KEYS", 192)
    replayed = fa3.Replayed(first, 10, 256)
    assert splits([(960, 192)]) is True
    assert splits([(960, 1)]) is None  # the keys of its tiles' fronts count, too


def test_fa3_reads_dense_keys_where_nothing_is_reused(device, monkeypatch):
    if device != "cpu":
        pytest.skip("FlashInfer itself is there: the kernel's benchmark checks it")
    segments = [(0, 200), (0, 1), (0, 333)]
    q, pool, tables = make(segments, 4, 2, 64, 32, torch.float32, device)
    monkeypatch.setattr(fa3, "_load", lambda dtype, dim: (Fa3(132), None))
    monkeypatch.setattr(fa3, "problem", lambda dtype, dim, device: None)
    arguments = {
        "page_size": 32,
        "heads": 4,
        "kv_heads": 2,
        "dim": 64,
        "dtype": torch.float32,
        "units": 5,
        "workspace": PrefillWorkspace(device),
        "dense": True,
    }
    plan = PrefillPlan.build(segments, tables, **arguments).at(3)
    assert plan.dense
    parts = []
    for (_, new), table in zip(segments, tables, strict=True):
        kv = pool[table].permute(2, 0, 3, 1, 4).flatten(1, 2)
        parts.append(kv[:, :new])
    k, v = torch.cat(parts, 1)
    with pytest.raises(ValueError, match="new is missing"):
        prefill_attention(plan, q, pool, torch.empty_like(q))
    check(plan, q, pool, segments, tables, new=(k, v))
    reused = PrefillPlan.build([(1, 199), *segments[1:]], tables, **arguments)
    assert not reused.dense and reused.backend == "flashinfer"


def columns(segments):
    reused, new = np.array(segments, dtype=np.int64).T
    return Segments(reused, new, np.cumsum(new) - new, np.zeros_like(new))


@given(
    segments=st.lists(
        st.tuples(st.integers(0, 40_000), st.integers(1, 3000)), min_size=1, max_size=5
    ),
    heads=st.integers(1, 12),
    units=st.integers(1, 140),
    own_launch=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_a_schedule_computes_every_key_of_every_tile_once(segments, heads, units, own_launch):
    costs = Costs(block=96, item=288, split=0)
    items, cost = tiles(columns(segments), 128, heads, None, costs)
    plan = schedule(items, cost, units, costs, 192, own_launch, True)
    works = [plan.main] + ([plan.fronts] if plan.fronts else [])
    for work in works:
        assert work.bounds[0] == 0 and work.bounds[-1] == len(work.items)
        assert len(work.bounds) == units + 1 and (np.diff(work.bounds) >= 0).all()
    done = np.concatenate([work.items for work in works])
    pieces = {}
    for item in done.tolist():
        pieces.setdefault((item[ROW], item[HEAD]), []).append(item)
    assert len(pieces) == len(items)
    merges = {(m[0], m[2]): m for m in plan.merges.tolist()}
    slots = []
    for tile in items.tolist():
        parts = sorted(pieces[tile[ROW], tile[HEAD]], key=lambda part: part[LOW])
        edges = [part[LOW] for part in parts] + [parts[-1][HIGH]]
        assert [part[HIGH] for part in parts] == edges[1:]
        assert (edges[0], edges[-1]) == (tile[LOW], tile[HIGH])
        assert all(part[TOKENS] == tile[TOKENS] for part in parts)
        if len(parts) == 1:
            assert parts[0][SLOT] == WHOLE
            continue
        _, tokens, _, first, count = merges.pop((tile[ROW], tile[HEAD]))
        assert tokens == tile[TOKENS]
        assert [part[SLOT] for part in parts] == [*range(first, first + count), TAIL]
        assert parts[-1][LOW] <= tile[POSITION] and all(e % 192 == 0 for e in edges[:-1])
        slots += range(first, first + count)
    assert not merges
    assert sorted(slots) == list(range(plan.slots))


@pytest.mark.parametrize("units", [16, 24, 32, 48, 64, 84, 100, 116, 132])
@pytest.mark.parametrize("segments", [[(0, 8192)], [(32768, 1024)]])
def test_blocks_have_equal_work_on_every_level(segments, units):
    """A block's keys, with what an item costs, are within 4 % of an equal share of the whole."""
    costs = Costs(block=96, item=288, split=800)
    items, cost = tiles(columns(segments), 128, 32, None, costs)
    plan = schedule(items, cost, units, costs, 96, True, True)
    most = 0.0
    for work in filter(None, (plan.main, plan.fronts)):
        owner = np.repeat(np.arange(units), np.diff(work.bounds))
        keys = work.items[:, HIGH] - work.items[:, LOW] + costs.item
        most += np.bincount(owner, keys, minlength=units).max()
    whole = (items[:, HIGH] - items[:, LOW] + costs.item).sum()
    assert most <= 1.04 * whole / units


def test_dealing_in_turn_is_as_even_as_dealing_one_by_one():
    items, cost = tiles(columns([(0, 20_000)]), 128, 32, None, Costs(96, 288, 0))
    plan = schedule(items, cost, 33, Costs(96, 288, 0), 96, False, False)
    owner = np.repeat(np.arange(33), np.diff(plan.main.bounds))
    keys = plan.main.items[:, HIGH] - plan.main.items[:, LOW]
    loads = np.bincount(owner, keys)
    assert loads.max() <= 1.001 * loads.mean()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"segments": []}, "0 segments"),
        ({"segments": [(0, 0)]}, "new >= 1"),
        ({"segments": [(0, 65)]}, "do not cover"),
        ({"page_size": 48}, "page_size=48"),
        ({"kv_heads": 3}, "kv_heads=3"),
        ({"dim": 60}, "dim=60"),
        ({"units": 0}, "units=0"),
        ({"window": 0}, "window=0"),
        ({"backend": "flashinfer"}, "backend='flashinfer': FA3"),
    ],
)
def test_what_cannot_be_planned_is_refused(change, message):
    arguments = {
        "segments": [(0, 64)],
        "tables": [[1, 2]],
        "page_size": 32,
        "heads": 4,
        "kv_heads": 2,
        "dim": 64,
        "dtype": torch.float32,
        "units": 2,
        "workspace": PrefillWorkspace("cpu"),
    } | change
    arguments["tables"] = [[1, 2]] * len(arguments["segments"])
    with pytest.raises(ValueError, match=message):
        PrefillPlan.build(**arguments)


def test_tensors_that_are_not_the_plans_are_refused(device):
    segments = [(0, 20)]
    q, pool, tables = make(segments, 4, 2, 64, 32, torch.float32, device)
    plan = PrefillPlan.build(
        segments,
        tables,
        page_size=32,
        heads=4,
        kv_heads=2,
        dim=64,
        dtype=torch.float32,
        units=2,
        workspace=PrefillWorkspace(device),
    )
    for name, wrong in (
        ("q is", (q[:-1], pool, q)),
        ("out: .* a token's heads contiguous", (q, pool, torch.empty(4, 20, 64).transpose(0, 1))),
        ("pool is", (q, pool[:, :1], q)),
        ("q: torch.float32 is needed", (q.half(), pool, q)),
        ("pool is torch.float16", (q, pool.half(), q)),
    ):
        with pytest.raises(ValueError, match=name):
            prefill_attention(plan, *wrong)


def test_strided_queries_and_another_level(device):
    """Queries are a slice of the fused projection; `at` keeps the batch and its pages."""
    segments = [(70, 45), (0, 60)]
    q, pool, tables = make(segments, 4, 2, 64, 32, torch.float32, device)
    fused = torch.randn(len(q), 8, 64, device=device)
    fused[:, :4] = q
    plan = PrefillPlan.build(
        segments,
        tables,
        page_size=32,
        heads=4,
        kv_heads=2,
        dim=64,
        dtype=torch.float32,
        units=5,
        workspace=PrefillWorkspace(device),
    )
    moved = plan.at(2)
    assert moved.batch is plan.batch and moved.units == 2
    check(moved, fused[:, :4], pool, segments, tables)
