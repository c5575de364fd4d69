"""Which way a product goes, and what it comes to where nothing is tuned."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from twolane.kernels.products import dispatch as linear
from twolane.kernels.products import skinny_gemm, widening
from twolane.kernels.products.dispatch import (
    CUBLAS,
    Case,
    GpuProducts,
    Way,
    choose,
    improve,
    read_ways,
    shortlist,
    write_ways,
)
from twolane.kernels.runtime import nvrtc
from twolane.kernels.sizes import SIZES
from twolane.model.matrix import GROUPS, Matrix, in_registers, quantised

LT = linear.CUBLASLT
OWN = Way(variant=skinny_gemm.Variant(128, 64), blocks=48)
WIDE = Way(variant=skinny_gemm.Variant(256, 64), blocks=48)


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({CUBLAS: 1.0, LT: 0.99, OWN: 0.99}, CUBLAS),
        ({CUBLAS: 1.0, LT: 0.9, OWN: 0.89}, LT),
        ({CUBLAS: 1.0, LT: 0.9, OWN: 0.8, WIDE: 0.7}, WIDE),
        ({CUBLAS: 1.0, LT: 1.2, OWN: 0.9}, OWN),
        ({CUBLAS: 1.0, LT: 0.9}, LT),
        ({CUBLAS: 1.0}, CUBLAS),
    ],
)
def test_noise_does_not_choose(seconds: dict[Way, float], chosen: Way) -> None:
    assert choose(seconds) == chosen


def test_a_product_goes_the_way_of_the_next_more_rows() -> None:
    weight = Matrix.plain(torch.zeros(64, 32, dtype=torch.bfloat16))
    products = GpuProducts(48, {Case.of("linear", weight): {16: LT, 64: OWN}})
    ways = [products.way("linear", rows, weight) for rows in (1, 16, 17, 64, 65)]
    assert ways == [LT, LT, OWN, OWN, CUBLAS]  # the own kernel has no more rows
    products.ways[Case.of("linear", weight)][2048] = LT
    assert [products.way("linear", rows, weight) for rows in (65, 2048, 9000)] == [LT] * 3
    assert products.way("add_linear", 1, weight) == CUBLAS
    assert products.way("linear", 1, Matrix.plain(weight.values.half())) == CUBLAS
    assert products.way("linear", 1, Matrix.plain(weight.values.t())) == CUBLAS


@pytest.mark.parametrize("rows", linear.ROWS)
@pytest.mark.parametrize("operation", ["linear", "add_linear", "gate_up", "logits"])
@pytest.mark.parametrize("units", [16, 56, 132])
def test_candidates(operation: linear.Operation, units: int, rows: int) -> None:
    """They have names of their own, hold the rows, and have no more blocks than SMs."""
    case = Case(operation, 24_576, 4096, "bf16")
    ways = list(GpuProducts(units)._candidates(case, rows))
    assert ways[:2] == [CUBLAS, LT]
    assert len({way.name for way in ways}) == len(ways)
    assert (len(ways) > 2) == (rows <= skinny_gemm.MAX_ROWS)
    for way in ways[2:]:
        assert way.variant is not None and way.variant.rows >= rows and way.blocks <= units
        assert way.variant.gated == (operation == "gate_up")
        assert way.variant.wide == (operation == "logits")
        assert way.variant.shared <= 227 * 1024


CASES = [Case("linear", 64, 32, "bf16"), Case("gate_up", 64, 32, "bf16")]


def test_what_was_chosen_is_kept(tmp_path: Path) -> None:
    record, (one, other) = tmp_path / "new" / "ways.json", CASES
    candidates = {
        (one, 16): [CUBLAS, LT],
        (other, 16): [CUBLAS, LT],
        (one, 64): [CUBLAS, OWN, WIDE],
    }
    assert read_ways(record, candidates) == {}
    ways = {(one, 16): LT, (other, 16): CUBLAS, (one, 64): WIDE}
    write_ways(record, ways)
    assert read_ways(record, candidates) == ways
    assert read_ways(record, {(one, 64): [CUBLAS, OWN], (one, 128): [CUBLAS]}) == {}
    for text in ("", "[1]", '{"16": 7}', json.dumps({"linear 64x32 bf16 64": "p999/1"})):
        record.write_text(text)
        assert read_ways(record, candidates) == {}


def test_the_fastest_are_tried_in_layers() -> None:
    own = [Way(variant=skinny_gemm.Variant(64, 64), blocks=blocks) for blocks in range(8)]
    seconds = {CUBLAS: 5.0, LT: 4.0, **{way: 9.0 - i for i, way in enumerate(own)}}
    assert shortlist(seconds) == [own[7], own[6], own[5], own[4], LT]
    assert shortlist({CUBLAS: 1.0, LT: 2.0}) == [CUBLAS]


def test_a_way_that_is_slower_alone_may_be_faster_in_layers() -> None:
    """The own kernel saves more where the next product's starts before it has ended."""
    one, other = CASES

    def seconds(ways: Mapping[Case, Way]) -> float:
        own = [way.variant is not None for way in ways.values()]
        return 10.0 + 0.1 * sum(own) - 0.5 * all(own) - 0.02 * (ways[other] == WIDE)

    begin = {one: CUBLAS, other: OWN}
    tries = {one: [OWN, CUBLAS], other: [WIDE, OWN, CUBLAS]}
    assert improve(begin, tries, seconds) == {one: OWN, other: OWN}  # 0.2 % less is noise
    assert improve({**begin, other: CUBLAS}, tries, seconds) == {one: CUBLAS, other: CUBLAS}
    assert begin == {one: CUBLAS, other: OWN}


def test_a_record_belongs_to_its_case(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keys = [("a", "x"), ("b", "x"), ("a", "y")]
    paths = {nvrtc.cache_path(*key) for key in keys}
    assert len(paths) == 3 and all(tmp_path in path.parents for path in paths)


def test_what_is_timed_is_more_than_the_cache_and_bounded() -> None:
    """Weights of 8 kB would take 25,000 products for one timing, and a start for ever."""
    small, large = (Matrix.plain(torch.empty(n, 64, dtype=torch.bfloat16)) for n in (64, 1 << 18))
    assert len(linear.in_turn([small, small])) == linear.MAX_TIMED
    assert sum(each.nbytes for each in linear.in_turn([large])) in range(200 << 20, 250 << 20)


def test_nothing_is_tuned_without_the_kernel() -> None:
    """On the CPU, and for float32 everywhere, products are the library's."""
    products, weight = GpuProducts(8), torch.zeros(64, 32)
    for each in (Matrix.plain(weight), Matrix.plain(weight.bfloat16())):
        products.tune({Case.of("linear", each): [each]}, 64)
        products.tune_passes({Case.of("linear", each): [each]})
    assert products.ways == {}


def test_passes_choose_a_library_for_every_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What decode chose stands, and what was found is not timed again. The clock is made up."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(skinny_gemm, "serves", lambda weight, scheme, gated: True)
    monkeypatch.setattr(nvrtc, "driver_version", lambda: 13_000)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "made up")
    weight = Matrix.plain(torch.zeros(64, 32, dtype=torch.bfloat16))
    case, timed = Case.of("linear", weight), []

    def seconds(self: GpuProducts, way: Way, case: Case, rows: int, weights: object) -> float:
        timed.append(rows)
        return 1.0 if way == CUBLAS else 0.9 if rows > 512 else 0.99

    monkeypatch.setattr(GpuProducts, "_seconds", seconds)
    first = GpuProducts(100, {case: {64: OWN, 128: LT}})
    first.tune_passes({case: [weight]})
    left = [size for size in SIZES if size > 128]
    assert timed == [size for size in left for _ in range(2)]
    assert list(first.ways[case]) == list(SIZES)
    ways = [first.way("linear", rows, weight) for rows in (20, 128, 129, 512, 513, 2048, 5000)]
    assert ways == [OWN, LT, CUBLAS, CUBLAS, LT, LT, LT]
    timed.clear()
    again = GpuProducts(100, {case: {64: OWN, 128: LT}})
    again.tune_passes({case: [weight]})
    assert again.ways == first.ways and not timed
    GpuProducts(84).tune_passes({case: [weight]})
    assert timed  # another share is another matter


def test_untuned_products() -> None:
    draw = torch.Generator().manual_seed(0)
    x, w = torch.randn(5, 32, generator=draw), torch.randn(48, 32, generator=draw)
    bias, old = torch.randn(48, generator=draw), torch.randn(5, 48, generator=draw)
    products, out, matrix = GpuProducts(8), torch.empty(5, 48), Matrix.plain(w)
    products.linear(x, matrix, bias, out)
    torch.testing.assert_close(out, x @ w.T + bias)
    products.logits(x, matrix, out)
    torch.testing.assert_close(out, x @ w.T)
    out.copy_(old)
    products.add_linear(x, matrix, bias, out)
    torch.testing.assert_close(out, old + x @ w.T + bias)


@pytest.mark.parametrize("group", [32, 128])
def test_four_bits_are_widened_for_a_library(
    group: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Part by part, each with its bias, as numbers that bfloat16 holds."""
    draw = torch.Generator().manual_seed(group)
    x, w, bias, old = (
        torch.randn(*shape, generator=draw).bfloat16().to(device)
        for shape in ((5, 640), (272, 640), (272,), (5, 272))
    )
    matrix = quantised(w, GROUPS[group])
    zeros = torch.randint(0, 16, matrix.scales.shape, generator=draw, dtype=torch.uint8)
    signs = torch.randint(0, 2, zeros.shape, generator=draw) * 2 - 1
    signed = matrix.scales * signs.to(device)
    weight = in_registers(replace(matrix, zeros=zeros.to(device), scales=signed))
    monkeypatch.setattr(widening, "WIDE_BYTES", 128 * 2 * 640)
    meant = weight.dequantised()
    wide = [widening.widen(weight.values, weight.scales, rows) for rows in widening.parts(272, 640)]
    assert [len(part) for part in wide] == [128, 128, 16]
    assert torch.equal(torch.cat(wide), meant.bfloat16())
    products, out = GpuProducts(8), torch.empty_like(old)
    expected = x.float() @ meant.bfloat16().float().T
    close = {"atol": 0.3, "rtol": 0.01}
    products.linear(x, weight, bias, out)
    torch.testing.assert_close(out.float(), expected + bias, **close)
    out.copy_(old)
    products.add_linear(x, weight, bias, out)
    torch.testing.assert_close(out.float(), expected + bias + old, **close)
    gate, up = expected.bfloat16().float().chunk(2, dim=1)
    act = old.new_empty(5, 136)
    products.gate_up(x, weight, None, out, act)
    silu = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(act.float(), silu, atol=0.3, rtol=0.02)


@pytest.mark.parametrize("operation", ["linear", "add_linear", "gate_up"])
def test_a_kernel_of_four_bits_that_is_wrong_is_not_chosen(
    operation: linear.Operation, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is replaced by a product that is right in one kind of tiles and wrong in another;
    a product that is not a number is wrong, too."""
    draw = torch.Generator().manual_seed(0)
    weight = in_registers(quantised(torch.randn(64, 128, generator=draw), "int4_g128").to(device))
    meant, case = weight.dequantised(), Case.of(operation, weight)
    right, wrong, broken = (
        Way(variant=skinny_gemm.Variant(n, 16, swap=True, group=128), blocks=n) for n in (64, 1, 2)
    )

    def launch(variant, blocks, x, values, bias, out, scratch, *, residual, **_) -> None:
        product = x.float() @ meant.T
        out.copy_((product + out if residual else product).to(out.dtype))
        if blocks < 64:
            out[0] = 2 * out[0] if blocks == 1 else torch.nan

    monkeypatch.setattr(skinny_gemm, "launch", launch)
    monkeypatch.setattr(GpuProducts, "scratch", lambda self, device: None)
    kept = GpuProducts(8)._agreeing([CUBLAS, right, wrong, broken], case, 3, weight)
    assert kept == [CUBLAS, right]


@pytest.mark.parametrize("biased", [False, True])
def test_untuned_gate(biased: bool, device: str) -> None:
    draw = torch.Generator().manual_seed(0)
    x, w, bias = (
        torch.randn(*shape, generator=draw).to(device) for shape in ((5, 32), (48, 32), (48,))
    )
    bias = bias if biased else None
    gate_up, out = torch.empty(5, 48, device=device), torch.empty(5, 24, device=device)
    GpuProducts(8).gate_up(x, Matrix.plain(w), bias, gate_up, out)
    gate, up = torch.nn.functional.linear(x, w, bias).tensor_split(2, dim=1)
    torch.testing.assert_close(out, torch.nn.functional.silu(gate) * up)
