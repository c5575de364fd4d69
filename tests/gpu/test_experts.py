"""Experts on a GPU: every way against float32, on shares of the SMs, repeatable bit for bit."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from twolane.kernels.experts import products as experts
from twolane.kernels.experts.products import Buffers, Way, combined, norm_and_combined
from twolane.kernels.experts.routing import ActiveRows, Routing
from twolane.kernels.fused import Norm
from twolane.kernels.products.dispatch import Products
from twolane.lanes.cuda.green_contexts import GreenContexts
from twolane.model.matrix import Matrix
from twolane.model.routing import route

EXPERTS, PER_TOKEN, HIDDEN, INNER = 32, 4, 512, 384
WAYS = (
    Way("own", 16),
    Way("own", 32),
    Way("own", 96),
    Way("torch", 64),
    Way("triton", 64),
    Way("triton", 128),
)


@pytest.fixture(scope="module")
def stream() -> Iterator[torch.cuda.Stream]:
    """On 32 SMs."""
    partitions = GreenContexts(0, (32,))
    yield partitions.stream("decode", 32)


class Layer:
    """Random experts and rows, and what these come to in float32."""

    def __init__(self, rows: int, skew: float, *, routed: bool = False) -> None:
        draw = torch.Generator(device="cuda").manual_seed(rows)

        def random(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, device="cuda", generator=draw) * scale).bfloat16()

        self.gate_up = Matrix.plain(random(EXPERTS * 2 * INNER, HIDDEN, scale=HIDDEN**-0.5))
        self.down = Matrix.plain(random(EXPERTS * HIDDEN, INNER, scale=INNER**-0.5))
        self.x, self.residual = random(rows, HIDDEN), random(rows, HIDDEN)
        favoured = torch.arange(EXPERTS, device="cuda") * -skew
        self.logits = (random(rows, EXPERTS).float() + favoured).bfloat16()
        marks = torch.ones(rows, dtype=torch.int32, device="cuda")
        marks[2::5] = 0
        self.active = ActiveRows(marks, 1)
        self.router: Matrix | None = None
        if routed:
            self.router = Matrix.plain(random(EXPERTS, HIDDEN))

    def run(self, units: int) -> Tensor:
        out = self.residual.clone()
        rows = len(out)
        room = self.buffers(rows)
        room.logits.copy_(self.logits)
        weights = self.gate_up, self.down
        lane = Products(units)
        if self.router is None:
            left = combined(self.x, self.active, *weights, room, lane, normalised=True)
        else:
            x, norm = torch.empty_like(self.x), Norm(torch.ones_like(self.x[0]), 0.0)
            rows = self.residual, norm, self.router, self.active
            left = norm_and_combined(*rows, *weights, x, room, lane, normalised=True)
            self.x, self.logits = x, room.logits
        left.add_into(out)
        return out

    def buffers(self, rows: int) -> Buffers:
        def room(count: int, width: int) -> Tensor:
            return torch.full((count, width), torch.nan, device="cuda", dtype=torch.bfloat16)

        routing = Routing.of(EXPERTS, PER_TOKEN, rows, torch.device("cuda"))
        widths = (HIDDEN, 2 * INNER, INNER, HIDDEN)
        return Buffers(
            routing, room(rows, EXPERTS), *(room(rows * PER_TOKEN, width) for width in widths)
        )

    def reference(self) -> Tensor:
        weights, chosen = route(self.logits, PER_TOKEN, normalised=True)
        gate_up = self.gate_up.values.float().view(EXPERTS, 2 * INNER, HIDDEN)
        down = self.down.values.float().view(EXPERTS, HIDDEN, INNER)
        total = self.residual.float()
        for expert in range(EXPERTS):
            rows, ranks = (chosen == expert).nonzero(as_tuple=True)
            gate, up = (self.x[rows].float() @ gate_up[expert].T).chunk(2, dim=1)
            out = (torch.nn.functional.silu(gate) * up) @ down[expert].T
            total[rows] += weights[rows, ranks, None] * out
        idle = self.active.marks == 0
        total[idle] = self.residual[idle].float()
        return total


@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way.kernel}-{way.rows}")
@pytest.mark.parametrize(("rows", "skew"), [(1, 0.0), (7, 0.0), (64, 0.0), (64, 1.0), (500, 0.2)])
def test_against_float32(
    monkeypatch: pytest.MonkeyPatch, stream: torch.cuda.Stream, way: Way, rows: int, skew: float
) -> None:
    """Rows that do not count stay as they are; a repetition is equal bit for bit."""
    monkeypatch.setattr(experts, "way", lambda *_: way)
    check(Layer(rows, skew), stream)


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
        assert (first.float() - reference).norm() < 2e-2 * change
