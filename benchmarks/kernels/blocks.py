"""FP8 products of passes with scales for blocks beside those with scales for rows:
`python benchmarks/kernels/blocks.py [--out FILE]`.

Activations have a scale for each 1 x 128 and weights one for each 128 x 128, or both one for each
row. The four products of a Qwen3-8B layer, by PyTorch, on all SMs. The error is against float32
products of the numbers that are meant.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

sys.path.append(str(Path(__file__).parents[1]))
from kernels.common import seconds

from twolane.model import fp8
from twolane.results.provenance import provenance, save

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24_576, 4096), "down": (4096, 12_288)}
ROWS = (64, 256, 512, 1024, 2048, 8192)
RECIPES = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128


def padded(scales: Tensor) -> Tensor:
    """Scales of 128 x 128 blocks as cuBLASLt wants them: columns of a multiple of four."""
    wide = scales.new_ones(len(scales), -(-scales.shape[1] // 4) * 4)
    wide[:, : scales.shape[1]] = scales
    return wide.t()


def measured(rows: int, n: int, k: int) -> dict[str, Any]:
    """Microseconds and errors of both kinds."""
    draw = torch.Generator("cuda").manual_seed(rows + n)
    x = torch.randn(rows, k, device="cuda", generator=draw)
    x *= torch.randn(k, device="cuda", generator=draw).exp()  # channels differ
    w = torch.randn(n, k, device="cuda", generator=draw) * 0.02
    exact = x @ w.t()
    (xb, xs), (wb, ws) = fp8.quantise_row_blocks(x), fp8.quantise_blocks(w)
    across, wide = xs.t().contiguous().t(), padded(ws)
    (xr, xrs), (wr, wrs) = fp8.quantise_rows(x), fp8.quantise_rows(w)

    def blocks() -> Tensor:
        return scaled_mm(xb, wb.t(), across, RECIPES[0], wide, RECIPES[1])

    def each_row() -> Tensor:
        return torch._scaled_mm(
            xr, wr.t(), xrs, wrs.t(), out_dtype=torch.bfloat16, use_fast_accum=True
        )

    meant = (
        fp8.scaled_blocks(xb.float(), xs)
        @ fp8.scaled_blocks(wb.float(), ws.repeat_interleave(128, dim=0)).t()
    )
    found: dict[str, Any] = {"error_of_product": error(blocks(), meant)}
    stream = torch.cuda.Stream()
    for name, run in (("blocks", blocks), ("rows", each_row)):
        found[name] = {"us": 1e6 * seconds([run] * 4, stream), "error": error(run(), exact)}
    return found


def error(got: Tensor, right: Tensor) -> float:
    """Relative."""
    return float((got.float() - right).norm() / right.norm())


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found: dict[str, dict[int, Any]] = {}
    for name, (n, k) in SHAPES.items():
        found[name] = {rows: measured(rows, n, k) for rows in ROWS}
        for rows, one in found[name].items():
            print(name, rows, one, flush=True)
    if given.out:
        about = provenance({"model": "qwen3-8b", "shapes": SHAPES, "rows": ROWS})
        save(given.out, about, {"products": found})


if __name__ == "__main__":
    main()
