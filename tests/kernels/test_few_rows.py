"""The CUDA C++ that routes few rows, its instructions acted out on the CPU.

See few_rows_host.cc. tests/gpu/test_experts.py checks the same on a GPU.
"""

import ctypes
import functools
from dataclasses import dataclass

import pytest
import torch

from tests.kernels import on_host
from twolane.kernels.activations import Activations, Quantised
from twolane.kernels.experts import few_rows, products
from twolane.kernels.experts import routing as launches
from twolane.kernels.experts.products import ExpertBuffers
from twolane.kernels.experts.routing import ActiveRows, Combination, Routing
from twolane.kernels.experts.rule import RoutingRule
from twolane.kernels.fused import Norm
from twolane.kernels.products.dispatch import input_of
from twolane.model import fp8
from twolane.model.matrix import Matrix, Scheme, quantised
from twolane.model.mlp import Experts
from twolane.model.routing import route

pytestmark = on_host.needs_compiler
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter has CPU tensors")
BF16, FP16 = torch.bfloat16, torch.float16
HIDDEN = 512


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("host")

    @functools.cache
    def build(options: tuple[str, ...], source: str = few_rows.source()) -> ctypes.CDLL:
        return on_host.build("few_rows_host.cc", source, options, folder)

    return build


@dataclass
class Case:
    """Random rows, of which every third does not count, and what the kernel makes of them."""

    rows: int
    rule: RoutingRule
    dtype: torch.dtype = BF16
    rounded: bool = False
    given: bool = False
    """Whether the rows come normalised; then all products and sums of the logits are exact."""

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(self.rows)
        self.residual = torch.randn(self.rows, HIDDEN, generator=draw).to(self.dtype)
        self.router = torch.randn(self.rule.logits, HIDDEN, generator=draw).to(self.dtype) / 16
        self.norm: Norm | None = Norm(torch.randn(HIDDEN, generator=draw).to(self.dtype), 1e-6)
        if self.given:
            self.norm = None
            self.residual = self.residual.float().round().clamp(-2, 2).to(self.dtype)
            seldom = torch.rand(self.router.shape, generator=draw) < 0.02
            self.router = (self.router.sign() * seldom / 4).to(self.dtype)
        marks = torch.ones(self.rows, dtype=torch.int32)
        marks[1::3] = 0
        self.active = ActiveRows(marks, 1)
        biases = torch.randn(self.rule.experts, generator=draw) / 4
        self.bias = biases if self.rule.biased else None
        self.logits = torch.full((self.rows, self.rule.logits), torch.nan, dtype=self.dtype)
        self.routing = self.empty_routing()
        wide = torch.full((self.rows, HIDDEN), torch.nan, dtype=self.dtype)
        scheme = "fp8_channel" if self.rounded else "bf16"
        self.x: Activations = input_of(wide, torch.full((self.rows, 1), torch.nan), scheme)
        if self.given and not self.rounded:
            self.x = self.residual

    def empty_routing(self) -> Routing:
        """Buffers that nothing has been written to."""
        return Routing.of(self.rule.stored, self.rule.entries, self.rows, torch.device("cpu"))

    @property
    def normal(self) -> torch.Tensor:
        """The normalised rows."""
        if self.norm is None:
            return self.residual
        wide = self.residual.float()
        normal = wide * (wide.square().mean(1, keepdim=True) + self.norm.eps).rsqrt()
        return normal.to(self.dtype) * self.norm.weight

    def run(self, build, seed: int, source: str | None = None) -> None:
        options = few_rows.options(self.router, self.rule, self.x, norm=self.norm is not None)
        rows = self.residual, self.norm, self.router, self.active
        filled = self.logits, self.x, self.routing
        packed = few_rows.arguments(*rows, *filled, self.rule, self.bias)
        grid = few_rows.blocks(self.rows, self.rule.logits)
        library = build(options) if source is None else build(options, source)
        fault = library.run(ctypes.byref(packed), grid, seed)
        assert fault is None, fault


FORTY = RoutingRule(40, 4)
SIGMOID = RoutingRule(40, 4, sigmoid=True, biased=True, scale=2.5, shared=1)
CASES = [
    Case(7, RoutingRule(12, 3, shared=2, gated=True)),
    Case(11, FORTY, rounded=True, given=True),
    Case(9, SIGMOID),
]
MORE = [
    Case(13, RoutingRule(128, 8, normalised=False), rounded=True),
    Case(1, RoutingRule(128, 8)),
    Case(8, RoutingRule(8, 2), rounded=True),
    Case(16, RoutingRule(300, 8), FP16),
    Case(5, RoutingRule(64, 6, biased=True, shared=2), rounded=True),
]


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.full) for case in MORE)],
    ids=lambda case: f"{case.rows}-of-{case.rule.experts}",
)
def test_rows_go_to_the_likeliest_experts(build, case: Case) -> None:
    """As on the CPU, of the same logits; a second launch finds what the first has left."""
    normal = case.normal
    for seed in range(2):
        case.run(build, seed)
        close = {"rtol": 2e-2, "atol": 2e-2}
        torch.testing.assert_close(
            case.logits.float(), normal.float() @ case.router.float().T, **close
        )
        if isinstance(case.x, Quantised):
            values, scales = fp8.quantise_rows(normal.float())
            torch.testing.assert_close(case.x.scales, scales, rtol=1e-2, atol=0.0)
            found, expected = (
                each.float() * scale
                for each, scale in ((case.x.values, case.x.scales), (values, scales))
            )
            torch.testing.assert_close(found, expected, rtol=0.07, atol=1e-2)
        else:
            torch.testing.assert_close(case.x.float(), normal.float(), rtol=1e-2, atol=1e-3)
        check(case)
    assert int(case.routing.experts_read) == 2 * int(case.routing.groups[0])


def check(case: Case) -> None:
    """Weights, positions and groups follow from the logits."""
    weights, chosen = route(case.logits, case.rule, case.bias)
    torch.testing.assert_close(case.routing.weights, weights)
    there = case.active.marks > 0
    flat = torch.where(there[:, None], chosen, case.rule.stored).flatten()
    order = flat.sort(stable=True).indices[: int((flat < case.rule.stored).sum())]
    positions = torch.full_like(flat, -1)
    positions[order] = torch.arange(len(order))
    assert torch.equal(case.routing.positions.flatten().long(), positions)
    expected, first = [], 0
    for expert in flat[order].unique().tolist():
        rows = [row for row in range(case.rows) if there[row] and expert in chosen[row]]
        expected.append([expert, first, len(rows), sum(1 << row for row in rows)])
        first += len(rows)
    found = case.routing.groups[4:].view(-1, 4)[: int(case.routing.groups[0])]
    assert found.tolist() == expected


@no_gpu
@pytest.mark.parametrize(
    "rounded", [pytest.param(False, marks=pytest.mark.full), True], ids=["bf16", "fp8"]
)
def test_normalised_rows_go_where_four_launches_send_them(build, rounded: bool) -> None:
    """Logits, places, groups and rounded rows are equal bit for bit: several ranks must agree."""
    case = Case(11, FORTY, rounded=rounded, given=True)
    case.run(build, 0)
    logits = (case.residual.float() @ case.router.float().T).to(case.dtype)
    assert torch.equal(case.logits, logits)
    expected = case.empty_routing()
    launches.route(logits, case.active, expected, few_rows.MAX_ROWS, case.rule)
    assert torch.equal(case.routing.positions, expected.positions)
    torch.testing.assert_close(case.routing.weights, expected.weights, rtol=1e-6, atol=0.0)
    count = int(expected.groups[0])
    found, listed = (each.groups[4:].view(-1, 4)[:count, :3] for each in (case.routing, expected))
    assert torch.equal(found, listed)
    assert torch.equal(case.routing.experts_read, expected.experts_read)
    if not isinstance(case.x, Quantised):
        return
    wide = torch.zeros(case.rows * case.rule.entries, HIDDEN, dtype=case.dtype)
    scales = torch.zeros(len(wide), 1)
    gathered = input_of(wide, scales, "fp8_channel")
    launches.gather(case.residual, expected, gathered)
    assert isinstance(gathered, Quantised)
    tokens = expected.tokens[: int(expected.ends[-1])].long()
    assert torch.equal(case.x.scales[tokens], gathered.scales[: len(tokens)])
    bits = [each.values.view(torch.uint8) for each in (case.x, gathered)]
    assert torch.equal(bits[0][tokens], bits[1][: len(tokens)])


@no_gpu
@pytest.mark.parametrize("scheme", [pytest.param("bf16", marks=pytest.mark.full), "fp8_channel"])
def test_experts_of_a_rank_are_those_of_four_launches(
    build, monkeypatch: pytest.MonkeyPatch, scheme: Scheme
) -> None:
    """What `Experts.write_into` writes is equal bit for bit, with the same products behind it."""
    case = Case(11, FORTY, rounded=scheme != "bf16", given=True)
    draw = torch.Generator().manual_seed(1)
    inner = 32
    wide = [
        torch.randn(case.rule.stored * n, k, generator=draw) * k**-0.5
        for n, k in ((2 * inner, HIDDEN), (HIDDEN, inner))
    ]
    gate_up, down = (
        Matrix.plain(each.to(BF16)) if scheme == "bf16" else quantised(each, scheme)
        for each in wide
    )
    mlp = Experts(Matrix.plain(case.router), gate_up, down, case.rule, None, "silu")

    def routed(rows, norm, router, active, logits, x, routing, rule, bias) -> None:
        told = few_rows.options(router, rule, x, norm=False)
        packed = few_rows.arguments(rows, norm, router, active, logits, x, routing, rule, bias)
        grid = few_rows.blocks(*logits.shape)
        assert build(told).run(ctypes.byref(packed), grid, 0) is None

    monkeypatch.setattr(few_rows, "norm_and_route", routed)
    monkeypatch.setattr(products, "_multiplied", multiplied)
    found = []
    for few in (False, True):
        monkeypatch.setattr(products, "routes_few", lambda *_, few=few: few)
        out = torch.full_like(case.residual, torch.nan)
        room = Room(case.rows, case.rule.stored, case.rule.entries, inner, scheme)
        mlp.write_into(out, case.residual, case.active, room, products.GpuProducts(4))
        found.append(out)
    there = case.active.marks > 0
    assert torch.equal(*found)
    assert bool((found[0][~there] == 0).all())
    assert bool(found[0][there].any(dim=1).all())


class Room:
    """The buffers of one rank's experts."""

    def __init__(self, rows: int, experts: int, per_token: int, inner: int, scheme: str) -> None:
        entries = rows * per_token

        def room(count: int, width: int, dtype: torch.dtype = BF16) -> torch.Tensor:
            return torch.full((count, width), torch.nan, dtype=dtype)

        self._room = ExpertBuffers(
            Routing.of(experts, per_token, rows, torch.device("cpu")),
            room(rows, experts),
            input_of(room(entries, HIDDEN), room(entries, 1, torch.float32), scheme),
            room(entries, 2 * inner),
            input_of(room(entries, inner), room(entries, 1, torch.float32), scheme),
            room(entries, HIDDEN),
        )

    def experts(self, rows: int, scheme: str) -> ExpertBuffers:
        return self._room


def multiplied(chosen, x: Activations, gate_up, down, buffers, lane, _=None) -> Combination:
    """The products of the sorted rows, or of the batch's rows where masks tell them, in float32."""
    rows = x.values.float() * x.scales if isinstance(x, Quantised) else x.float()
    routing, outs = buffers.routing, buffers.outs
    up, back = (
        each.dequantised().float().view(routing.experts, -1, each.shape[1])
        for each in (gate_up, down)
    )
    for group in range(int(routing.groups[0])):
        expert, first, count, mask = routing.groups[4:].view(-1, 4)[group].tolist()
        of = (
            [row for row in range(32) if mask >> row & 1]
            if chosen.spread
            else slice(first, first + count)
        )
        gate, value = (rows[of] @ up[expert].T).chunk(2, dim=1)
        outs[first : first + count] = (torch.nn.functional.silu(gate) * value) @ back[expert].T
    return Combination(outs, routing)


def test_equally_likely_experts_go_by_number(build) -> None:
    case = Case(3, RoutingRule(12, 3))
    case.router.zero_()
    case.run(build, 0)
    check(case)
    assert case.routing.groups[4:].view(-1, 4)[:3, 0].tolist() == [0, 1, 2]


def test_no_rows_wake_no_experts(build) -> None:
    """Of a batch whose rows have all ended."""
    case = Case(2, RoutingRule(12, 3))
    case.active.marks.zero_()
    case.run(build, 0)
    assert case.routing.groups[:3].tolist() == [0, 0, 0]
    assert bool((case.routing.positions == -1).all())


def test_rows_that_are_no_numbers_do_no_harm(build) -> None:
    """Experts of an active row exist, whatever its logits are."""
    case = Case(4, RoutingRule(12, 3))
    case.residual[0] = torch.nan
    case.run(build, 0)
    groups = case.routing.groups[4:].view(-1, 4)[: int(case.routing.groups[0])]
    assert bool((groups[:, 0] < 12).all())


def test_a_missing_wait_is_seen(build) -> None:
    source, case = few_rows.source(), Case(7, RoutingRule(12, 3))
    place = source.rindex("wait_for_previous();")
    broken = source[:place] + source[place:].replace("wait_for_previous();", "", 1)
    with pytest.raises(AssertionError, match="did not wait"):
        case.run(build, 0, broken)
