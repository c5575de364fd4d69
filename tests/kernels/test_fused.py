"""The fused operations against the CPU's model, spelled out with PyTorch."""

import pytest
import torch
from torch.nn import functional

from twolane.kernels import fused
from twolane.kernels.pool import MirroredPool, Pool, RoundedPool, exponents_of, values_of
from twolane.model import fp8
from twolane.model.mlp import ACTIVATIONS

TYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5


def random(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


def assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Within two roundings of 16-bit types; float32 sums in another order."""
    bound = torch.finfo(out.dtype).eps * (20 if out.dtype == torch.float32 else 2)
    torch.testing.assert_close(out.float(), expected.float(), rtol=bound, atol=bound / 4)


def llama_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As `transformers` writes it, with its roundings."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * wide.to(x.dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rows", "hidden"), [(1, 64), (3, 576), (2, 2560), (2, 8192)])
def test_norms_follow_llama(rows: int, hidden: int, dtype: torch.dtype, device: str) -> None:
    x, residual = (random(rows, hidden + i, dtype=dtype, device=device) for i in range(2))
    residual = residual[:, :hidden].contiguous()
    weight = 1 + random(hidden, dtype=dtype, device=device) / 4
    assert_close(fused.rms_norm(x, weight, EPS, torch.empty_like(x)), llama_norm(x, weight))
    total = x + residual
    out = fused.add_rms_norm(x, residual, weight, EPS, torch.empty_like(x))
    assert torch.equal(residual, total)
    assert_close(out, llama_norm(total, weight))


def test_norm_of_rows_that_lie_apart(device: str) -> None:
    x, weight = random(6, 96, device=device), random(96, device=device)
    out = fused.rms_norm(x[::2], weight, EPS, torch.empty(3, 96, device=device))
    assert_close(out, llama_norm(x[::2], weight))


def test_add_norm_may_write_over_its_input(device: str) -> None:
    x, residual, weight = (random(n, 96, device=device) for n in (3, 3, 1))
    residual = residual + 1
    expected = llama_norm(x + residual, weight[0])
    fused.add_rms_norm(x, residual, weight[0], EPS, x)
    assert_close(x, expected)


def rotated(x: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Neighbouring pairs of x [T, heads, dim], turned; the scale is 1.5."""
    angles = positions[:, None].float() * frequencies
    turn = torch.complex(angles.cos() * 1.5, angles.sin() * 1.5)[:, None]
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:2], -1, 2))
    return torch.view_as_real(pairs * turn).flatten(2).to(x.dtype)


class Heads:
    """A batch of three tokens, what becomes of it, and a pool to write to."""

    def __init__(
        self, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, norm: bool, device: str
    ) -> None:
        self.heads, self.kv_heads, self.dim, self.page = heads, kv_heads, dim, 16
        count = heads + 2 * kv_heads
        self.qkv = random(3, count * dim, dtype=dtype, device=device)
        self.norm = None
        if norm:
            self.norm = 1 + random(heads + kv_heads, dim, dtype=dtype, device=device) / 4
        frequencies = (10_000.0 ** (-torch.arange(0, dim, 2) / dim)).to(device)
        self.positions = torch.tensor([0, 37, 1000], dtype=torch.int32, device=device)
        self.table = fused.rotary_table(frequencies, 1.5, 1001)
        self.pool = torch.full((5, kv_heads, 2, self.page, dim), 7.0, dtype=dtype, device=device)
        x = self.qkv.view(3, count, dim)
        qk = x[:, : heads + kv_heads]
        if self.norm is not None:
            qk = llama_norm(qk, self.norm)
        qk = rotated(qk, self.positions, frequencies)
        self.q, self.k = qk[:, :heads], qk[:, heads:]
        self.v = x[:, heads + kv_heads :].clone()

    def expected_pool(self, slots: list[int]) -> torch.Tensor:
        pool = self.pool.clone()
        for row, slot in enumerate(slots):
            if slot >= 0:
                pool[slot // self.page, :, 0, slot % self.page] = self.k[row]
                pool[slot // self.page, :, 1, slot % self.page] = self.v[row]
        return pool


SHAPES = [(8, 2, 64, False), (32, 8, 128, True), (9, 3, 64, False), (4, 4, 96, True)]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "norm"), SHAPES)
def test_rotates_and_writes(
    heads: int, kv_heads: int, dim: int, norm: bool, dtype: torch.dtype, device: str
) -> None:
    case = Heads(heads, kv_heads, dim, dtype, norm, device)
    slots = [0, -1, 4 * 16 + 15]
    expected = case.expected_pool(slots)
    out = torch.full((3, heads, dim), 3.0, dtype=dtype, device=device)
    places = torch.tensor(slots, device=device)
    fused.qkv_rope_write(
        case.qkv, case.positions, case.norm, EPS, case.table, out, case.pool, places
    )
    assert_close(out[::2], case.q[::2])
    assert (out[1] == 3.0).all()
    assert_close(case.pool, expected)
    assert torch.equal(case.pool == 7.0, expected == 7.0)


@pytest.mark.parametrize("dtype", TYPES)
def test_norms_after_the_rotation(dtype: torch.dtype, device: str) -> None:
    """In both forms, for decode and for the rest."""
    heads, kv_heads, dim = 8, 4, 64
    case = Heads(heads, kv_heads, dim, dtype, True, device)
    frequencies = (10_000.0 ** (-torch.arange(0, dim, 2) / dim)).to(device)
    table = fused.rotary_table(frequencies, 1.0, 1001)
    qk = case.qkv.view(3, -1, dim)[:, : heads + kv_heads].float()
    wide = llama_norm(rotated(qk, case.positions, frequencies) / 1.5, case.norm.float())
    expected = wide.to(dtype)
    out = torch.zeros(3, heads, dim, dtype=dtype, device=device)
    rows = case.qkv, case.positions, case.norm, EPS, table
    tables = torch.zeros(3, 70, dtype=torch.int32, device=device)
    ints = torch.arange(3, dtype=torch.int32, device=device)
    where = tables, ints, torch.ones_like(ints)
    fused.qkv_rope_write(*rows, out, case.pool, *where, norm_last=True)
    assert_close(out, expected[:, :heads])
    places = torch.arange(3, device=device)
    fused.qkv_rope_write(*rows, out.zero_(), case.pool, places, norm_last=True)
    assert_close(out, expected[:, :heads])
    assert_close(case.pool[0, :, 0, :3].transpose(0, 1), expected[:, heads:])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "norm"), SHAPES)
def test_writes_to_a_rounded_pool(
    heads: int, kv_heads: int, dim: int, norm: bool, dtype: torch.dtype, device: str
) -> None:
    """The pool holds what the CPU's holds of the same numbers, and rows get what the pool holds."""
    if norm and device != "cpu":
        pytest.skip("forms of the kernel differ in the last bit of a norm")
    case, twin = (Heads(heads, kv_heads, dim, dtype, norm, device) for _ in range(2))
    twin.qkv.copy_(case.qkv)
    norms, before = case.norm, case.qkv.clone()
    places = torch.tensor([0, -1, 4 * 16 + 15], device=device)
    out, same = torch.empty_like(case.q), torch.empty_like(case.q)
    rest = case.positions, norms, EPS, case.table
    fused.qkv_rope_write(twin.qkv, *rest, same, twin.pool, places)
    shape = case.pool.shape
    pool = RoundedPool(
        torch.zeros(shape, dtype=fp8.E4M3, device=device),
        torch.full(shape[:-1], 77, dtype=torch.int8, device=device),
    )
    fused.qkv_rope_write(case.qkv, *rest, out, pool, places)
    assert torch.equal(out[::2], same[::2])
    for row, page, offset in ((0, 0, 0), (2, 4, 15)):
        values, exponents = fp8.quantise_heads(twin.pool[page, :, :, offset])
        assert torch.equal(pool.values[page, :, :, offset].float(), values.float())
        assert torch.equal(pool.exponents[page, :, :, offset], exponents)
        seen = case.qkv[row, heads * dim :].view(2, kv_heads, dim).transpose(0, 1)
        assert torch.equal(seen, fp8.dequantise_heads(values, exponents, dtype))
    written = pool.exponents != 77
    assert int(written.sum()) == 2 * 2 * kv_heads
    tables = torch.zeros(1, 70, dtype=torch.int32, device=device)
    tables[0, 62] = 3
    ints = torch.tensor([0, 0, 0], dtype=torch.int32, device=device)
    lengths = torch.tensor([0, 0, 1], dtype=torch.int32, device=device)
    decoded = RoundedPool(torch.zeros_like(pool.values), torch.zeros_like(pool.exponents))
    fresh = Heads(heads, kv_heads, dim, dtype, norm, device)
    fresh.qkv.copy_(before)
    fused.qkv_rope_write(fresh.qkv, *rest, same, decoded, tables, ints, lengths)
    values, exponents = (part[4, :, :, 15] for part in (pool.values, pool.exponents))
    assert torch.equal(decoded.values[3, :, :, 8].float(), values.float())
    assert torch.equal(decoded.exponents[3, :, :, 8], exponents)


@pytest.mark.parametrize("rounded", [False, True])
def test_a_mirrored_pool_and_its_copy_hold_the_same(rounded: bool, device: str) -> None:
    """Rows of prompts and of decode steps, and no other places; the copy is somewhere else."""
    case = Heads(9, 3, 64, torch.bfloat16, False, device)
    shape = case.pool.shape

    def new() -> Pool:
        exponents = torch.full(shape[:-1], 77, dtype=torch.int8, device=device)
        values = torch.zeros(shape, dtype=fp8.E4M3, device=device)
        return RoundedPool(values, exponents) if rounded else torch.full_like(case.pool, 7.0)

    pool, twin, alone = new(), new(), new()
    mirrored, before = MirroredPool(pool, twin), case.qkv.clone()
    out, places = torch.empty_like(case.q), torch.tensor([0, -1, 4 * 16 + 15], device=device)
    rest = case.positions, None, EPS, case.table, out
    tables = torch.zeros(1, 70, dtype=torch.int32, device=device)
    tables[0, 62] = 3
    ints = torch.tensor([0, 0, 0], dtype=torch.int32, device=device)
    lengths = torch.tensor([0, 0, 1], dtype=torch.int32, device=device)
    for written in (mirrored, alone):
        for where in ((places,), (tables, ints, lengths)):
            case.qkv.copy_(before)
            fused.qkv_rope_write(case.qkv, *rest, written, *where)
    for other in (twin, alone):
        assert torch.equal(values_of(pool).float(), values_of(other).float())
        assert torch.equal(exponents_of(pool), exponents_of(other))
    assert int((exponents_of(pool) != 77).sum() if rounded else (pool != 7.0).any(-1).sum()) == 18


def test_rotates_in_place_and_finds_pages(device: str) -> None:
    case = Heads(8, 2, 64, torch.float32, True, device)
    tables = torch.zeros(4, 70, dtype=torch.int32, device=device)
    tables[2, 0], tables[3, 2], tables[0, 62] = 4, 1, 2
    slots = torch.tensor([2, 3, 0], dtype=torch.int32, device=device)
    lengths = torch.tensor([1, 38, 0], dtype=torch.int32, device=device)
    expected = case.expected_pool([4 * 16, 16 + 5, -1])
    out = case.qkv[:, : 8 * 64].view(3, 8, 64)
    untouched = case.qkv[2].clone()
    fused.qkv_rope_write(
        case.qkv, case.positions, case.norm, EPS, case.table, out, case.pool, tables, slots, lengths
    )
    assert_close(out[:2], case.q[:2])
    assert torch.equal(case.qkv[2], untouched)
    assert_close(case.pool, expected)


def test_keys_go_back_where_they_came_from(device: str) -> None:
    case = Heads(8, 2, 64, torch.bfloat16, True, device)
    parts = case.qkv.view(3, 12, 64)
    before = parts.clone()
    out, places = torch.empty_like(case.q), torch.arange(3, device=device)
    fused.qkv_rope_write(
        case.qkv, case.positions, case.norm, EPS, case.table, out, case.pool, places
    )
    assert_close(parts[:, 8:10], case.k)
    assert torch.equal(parts[:, :8], before[:, :8])
    assert torch.equal(parts[:, 10:], before[:, 10:])


def test_rows_that_pad_are_not_followed(device: str) -> None:
    """Their slot, position and page may be anything."""
    case = Heads(8, 2, 64, torch.float32, False, device)
    before = case.pool.clone()
    far = torch.full((3,), 2**30, dtype=torch.int32, device=device)
    nothing = torch.zeros(3, dtype=torch.int32, device=device)
    tables = torch.zeros(1, 1, dtype=torch.int32, device=device)
    out = torch.empty(3, 8, 64, device=device)
    fused.qkv_rope_write(case.qkv, far, None, EPS, case.table, out, case.pool, tables, far, nothing)
    fused.qkv_rope_write(case.qkv, far, None, EPS, case.table, out, case.pool, -far)
    assert torch.equal(case.pool, before)


def test_long_contexts_turn_as_in_float64(device: str) -> None:
    """The table is as good as the float32 product of position and frequency."""
    frequencies = (500_000.0 ** (-torch.arange(0, 128, 2) / 128)).to(device)
    table = fused.rotary_table(frequencies, 1.0, 131_072)[131_000:].double()
    places = torch.arange(131_000, 131_072, dtype=torch.float32, device=device)
    angles = (places[:, None] * frequencies).double()
    expected = torch.stack((angles.cos(), angles.sin()), dim=-1)
    torch.testing.assert_close(table, expected, rtol=0, atol=2e-7)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rows", "inner"), [(1, 96), (2, 2100)])
def test_silu_mul(rows: int, inner: int, dtype: torch.dtype, device: str) -> None:
    gate_up = 4 * random(rows, 2 * inner, dtype=dtype, device=device)
    gate_up[0, 0] = -80.0  # almost -0
    gate, up = gate_up.chunk(2, dim=1)
    out = torch.empty(rows, inner, dtype=dtype, device=device)
    assert_close(fused.act_mul(gate_up, out), functional.silu(gate) * up)


def test_clamped_swiglu(device: str) -> None:
    """Of numbers far beyond the bounds, too."""
    gate_up = 6 * random(3, 2 * 96, dtype=torch.float32, device=device)
    out = torch.empty(3, 96, device=device)
    expected = ACTIVATIONS["clamped_swiglu"](*gate_up.chunk(2, dim=1))
    assert_close(fused.act_mul(gate_up, out, "clamped_swiglu"), expected)
    assert float(gate_up.abs().max()) > 14.0


@pytest.mark.parametrize("width", [64, 2500])
def test_the_columns_of_ranks_are_put_side_by_side(width: int, device: str) -> None:
    parts = random(3, 2, width, dtype=torch.float32, device=device)
    out = torch.full((2, 3 * width), torch.nan, device=device)
    fused.side_by_side(parts, out)
    assert torch.equal(out, torch.cat(list(parts), dim=1))
    short = torch.full((2, 2 * width + 3), torch.nan, device=device)
    fused.side_by_side(parts, short)
    assert torch.equal(short, out[:, : 2 * width + 3])


@pytest.mark.parametrize("hidden", [64, 1100])
def test_embeds_the_last_token_of_active_rows(hidden: int, device: str) -> None:
    table = random(10, hidden, dtype=torch.bfloat16, device=device)
    last_token = torch.tensor([9, -5, 4], device=device)
    slots = torch.tensor([2, 1_000_000, 0], dtype=torch.int32, device=device)
    lengths = torch.tensor([5, 0, 1], dtype=torch.int32, device=device)
    out = torch.empty(3, hidden, dtype=torch.bfloat16, device=device)
    fused.embed(last_token, slots, lengths, table, out)
    assert torch.equal(out, torch.stack((table[4], torch.zeros_like(table[0]), table[9])))


@pytest.mark.parametrize("hidden", [64, 1100])
def test_a_pass_begins_with_decode_rows_and_ends_in_padding(hidden: int, device: str) -> None:
    """Two decode rows, three given tokens, two rows of padding; what lies behind each is not."""

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    table = random(10, hidden, dtype=torch.bfloat16, device=device)
    residual = torch.full((7, hidden), torch.nan, dtype=torch.bfloat16, device=device)
    positions, write_slots = ints(*[77] * 7), ints(*[77] * 7)
    bad = 1_000_000
    fused.lay_out(
        ints(2, 5),
        ints(2, 0, bad),
        ints(17, 3, bad),
        ints(9, bad, 4),
        ints(*range(20, 29)).view(3, 3),
        ints(1, 2, 3, bad),
        ints(30, 31, 0, bad),
        ints(100, 101, 5, bad),
        page_size=16,
        embedding=table,
        residual=residual,
        positions=positions,
        write_slots=write_slots,
    )
    assert torch.equal(residual[:5], table[[4, 9, 1, 2, 3]])
    assert (residual[5:] == 0).all()
    assert positions.tolist() == [17, 3, 30, 31, 0, 0, 0]
    assert write_slots.tolist() == [27 * 16 + 1, 20 * 16 + 3, 100, 101, 5, -1, -1]


@pytest.mark.parametrize("rows", [4, 300])
def test_advance_runs_rows_for_their_steps(rows: int, device: str) -> None:
    """Row r takes part in r % 3 steps of three, and stops there."""
    numbers = torch.arange(rows, dtype=torch.int32, device=device)
    steps = numbers % 3
    slots = numbers.flip(0).contiguous()
    step = torch.zeros(1, dtype=torch.int32, device=device)
    positions, lengths = numbers + 10, torch.where(steps > 0, numbers + 11, 0).int()
    last_token = torch.full((rows,), -1, device=device)
    ring = torch.full((3, rows), -1, device=device)
    for now in range(3):
        sampled = numbers.long() * 10 + now
        fused.advance(sampled, slots, steps, step, positions, lengths, last_token, ring)
        active = now < steps
        assert torch.equal(ring[now], torch.where(active, sampled, -1))
        left = torch.where(now + 1 < steps, numbers + 12 + now, 0)
        assert torch.equal(lengths, left.int())
    assert step.item() == 3
    assert torch.equal(positions, numbers + 10 + steps)
    expected = torch.where(steps > 0, numbers.long() * 10 + steps - 1, -1)
    assert torch.equal(last_token[slots.long()], expected)


def test_advance_leaves_the_experts_read_behind_the_tokens(device: str) -> None:
    """Of every step its own."""
    ints = torch.zeros(2, dtype=torch.int32, device=device)
    slots, steps, lengths = ints + torch.arange(2, device=device).int(), ints + 2, ints + 5
    step, experts_read = torch.zeros(1, dtype=torch.int32, device=device), ints[:1].clone()
    ring = torch.full((2, 3), -1, dtype=torch.int32, device=device)
    for now in range(2):
        experts_read += 7 + now
        how = ints.clone(), lengths, ints.clone(), ring
        fused.advance(ints + now + 3, slots, steps, step, *how, experts_read)
    assert ring.tolist() == [[3, 3, 7], [4, 4, 8]]
    assert experts_read.item() == 0
