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
    experts: int
    per_token: int
    dtype: torch.dtype = BF16
    normalised: bool = True
    rounded: bool = False
    given: bool = False
    """Whether the rows come normalised; then all products and sums of the logits are exact."""

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(self.rows)
        self.residual = torch.randn(self.rows, HIDDEN, generator=draw).to(self.dtype)
        self.router = torch.randn(self.experts, HIDDEN, generator=draw).to(self.dtype) / 16
        self.norm: Norm | None = Norm(torch.randn(HIDDEN, generator=draw).to(self.dtype), 1e-6)
        if self.given:
            self.norm = None
            self.residual = self.residual.float().round().clamp(-2, 2).to(self.dtype)
            seldom = torch.rand(self.router.shape, generator=draw) < 0.02
            self.router = (self.router.sign() * seldom / 4).to(self.dtype)
        marks = torch.ones(self.rows, dtype=torch.int32)
        marks[1::3] = 0
        self.active = ActiveRows(marks, 1)
        self.logits = torch.full((self.rows, self.experts), torch.nan, dtype=self.dtype)
        self.routing = Routing.of(self.experts, self.per_token, self.rows, torch.device("cpu"))
        wide = torch.full((self.rows, HIDDEN), torch.nan, dtype=self.dtype)
        scheme = "fp8_channel" if self.rounded else "bf16"
        self.x: Activations = input_of(wide, torch.full((self.rows, 1), torch.nan), scheme)
        if self.given and not self.rounded:
            self.x = self.residual

    @property
    def normal(self) -> torch.Tensor:
        """The normalised rows."""
        if self.norm is None:
            return self.residual
        wide = self.residual.float()
        normal = wide * (wide.square().mean(1, keepdim=True) + self.norm.eps).rsqrt()
        return normal.to(self.dtype) * self.norm.weight

    def run(self, build, seed: int, source: str | None = None) -> None:
        kind = {"norm": self.norm is not None, "normalised": self.normalised}
        options = few_rows.options(self.router, self.per_token, self.x, **kind)
        rows = self.residual, self.norm, self.router, self.active
        packed = few_rows.arguments(*rows, self.logits, self.x, self.routing)
        grid = few_rows.blocks(self.rows, self.experts)
        library = build(options) if source is None else build(options, source)
        fault = library.run(ctypes.byref(packed), grid, seed)
        assert fault is None, fault


CASES = [Case(7, 12, 3), Case(11, 40, 4, rounded=True, given=True)]
MORE = [
    Case(13, 128, 8, normalised=False, rounded=True),
    Case(1, 128, 8),
    Case(8, 8, 2, rounded=True),
    Case(16, 300, 8, FP16),
]


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.full) for case in MORE)],
    ids=lambda case: f"{case.rows}-of-{case.experts}",
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
    weights, chosen = route(case.logits, case.per_token, case.normalised)
    torch.testing.assert_close(case.routing.weights, weights)
    there = case.active.marks > 0
    flat = torch.where(there[:, None], chosen, case.experts).flatten()
    order = flat.sort(stable=True).indices[: int((flat < case.experts).sum())]
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
    case = Case(11, 40, 4, rounded=rounded, given=True)
    case.run(build, 0)
    logits = (case.residual.float() @ case.router.float().T).to(case.dtype)
    assert torch.equal(case.logits, logits)
    expected = Routing.of(case.experts, case.per_token, case.rows, torch.device("cpu"))
    launches.route(logits, case.active, expected, few_rows.MAX_ROWS, normalised=True)
    assert torch.equal(case.routing.positions, expected.positions)
    torch.testing.assert_close(case.routing.weights, expected.weights, rtol=1e-6, atol=0.0)
    count = int(expected.groups[0])
    found, listed = (each.groups[4:].view(-1, 4)[:count, :3] for each in (case.routing, expected))
    assert torch.equal(found, listed)
    assert torch.equal(case.routing.experts_read, expected.experts_read)
    if not isinstance(case.x, Quantised):
        return
    wide = torch.zeros(case.rows * case.per_token, HIDDEN, dtype=case.dtype)
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
    case = Case(11, 40, 4, rounded=scheme != "bf16", given=True)
    draw = torch.Generator().manual_seed(1)
    inner = 32
    wide = [
        torch.randn(case.experts * n, k, generator=draw) * k**-0.5
        for n, k in ((2 * inner, HIDDEN), (HIDDEN, inner))
    ]
    gate_up, down = (
        Matrix.plain(each.to(BF16)) if scheme == "bf16" else quantised(each, scheme)
        for each in wide
    )
    mlp = Experts(Matrix.plain(case.router), gate_up, down, case.per_token, True, "silu")

    def routed(rows, norm, router, active, logits, x, routing, *, normalised: bool) -> None:
        told = few_rows.options(router, case.per_token, x, norm=False, normalised=normalised)
        packed = few_rows.arguments(rows, norm, router, active, logits, x, routing)
        grid = few_rows.blocks(*logits.shape)
        assert build(told).run(ctypes.byref(packed), grid, 0) is None

    monkeypatch.setattr(few_rows, "norm_and_route", routed)
    monkeypatch.setattr(products, "_multiplied", multiplied)
    found = []
    for few in (False, True):
        monkeypatch.setattr(products, "routes_few", lambda *_, few=few: few)
        out = torch.full_like(case.residual, torch.nan)
        room = Room(case.rows, case.experts, case.per_token, inner, scheme)
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


def multiplied(chosen, x: Activations, gate_up, down, buffers, lane) -> Combination:
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
    case = Case(3, 12, 3)
    case.router.zero_()
    case.run(build, 0)
    check(case)
    assert case.routing.groups[4:].view(-1, 4)[:3, 0].tolist() == [0, 1, 2]


def test_no_rows_wake_no_experts(build) -> None:
    """Of a batch whose rows have all ended."""
    case = Case(2, 12, 3)
    case.active.marks.zero_()
    case.run(build, 0)
    assert case.routing.groups[:3].tolist() == [0, 0, 0]
    assert bool((case.routing.positions == -1).all())


def test_rows_that_are_no_numbers_do_no_harm(build) -> None:
    """Experts of an active row exist, whatever its logits are."""
    case = Case(4, 12, 3)
    case.residual[0] = torch.nan
    case.run(build, 0)
    groups = case.routing.groups[4:].view(-1, 4)[: int(case.routing.groups[0])]
    assert bool((groups[:, 0] < 12).all())


def test_a_missing_wait_is_seen(build) -> None:
    source, case = few_rows.source(), Case(7, 12, 3)
    place = source.rindex("wait_for_previous();")
    broken = source[:place] + source[place:].replace("wait_for_previous();", "", 1)
    with pytest.raises(AssertionError, match="did not wait"):
        case.run(build, 0, broken)
