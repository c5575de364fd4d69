"""The CUDA C++ of products of few rows, its instructions acted out on the CPU.

See skinny_gemm_host.cc. tests/gpu/test_products.py checks the same on a GPU.
"""

import ctypes
import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels import on_host
from twolane.kernels.products import skinny_gemm
from twolane.kernels.products.skinny_gemm import ROWS, Groups, Scratch, Variant
from twolane.model.load.quantized import for_gpu
from twolane.model.matrix import quantised

pytestmark = on_host.needs_compiler
BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("host")

    @functools.cache
    def build(options: tuple[str, ...], source: str = skinny_gemm.text()) -> ctypes.CDLL:
        return on_host.build("skinny_gemm_host.cc", source, options, folder)

    return build


class _Matrix(ctypes.Structure):
    """As in skinny_gemm_host.cc."""

    _fields_ = (
        ("at", ctypes.c_void_p),
        *((name, ctypes.c_uint64) for name in ("rows", "columns", "stride", "box_rows", "line")),
        ("bytes", ctypes.c_uint64),
        ("padding", ctypes.c_char * 72),
    )


def matrix(of: Tensor, rows: int, line: int):
    """In place of the driver's description of a matrix."""
    described = _Matrix(of.data_ptr(), *of.shape, of.stride(0), rows, line, of.itemsize)
    return skinny_gemm.TensorMap.from_buffer_copy(described)


def run(
    build, variant: Variant, blocks: int, x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor,
    seed: int = 0, scales: skinny_gemm.Scales | None = None, groups: Groups | None = None,
    w_groups: Tensor | None = None,
) -> None:  # fmt: skip
    """The kernel, adding into `out` if there is a bias."""
    scratch = Scratch.of(blocks, torch.device("cpu"))
    scratch.partials.fill_(torch.nan)
    arguments = skinny_gemm.arguments(
        variant, x, w, bias, out, scratch, bias is not None, matrix, scales, groups, w_groups
    )
    aligned = (ctypes.c_char * (ctypes.sizeof(arguments) + 64))()
    place = ctypes.addressof(aligned) + -ctypes.addressof(aligned) % 64
    ctypes.memmove(place, ctypes.addressof(arguments), ctypes.sizeof(arguments))
    grid = blocks if variant.grouped else min(blocks, arguments.tiles * arguments.iterations)
    fault = build(variant.options()).run(ctypes.c_void_p(place), grid, seed)
    assert fault is None, fault
    assert not scratch.arrivals.any()


class Case:
    """Random factors, and the product in float32."""

    def __init__(self, variant: Variant, m: int, n: int, k: int) -> None:
        draw = torch.Generator().manual_seed(m * n + k)

        kind = BF16 if variant.dtype == E4M3 else variant.dtype

        def random(*shape: int, dtype: torch.dtype = kind) -> Tensor:
            return torch.randn(shape, generator=draw).to(dtype)

        plain = not (variant.gated or variant.wide)
        self.x = random(m, k + 16, dtype=variant.dtype)[:, :k]
        self.w = random(n * (1 + variant.gated), k, dtype=variant.dtype)
        self.bias = random(n) if plain else None
        self.old = random(m + 1, n) if plain else torch.full((m + 1, n), 7.0, dtype=kind)
        if variant.wide:
            self.old = self.old.float()
        self.expected = self.x.float() @ self.w.float().T
        self.scales = None
        if variant.dtype == E4M3:
            self.scales = tuple(random(len(each)).exp().float() for each in (self.x, self.w))
            self.expected *= self.scales[0][:, None] * self.scales[1]
        self.w_groups = None
        if variant.group:
            w = quantised(torch.randn(self.w.shape, generator=draw), f"int4_g{variant.group}")
            assert w.scales is not None
            zeros = torch.randint(0, 16, w.scales.shape, generator=draw, dtype=torch.uint8)
            signs = torch.randint(0, 2, w.scales.shape, generator=draw) * 2 - 1
            w = for_gpu(replace(w, zeros=zeros, scales=w.scales * signs), BF16)
            self.w, self.w_groups = w.values, w.scales
            self.expected = self.x.float() @ w.dequantised().T
        if variant.gated:
            gate, up = self.expected.tensor_split(2, dim=1)
            self.expected = torch.nn.functional.silu(gate) * up
        if self.bias is not None:
            self.expected += self.bias.float() + self.old[:-1].float()

    def error(self, out: Tensor) -> float:
        return float((out.float() - self.expected).norm() / self.expected.norm())


VARIANTS = [
    (Variant(128, 16, swap=True, gated=True), 16),
    (Variant(64, 24, swap=True, dtype=FP16), 17),
    (Variant(64, 64, wide=True), 50),
    (Variant(128, 16, swap=True, dtype=E4M3), 9),
    (Variant(256, 24, swap=True, gated=True, group=32), 24),
]
ALL = [
    (Variant(256, 48, swap=True), 40),
    (Variant(256, 64, gated=True, dtype=E4M3), 61),
    (Variant(64, 16, swap=True), 3),
    (Variant(256, 32, swap=True, wide=True, dtype=FP16), 21),
    (Variant(256, 64), 64),
    (Variant(128, 64, gated=True, dtype=FP16), 33),
    (Variant(128, 96, swap=True, gated=True), 90),
    (Variant(256, 40, swap=True, dtype=E4M3), 33),
    (Variant(128, 128, dtype=E4M3), 101),
    (Variant(128, 32, swap=True, gated=True, dtype=E4M3), 30),
    (Variant(128, 16, swap=True, group=128), 9),
    (Variant(256, 64, swap=True, group=64), 60),
    (Variant(128, 128), 70),
    (Variant(256, 40, swap=True), 33),
    (Variant(256, 64, dtype=E4M3), 64),
] + [
    (variant, rows - 3)
    for rows in ROWS
    for gated, wide, dtype in (
        (False, False, BF16), (True, False, BF16), (False, True, BF16), (False, False, E4M3),
        (True, False, E4M3),
    )
    for units in (32, 132)
    for variant in skinny_gemm.variants(rows, dtype, units, gated=gated, wide=wide)
] + [
    (variant, rows - 3)
    for rows in ROWS
    for gated in (False, True)
    for variant in skinny_gemm.variants(rows, BF16, 132, gated=gated, group=128)
]  # fmt: skip


@pytest.mark.parametrize(
    ("variant", "m"), [*VARIANTS, *(pytest.param(*each, marks=pytest.mark.full) for each in ALL)]
)
def test_against_a_reference(build, variant: Variant, m: int) -> None:
    """Tiles cut among blocks and not, the last ones partly outside, k not whole; rows strided."""
    k = 256 if variant.group else 200 * (1 + (variant.dtype == E4M3))
    case = Case(variant, m, 2 * variant.columns + 16, k)
    for blocks in (1, 7):
        out = case.old.clone()
        rest = {"scales": case.scales, "w_groups": case.w_groups}
        run(build, variant, blocks, case.x, case.w, case.bias, out[:-1], **rest)
        assert case.error(out[:-1]) < (1e-3 if variant.dtype == FP16 else 4e-3)
        assert torch.equal(out[-1], case.old[-1])


def test_order_of_arrival_does_not_matter(build) -> None:
    """Three tiles of four iterations over seven blocks: some tiles are the sum of three parts."""
    variant, outs = Variant(64, 16, swap=True), []
    case = Case(variant, 5, 192, 256)
    for seed in range(4):
        outs.append(case.old.clone())
        run(build, variant, 11, case.x, case.w, case.bias, outs[-1][:-1], seed)
    assert all(torch.equal(out, outs[0]) for out in outs)


BROKEN = {
    "x is read too early": ("    wait_for_previous();\n    at = begin;", "    at = begin;"),
    "partial sums are left too early": ("        wait_for_previous();\n        consume", "consume"),
    "a place is given back too early": (
        "multiply_wait<1>();\n            if (i > from",
        "multiply_wait<2>();\n            if (i > from",
    ),
    "a sum is read too early": ("multiply_wait<0>();", ""),
    "a fragment changes too early": ("multiply_wait<1>();  // the other", "//"),
}


SEEN = {"x is read too early", "a fragment changes too early"}
"""Those that are broken in the short form, too: each is compiled."""


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[] if what in SEEN else pytest.mark.full) for what in BROKEN]
)
def test_a_missing_wait_is_seen(build, what: str) -> None:
    wait, instead = BROKEN[what]
    source = skinny_gemm.text()
    assert source.count(wait) == 1
    broken = source.replace(wait, instead)
    widens = "fragment" in what
    variant = Variant(128, 16, swap=True, group=128) if widens else Variant(64, 16, swap=True)
    case = Case(variant, 5, 192, 40 * 64)
    out = case.old.clone()
    given = case.x, case.w, case.bias, out[:-1]
    with pytest.raises(AssertionError):
        run(lambda o: build(o, broken), variant, 2, *given, w_groups=case.w_groups)
        assert case.error(out[:-1]) < 4e-3


@pytest.mark.parametrize(
    ("gated", "dtype"),
    [
        (True, BF16),
        (False, E4M3),
        pytest.param(False, BF16, marks=pytest.mark.full),
        pytest.param(True, E4M3, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("counts", [[0, 3, 0, 16, 1], [0, 0, 2, 0, 0], [16] * 5])
def test_rows_grouped_by_expert(build, counts: list[int], gated: bool, dtype: torch.dtype) -> None:
    """Experts without rows are never read: their weights are not numbers."""
    n, k, variant = 96, 208, Variant(128, 16, swap=True, gated=gated, dtype=dtype, grouped=True)
    draw = torch.Generator().manual_seed(sum(counts))
    rows, width = sum(counts), n * (1 + gated)
    x = torch.randn(rows, k, generator=draw).to(dtype)
    w = torch.randn(len(counts), width, k, generator=draw).to(dtype)
    of_x = torch.randn(rows, 1, generator=draw).exp()
    of_w = torch.randn(len(counts), width, generator=draw).exp()
    scales = (of_x, of_w.flatten()) if dtype == E4M3 else None
    lists, expected, first = [], [], 0
    for expert, count in enumerate(counts):
        if count == 0:
            w[expert], of_w[expert] = torch.nan, torch.nan
            continue
        lists += [expert, first, count, 0]
        wide = x[first : first + count].float() @ w[expert].float().T
        if scales is not None:
            wide *= of_x[first : first + count] * of_w[expert]
        gate, up = wide.chunk(2, dim=1)
        expected.append(torch.nn.functional.silu(gate) * up if gated else wide)
        first += count
    numbers = torch.tensor([len(lists) // 4, 0, 0, 0, *lists], dtype=torch.int32)
    groups = Groups(numbers, len(counts), known=False, following=None)
    for blocks in (1, 5, 13):
        out = torch.full((rows + 1, n), 7.0, dtype=BF16)
        run(
            build, variant, blocks, x, w.flatten(0, 1), None, out[:-1], scales=scales, groups=groups
        )
        reference = torch.cat(expected)
        assert (out[:-1].float() - reference).norm() < 4e-3 * reference.norm()
        assert bool((out[-1] == 7).all())


@pytest.mark.parametrize("dtype", [pytest.param(BF16, marks=pytest.mark.full), E4M3])
def test_rows_of_a_batch_found_by_masks(build, dtype: torch.dtype) -> None:
    """A row goes to several experts; what an expert makes of its rows lies together, in order."""
    n, k, rows = 96, 208, 13
    variant = Variant(128, 16, swap=True, gated=True, dtype=dtype, grouped=True, spread=True)
    draw = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, k, generator=draw).to(dtype)
    w = torch.randn(4, 2 * n, k, generator=draw).to(dtype)
    of_x = torch.randn(rows, 1, generator=draw).exp()
    of_w = torch.randn(4, 2 * n, generator=draw).exp()
    scales = (of_x, of_w.flatten()) if dtype == E4M3 else None
    lists, expected, first = [], [], 0
    for expert, mine in ((0, [4]), (2, list(range(rows))), (3, [0, 4, 5, 12])):
        lists += [expert, first, len(mine), sum(1 << row for row in mine)]
        wide = x[mine].float() @ w[expert].float().T
        if scales is not None:
            wide *= of_x[mine] * of_w[expert]
        gate, up = wide.chunk(2, dim=1)
        expected.append(torch.nn.functional.silu(gate) * up)
        first += len(mine)
    numbers = torch.tensor([3, 0, 0, 0, *lists], dtype=torch.int32)
    groups = Groups(numbers, 4, known=False, following=None)
    for blocks in (1, 5, 13):
        out = torch.full((first + 1, n), 7.0, dtype=BF16)
        given = x, w.flatten(0, 1), None, out[:-1]
        run(build, variant, blocks, *given, scales=scales, groups=groups)
        reference = torch.cat(expected)
        assert (out[:-1].float() - reference).norm() < 4e-3 * reference.norm()
        assert bool((out[-1] == 7).all())


def test_a_grouped_product_brings_the_next_ones_weights_into_the_cache(build) -> None:
    """All of those of experts that have rows, each once, where the blocks' shares are small."""
    n, k, variant = 96, 200, Variant(128, 16, swap=True, gated=True, grouped=True)
    x, w = torch.ones(3, k, dtype=BF16), torch.ones(4 * 2 * n, k, dtype=BF16)
    following = torch.ones(4 * 160, 96, dtype=BF16)
    numbers = torch.tensor([2, 0, 0, 0, 1, 0, 2, 0, 2, 2, 1, 0], dtype=torch.int32)
    groups = Groups(numbers, 4, known=False, following=following)
    out = torch.empty(3, n, dtype=BF16)
    brought = build(variant.options()).brought
    brought.argtypes, brought.restype = [ctypes.c_void_p] * 2, ctypes.c_long
    each = following.nbytes // 4
    for blocks in (1, 3):
        run(build, variant, blocks, x, w, None, out, groups=groups)
        place = following.data_ptr()
        assert brought(place + each, place + 3 * each) == 2 * each
