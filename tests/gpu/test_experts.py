"""Experts on a GPU: every way against float32, on shares of the SMs, repeatable bit for bit."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from twolane.kernels.experts import products as experts
from twolane.kernels.experts.grouped_gemm import FOUR_BIT_ROWS
from twolane.kernels.experts.products import ExpertBuffers, ExpertWay, combined, norm_and_combined
from twolane.kernels.experts.routing import ActiveRows, Routing
from twolane.kernels.experts.rule import RoutingRule
from twolane.kernels.fused import Norm
from twolane.kernels.products.dispatch import GpuProducts, input_of
from twolane.lanes.cuda.green_contexts import GreenContexts
from twolane.model import fp8
from twolane.model.matrix import Matrix, Scheme, in_registers, quantised
from twolane.model.routing import route

EXPERTS, PER_TOKEN, HIDDEN, INNER = 32, 4, 512, 384
RULE = RoutingRule(EXPERTS, PER_TOKEN)
WAYS = (
    ExpertWay("own", 16),
    ExpertWay("own", 32),
    ExpertWay("own", 96),
    ExpertWay("torch", 64),
    ExpertWay("triton", 64),
    ExpertWay("triton", 128),
)


@pytest.fixture(scope="module")
def stream() -> Iterator[torch.cuda.Stream]:
    """On 32 SMs."""
    partitions = GreenContexts(0, (32,))
    yield partitions.stream("decode", 32)


class Layer:
    """Random experts and rows, and what these come to in float32.

    Args:
        rows: number of rows, of which some do not count.
        skew: how much better each expert is liked than the next.
        routed: the kernel under test makes the router's logits, too.
        given: such a kernel is given the rows normalised, as on several ranks.
        scheme: of the experts' matrices; None: bfloat16.
    """

    def __init__(
        self,
        rows: int,
        skew: float,
        *,
        routed: bool = False,
        given: bool = False,
        scheme: Scheme | None = None,
    ) -> None:
        draw = torch.Generator(device="cuda").manual_seed(rows)

        def random(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, device="cuda", generator=draw) * scale).bfloat16()

        def matrix(rows: int, columns: int) -> Matrix:
            values = random(rows, columns, scale=columns**-0.5)
            if scheme is None:
                return Matrix.plain(values)
            stored = quantised(values.float(), scheme)
            return in_registers(stored) if scheme.startswith("int4") else stored

        self.gate_up = matrix(EXPERTS * 2 * INNER, HIDDEN)
        self.down = matrix(EXPERTS * HIDDEN, INNER)
        self.x, self.residual = random(rows, HIDDEN), random(rows, HIDDEN)
        favoured = torch.arange(EXPERTS, device="cuda") * -skew
        self.logits = (random(rows, EXPERTS).float() + favoured).bfloat16()
        marks = torch.ones(rows, dtype=torch.int32, device="cuda")
        marks[2::5] = 0
        self.active = ActiveRows(marks, 1)
        self.router: Matrix | None = None
        self.given = given
        if routed:
            self.router = Matrix.plain(random(EXPERTS, HIDDEN))

    def run(self, units: int) -> Tensor:
        out = self.residual.clone()
        rows = len(out)
        room = self.buffers(rows)
        room.logits.copy_(self.logits)
        weights = self.gate_up, self.down
        lane = GpuProducts(units)
        if self.router is None:
            left = combined(self.x, self.active, *weights, room, lane, RULE, None)
        else:
            scales = torch.empty(rows, 1, device="cuda")
            x = input_of(torch.empty_like(self.x), scales, self.gate_up.scheme)
            norm = None if self.given else Norm(torch.ones_like(self.x[0]), 0.0)
            if self.given and isinstance(x, Tensor):
                x = self.residual
            rows = self.residual, norm, self.router, self.active
            left = norm_and_combined(*rows, *weights, x, room, lane, RULE, None)
            self.x = x if isinstance(x, Tensor) else (x.values.float() * x.scales).bfloat16()
            self.logits = room.logits
        left.add_into(out)
        return out

    def buffers(self, rows: int) -> ExpertBuffers:
        def room(count: int, width: int) -> Tensor:
            return torch.full((count, width), torch.nan, device="cuda", dtype=torch.bfloat16)

        routing = Routing.of(EXPERTS, PER_TOKEN, rows, torch.device("cuda"))
        entries, scheme = rows * PER_TOKEN, self.gate_up.scheme
        scales = [torch.full((entries, 1), torch.nan, device="cuda") for _ in range(2)]
        return ExpertBuffers(
            routing,
            room(rows, EXPERTS),
            input_of(room(entries, HIDDEN), scales[0], scheme),
            room(entries, 2 * INNER),
            input_of(room(entries, INNER), scales[1], scheme),
            room(entries, HIDDEN),
        )

    def reference(self) -> Tensor:
        weights, chosen = route(self.logits, RULE)
        gate_up = self.gate_up.dequantised().float().view(EXPERTS, 2 * INNER, HIDDEN)
        down = self.down.dequantised().float().view(EXPERTS, HIDDEN, INNER)
        total = self.residual.float()
        for expert in range(EXPERTS):
            rows, ranks = (chosen == expert).nonzero(as_tuple=True)
            gate, up = (self._rounded(self.x[rows]) @ gate_up[expert].T).chunk(2, dim=1)
            out = self._rounded(torch.nn.functional.silu(gate) * up) @ down[expert].T
            total[rows] += weights[rows, ranks, None] * out
        idle = self.active.marks == 0
        total[idle] = self.residual[idle].float()
        return total

    def _rounded(self, rows: Tensor) -> Tensor:
        """Rows as the product that they go into rounds them, in float32."""
        if self.gate_up.scheme != "fp8_channel" or not len(rows):
            return rows.float()
        values, scales = fp8.quantise_rows(rows.float())
        return values.float() * scales


@pytest.mark.parametrize("scheme", [None, "fp8_channel"], ids=["bf16", "fp8"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way.kernel}-{way.rows}")
@pytest.mark.parametrize(("rows", "skew"), [(1, 0.0), (7, 0.0), (64, 0.0), (64, 1.0), (500, 0.2)])
def test_against_float32(
    monkeypatch: pytest.MonkeyPatch,
    stream: torch.cuda.Stream,
    way: ExpertWay,
    rows: int,
    skew: float,
    scheme: Scheme | None,
) -> None:
    """Rows that do not count stay as they are; a repetition is equal bit for bit."""
    monkeypatch.setattr(experts, "way", lambda *_: way)
    check(Layer(rows, skew, scheme=scheme), stream)


@pytest.mark.parametrize("scheme", ["int4_g32", "int4_g128"])
@pytest.mark.parametrize("tile", FOUR_BIT_ROWS)
@pytest.mark.parametrize("rows", [1, 64, 500])
def test_four_bits_against_float32(
    monkeypatch: pytest.MonkeyPatch,
    stream: torch.cuda.Stream,
    rows: int,
    tile: int,
    scheme: Scheme,
) -> None:
    """As above, widened in registers."""
    monkeypatch.setattr(experts, "way", lambda *_: ExpertWay("triton", tile))
    check(Layer(rows, 0.2, scheme=scheme), stream)


@pytest.mark.parametrize("rows", [1, 2, 7, 13, 16])
def test_few_rows_are_rounded_where_they_are_routed(stream: torch.cuda.Stream, rows: int) -> None:
    """Of the rows and logits that it makes, it makes the right sums."""
    check(Layer(rows, 0.0, routed=True, scheme="fp8_channel"), stream)


@pytest.mark.parametrize("scheme", [None, "fp8_channel"], ids=["bf16", "fp8"])
@pytest.mark.parametrize("rows", [1, 2, 7, 13, 16])
def test_few_rows_that_come_normalised(
    stream: torch.cuda.Stream, rows: int, scheme: Scheme | None
) -> None:
    """As on several ranks; logits are those of the rows as they are."""
    layer = Layer(rows, 0.0, routed=True, given=True, scheme=scheme)
    check(layer, stream)
    assert layer.router is not None
    logits = layer.residual.float() @ layer.router.values.float().T
    torch.testing.assert_close(layer.logits.float(), logits, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("rows", [1, 2, 7, 13, 16])
def test_few_rows_routed_by_one_kernel(stream: torch.cuda.Stream, rows: int) -> None:
    """Its norm and its logits are those of float32; of these, it makes the right sums."""
    layer = Layer(rows, 0.0, routed=True)
    check(layer, stream)
    assert layer.router is not None
    wide = layer.residual.float()
    normal = wide * wide.square().mean(1, keepdim=True).rsqrt()
    torch.testing.assert_close(layer.x.float(), normal, rtol=1e-2, atol=1e-3)
    logits = layer.x.float() @ layer.router.values.float().T
    torch.testing.assert_close(layer.logits.float(), logits, rtol=1e-2, atol=1e-2)


def check(layer: Layer, stream: torch.cuda.Stream) -> None:
    """The layer on all SMs and on some, each time twice."""
    torch.cuda.synchronize()
    for units, where in ((132, torch.cuda.Stream()), (32, stream)):
        with torch.cuda.stream(where):
            first, second = layer.run(units), layer.run(units)
        torch.cuda.synchronize()
        reference = layer.reference()
        change = (reference - layer.residual.float()).norm()
        idle = layer.active.marks == 0
        assert torch.equal(first, second)
        assert torch.equal(first[idle], layer.residual[idle])
        # Numbers that differ in a last bit may be rounded to e4m3 another way.
        most = 2e-2 if layer.gate_up.scales is None else 3e-2
        assert (first.float() - reference).norm() < most * change
