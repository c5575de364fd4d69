"""A layer's products on shares of the SMs, by each way that `products/dispatch.py` chooses from.

Microseconds of the four products of a Qwen3-8B layer, each after its norm and with its activation,
for the passes of prefill on the shares that it has, and for decode on its own. Weights and rows are
random, and come from memory. That every way is right is for `tests/gpu/test_products.py`.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from harness import Report, partition

from twolane.kernels.products import skinny_gemm
from twolane.kernels.products.dispatch import CUBLAS, CUBLASLT, ROWS, Case, GpuProducts, Way
from twolane.model.matrix import Matrix

HIDDEN, INNER, QKV, LAYERS = 4096, 12288, 6144, 8
CASES = (
    Case("linear", QKV, HIDDEN, "bf16"),
    Case("add_linear", HIDDEN, HIDDEN, "bf16"),
    Case("gate_up", 2 * INNER, HIDDEN, "bf16"),
    Case("add_linear", HIDDEN, INNER, "bf16"),
)
ON_GPU = {"device": "cuda", "dtype": torch.bfloat16}
PREFILL, DECODE = (132, 116, 100, 84, 68, 52, 36, 20), (132, 96, 80, 64, 48, 32, 16)
SIZES = (*range(64, 1024, 64), *range(1024, 2048 + 1, 128))
"""Rows of passes; twice as many up to 1,024 as have graphs."""


def layer(
    products: GpuProducts, ways: Sequence[Sequence[Way]], rows: int, weights: Sequence[Sequence]
) -> float:
    """Microseconds with the fastest of each product's ways."""
    each = (
        min(products._seconds(way, case, rows, some) for way in own)
        for case, own, some in zip(CASES, ways, weights, strict=True)
    )
    return 1e6 * sum(each)


def options(add: Callable[..., Any]) -> None:
    """The case has no options."""


def main(report: Report, given: argparse.Namespace) -> None:
    """Measure the shares of both lanes."""
    weights = [
        [Matrix.plain(0.02 * torch.randn(c.n, c.k, **ON_GPU)) for _ in range(LAYERS)] for c in CASES
    ]
    flops = sum(2.0 * case.n * case.k for case in CASES)
    for units in PREFILL:
        products, stream = GpuProducts(units), partition(units).stream
        for rows in SIZES:
            with report.attempt(f"{units} {rows}"), torch.cuda.stream(stream):
                took = {
                    way.name: layer(products, [[way]] * len(CASES), rows, weights)
                    for way in (CUBLAS, CUBLASLT)
                }
                best = 1e-6 * flops * rows / min(took.values())
                report.add(prefill=units, rows=rows, **took, tflops=best)
    for units in DECODE:
        products, stream = GpuProducts(units), partition(units).stream
        for rows in ROWS:
            own = [[w for w in products._candidates(c, rows) if w.variant] for c in CASES]
            skinny_gemm.compile_all({way.variant for ways in own for way in ways if way.variant})
            with report.attempt(f"{units} {rows}"), torch.cuda.stream(stream):
                ways = {way.name: [[way]] * len(CASES) for way in (CUBLAS, CUBLASLT)}
                if all(own):
                    ways["own"] = own
                took = {name: layer(products, each, rows, weights) for name, each in ways.items()}
                report.add(decode=units, rows=rows, **took)
