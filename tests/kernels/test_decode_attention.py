"""Decode attention against a float32 reference, over shapes, lengths, windows and levels."""

from dataclasses import dataclass, replace

import pytest
import torch

from twolane.kernels.decode_attention.dispatch import (
    DecodeScratch,
    decode_attention,
    decode_scratch,
)
from twolane.kernels.pool import Pool, RoundedPool
from twolane.model import fp8

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@dataclass(frozen=True)
class Case:
    """Random queries and a random paged cache; what no sequence has written is NaN."""

    q: torch.Tensor
    pool: Pool
    tables: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor
    sinks: torch.Tensor | None = None

    @classmethod
    def make(
        cls,
        lengths: list[int],
        kv_heads: int = 2,
        group: int = 4,
        dim: int = 64,
        page: int = 16,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        seed: int = 0,
    ) -> "Case":
        random = torch.Generator().manual_seed(seed)
        rows, most = len(lengths), max(-(-max(lengths) // page), 1)
        used = [-(-n // page) for n in lengths]
        pages = torch.randperm(sum(used) + 3, generator=random, dtype=torch.int32)
        pool = torch.full((len(pages), kv_heads, 2, page, dim), torch.nan)
        # Beyond a sequence's pages, tables name pages outside the pool: nothing may follow them.
        tables = torch.full((rows + 2, most), 1 << 30, dtype=torch.int32)
        slots = torch.randperm(rows + 2, generator=random, dtype=torch.int32)[:rows]
        taken = 0
        for slot, n, count in zip(slots.tolist(), lengths, used, strict=True):
            mine = pages[taken : taken + count]
            tables[slot, :count] = mine
            taken += count
            for i, p in enumerate(mine.tolist()):
                written = min(page, n - i * page)
                shape = (kv_heads, 2, written, dim)
                pool[p, :, :, :written] = torch.randn(shape, generator=random)
        q = torch.randn((rows, kv_heads * group, dim), generator=random) * 2
        return cls(
            q.to(device, dtype),
            pool.to(device, dtype),
            tables.to(device),
            slots.to(device),
            torch.tensor(lengths, dtype=torch.int32, device=device),
        )

    def rounded(self) -> "Case":
        """The same in a rounded pool; what no sequence has written is NaN, with any exponent."""
        values, exponents = fp8.quantise_heads(self.pool)
        return replace(self, pool=RoundedPool(values, exponents))

    def with_sinks(self) -> "Case":
        """The same with sinks from far below to far above all scores."""
        sinks = torch.linspace(-9.0, 9.0, self.q.shape[1], device=self.q.device)
        return replace(self, sinks=sinks[torch.arange(len(sinks)) * 5 % len(sinks)])

    def run(
        self,
        units: int,
        window: int | None = None,
        scale: float | None = None,
        scratch: DecodeScratch | None = None,
    ) -> torch.Tensor:
        out = torch.full_like(self.q, 7.0)
        scratch = scratch or decode_scratch(*self.q.shape, units, self.q.device)
        arguments = self.q, self.pool, self.tables, self.slots, self.lengths, out, scratch
        decode_attention(*arguments, units=units, window=window, scale=scale, sinks=self.sinks)
        return out

    def reference(self, window: int | None = None, scale: float | None = None) -> torch.Tensor:
        """float32 on the CPU; padding rows keep what `run` filled in."""
        pool = self.pool
        if isinstance(pool, RoundedPool):
            pool = torch.ldexp(pool.values.float(), pool.exponents[..., None].int())
        (_, heads, dim), (_, kv_heads, _, page, _) = self.q.shape, pool.shape
        out = torch.full(self.q.shape, 7.0)
        pool, q = pool.float().cpu(), self.q.float().cpu()
        for row, n in enumerate(self.lengths.tolist()):
            if not n:
                continue
            pages = self.tables[int(self.slots[row]), : -(-n // page)].long().cpu()
            kv = pool[pages].permute(2, 1, 0, 3, 4).reshape(2, kv_heads, -1, dim)
            first = max(0, n - window) if window else 0
            k, v = kv[:, :, first:n].repeat_interleave(heads // kv_heads, 1)
            scores = torch.einsum("hd,hnd->hn", q[row], k) * (scale or dim**-0.5)
            if self.sinks is not None:
                scores = torch.cat([scores, self.sinks.cpu()[:, None]], dim=1)
            out[row] = torch.einsum("hn,hnd->hd", scores.softmax(-1)[:, : n - first], v)
        return out

    def check(self, units: int, window: int | None = None, scale: float | None = None) -> None:
        out, expected = self.run(units, window, scale).float().cpu(), self.reference(window, scale)
        error = (out - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert error.max() < TOLERANCE[self.q.dtype], error.max(dim=1)
        padding = self.lengths.cpu() == 0
        assert (out[padding] == 7).all()


RAGGED = [37, 0, 1, 64, 16, 129, 17]


@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 8, 16])
def test_group_sizes(group: int, device: str) -> None:
    Case.make(RAGGED, group=group, device=device).check(units=1)


@pytest.mark.parametrize(("group", "dim", "page"), [(4, 64, 16), (1, 128, 32), (7, 80, 64)])
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.full), torch.bfloat16]
)
@pytest.mark.parametrize("units", [1, 3])
def test_rounded_pools(
    group: int, dim: int, page: int, units: int, dtype: torch.dtype, device: str
) -> None:
    case = Case.make(RAGGED, group=group, dim=dim, page=page, dtype=dtype, device=device).rounded()
    case.check(units)
    case.check(units, window=40)


@pytest.mark.parametrize("dim", [16, 32, 64, 80, 96, 128, 256])
def test_head_dimensions(dim: int, device: str) -> None:
    Case.make([40, 0, 3, 70], group=2, dim=dim, device=device).check(units=1)


@pytest.mark.parametrize("page", [16, 32, 64])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_pages_and_types(page: int, dtype: torch.dtype, device: str) -> None:
    Case.make([150, 31, 0, 32, 33], page=page, dtype=dtype, device=device).check(units=1)


@pytest.mark.parametrize("window", [1, 5, 16, 40, 1000])
def test_sliding_window(window: int, device: str) -> None:
    Case.make(RAGGED, device=device).check(units=1, window=window)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("units", [1, 3])
@pytest.mark.parametrize("group", [1, 7])
def test_sinks(group: int, units: int, window: int | None, device: str) -> None:
    """Also where several workers share a run, and in a rounded pool."""
    case = Case.make([*RAGGED, 300], group=group, device=device).with_sinks()
    case.check(units, window)
    case.rounded().check(units, window)


@pytest.mark.parametrize("units", [1, 2, 5])
def test_cuts(units: int, device: str) -> None:
    """From several runs a worker to a run over several workers, and workers without work."""
    Case.make([160, 0, 33, 5, 0], group=2, device=device).check(units)


def test_nothing_but_padding(device: str) -> None:
    Case.make([0, 0], device=device).check(units=2)


def test_scale(device: str) -> None:
    Case.make([50], device=device).check(units=1, scale=0.3)


def test_queries_inside_a_wider_matrix(device: str) -> None:
    case = Case.make([20, 30], device=device)
    wide = torch.randn(2, 3 * case.q[0].numel(), device=device)
    inner = wide[:, case.q[0].numel() : 2 * case.q[0].numel()].view(case.q.shape)
    inner.copy_(case.q)
    inside = Case(inner, case.pool, case.tables, case.slots, case.lengths)
    assert not inner.is_contiguous()
    assert torch.equal(inside.run(units=1), case.run(units=1))


def test_scratch_is_used_again(device: str) -> None:
    """What one launch leaves there does not reach the next, also of another shape."""
    scratch = decode_scratch(8, 16, 128, 1, device)
    scratch.partial.fill_(torch.nan)
    scratch.sums.fill_(torch.nan)
    for lengths in ([40, 7], [5, 16, 20], [40, 7]):
        case = Case.make(lengths, device=device)
        assert torch.equal(case.run(1, scratch=scratch), case.run(1))


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("q", {"q": torch.zeros(2, 34, 64)}),
        ("q", {"q": torch.zeros(2, 8, 64, dtype=torch.float64)}),
        ("pool", {"pool": torch.zeros(9, 2, 2, 24, 64)}),
        ("pool", {"pool": torch.zeros(9, 2, 2, 16, 32)}),
        ("tables", {"tables": torch.zeros(4, 2, dtype=torch.int64)}),
        ("lengths", {"lengths": torch.zeros(3, dtype=torch.int32)}),
        ("slots", {"slots": torch.zeros(2, dtype=torch.int64)}),
        ("sinks", {"sinks": torch.zeros(2)}),
    ],
)
def test_refusals_name_the_field(field: str, change: dict[str, torch.Tensor]) -> None:
    arguments = vars(Case.make([20, 30])) | change
    with pytest.raises(ValueError, match=f"^{field}: "):
        Case(**arguments).run(units=1)


def test_refuses_a_small_scratch_and_a_bad_window() -> None:
    case = Case.make([20, 30])
    with pytest.raises(ValueError, match=r"^scratch: .*: units"):
        case.run(units=3, scratch=decode_scratch(2, 8, 64, 2, "cpu"))
    with pytest.raises(ValueError, match=r"^window=0"):
        case.run(units=1, window=0)
