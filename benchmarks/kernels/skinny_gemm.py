"""Decode's products on a share of the SMs: checked against float32, then tuned and timed.

    PYTHONPATH=src python benchmarks/kernels/skinny_gemm.py [--ways]

`--ways` also prints what every way of every product reaches.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from common import Partition, Report, partition, seconds, worst_difference

from twolane.kernels import fused, skinny_gemm
from twolane.kernels.linear import Case, Products, Way, _library

HIDDEN, INNER, QKV, VOCABULARY, LAYERS = 4096, 12288, 6144, 151936, 10  # Qwen3-8B, ten layers
SHAPES = {
    "qkv": ("linear", QKV, HIDDEN),
    "o": ("add_linear", HIDDEN, HIDDEN),
    "gate_up": ("gate_up_silu", 2 * INNER, HIDDEN),
    "down": ("add_linear", HIDDEN, INNER),
    "head": ("logits", VOCABULARY, HIDDEN),
}
LEVELS = (16, 32, 48, 64, 132)
BATCHES = (1, 8, 16, 32, 64, 128)
DTYPE = torch.bfloat16


def random(*shape: int, scale: float = 1.0, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def check(report: Report, v: skinny_gemm.Variant, m: int, n: int, k: int, part: Partition) -> None:
    """Thrice the same, and right; with bias and residual where the variant has them."""
    torch.manual_seed(m * n + k)
    x, w = random(m, k, dtype=v.dtype), random(n * (1 + v.gated), k, scale=k**-0.5, dtype=v.dtype)
    plain = not v.gated and not v.wide
    bias = random(n, dtype=v.dtype) if plain else None
    old = random(m, n, dtype=v.dtype) if plain else None
    reference = x.float() @ w.float().T
    if v.gated:
        reference = torch.nn.functional.silu(reference[:, :n]) * reference[:, n:]
    if plain:
        reference += bias.float() + old.float()
    nothing = torch.full((m, n), torch.nan, device="cuda", dtype=torch.float if v.wide else v.dtype)
    outs = [(old if plain else nothing).clone() for _ in range(3)]
    scratch = skinny_gemm.Scratch.of(part.units, x.device)
    part.stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(part.stream):
        for out in outs:
            skinny_gemm.launch(v, part.units, x, w, bias, out, scratch, residual=plain)
    torch.cuda.synchronize()
    error, where = worst_difference(outs[0], reference)
    same = all(torch.equal(out, outs[0]) for out in outs)
    clean = not int(scratch.arrivals.count_nonzero())
    if not (error < 6e-3 and same and clean):
        report.failures += 1
        report.add(bad=str(v), m=m, n=n, k=k, units=part.units, error=error, same=same,
                   clean=clean, where=where)  # fmt: skip


def checks(report: Report, parts: dict[int, Partition]) -> None:
    start, count = time.perf_counter(), 0
    wanted = [
        (v, m)
        for m in (3, 16, 29, 64, 100, 128)
        for gated, wide in ((False, False), (True, False), (False, True))
        for v in skinny_gemm.variants(m, DTYPE, 64, gated=gated, wide=wide)
    ]
    wanted += [(v, 50) for v in skinny_gemm.variants(50, torch.float16, 64)]
    skinny_gemm.compile_all(v for v, _ in wanted)
    report.add(compiled=len({v for v, _ in wanted}), seconds=time.perf_counter() - start)
    for v, m in wanted:
        for n, k, units in ((1552, 1096, 32), (4096, 4096, 132), (3072, 4096, 16), (160, 64, 48)):
            with report.attempt(f"check {v} {m} {n} {k} {units}"):
                check(report, v, m, n, k, parts[units])
                count += 1
    report.add(checks=count, failures=report.failures)


def tune(report: Report, weights: dict[str, list], parts: dict[int, Partition]) -> dict:
    """The tuned products of every level."""
    tuned = {}
    for units, part in parts.items():
        products, start = Products(units), time.perf_counter()
        with report.attempt(f"tune {units}"), torch.cuda.stream(part.stream):
            for name, (operation, _, _) in SHAPES.items():
                products.tune(operation, weights[name], BATCHES[-1])
        report.add(tuned=units, seconds=time.perf_counter() - start)
        tuned[units] = products
    return tuned


def ways(report: Report, weights: dict[str, list], parts: dict[int, Partition]) -> None:
    for name, (operation, n, k) in SHAPES.items():
        for rows in (16, 32, 64, 128):
            for units, part in parts.items():
                products, case = Products(units), Case(operation, n, k, DTYPE)
                row = {}
                with report.attempt(f"ways {name}"), torch.cuda.stream(part.stream):
                    for way in products._candidates(case, rows):
                        t = products._seconds(way, case, rows, weights[name][:5])
                        row[way.name] = round(2e-12 * n * k / t, 2)
                report.add(ways=name, rows=rows, units=units, **row)


def stack(
    m: int, weights: dict[str, list], products: Products, way: Way | None, small: bool
) -> Callable[[], None]:
    """All layers and the head, by one way or, with None, as tuned."""
    x = {name: random(m, k) for name, (_, _, k) in SHAPES.items()}
    qkv, hidden = random(m, QKV), random(m, HIDDEN)
    gate_up, act = random(m, 2 * INNER), random(m, INNER)
    logits = torch.zeros(m, VOCABULARY, device="cuda")

    def one(name: str, w: torch.Tensor) -> None:
        if small:
            x[name].neg_()
        operation = SHAPES[name][0]
        out = {"qkv": qkv, "gate_up": act, "head": logits}.get(name, hidden)
        if name == "gate_up" and small:
            products._run(way or products.way(operation, m, w), operation, x[name], w, None,
                          act, gate_up)  # fmt: skip
        elif name == "gate_up":  # the product alone
            chosen = way or products.way(operation, m, w)
            if chosen.variant is None:
                with _library(chosen.library, products.units):
                    torch.mm(x[name], w.t(), out=gate_up)
            else:
                products._run(chosen, operation, x[name], w, None, act, gate_up)
        else:
            chosen = way or products.way(operation, m, w)
            products._run(chosen, operation, x[name], w, None, out)

    def run() -> None:
        for layer in range(LAYERS):
            for name in ("qkv", "o", "gate_up", "down"):
                one(name, weights[name][layer])
        one("head", weights["head"][0])

    return run


def stacks(
    report: Report, weights: dict[str, list], parts: dict[int, Partition], tuned: dict
) -> None:
    """TB/s of weights; `+`: with a small kernel in front of each product, and the activation."""
    size = sum(w.nbytes for some in weights.values() for w in some)
    modes = {"cublas": Way(), "cublaslt": Way("cublaslt"), "tuned": None}
    for m in BATCHES:
        for units, part in parts.items():
            row = {}
            for mode, way in modes.items():
                for small in (False, True):
                    with report.attempt(f"stack {m} {units} {mode}"):
                        run = stack(m, weights, tuned[units], way, small)
                        row[mode + "+" * small] = size / seconds([run], part.stream, 5) / 1e12
            chosen = [
                tuned[units].way(op, m, weights[name][0]).name
                for name, (op, _, _) in SHAPES.items()
            ]
            report.add(stack=m, units=units, **row, chosen=" ".join(chosen))


def main() -> None:
    report = Report("skinny-gemm")
    parts = {units: partition(units) for units in LEVELS}
    fused.silu_mul(random(2, 2 * INNER), random(2, INNER))
    checks(report, parts)
    weights = {
        name: [random(n, k, scale=0.02) for _ in range(1 if name == "head" else LAYERS)]
        for name, (_, n, k) in SHAPES.items()
    }
    tuned = tune(report, weights, parts)
    if "--ways" in sys.argv:
        ways(report, weights, parts)
    stacks(report, weights, parts, tuned)
    report.write()


if __name__ == "__main__":
    main()
