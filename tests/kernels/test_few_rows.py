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
from twolane.kernels.experts import few_rows
from twolane.kernels.experts.routing import ActiveRows, Routing
from twolane.kernels.fused import Norm
from twolane.kernels.products.dispatch import input_of
from twolane.model import fp8
from twolane.model.routing import route

pytestmark = on_host.needs_compiler
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

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(self.rows)
        self.residual = torch.randn(self.rows, HIDDEN, generator=draw).to(self.dtype)
        self.norm = Norm(torch.randn(HIDDEN, generator=draw).to(self.dtype), 1e-6)
        self.router = torch.randn(self.experts, HIDDEN, generator=draw).to(self.dtype) / 16
        marks = torch.ones(self.rows, dtype=torch.int32)
        marks[1::3] = 0
        self.active = ActiveRows(marks, 1)
        self.logits = torch.full((self.rows, self.experts), torch.nan, dtype=self.dtype)
        self.routing = Routing.of(self.experts, self.per_token, self.rows, torch.device("cpu"))
        wide = torch.full((self.rows, HIDDEN), torch.nan, dtype=self.dtype)
        scheme = "fp8_channel" if self.rounded else "bf16"
        self.x: Activations = input_of(wide, torch.full((self.rows, 1), torch.nan), scheme)

    def run(self, build, seed: int, source: str | None = None) -> None:
        options = few_rows.options(self.router, self.per_token, self.x, normalised=self.normalised)
        rows = self.residual, self.norm, self.router, self.active
        packed = few_rows.arguments(*rows, self.logits, self.x, self.routing)
        grid = few_rows.blocks(self.rows, self.experts)
        library = build(options) if source is None else build(options, source)
        fault = library.run(ctypes.byref(packed), grid, seed)
        assert fault is None, fault


CASES = [Case(7, 12, 3), Case(13, 128, 8, normalised=False, rounded=True)]
MORE = [Case(1, 128, 8), Case(8, 8, 2, rounded=True), Case(16, 300, 8, FP16)]


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.full) for case in MORE)],
    ids=lambda case: f"{case.rows}-of-{case.experts}",
)
def test_rows_go_to_the_likeliest_experts(build, case: Case) -> None:
    """As on the CPU, of the same logits; a second launch finds what the first has left."""
    wide = case.residual.float()
    normal = wide * (wide.square().mean(1, keepdim=True) + 1e-6).rsqrt()
    normal = normal.to(case.dtype) * case.norm.weight
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
    assert int(case.routing.woken) == 2 * int(case.routing.groups[0])


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
