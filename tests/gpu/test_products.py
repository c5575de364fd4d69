"""Products on a GPU: every way against float32, and what tuning leaves behind."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from twolane.kernels.products.dispatch import CUBLAS, CUBLASLT, Case, GpuProducts, Operation
from twolane.kernels.products.skinny_gemm import ROWS
from twolane.kernels.runtime import nvrtc
from twolane.kernels.sizes import SIZES
from twolane.lanes.cuda.green_contexts import GreenContexts
from twolane.model.matrix import Matrix

BF16, FP16 = torch.bfloat16, torch.float16
OPERATIONS: tuple[Operation, ...] = ("linear", "add_linear", "gate_up", "logits")

if torch.cuda.is_available() and not nvrtc.available(torch.device("cuda", 0)):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What a test tunes is not found by others; what it compiles is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="module")
def stream() -> Iterator[torch.cuda.Stream]:
    """On 32 SMs."""
    partitions = GreenContexts(0, (32,))
    yield partitions.stream("decode", 32)


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


class Problem:
    """A product, and what it comes to in float32."""

    def __init__(self, operation: Operation, m: int, n: int, k: int, dtype: torch.dtype) -> None:
        torch.manual_seed(m * n + k)
        self.operation, self.x = operation, random(m, k, dtype=dtype)
        gated = operation == "gate_up"
        self.w = random(n * (1 + gated), k, dtype=dtype, scale=k**-0.5)
        self.matrix = Matrix.plain(self.w)
        self.bias = random(n, dtype=dtype) if operation in ("linear", "add_linear") else None
        kind = torch.float32 if operation == "logits" else dtype
        self.old = random(m, n, dtype=kind)
        self.expected = self.x.float() @ self.w.float().T
        if gated:
            gate, up = self.expected.tensor_split(2, dim=1)
            self.expected = torch.nn.functional.silu(gate) * up
        if self.bias is not None:
            self.expected += self.bias.float()
        if operation == "add_linear":
            self.expected += self.old.float()

    def run(self, products: GpuProducts) -> Tensor:
        out = self.old.clone()
        if self.operation == "linear":
            products.linear(self.x, self.matrix, self.bias, out)
        elif self.operation == "add_linear":
            products.add_linear(self.x, self.matrix, self.bias, out)
        elif self.operation == "logits":
            products.logits(self.x, self.matrix, out)
        else:
            gate_up = self.x.new_empty(len(self.x), len(self.w))
            products.gate_up(self.x, self.matrix, None, gate_up, out)
        return out


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_way(
    operation: Operation, rows: int, dtype: torch.dtype, stream: torch.cuda.Stream
) -> None:
    """Right, and the same each time, queued behind one another."""
    for m, n, k in ((rows, 4096, 1024), (rows - 3, 1552, 1096)):
        problem, products = Problem(operation, m, n, k, dtype), GpuProducts(32)
        case = Case.of(operation, problem.matrix)
        torch.cuda.synchronize()
        for way in products._candidates(case, m):
            products.ways = {case: {rows: way}}
            with torch.cuda.stream(stream):
                outs = [problem.run(products) for _ in range(3)]
            torch.cuda.synchronize()
            error = (outs[0].float() - problem.expected).norm() / problem.expected.norm()
            assert error < (6e-3 if dtype == BF16 else 1e-3), way.name
            assert all(torch.equal(out, outs[0]) for out in outs), way.name


def test_tuning_is_remembered(stream: torch.cuda.Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [Matrix.plain(random(3072, 2048, dtype=BF16, scale=0.02)) for _ in range(3)]
    case = Case.of("linear", weights[0])
    uses, asked = {case: weights}, []

    def layers(rows: int) -> Callable[[], None]:
        asked.append(rows)
        x, out = random(rows, 2048, dtype=BF16), torch.empty(rows, 3072, device="cuda", dtype=BF16)
        return lambda: [first.linear(x, w, None, out) for w in weights]

    first = GpuProducts(32)
    with torch.cuda.stream(stream):
        first.tune(uses, 40, layers)
        monkeypatch.setattr(GpuProducts, "_seconds", None)  # nothing may be timed again
        again = GpuProducts(32)
        again.tune(uses, 40, layers)
    assert list(first.ways[case]) == [16, 24, 32, 40]
    assert again.ways == first.ways
    assert asked == [16, 24, 32, 40]
    problem = Problem("linear", 40, 3072, 2048, BF16)
    error = (problem.run(again).float() - problem.expected).norm() / problem.expected.norm()
    assert error < 6e-3


def test_products_of_passes() -> None:
    """Right at every size by either library, on a share that no kernel of the device is made for;
    and each size is tuned."""
    partitions = GreenContexts(0, (32,))
    units = partitions.prefill_units[0]
    stream, products = partitions.capture_stream("prefill", units), GpuProducts(units)
    for size in (64, 640, 2048, 3000):
        problem = Problem("linear", size, 3072, 2048, BF16)
        case = Case.of("linear", problem.matrix)
        torch.cuda.synchronize()
        for way in (CUBLAS, CUBLASLT):
            products.ways = {case: {size: way}}
            with torch.cuda.stream(stream):
                out = problem.run(products)
            torch.cuda.synchronize()
            error = (out.float() - problem.expected).norm() / problem.expected.norm()
            assert error < 6e-3, (size, way.name)
    products.ways = {}
    with torch.cuda.stream(stream):
        products.tune_passes({case: [problem.matrix]})
    assert list(products.ways[case]) == list(SIZES)


def test_float32_stays_with_the_library() -> None:
    products = GpuProducts(132)
    weight = Matrix.plain(torch.randn(64, 64, device="cuda"))
    products.tune({Case.of("linear", weight): [weight]}, 64)
    products.tune_passes({Case.of("linear", weight): [weight]})
    assert products.ways == {}


def test_records_are_files_of_the_cache(stream: torch.cuda.Stream, tmp_path: Path) -> None:
    with torch.cuda.stream(stream), pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path))
        weight = Matrix.plain(random(512, 512, dtype=BF16))
        GpuProducts(32).tune({Case.of("linear", weight): [weight]}, 16)
    names = {path.suffix for path in (tmp_path / "twolane" / "kernels").iterdir()}
    assert names == {".cubin", ".json"}
