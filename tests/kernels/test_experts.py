"""Mixtures of experts on a GPU: routing against the CPU's, and products grouped by expert."""

from dataclasses import replace

import pytest
import torch

from tests.kernels.interpreter import DEVICE
from twolane.kernels.experts import grouped_gemm
from twolane.kernels.experts.products import Epilogues, ExpertBuffers, combined, way
from twolane.kernels.experts.routing import (
    ActiveRows,
    Combination,
    Routing,
    gather,
    route,
)
from twolane.kernels.experts.rule import RoutingRule
from twolane.kernels.fused import rms_norm
from twolane.kernels.products.dispatch import GpuProducts, input_of
from twolane.model.load.quantized import for_gpu
from twolane.model.matrix import Matrix, Scheme, in_registers, quantised
from twolane.model.mlp import ExpertBiases, Experts
from twolane.model.products import Products
from twolane.model.routing import route as on_cpu

EXPERTS, PER_TOKEN, UNITS = 12, 3, 4
RULE = RoutingRule(EXPERTS, PER_TOKEN)
RULES = {
    "normalised": RULE,
    "plain": RULE._replace(normalised=False),
    "shared": RULE._replace(sigmoid=True, biased=True, scale=1.5, shared=1),
    "gated": RULE._replace(shared=2, gated=True),
}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def some_active(rows: int) -> ActiveRows:
    """Every third row does not count."""
    marks = torch.ones(rows, dtype=torch.int32, device=DEVICE)
    marks[1::3] = 0
    return ActiveRows(marks, 1)


@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        *((rows, kind) for rows in (1, 29) for kind in RULES),
        (700, "normalised"),
        pytest.param(700, "plain", marks=pytest.mark.full),
    ],
)
def test_routing_is_that_of_the_cpu(rows: int, kind: str) -> None:
    """Logits are rounded, so that many are alike."""
    rule = RULES[kind]
    bias = (random(EXPERTS, seed=9) * 2).round() / 16 if rule.biased else None
    logits, active = (random(rows, rule.logits) * 4).round() / 4, some_active(rows)
    routing = Routing.of(rule.stored, rule.entries, rows, torch.device(DEVICE))
    weights, chosen = on_cpu(logits.cpu(), rule, None if bias is None else bias.cpu())
    for _ in range(2):  # the second finds what the first left
        route(logits, active, routing, 16, rule, bias)
        there = active.marks.cpu() > 0
        assert torch.equal(routing.chosen.cpu()[there].long(), chosen[there])
        torch.testing.assert_close(routing.weights.cpu()[there], weights[there])
        assert bool((routing.chosen[~there.to(DEVICE)] == rule.stored).all())
        flat = torch.where(there[:, None], chosen, rule.stored).flatten()
        order = flat.sort(stable=True).indices[: int((flat < rule.stored).sum())]
        assert torch.equal(routing.tokens.cpu()[: len(order)].long(), order // rule.entries)
        positions = torch.full_like(flat, -1)
        positions[order] = torch.arange(len(order))
        assert torch.equal(routing.positions.cpu().flatten().long(), positions)
        counts = flat.bincount(minlength=rule.stored + 1)[: rule.stored]
        assert torch.equal(routing.ends.cpu().long(), counts.cumsum(0))
        assert groups(routing) == listed(counts.tolist(), 16)
    assert int(routing.experts_read) == 2 * int((counts > 0).sum())


def test_what_experts_leave_is_added_by_the_next_norm() -> None:
    """As it is added first and normalised then."""
    rows, hidden = 5, 40
    routing = Routing.of(EXPERTS, PER_TOKEN, rows, torch.device(DEVICE))
    route(random(rows, EXPERTS), some_active(rows), routing, 16, RULE)
    left = Combination(random(rows * PER_TOKEN, hidden, seed=3), routing)
    weight, first = random(hidden, seed=4), random(rows, hidden, seed=5)
    second = first.clone()
    left.add_into(first)
    normal = rms_norm(first, weight, 1e-6, torch.empty_like(first))
    assert torch.equal(left.add_and_norm(second, weight, 1e-6, torch.empty_like(first)), normal)
    assert torch.equal(first, second)


def groups(routing: Routing) -> list[tuple[int, ...]]:
    """Expert, first entry and rows of each group."""
    numbers = routing.groups.tolist()
    return [tuple(numbers[4 + 4 * i : 7 + 4 * i]) for i in range(numbers[0])]


def listed(counts: list[int], most: int) -> list[tuple[int, ...]]:
    found, begin = [], 0
    for expert, count in enumerate(counts):
        found += [(expert, begin + i, min(most, count - i)) for i in range(0, count, most)]
        begin += count
    return found


@pytest.mark.parametrize(
    ("rows", "scheme", "biased"),
    [(5, None, False), (200, None, True), (5, "fp8_channel", False), (5, "fp8_channel", True)],
)
def test_experts_are_those_of_the_cpu(rows: int, scheme: Scheme | None, biased: bool) -> None:
    """Rows that are not active stay as they are, and what they are does not matter."""
    hidden, inner = 48, 32
    router = Matrix.plain(random(EXPERTS, hidden))
    gate_up = stored(random(EXPERTS * 2 * inner, hidden, seed=1) / 6, scheme)
    down = stored(random(EXPERTS * hidden, inner, seed=2) / 5, scheme)
    matrices = router, gate_up, down
    mlp = Experts(*matrices, RULE, None, activation="silu")
    if biased:
        given = (random(EXPERTS * n, seed=n) for n in (1, 2 * inner, hidden))
        mlp = replace(mlp, activation="clamped_swiglu", biases=ExpertBiases(*given))
    cpu = of_cpu(mlp)
    x, residual, active = random(rows, hidden, seed=3), random(rows, hidden), some_active(rows)
    expected, there = cpu.add(residual.cpu(), x.cpu(), Products()).to(DEVICE), active.marks > 0
    room = buffers(rows, hidden, inner, gate_up.scheme)
    close = {"atol": 1e-5, "rtol": 1e-5} if scheme is None else {"atol": 2e-2, "rtol": 1e-2}
    for _ in range(2):
        x[~there] = x[~there] * -7
        out = residual.clone()
        mlp._combined(x, active, Room(room), GpuProducts(UNITS)).add_into(out)
        torch.testing.assert_close(out[there], expected[there], **close)
        assert torch.equal(out[~there], residual[~there])


def of_cpu(mlp: Experts) -> Experts:
    """The same experts in the CPU's memory."""
    matrices = {name: getattr(mlp, name).to(torch.device("cpu")) for name in MATRICES}
    biases = mlp.biases and ExpertBiases(*(each.cpu() for each in vars(mlp.biases).values()))
    return replace(mlp, **matrices, biases=biases)


MATRICES = "router", "gate_up", "down"


class Room:
    """Buffers of a lane that has no others."""

    def __init__(self, room: ExpertBuffers) -> None:
        self._room = room

    def experts(self, rows: int, scheme: str) -> ExpertBuffers:
        return self._room


def stored(values: torch.Tensor, scheme: Scheme | None) -> Matrix:
    return Matrix.plain(values) if scheme is None else quantised(values, scheme)


def buffers(
    rows: int, hidden: int, inner: int, scheme: str, dtype: torch.dtype = torch.float32
) -> ExpertBuffers:
    routing, entries = (
        Routing.of(EXPERTS, PER_TOKEN, rows, torch.device(DEVICE)),
        rows * PER_TOKEN,
    )

    def room(count: int, width: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.full((count, width), torch.nan, device=DEVICE, dtype=dtype)

    x, act = (
        input_of(room(entries, w), room(entries, 1, torch.float32), scheme) for w in (hidden, inner)
    )
    gate_up, outs = (room(entries, width) for width in (2 * inner, hidden))
    return ExpertBuffers(routing, room(rows, EXPERTS), x, gate_up, act, outs)


def test_rows_of_an_expert_with_several_groups() -> None:
    """All tokens go to the same experts; each has more rows than a tile."""
    rows, n, k = 150, 70, 33
    logits = random(1, EXPERTS).expand(rows, -1).contiguous()
    everything = ActiveRows(torch.zeros(rows, dtype=torch.int32, device=DEVICE), 0)
    routing = Routing.of(EXPERTS, PER_TOKEN, rows, torch.device(DEVICE))
    route(logits, everything, routing, grouped_gemm.ROWS[0], RULES["plain"])
    x, w = random(rows, k), random(EXPERTS * n, k)
    sorted_x, out = random(rows * PER_TOKEN, k), random(rows * PER_TOKEN, n)
    gather(x, routing, sorted_x)
    grouped_gemm.grouped_gemm(sorted_x, Matrix.plain(w), routing, out, grouped_gemm.ROWS[0], UNITS)
    for rank in range(PER_TOKEN):
        expert = int(routing.chosen[0, rank])
        at = routing.positions[:, rank].long()
        expected = x @ w[expert * n : (expert + 1) * n].t()
        torch.testing.assert_close(out[at], expected, atol=1e-5, rtol=1e-5)
    residual = torch.zeros(rows, n, device=DEVICE)
    Combination(out, routing).add_into(residual)
    summed = sum(
        routing.weights[:, rank, None] * out[routing.positions[:, rank].long()]
        for rank in range(PER_TOKEN)
    )
    torch.testing.assert_close(residual, summed)


@pytest.mark.parametrize(
    ("rows", "scheme", "tile"),
    [(3, "int4_g128", 16), (36, "int4_g32", 64), (264, "int4_g64", 128)],
)
def test_experts_of_four_bits_are_those_of_the_cpu(rows: int, scheme: Scheme, tile: int) -> None:
    """With zero points, in the form that a GPU's kernels read, and with whole tiles and others."""
    hidden, inner = 256, 128
    router = Matrix.plain(random(EXPERTS, hidden).bfloat16())
    wide = random(EXPERTS * 2 * inner, hidden, seed=1) / 16, random(EXPERTS * hidden, inner) / 11
    gate_up, down = (with_zeros(quantised(each.cpu(), scheme)) for each in wide)
    sizes = {"gate_up": 2 * inner, "down": hidden}
    biases = {name: random(EXPERTS * n, seed=n).bfloat16() for name, n in sizes.items()}
    of_cpu = {name: each.cpu() for name, each in biases.items()}
    mlp = Experts(
        *(router.to(torch.device("cpu")), gate_up, down, RULE, None, "clamped_swiglu"),
        ExpertBiases(torch.zeros(EXPERTS).bfloat16(), **of_cpu),
    )
    x, active = random(rows, hidden, seed=3).bfloat16(), some_active(rows)
    residual = torch.zeros_like(x)
    expected = mlp.add(residual.cpu(), x.cpu(), Products()).to(DEVICE)
    ours = [in_registers(each).to(torch.device(DEVICE)) for each in (gate_up, down)]
    assert way(rows * PER_TOKEN, EXPERTS, ours[0]).rows == tile
    room = buffers(rows, hidden, inner, ours[0].scheme, torch.bfloat16)
    room.logits.copy_(x.float() @ router.values.float().t())
    after = Epilogues("clamped_swiglu", **biases)
    left = combined(x, active, *ours, room, GpuProducts(UNITS), RULE, None, after)
    left.add_into(residual)
    there = active.marks > 0
    apart = (residual - expected)[there].float().norm() / expected[there].float().norm()
    assert float(apart) < 0.01
    assert not bool(residual[~there].any())


@pytest.mark.parametrize(
    ("rows", "hidden", "dtype", "tile"),
    [(5, 160, torch.float32, 16), (29, 64, torch.bfloat16, 16), (150, 160, torch.bfloat16, 64)],
)
def test_experts_in_mxfp4_are_those_of_the_cpu(rows, hidden, dtype, tile) -> None:
    """Kept in four bits, of whole blocks of 64 columns and of one and a half."""
    inner = 96
    sizes = EXPERTS, 2 * inner, EXPERTS * 2 * inner, EXPERTS * hidden
    given = [random(n, seed=n).to(dtype) for n in (sizes[0], sizes[2], sizes[3])]
    router = Matrix.plain(random(EXPERTS, hidden).to(dtype))
    wide = random(sizes[2], hidden, seed=1) / 6, random(sizes[3], inner, seed=2) / 5
    gate_up, down = (quantised(each.cpu(), "mxfp4") for each in wide)
    cpu = Experts(
        *(router.to(torch.device("cpu")), gate_up, down, RULE, None, "clamped_swiglu"),
        ExpertBiases(*(each.cpu() for each in given)),
    )
    x, residual, active = random(rows, hidden, seed=3).to(dtype), None, some_active(rows)
    residual = torch.zeros_like(x)
    expected = cpu.add(residual.cpu(), x.cpu(), Products()).to(DEVICE)
    ours = [
        for_gpu(each, dtype, four_bits=False).to(torch.device(DEVICE)) for each in (gate_up, down)
    ]
    for one, other in zip(ours, (gate_up, down), strict=True):
        assert one.scheme == "mxfp4_gpu" and one.shape[0] == other.shape[0]
        assert torch.equal(one.dequantised().cpu()[:, : other.shape[1]], other.dequantised())
    mlp = replace(cpu, router=router, gate_up=ours[0], down=ours[1], biases=ExpertBiases(*given))
    assert way(rows * PER_TOKEN, EXPERTS, ours[0], mlp._epilogues).rows == tile
    room = buffers(rows, hidden, inner, ours[0].scheme, dtype)
    mlp._combined(x, active, Room(room), GpuProducts(UNITS)).add_into(residual)
    there = active.marks > 0
    apart = (residual - expected)[there].float().norm() / expected[there].float().norm()
    assert float(apart) < (1e-5 if dtype == torch.float32 else 0.01)
    assert not bool(residual[~there].any())


def test_scales_beyond_the_kernel_are_served_widened() -> None:
    matrix = quantised(random(4, 64).cpu() * 40.0, "mxfp4")
    assert int(matrix.scales.max()) > 128
    served = for_gpu(matrix, torch.bfloat16)
    assert served.scheme == "bf16"
    assert torch.equal(served.values.float(), matrix.dequantised())


def with_zeros(matrix: Matrix) -> Matrix:
    assert matrix.scales is not None
    draw = torch.Generator().manual_seed(7)
    zeros = torch.randint(6, 11, matrix.scales.shape, generator=draw, dtype=torch.uint8)
    return Matrix(matrix.values, matrix.scheme, matrix.scales, zeros)
